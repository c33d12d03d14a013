"""Train a Qwen3-MoE with expert parallelism and FSDP over all ranks, on CPUs or GPUs as found.

    python examples/train_qwen3_moe.py --launch 4 --compare all_to_all --out runs/demo
    torchrun --nproc-per-node 4 examples/train_qwen3_moe.py --preset 30b-a3b --layers 4

The first starts its ranks itself. With ``--compare`` both exchanges train on the same batches from the same
weights, in fresh processes and in turn, so that neither inherits anything from the other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from _options import PRESETS, TrainOptions

ROUNDS = 2  # each arm of a comparison runs this often, in turn: a slow minute of the machine then hits both


def main(
    preset: Annotated[str, typer.Option(help="tiny | 30b-a3b: widths and defaults of a run from scratch.")] = "tiny",
    model: Annotated[Path | None, typer.Option(help="Folder of a Qwen3-MoE checkpoint, instead of a preset.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers. (default: the preset's or the checkpoint's)")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="File or folder to train on, as bytes. (default: Python's standard library)"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. (default: the preset's)")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Bytes per sequence. (default: the preset's)")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per rank. (default: the preset's)")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of AdamW. (default: the preset's)")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 | bfloat16 | float16. (default: the preset's; float32 on CPUs)"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.")] = 0,
    ep_implementation: Annotated[str, typer.Option(help="ep_plugin | all_to_all.")] = "ep_plugin",
    compare: Annotated[str | None, typer.Option(help="Train through this exchange too, and compare.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json and loss.png.")] = Path("runs/train_qwen3_moe"),
    launch: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start. (default: one per GPU; 4 without GPUs)")
    ] = None,
) -> None:
    """Train a Qwen3-MoE with expert parallelism and FSDP over all ranks, and report loss and speed."""
    options = _resolve(preset, model, layers, text, steps, seq_len, batch, lr, dtype, seed, ep_implementation)
    _check_exchanges(ep_implementation, compare)
    name = str(model) if model else f"{preset}, {options.layers} layers"
    if "WORLD_SIZE" in os.environ:
        _run_under_torchrun(options, name, compare, launch, out)
        return
    arms = [options]
    if compare is not None:
        arms = [options, replace(options, ep_implementation=compare)] * ROUNDS
    results = [_launch_arm(arm, launch or _num_gpus() or 4) for arm in arms]
    _report(results, name, compare, out)


def _resolve(
    preset: str, model: Path | None, layers: int | None, text: Path | None, steps: int | None,
    seq_len: int | None, batch: int | None, lr: float | None, dtype: str | None, seed: int,
    ep_implementation: str,
) -> TrainOptions:  # fmt: skip
    """Fill in the preset's defaults and refuse what cannot work before any process is started."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"expected one of {', '.join(PRESETS)}, got {preset!r}", param_hint="--preset")
    if model is not None and not (model / "config.json").is_file():
        raise typer.BadParameter(
            f"expected a folder with a Qwen3-MoE checkpoint, got {model} without config.json",
            param_hint="--model",
        )
    if text is not None and not text.exists():
        raise typer.BadParameter(f"expected a file or folder, got {text}, which is not there", param_hint="--text")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"expected float32, bfloat16 or float16, got {dtype!r}", param_hint="--dtype")
    defaults = PRESETS[preset]
    return TrainOptions(
        preset=None if model else preset,
        model=str(model.resolve()) if model else None,
        layers=layers or (0 if model else defaults.layers),
        text=str(text.resolve()) if text else None,
        steps=steps or defaults.steps,
        seq_len=seq_len or defaults.seq_len,
        batch=batch or defaults.batch,
        lr=lr or defaults.lr,
        seed=seed,
        dtype=dtype or (defaults.dtype if _num_gpus() else "float32"),
        ep_implementation=ep_implementation,
    )


def _check_exchanges(ep_implementation: str, compare: str | None) -> None:
    for hint, exchange in (("--ep-implementation", ep_implementation), ("--compare", compare)):
        if exchange not in (None, "ep_plugin", "all_to_all"):
            raise typer.BadParameter(f"expected ep_plugin or all_to_all, got {exchange!r}", param_hint=hint)
    if compare == ep_implementation:
        raise typer.BadParameter(f"expected another exchange than {ep_implementation}", param_hint="--compare")


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _run_under_torchrun(options: TrainOptions, name: str, compare: str | None, launch: int | None, out: Path) -> None:
    from _training import leave, write_result

    if compare is not None or launch is not None:
        raise typer.BadParameter(
            "expected to start the ranks itself, got torchrun's environment; start it with plain python",
            param_hint="--compare" if compare is not None else "--launch",
        )
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        write_result(options, result)
        if os.environ["RANK"] == "0":
            _report([json.loads(result.read_text())], name, None, out)
    leave()


def _launch_arm(options: TrainOptions, ranks: int) -> dict:
    """Train one arm in ``ranks`` fresh processes; exits non-zero when a rank fails.

    The agent ends the other ranks as soon as one of them dies, and all of them when this process is
    interrupted.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="train_qwen3_moe",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        result = Path(folder) / "result.json"
        worker = str(Path(__file__).with_name("_training.py"))
        try:
            elastic_launch(config, sys.executable)("-u", worker, json.dumps(asdict(options)), str(result))
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None
        except SignalException as error:
            print(f"stopped: {error}", file=sys.stderr)
            raise typer.Exit(128 + error.sigval) from None
        return json.loads(result.read_text())


def _report(results: list[dict], name: str, compare: str | None, out: Path) -> None:
    import _report as report

    report.write(report.summarise(results, model=name, reference=compare), out)


if __name__ == "__main__":
    typer.run(main)
