"""The matrix product that communication is timed beside."""

from __future__ import annotations

import torch

SIZE = 8192
_JUDGED = 64  # rows and columns


class Product:
    """Calling it multiplies two fixed matrices, ``[size, size]`` each, on the current stream, into one output."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = SIZE) -> None:
        random = torch.Generator(device).manual_seed(0)
        self._a, self._b = (torch.randn(size, size, generator=random, device=device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def forget(self) -> None:
        """Leaves no product behind that `wrong` could take for the next one."""
        self._out.fill_(torch.nan)

    def wrong(self) -> list[str]:
        """What is wrong with the latest product in some rows and columns, judged in float64."""
        some = slice(None, None, max(1, len(self._a) // _JUDGED))
        expected = self._a[some].double() @ self._b[:, some].double()
        error = float((self._out[some][:, some].double() - expected).abs().max() / expected.abs().max())
        return [] if error <= 1e-2 else [f"matmul: expected a relative error of at most 1e-2, got {error:g}"]
