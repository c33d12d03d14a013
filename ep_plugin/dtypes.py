"""The element types of rows that can be sent, summed or quantised, and their codes in kernels."""

from __future__ import annotations

import torch

from ep_plugin import _C

# Combine sums rows of these types.
ELEMENTS = {
    torch.float32: _C.Element.FLOAT32,
    torch.bfloat16: _C.Element.BFLOAT16,
    torch.float16: _C.Element.FLOAT16,
    torch.float64: _C.Element.FLOAT64,
}
# Dispatch sends rows of these types. Ranks compare the position in this list.
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
# The values of `quantize`, and the dtype of quantised rows. The last two are only for mode="ll".
QUANTIZED = {"e4m3": torch.float8_e4m3fn, "e4m3_pow2": torch.float8_e4m3fn, "e4m3_ue8m0": torch.float8_e4m3fn}
QUANTIZED_BY_MODE = {"ht": ("e4m3",), "ll": tuple(QUANTIZED)}
QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


def num_scales(hidden: int | torch.SymInt) -> int | torch.SymInt:
    """Returns the number of scales of a quantised row of `hidden` elements."""
    return (hidden + _C.scale_block - 1) // _C.scale_block


def weight_dtype(rows: torch.dtype) -> torch.dtype:
    """Returns the dtype of the weights that are sent with rows of dtype `rows`."""
    return torch.float64 if rows is torch.float64 else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without that of its module."""
    return str(dtype).removeprefix("torch.")
