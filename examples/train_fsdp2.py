"""Train a dense Qwen3 with FSDP2 over all ranks, on CPUs or GPUs as found.

    python examples/train_fsdp2.py --launch 4 --compare stock --out runs/train_fsdp2
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --preset 4b --layers 12

The one line is in ``_training.py``: ``fsdp2.enable(model)``. With ``--compare stock`` PyTorch's own collectives train
too, on the same batches from the same weights, in fresh processes and in turn.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from _launch import resolve, run


def main(
    preset: Annotated[str, typer.Option(help="tiny | 4b: widths and defaults of a run from scratch.")] = "tiny",
    model: Annotated[Path | None, typer.Option(help="Folder of a Qwen3 checkpoint, instead of a preset.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers. (default: the preset's or the checkpoint's)")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="File or folder to train on. (default: Python's standard library)"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. (default: the preset's)")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence. (default: the preset's)")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per rank. (default: the preset's)")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of AdamW. (default: the preset's)")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 | bfloat16 | float16. (default: the preset's; float32 on CPUs)"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.")] = 0,
    collectives: Annotated[str, typer.Option(help="ep_plugin | stock: who gathers and reduces.")] = "ep_plugin",
    compare: Annotated[str | None, typer.Option(help="Train through these collectives too, and compare.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side of a comparison trains, in turn.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json and loss.png.")] = Path("runs/train_fsdp2"),
    launch: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start. (default: one per GPU; 4 without GPUs)")
    ] = None,
) -> None:
    """Train a dense Qwen3 with FSDP2 over all ranks, and report loss and speed."""
    for hint, name in (("--collectives", collectives), ("--compare", compare)):
        if name not in (None, "ep_plugin", "stock"):
            raise typer.BadParameter(f"expected ep_plugin or stock, got {name!r}", param_hint=hint)
    if compare == collectives:
        raise typer.BadParameter(f"expected other collectives than {collectives}", param_hint="--compare")
    options = resolve(
        "qwen3", preset, model, layers, text, steps, seq_len, batch, lr, dtype, seed, None, collectives
    )  # fmt: skip
    name = str(model) if model else f"{preset}, {options.layers} layers"
    run(options, name, replace(options, fsdp2=compare) if compare else None, launch, out, rounds)


if __name__ == "__main__":
    typer.run(main)
