"""Writes a comparison: numbers in ``metrics.json``, the losses in ``loss.png``, a table on the screen."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from rich.console import Console
from rich.table import Table

from ep_plugin.bench import provenance, training

WARMUP = 3  # steps left out of every speed: pools grow and caches fill in them


def summarise(results: list[dict[str, Any]], *, code_hash: str) -> dict[str, Any]:
    """The metrics of one comparison.

    Args:
        results: what `train.py` wrote, of each arm in the order they ran; the first is ep_plugin's.
        code_hash: of ep_plugin before the run, as in ep-bench's results.

    Returns:
        Speeds are tokens of all ranks per second at the median step. Exchange times are of a median step:
        ``with_waiting`` is the mean of the ranks, ``alone`` excludes the wait for slower ranks. Both arms' must have
        been timed. ``served`` and ``memory_mib`` are of rank 0 in each arm's first run.
        ``profiled`` is the mean of an arm's runs, with the option `table`.
        ``compare.max_rel_diff`` is the largest |a - b| / |b| of the loss over all steps and pairs of runs.
    """
    first = results[0]
    options = first["options"]
    arms: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        arms.setdefault(result["options"]["arm"], []).append(result)
    ours, theirs = arms.values()
    step_seconds = {name: _median(runs, "step_seconds") for name, runs in arms.items()}
    tokens = options["batch"] * options["micro_batches"] * options["seq_len"] * first["world_size"]
    exchange = {}
    if all("exchange_seconds" in result for result in results):
        exchange["share_dispatch_combine"] = {
            name: sum(_timed(runs, "exchange_seconds")) / sum(_timed(runs, "step_seconds"))
            for name, runs in arms.items()
        }
        keys = {"with_waiting": "exchange_seconds", "alone": "exchange_alone_seconds"}
        exchange["exchange_ms"] = {
            name: {label: 1e3 * _median(runs, key) for label, key in keys.items()} for name, runs in arms.items()
        }
    profiled = {}
    if options["table"]:
        profiled = {"profiled": {name: _mean([run["profiled"] for run in runs]) for name, runs in arms.items()}}
    difference = max(
        abs(a - b) / abs(b)
        for mine in ours
        for other in theirs
        for a, b in zip(mine["losses"], other["losses"], strict=True)
    )
    size = f"checkpoint {options['checkpoint']}" if options["checkpoint"] else options["preset"]
    return {
        "backend": "cpu" if first["device"] == "cpu" else "cuda",
        "process_group": first["process_group"],
        "device": first["device"],
        "world_size": first["world_size"],
        **({"emulation": first["emulation"]} if first["emulation"] else {}),
        "model": f"{options['model']} {size}, {options['layers']} layers",
        "steps": options["steps"],
        "rounds": len(ours),
        "loss_first": first["losses"][0],
        "loss_last": first["losses"][-1],
        "compare": {"reference": theirs[0]["options"]["arm"], "max_rel_diff": difference},
        "tokens_per_s": {name: tokens / seconds for name, seconds in step_seconds.items()},
        "step_ms": {name: 1e3 * seconds for name, seconds in step_seconds.items()},
        **exchange,
        **profiled,
        "fsdp2_launches": {name: runs[0]["fsdp2_launches"] for name, runs in arms.items()},
        "served": {name: runs[0]["served"] for name, runs in arms.items()},
        "memory_mib": {name: runs[0]["memory_mib"] for name, runs in arms.items()},
        "losses": {name: runs[0]["losses"] for name, runs in arms.items()},
        "options": {name: value for name, value in options.items() if name not in ("arm", "title")},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "code_hash": code_hash,
        "commit": provenance.commit(),
        "command": shlex.join(["python", "-m", "examples.compare", *sys.argv[1:]]),
    }


def _mean(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {name: statistics.mean(each["parts_ms"][name] for each in profiles) for name in profiles[0]["parts_ms"]}
    return {"step_ms": statistics.mean(each["step_ms"] for each in profiles), "parts_ms": parts}


def _timed(runs: list[dict[str, Any]], key: str) -> list[float]:
    """The values of every timed step. A run too short to leave any out is used whole."""
    return [value for run in runs for value in (run[key][WARMUP:] or run[key])]


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(_timed(runs, key))


def write(metrics: dict[str, Any], out: Path) -> None:
    """Print the table, and write ``metrics.json`` and ``loss.png`` into the folder `out`."""
    console = Console()
    console.print(_table(metrics))
    if "profiled" in metrics:
        console.print(training.parts_table(metrics), highlight=False, markup=False)
    console.print("largest relative difference of the loss: {max_rel_diff:.2e}".format(**metrics["compare"]))
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, losses), style in zip(metrics["losses"].items(), ({"linewidth": 4, "alpha": 0.5}, {}), strict=True):
        axes.plot(losses, label=name, **style)  # the curves coincide: the first is wide, so that both can be seen
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="{model}, {world_size} ranks".format(**metrics))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120)
    plt.close(figure)
    console.print(f"wrote {out / 'metrics.json'} and {out / 'loss.png'}", soft_wrap=True)


def _table(metrics: dict[str, Any]) -> Table:
    title = "{model} on {world_size} x {device}, {steps} steps".format(**metrics)
    exchange = metrics.get("exchange_ms")
    columns = ["in dispatch / combine", "without waiting"] if exchange else []
    table = Table("through", "loss", "tokens/s", "ms/step", *columns, "MiB for peers", title=title)
    for name, losses in metrics["losses"].items():
        row = [f"{losses[0]:.2f} → {losses[-1]:.2f}", f"{metrics['tokens_per_s'][name]:,.0f}"]
        row += [f"{metrics['step_ms'][name]:.1f}"]
        if exchange:
            row += [f"{metrics['share_dispatch_combine'][name]:.0%}", f"{exchange[name]['alone']:.1f} ms"]
        row += [f"{metrics['memory_mib'][name]['peers']:.1f}"]
        table.add_row(name, *row)
    return table
