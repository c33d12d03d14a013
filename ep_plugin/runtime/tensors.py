"""Checks of tensors whose addresses kernels take."""

from __future__ import annotations

import torch

# Types whose value is their memory: no compiler's stand-in, no sharded tensor, no user's own subclass.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_lazy(tensor: torch.Tensor | None) -> bool:
    """Whether a sign or zeros are pending: an operator's dispatch writes them to memory."""
    return tensor is not None and (tensor.is_neg() or tensor._is_zerotensor())
