"""Train a DeepSeek-V3 from Megatron-core's own layers with expert parallelism over all ranks, on GPUs.

    python examples/train_deepseek_megatron.py --launch 4 --compare alltoall --out runs/deepseek_megatron
    EP_PLUGIN=megatron torchrun --nproc-per-node 4 examples/train_deepseek_megatron.py

Nothing here names ep_plugin to Megatron: the ranks' environment has EP_PLUGIN=megatron, and ``flex`` is then ours. With
``--compare alltoall`` Megatron's own exchange trains too, on the same batches from the same weights, in fresh processes
and in turn.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from _launch import num_gpus, resolve, run
from _options import MEGATRON, PRESETS


def main(
    preset: Annotated[str, typer.Option(help="tiny | v3: widths and defaults of the run.")] = "v3",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers; the first of tiny is dense. (default: the preset's)")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="File or folder to train on. (default: Python's standard library)"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. (default: the preset's)")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence. (default: the preset's)")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per rank. (default: the preset's)")] = None,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="Batches whose gradients add up to one step's, as pipelines have them.")
    ] = 4,
    lr: Annotated[float | None, typer.Option(help="Learning rate of AdamW. (default: the preset's)")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16 | float16. (default: the preset's)")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.")] = 0,
    dispatcher: Annotated[str, typer.Option(help="flex | alltoall.")] = "flex",
    compare: Annotated[str | None, typer.Option(help="Train through this dispatcher too, and compare.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side of a comparison trains, in turn.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json and loss.png.")] = Path(
        "runs/train_deepseek_megatron"
    ),
    launch: Annotated[int | None, typer.Option(min=1, help="Ranks to start. (default: one per GPU)")] = None,
) -> None:
    """Train a DeepSeek-V3 from Megatron-core's layers, and report loss and speed."""
    options = resolve(
        MEGATRON, preset, None, layers, text, steps, seq_len, batch, lr, dtype, seed, dispatcher, "stock"
    )  # fmt: skip
    for hint, name in (("--dispatcher", dispatcher), ("--compare", compare)):
        if name not in (None, "flex", "alltoall"):
            raise typer.BadParameter(f"expected flex or alltoall, got {name!r}", param_hint=hint)
    if compare == dispatcher:
        raise typer.BadParameter(f"expected another dispatcher than {dispatcher}", param_hint="--compare")
    dense = PRESETS[MEGATRON][preset].widths["first_k_dense_replace"]
    if options.layers <= dense:
        raise typer.BadParameter(
            f"expected more than {dense}, the first {dense} being dense, got {options.layers}", param_hint="--layers"
        )
    _check_machine()
    options, other = (
        replace(
            options,
            ep_implementation=name,
            micro_batches=micro_batches,
            switched_on="megatron" if name == "flex" else "",
        )
        for name in (dispatcher, compare)
    )
    run(
        options,
        f"DeepSeek-V3 {preset} of Megatron-core, {options.layers} layers",
        other if compare else None,
        launch,
        out,
        rounds,
    )


def _check_machine() -> None:
    if importlib.util.find_spec("megatron") is None:
        raise typer.BadParameter("expected megatron-core, found none: pip install megatron-core==0.16.1")
    if not num_gpus():
        raise typer.BadParameter(
            "expected NVIDIA GPUs, which Megatron-core's layers need, found none: train_deepseek_hf.py runs on CPUs"
        )


if __name__ == "__main__":
    typer.run(main)
