"""The dtypes that kernels add."""

from __future__ import annotations

import torch

from ep_plugin import _C

# Rows and shards of these types can be summed.
ELEMENTS = {
    torch.float32: _C.Element.FLOAT32,
    torch.bfloat16: _C.Element.BFLOAT16,
    torch.float16: _C.Element.FLOAT16,
    torch.float64: _C.Element.FLOAT64,
}
