"""What a run leaves behind: numbers in ``metrics.json``, the curve in ``loss.png``, a table on the screen."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from rich.console import Console
from rich.table import Table

WARMUP = 3  # steps left out of every speed: pools grow and caches fill in them
# Options in which the arms of a comparison differ.
_OF_AN_ARM = ("ep_implementation", "fsdp2", "overlap", "switched_on")


def summarise(arms: list[dict], *, model: str, reference: str | None, code_hash: str) -> dict:
    """The metrics of one run from its arms' results, in the order they ran.

    Speeds are tokens of all ranks per second at the median step, the first three steps of every arm left out.
    ``max_rel_diff`` is the largest |a - b| / |b| of the loss over all steps and all pairs of arms. Exchanges are there
    where all arms timed theirs. ``code_hash``: of ep_plugin before the run, as ep-bench's results have it.
    """
    main = arms[0]
    options = main["options"]
    by_name: dict[str, list[dict]] = {}
    for arm in arms:
        by_name.setdefault(arm["implementation"], []).append(arm)
    tokens = options["batch"] * options["micro_batches"] * options["seq_len"] * main["world_size"]
    compare = None
    if reference is not None:
        ours, theirs = (by_name[name] for name in (main["implementation"], reference))
        compare = {"reference": reference, "max_rel_diff": max(_rel_diff(a, b) for a in ours for b in theirs)}
    return {
        "backend": "cpu" if main["device"] == "cpu" else "cuda",
        "process_group": main["backend"],
        "device": main["device"],
        "world_size": main["world_size"],
        "model": model,
        "steps": options["steps"],
        "rounds": len(by_name[main["implementation"]]),
        "loss_first": main["losses"][0],
        "loss_last": main["losses"][-1],
        "compare": compare,
        "tokens_per_s": {name: tokens / _median_step(runs) for name, runs in by_name.items()},
        "step_ms": {name: 1e3 * _median_step(runs) for name, runs in by_name.items()},
        **(_exchange(by_name) if all("exchange_seconds" in arm for arm in arms) else {}),
        "fsdp2_launches": {name: runs[0].get("fsdp2_launches") for name, runs in by_name.items()},
        "overlap": {name: runs[0]["options"]["overlap"] for name, runs in by_name.items()},
        "losses": {name: runs[0]["losses"] for name, runs in by_name.items()},
        "options": {key: value for key, value in options.items() if key not in _OF_AN_ARM},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "code_hash": code_hash,
    }


def write(metrics: dict, out: Path) -> None:
    """Print the table, and write ``metrics.json`` and ``loss.png`` into the folder ``out``."""
    console = Console()
    console.print(_table(metrics))
    if metrics["compare"]:
        console.print("largest relative difference of the loss: {max_rel_diff:.2e}".format(**metrics["compare"]))
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    _plot(metrics, out / "loss.png")
    console.print(f"wrote {out / 'metrics.json'} and {out / 'loss.png'}", soft_wrap=True)


def _exchange(by_name: dict[str, list[dict]]) -> dict:
    return {
        "share_dispatch_combine": {name: _exchange_share(runs) for name, runs in by_name.items()},
        "exchange_ms": {name: _exchange_ms(runs) for name, runs in by_name.items()},
    }


def _rel_diff(ours: dict, theirs: dict) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))


def _timed(runs: list[dict], key: str) -> list[float]:
    """Values of every timed step; a run too short to leave any out is used whole."""
    return [value for run in runs for value in (run[key][WARMUP:] or run[key])]


def _median_step(runs: list[dict]) -> float:
    return statistics.median(_timed(runs, "step_seconds"))


def _exchange_share(runs: list[dict]) -> float:
    return sum(_timed(runs, "exchange_seconds")) / sum(_timed(runs, "step_seconds"))


def _exchange_ms(runs: list[dict]) -> dict[str, float]:
    """Of a median step: ``with_waiting``, the mean of the ranks; ``alone``, without what they wait for slower ones."""
    keys = {"with_waiting": "exchange_seconds", "alone": "exchange_alone_seconds"}
    return {name: 1e3 * statistics.median(_timed(runs, key)) for name, key in keys.items()}


def _plot(metrics: dict, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, (name, losses) in enumerate(metrics["losses"].items()):
        # The curves lie on each other: the first is drawn wide so that both can be seen.
        axes.plot(losses, label=name, linewidth=4 if index == 0 else 1.2, alpha=0.5 if index == 0 else 1.0)
    axes.set(
        xlabel="step",
        ylabel="loss (nats per token)",
        title=f"{metrics['model']}, {metrics['world_size']} ranks",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _table(metrics: dict) -> Table:
    exchange = metrics.get("exchange_ms")
    title = "{model} on {world_size} x {device}, {steps} steps".format(**metrics)
    table = Table("through", "loss", "tokens/s", "ms/step", title=title)
    for column in ("in dispatch / combine", "without waiting") if exchange else ():
        table.add_column(column)
    for name, losses in metrics["losses"].items():
        row = [f"{losses[0]:.2f} → {losses[-1]:.2f}", f"{metrics['tokens_per_s'][name]:,.0f}"]
        row += [f"{metrics['step_ms'][name]:.1f}"]
        if exchange:
            row += [f"{metrics['share_dispatch_combine'][name]:.0%}", f"{exchange[name]['alone']:.1f} ms"]
        table.add_row(name, *row)
    return table
