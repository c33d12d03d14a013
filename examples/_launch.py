"""What the examples share of starting a run: filling in options, starting ranks, collecting what the arms measured."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import typer
from _options import PRESETS, TrainOptions

from ep_plugin.bench.provenance import hash_sources


def resolve(
    architecture: str, preset: str, model: Path | None, layers: int | None, text: Path | None,
    steps: int | None, seq_len: int | None, batch: int | None, lr: float | None, dtype: str | None, seed: int,
    ep_implementation: str | None, fsdp2: str,
) -> TrainOptions:  # fmt: skip
    """Fill in the preset's defaults and refuse what cannot work before any process is started."""
    presets = PRESETS[architecture]
    if preset not in presets:
        raise typer.BadParameter(f"expected one of {', '.join(presets)}, got {preset!r}", param_hint="--preset")
    if model is not None and not (model / "config.json").is_file():
        raise typer.BadParameter(
            f"expected a folder with a checkpoint, got {model} without config.json",
            param_hint="--model",
        )
    if text is not None and not text.exists():
        raise typer.BadParameter(f"expected a file or folder, got {text}, which is not there", param_hint="--text")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"expected float32, bfloat16 or float16, got {dtype!r}", param_hint="--dtype")
    if lr is not None and not lr >= 0:
        raise typer.BadParameter(f"expected at least 0, got {lr:g}", param_hint="--lr")
    defaults = presets[preset]
    return TrainOptions(
        architecture=architecture,
        preset=None if model else preset,
        model=str(model.resolve()) if model else None,
        layers=(0 if model else defaults.layers) if layers is None else layers,
        text=str(text.resolve()) if text else None,
        steps=defaults.steps if steps is None else steps,
        seq_len=defaults.seq_len if seq_len is None else seq_len,
        batch=defaults.batch if batch is None else batch,
        lr=defaults.lr if lr is None else lr,
        seed=seed,
        dtype=dtype or (defaults.dtype if num_gpus() else "float32"),
        ep_implementation=ep_implementation,
        fsdp2=fsdp2,
    )


def check_exchanges(ep_implementation: str, compare: str | None, fsdp2: str) -> None:
    """Refuse names of exchanges and collectives that the examples with experts do not know."""
    for hint, exchange in (("--ep-implementation", ep_implementation), ("--compare", compare)):
        if exchange not in (None, "ep_plugin", "all_to_all"):
            raise typer.BadParameter(f"expected ep_plugin or all_to_all, got {exchange!r}", param_hint=hint)
    if compare == ep_implementation:
        raise typer.BadParameter(f"expected another exchange than {ep_implementation}", param_hint="--compare")
    if fsdp2 not in ("ep_plugin", "stock"):
        raise typer.BadParameter(f"expected ep_plugin or stock, got {fsdp2!r}", param_hint="--fsdp2")


def run(
    options: TrainOptions, name: str, other: TrainOptions | None, launch: int | None, out: Path, rounds: int
) -> None:
    """Train, under torchrun as one of its ranks, else in ranks started here; through ``other`` too where it is given,
    each ``rounds`` times and in turn: a slow minute of the machine then hits both.

    Writes the report of the model ``name`` into the folder ``out``.
    """
    if "WORLD_SIZE" in os.environ:
        _run_under_torchrun(options, name, other is not None, launch, out)
        return
    _make_folder(out)
    code_hash = hash_sources()
    arms = [options] if other is None else [options, other] * rounds
    results = [_launch_arm(arm, launch or num_gpus() or 4) for arm in arms]
    _report(results, name, other.arm if other else None, code_hash, out)


def _make_folder(out: Path) -> None:
    """Refuse a folder that the report could not be written into, before anything is trained."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"expected a folder, or where one can be made, got {out}: {error}", param_hint="--out"
        ) from None
    for path in (out / "metrics.json", out / "loss.png"):
        if path.is_dir() or not os.access(path if path.exists() else out, os.W_OK):
            raise typer.BadParameter(f"expected a file that can be written, got {path}", param_hint="--out")


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _run_under_torchrun(options: TrainOptions, name: str, compare: bool, launch: int | None, out: Path) -> None:
    from _training import leave, write_result

    if compare or launch is not None:
        raise typer.BadParameter(
            "expected to start the ranks itself, got torchrun's environment; start it with plain python",
            param_hint="--compare" if compare else "--launch",
        )
    reports = os.environ["RANK"] == "0"
    if reports:
        _make_folder(out)
        code_hash = hash_sources()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        write_result(options, result)
        if reports:
            _report([json.loads(result.read_text())], name, None, code_hash, out)
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
            run_id="example",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        result = Path(folder) / "result.json"
        worker = str(Path(__file__).with_name("_training.py"))
        try:
            with _switched_on(options.switched_on):
                elastic_launch(config, sys.executable)("-u", worker, json.dumps(asdict(options)), str(result))
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None
        except SignalException as error:
            print(f"stopped: {error}", file=sys.stderr)
            raise typer.Exit(128 + error.sigval) from None
        return json.loads(result.read_text())


@contextlib.contextmanager
def _switched_on(names: str | None) -> Iterator[None]:
    """Processes started meanwhile have EP_PLUGIN set to ``names``; None leaves it as it is."""
    before = os.environ.get("EP_PLUGIN")
    if names is not None:
        os.environ["EP_PLUGIN"] = names
    try:
        yield
    finally:
        os.environ.pop("EP_PLUGIN", None)
        if before is not None:
            os.environ["EP_PLUGIN"] = before


def _report(results: list[dict], name: str, compare: str | None, code_hash: str, out: Path) -> None:
    import _report as report

    report.write(report.summarise(results, model=name, reference=compare, code_hash=code_hash), out)
