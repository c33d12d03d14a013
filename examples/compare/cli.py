"""Train one model twice, through ep_plugin and through what its framework has built in, and compare loss and speed.

    python -m examples.compare qwen3_moe --out runs/demo        # in the repository's root; on CPUs or GPUs as found
    python -m examples.compare qwen3 --preset 4b --layers 12
    python -m examples.compare deepseek_v3 --preset v3
    python -m examples.compare megatron                         # DeepSeek-V3 of Megatron-core's layers, on GPUs only
    python -m examples.compare megatron_dense                   # Qwen3-4B of Megatron-core's layers, on GPUs only
    python -m examples.compare qwen3_moe --nodes 2 --ranks 4    # two emulated nodes of two ranks
    python -m examples.compare qwen3_moe --table                # and where a step's time goes: see parts.py

Both arms start from the same weights and train on the same batches. Each runs in fresh processes, `--rounds` times and
in turn, so that a slow minute of the machine affects both. See report.py for what is written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import typer

from ep_plugin.bench.provenance import hash_sources
from ep_plugin.bench.suite import take_fields
from examples.compare.launch import Comparison
from examples.compare.options import DTYPES, MODELS, OURS, Options


def main(**given: Any) -> None:
    """Train MODEL through ep_plugin and through what is built in, and compare loss and speed."""
    comparison = Comparison(**given)
    options = resolve(comparison)
    _make_folder(comparison.out)
    code_hash, rounds = hash_sources(), comparison.rounds
    arms = [(number, arm) for number in range(1, rounds + 1) for arm in (OURS, MODELS[options.model].built_in)]
    results = []
    for number, arm in arms:
        one = replace(options, arm=arm, title=f"{arm}, round {number} of {rounds}")
        with _environment(one):
            results.append(comparison.train(one))

    from examples.compare import report

    report.write(report.summarise(results, code_hash=code_hash), comparison.out)


take_fields(main, Comparison)


def resolve(given: Options) -> Options:
    """The options of the arm OURS, where None takes the preset's value. Refuses what no process should start for."""
    model, checkpoint, text = given.model, given.checkpoint, given.text
    presets = _value_of(MODELS, model, "MODEL").presets
    preset = given.preset or next(iter(presets))
    defaults = _value_of(presets, preset, "--preset")
    if given.dtype is not None:
        _value_of(dict.fromkeys(DTYPES), given.dtype, "--dtype")
    if text is not None and not Path(text).exists():
        raise typer.BadParameter(f"expected a file or folder, got {text}, which does not exist", param_hint="--text")
    if model == "qwen3" and not given.fsdp2:
        raise typer.BadParameter("expected --fsdp2 for qwen3, which has no experts to exchange", param_hint="--fsdp2")
    dense, most = defaults.dense_layers, defaults.layers
    if checkpoint is not None:
        config = _read_config(Path(checkpoint), model)
        dense, most = config.get("first_k_dense_replace", 0), config["num_hidden_layers"]
    if (given.layers or most) <= dense:
        raise typer.BadParameter(
            f"expected more than {dense}, since the first {dense} have no experts, got {given.layers or most}",
            param_hint="--layers",
        )
    is_megatron = MODELS[model].module == "megatron"
    if is_megatron and given.table:
        raise typer.BadParameter(f"expected a model of transformers, got {model}", param_hint="--table")
    if is_megatron:
        _check_megatron(model, checkpoint)
    asked = {each.name: getattr(given, each.name) for each in fields(Options)}
    chosen = {name: vars(defaults).get(name) if value is None else value for name, value in asked.items()}
    return Options(
        **chosen
        | {
            "preset": preset,
            "checkpoint": checkpoint and str(Path(checkpoint).resolve()),
            "layers": given.layers or most,
            "text": text and str(Path(text).resolve()),
            "dtype": given.dtype or (defaults.dtype if torch.cuda.is_available() else "float32"),
            "fsdp2": given.fsdp2 and not is_megatron,
            "overlap": given.overlap and model == "deepseek_v3",
        }
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


def _check_megatron(model: str, checkpoint: str | None) -> None:
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
