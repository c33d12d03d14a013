"""Text as token ids, and the batches that both arms train on."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

BYTES = 256


def read_text(path: Path | None, vocab_size: int) -> torch.Tensor:
    """Token ids of a text, int32 ``[tokens]``.

    Args:
        path: a file, or a folder whose ``.py``, ``.txt`` and ``.md`` files are joined. None: the source files of this
            Python's standard library.
        vocab_size: up to 256, the ids are bytes. Above, they are up to so many byte pairs, learned from the text, which
            takes a core a minute for 30 MB: bytes are few and uneven, and would all be routed to a few experts.

    Raises:
        ValueError: the text has fewer than 2 bytes.
    """
    if path is None:
        files = _standard_library_sources()
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".py", ".txt", ".md"))
    else:
        files = [path]
    texts = [file.read_bytes() for file in files]
    joined = bytearray(b"\n".join(texts))
    if len(joined) < 2:
        raise ValueError(f"text: expected at least 2 bytes to train on, got {len(joined)} from {path}")
    if vocab_size <= BYTES:
        return torch.frombuffer(joined, dtype=torch.uint8).int()
    return _byte_pairs([text.decode(errors="replace") + "\n" for text in texts], vocab_size)


def batch_at(text: torch.Tensor, *, batch: int, seq_len: int, seed: int, step: int, rank: int) -> torch.Tensor:
    """``[batch, seq_len]`` int64 windows of ``text``, a pure function of (seed, step, rank)."""
    span = len(text) - seq_len
    if span < 0:
        raise ValueError(f"text: expected at least seq_len={seq_len} tokens, got {len(text)}")
    generator = torch.Generator().manual_seed(hash((seed, step, rank)) & (2**63 - 1))
    starts = torch.randint(span + 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(seq_len)].long()


def _byte_pairs(texts: list[str], vocab_size: int) -> torch.Tensor:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.cat([torch.tensor(text.ids, dtype=torch.int32) for text in encoded])


def _standard_library_sources() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = ("site-packages", "dist-packages")
    return sorted(file for file in root.rglob("*.py") if not any(part in installed for part in file.parts))
