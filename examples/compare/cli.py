"""Train one model twice, through ep_plugin and through what its framework has built in, and compare loss and speed.

    python -m examples.compare qwen3_moe --out runs/demo        # in the repository's root; on CPUs or GPUs as found
    python -m examples.compare qwen3 --preset 4b --layers 12
    python -m examples.compare deepseek_v3 --preset v3
    python -m examples.compare megatron                         # DeepSeek-V3 of Megatron-core's layers, on GPUs only
    python -m examples.compare megatron_dense                   # Qwen3-4B of Megatron-core's layers, on GPUs only
    python -m examples.compare qwen3_moe --nodes 2 --ranks 4    # two emulated nodes of two ranks

Both arms start from the same weights and train on the same batches. Each runs in fresh processes, `--rounds` times and
in turn, so that a slow minute of the machine affects both. See report.py for what is written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ep_plugin.bench.provenance import hash_sources
from examples.compare.launch import Ranks
from examples.compare.options import MODELS, OURS, Options

DTYPES = ("float32", "bfloat16", "float16")


def main(
    model: Annotated[str, typer.Argument(help=" | ".join(MODELS))],
    preset: Annotated[
        str | None, typer.Option(help="tiny, or a published size. (default: tiny; megatron: v3; megatron_dense: 4b)")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder of a checkpoint to train on.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers. (default: all)")] = None,
    text: Annotated[Path | None, typer.Option(help="File or folder. (default: Python's standard library)")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. (default: the preset's)")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence. (default: the preset's)")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per rank. (default: the preset's)")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Batches per step. (default: the preset's)")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate of AdamW. (default: the preset's)")] = None,
    dtype: Annotated[str | None, typer.Option(help=" | ".join(DTYPES) + " (default: the preset's)")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.")] = 0,
    fsdp2: Annotated[bool, typer.Option(help="ep_plugin gathers and reduces for FSDP2 too.")] = True,
    overlap: Annotated[bool, typer.Option(help="Shared experts run during ep_plugin's dispatch.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm trains.")] = 2,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes. (default: one per GPU; 4 without GPUs)")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Emulated nodes of as many ranks each.")] = 1,
    rate: Annotated[str | None, typer.Option(help="Of a node's link, such as 1gbit. (default: no limit)")] = None,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json and loss.png.")] = Path("runs/compare"),
) -> None:
    """Train MODEL through ep_plugin and through what is built in, and compare loss and speed."""
    options = resolve(
        model, preset, checkpoint=checkpoint, layers=layers, text=text, steps=steps, seq_len=seq_len, batch=batch,
        micro_batches=micro_batches, lr=lr, dtype=dtype, seed=seed, fsdp2=fsdp2, overlap=overlap,
    )  # fmt: skip
    started = Ranks.of(ranks, nodes, rate)
    _make_folder(out)
    code_hash = hash_sources()
    arms = [(number, arm) for number in range(1, rounds + 1) for arm in (OURS, MODELS[model].built_in)]
    titled = [replace(options, arm=arm, title=f"{arm}, round {number} of {rounds}") for number, arm in arms]
    results = [_train(one, started) for one in titled]

    from examples.compare import report

    report.write(report.summarise(results, code_hash=code_hash), out)


def resolve(
    model: str, preset: str | None, *, checkpoint: Path | None, layers: int | None, text: Path | None,
    dtype: str | None, seed: int, fsdp2: bool, overlap: bool, **given: Any,
) -> Options:  # fmt: skip
    """The options of the arm OURS, where None takes the preset's value. Refuses what no process should start for."""
    presets = _value_of(MODELS, model, "MODEL").presets
    preset = preset or next(iter(presets))
    defaults = _value_of(presets, preset, "--preset")
    if dtype is not None:
        _value_of(dict.fromkeys(DTYPES), dtype, "--dtype")
    if text is not None and not text.exists():
        raise typer.BadParameter(f"expected a file or folder, got {text}, which does not exist", param_hint="--text")
    if model == "qwen3" and not fsdp2:
        raise typer.BadParameter("expected --fsdp2 for qwen3, which has no experts to exchange", param_hint="--fsdp2")
    dense, most = defaults.dense_layers, defaults.layers
    if checkpoint is not None:
        config = _read_config(checkpoint, model)
        dense, most = config.get("first_k_dense_replace", 0), config["num_hidden_layers"]
    if (layers or most) <= dense:
        raise typer.BadParameter(
            f"expected more than {dense}, since the first {dense} have no experts, got {layers or most}",
            param_hint="--layers",
        )
    is_megatron = MODELS[model].module == "megatron"
    if is_megatron:
        _check_megatron(model, checkpoint)
    chosen = {name: getattr(defaults, name) if value is None else value for name, value in given.items()}
    return Options(
        model=model,
        arm=OURS,
        preset=preset,
        checkpoint=str(checkpoint.resolve()) if checkpoint else None,
        layers=layers or most,
        text=str(text.resolve()) if text else None,
        dtype=dtype or (defaults.dtype if torch.cuda.is_available() else "float32"),
        seed=seed,
        fsdp2=fsdp2 and not is_megatron,
        overlap=overlap and model == "deepseek_v3",
        **chosen,
    )


def _value_of(known: dict[str, Any], name: str, hint: str) -> Any:
    if name not in known:
        raise typer.BadParameter(f"expected one of {', '.join(known)}, got {name!r}", param_hint=hint)
    return known[name]


def _read_config(checkpoint: Path, model: str) -> dict[str, Any]:
    path = checkpoint / "config.json"
    if not path.is_file():
        raise typer.BadParameter(
            f"expected a folder with a checkpoint, got {checkpoint} without config.json", param_hint="--checkpoint"
        )
    config = json.loads(path.read_text())
    if config.get("model_type") != model:
        raise typer.BadParameter(f"expected a {model}, got a {config.get('model_type')}", param_hint="--checkpoint")
    return config


def _check_megatron(model: str, checkpoint: Path | None) -> None:
    if importlib.util.find_spec("megatron") is None:
        raise typer.BadParameter(
            "expected megatron-core, found none: run pip install '.[megatron]' in the repository's root"
        )
    if not torch.cuda.is_available():
        raise typer.BadParameter(
            "expected NVIDIA GPUs, which Megatron-core's layers need, found none: qwen3 and deepseek_v3 run on CPUs"
        )
    if checkpoint is not None:
        raise typer.BadParameter(f"expected a preset for {model}, got a checkpoint", param_hint="--checkpoint")


def _make_folder(out: Path) -> None:
    """Refuses a folder that cannot be written before anything is trained."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"expected a folder, got {out}: {error}", param_hint="--out") from None
    for path in (out / "metrics.json", out / "loss.png"):
        if path.is_dir() or not os.access(path if path.exists() else out, os.W_OK):
            raise typer.BadParameter(f"expected a file that can be written, got {path}", param_hint="--out")


def _train(options: Options, ranks: Ranks) -> dict[str, Any]:
    """The result of one arm, trained in fresh processes. Exits with a status other than 0 if a rank fails."""
    with tempfile.TemporaryDirectory() as folder, _environment(options):
        result = Path(folder) / "result.json"
        ranks.run(json.dumps(asdict(options)), str(result), folder)
        return json.loads(result.read_text())


@contextlib.contextmanager
def _environment(options: Options) -> Iterator[None]:
    """Sets EP_PLUGIN for processes that start meanwhile: Megatron's arms differ by it alone."""
    if MODELS[options.model].module != "megatron":
        yield
        return
    before = os.environ.get("EP_PLUGIN")
    os.environ["EP_PLUGIN"] = "megatron" if options.arm == OURS else ""
    try:
        yield
    finally:
        os.environ.pop("EP_PLUGIN")
        if before is not None:
            os.environ["EP_PLUGIN"] = before
