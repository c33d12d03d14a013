"""The element types of rows: which can travel, be summed or be made by quantising, and their codes in kernels."""

from __future__ import annotations

import torch

from ep_plugin import _C

# Rows of these types can be summed.
ELEMENTS = {
    torch.float32: _C.Element.FLOAT32,
    torch.bfloat16: _C.Element.BFLOAT16,
    torch.float16: _C.Element.FLOAT16,
    torch.float64: _C.Element.FLOAT64,
}
# Rows of these types can travel. Ranks compare the position.
DTYPES = [
    *ELEMENTS,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# The values of `quantize`, and the dtype of the rows that each makes.
QUANTIZED = {"e4m3": torch.float8_e4m3fn}
QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


def num_scales(hidden: int | torch.SymInt) -> int | torch.SymInt:
    """Scales of a quantised row."""
    return (hidden + _C.scale_block - 1) // _C.scale_block


def weight_dtype(rows: torch.dtype) -> torch.dtype:
    """The dtype in which weights travel beside rows of dtype `rows`."""
    return torch.float64 if rows is torch.float64 else torch.float32
