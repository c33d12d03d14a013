"""Train a DeepSeek-V3 of transformers with expert parallelism and FSDP over all ranks, on CPUs or GPUs as found.

    python examples/train_deepseek_hf.py --launch 4 --compare all_to_all --out runs/deepseek
    torchrun --nproc-per-node 4 examples/train_deepseek_hf.py --preset v3

Multi-latent attention, a shared expert beside the routed ones, and a sigmoid router that takes its experts from a few
groups of them. Both hooks are on: ep_plugin exchanges tokens, and gathers and reduces for FSDP2; the shared expert runs
while tokens travel. With ``--compare`` the built-in exchange and stock FSDP2 train too, on the same batches from the
same weights, in fresh processes and in turn.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from _launch import check_exchanges, resolve, run
from _options import DEEPSEEK_PRESETS, TrainOptions


def main(
    preset: Annotated[str, typer.Option(help="tiny | v3: widths and defaults of a run from scratch.")] = "tiny",
    model: Annotated[Path | None, typer.Option(help="Folder of a DeepSeek-V3 checkpoint, instead of a preset.")] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Decoder layers, dense ones first. (default: the preset's or checkpoint's)"),
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
    fsdp2: Annotated[str, typer.Option(help="ep_plugin | stock: who gathers and reduces for FSDP2.")] = "ep_plugin",
    overlap: Annotated[
        bool,
        typer.Option(help="Shared experts run while ep_plugin dispatches; what it spends there is not timed then."),
    ] = True,
    compare: Annotated[
        str | None, typer.Option(help="Train through this exchange and stock FSDP2 too, and compare.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side of a comparison trains, in turn.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json and loss.png.")] = Path("runs/train_deepseek_hf"),
    launch: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start. (default: one per GPU; 4 without GPUs)")
    ] = None,
) -> None:
    """Train a DeepSeek-V3 with expert parallelism and FSDP over all ranks, and report loss and speed."""
    options = resolve(
        "deepseek_v3", preset, model, layers, text, steps, seq_len, batch, lr, dtype, seed, ep_implementation, fsdp2
    )  # fmt: skip
    check_exchanges(ep_implementation, compare, fsdp2)
    _check_layers(options)
    options = replace(options, overlap=overlap and ep_implementation == "ep_plugin")
    name = str(model) if model else f"DeepSeek-V3 {preset}, {options.layers} layers"
    other = None
    if compare:
        other = replace(options, ep_implementation=compare, fsdp2="stock", overlap=overlap and compare == "ep_plugin")
    run(options, name, other, launch, out, rounds)


def _check_layers(options: TrainOptions) -> None:
    """Without a layer beyond the dense ones there would be nothing to exchange."""
    if options.model:
        config = json.loads((Path(options.model) / "config.json").read_text())
        if config.get("model_type") != "deepseek_v3":
            raise typer.BadParameter(f"expected a deepseek_v3, got a {config.get('model_type')}", param_hint="--model")
    else:
        config = DEEPSEEK_PRESETS[options.preset].widths
    dense = config["first_k_dense_replace"]
    layers = options.layers or config["num_hidden_layers"]
    if layers <= dense:
        raise typer.BadParameter(
            f"expected more than {dense}, the first {dense} being dense, got {layers}", param_hint="--layers"
        )


if __name__ == "__main__":
    typer.run(main)
