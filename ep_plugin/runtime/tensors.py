"""Kinds of tensors."""

from __future__ import annotations

import torch

# Tensors that are no more than their memory says: not a compiler's stand-in, not sharded, not a user's own kind.
PLAIN = (torch.Tensor, torch.nn.Parameter)
