"""Text as bytes, and the batches that every arm of a comparison shares."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def read_text(path: Path | None) -> torch.Tensor:
    """The bytes of a file, or of the ``.py``, ``.txt`` and ``.md`` files of a folder, joined; uint8
    ``[bytes]``.

    ``None`` reads the source files of the Python standard library that runs this. Raises ``ValueError`` when
    fewer than 2 bytes are found.
    """
    if path is None:
        files = _standard_library_sources()
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".py", ".txt", ".md"))
    else:
        files = [path]
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    if len(text) < 2:
        raise ValueError(f"text: expected at least 2 bytes to train on, got {len(text)} from {path}")
    return torch.frombuffer(text, dtype=torch.uint8)


def batch_at(text: torch.Tensor, *, batch: int, seq_len: int, seed: int, step: int, rank: int) -> torch.Tensor:
    """``[batch, seq_len]`` int64 windows of ``text``, a pure function of (seed, step, rank)."""
    span = len(text) - seq_len
    if span < 0:
        raise ValueError(f"text: expected at least seq_len={seq_len} bytes, got {len(text)}")
    generator = torch.Generator().manual_seed(hash((seed, step, rank)) & (2**63 - 1))
    starts = torch.randint(span + 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(seq_len)].long()


def _standard_library_sources() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = ("site-packages", "dist-packages")
    return sorted(file for file in root.rglob("*.py") if not any(part in installed for part in file.parts))
