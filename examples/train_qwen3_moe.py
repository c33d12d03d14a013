"""Train a Qwen3-MoE with expert parallelism and FSDP over all ranks, on CPUs or GPUs as found.

    python examples/train_qwen3_moe.py --launch 4 --fsdp2 ep_plugin --compare all_to_all --out runs/demo
    torchrun --nproc-per-node 4 examples/train_qwen3_moe.py --preset 30b-a3b --layers 4

The first starts its ranks itself. With ``--compare`` both exchanges train on the same batches from the same
weights, in fresh processes and in turn, so that neither inherits anything from the other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from _launch import check_exchanges, resolve, run


def main(
    preset: Annotated[str, typer.Option(help="tiny | 30b-a3b: widths and defaults of a run from scratch.")] = "tiny",
    model: Annotated[Path | None, typer.Option(help="Folder of a Qwen3-MoE checkpoint, instead of a preset.")] = None,
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
    ep_implementation: Annotated[str, typer.Option(help="ep_plugin | all_to_all.")] = "ep_plugin",
    fsdp2: Annotated[str, typer.Option(help="ep_plugin | stock: who gathers and reduces for FSDP2.")] = "stock",
    compare: Annotated[
        str | None, typer.Option(help="Train through this exchange and stock FSDP2 too, and compare.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side of a comparison trains, in turn.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json and loss.png.")] = Path("runs/train_qwen3_moe"),
    launch: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start. (default: one per GPU; 4 without GPUs)")
    ] = None,
) -> None:
    """Train a Qwen3-MoE with expert parallelism and FSDP over all ranks, and report loss and speed."""
    options = resolve(
        "qwen3_moe", preset, model, layers, text, steps, seq_len, batch, lr, dtype, seed, ep_implementation, fsdp2
    )  # fmt: skip
    check_exchanges(ep_implementation, compare, fsdp2)
    name = str(model) if model else f"{preset}, {options.layers} layers"
    other = replace(options, ep_implementation=compare, fsdp2="stock") if compare else None
    run(options, name, other, launch, out, rounds)


if __name__ == "__main__":
    typer.run(main)
