"""Layers of experts that one rank holds alone: without FSDP2, in FSDP2 groups of one rank, and the same with ep_plugin.

    python benchmarks/experts_of_one_rank.py OUT.json [qwen3_30b_a3b|deepseek_v3|tiny ...]

A layer holds what one of 4 ranks would hold of the model's experts, in BF16. 32,768 rows, as many for each expert, go
forward and backward through all layers. The three ways take turns, step by step. `step_ms` is the median of 15 steps
after 5, without the optimizer. `peak_mib` is PyTorch's peak of such a step. `copied_mb` is what operators that only
copy or cast write in it. Then each way trains for 50 steps from the same weights, and the losses with FSDP2 must be
equal.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin.bench import provenance
from ep_plugin.integrations import fsdp2

WAYS = ("without FSDP2", "FSDP2", "FSDP2 with ep_plugin")
WARM_UP, STEPS, TRAINED = 5, 15, 50


@dataclass(frozen=True)
class Sizes:
    experts: int  # of the rank
    hidden: int
    inner: int
    layers: int
    rows: int = 32768


SIZES = {
    "qwen3_30b_a3b": Sizes(experts=32, hidden=2048, inner=768, layers=4),
    "deepseek_v3": Sizes(experts=64, hidden=7168, inner=2048, layers=2),
    "tiny": Sizes(experts=4, hidden=64, inner=32, layers=2, rows=256),
}


class Experts(nn.Module):
    """SwiGLU experts, in the layout of transformers."""

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        for name, (outs, ins) in {
            "gate_up": (2 * sizes.inner, sizes.hidden),
            "down": (sizes.hidden, sizes.inner),
        }.items():
            weight = torch.empty(sizes.experts, outs, ins, dtype=torch.bfloat16, device=device)
            setattr(self, name, nn.Parameter(weight.normal_(0, ins**-0.5, generator=generator)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(rows, self.gate_up.mT).chunk(2, -1)
        return rows + torch.bmm(nn.functional.silu(gate) * up, self.down.mT)


class Copied(TorchDispatchMode):
    """Counts the bytes that operators write which only copy or cast."""

    NAMES = "copy", "clone", "cat", "all_gather", "allgather", "reduce_scatter"

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(name in func.name() for name in self.NAMES):
            self.nbytes += _bytes_of((kwargs or {}).get("out", args[0]) if result is None else result)
        return result


def _bytes_of(written: Any) -> int:
    if isinstance(written, torch.Tensor):
        return written.nbytes
    return sum(map(_bytes_of, written)) if isinstance(written, list | tuple) else 0


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """Returns the figures of all ways for one model's sizes."""
    sizes = SIZES[name]
    rows = torch.randn(sizes.experts, sizes.rows // sizes.experts, sizes.hidden, dtype=torch.bfloat16, device=device)
    steps = {way: _step(way, sizes, rows) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(WARM_UP + STEPS):
        for way, step in steps.items():
            times[way].append(_time(step, device))
    found = {way: {"step_ms": round(statistics.median(times[way][WARM_UP:]), 3)} for way in WAYS}
    losses = {}
    del steps, step
    for way in WAYS:
        gc.collect()  # FSDP2's modules refer to each other
        step = _step(way, sizes, rows)
        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            found[way]["peak_mib"] = torch.cuda.max_memory_allocated(device) >> 20
        with Copied() as copied:
            step()
        found[way]["copied_mb"] = round(copied.nbytes / 1e6, 3)
        losses[way] = [step(trains=True).item() for _ in range(TRAINED)]
        del step
    if losses["FSDP2"] != losses["FSDP2 with ep_plugin"] or not all(map(math.isfinite, losses["FSDP2"])):
        raise SystemExit(f"losses of {name}: expected equal ones, got {losses}")
    return {"sizes": vars(sizes), "ways": found, "losses": {"first": losses["FSDP2"][0], "last": losses["FSDP2"][-1]}}


def _step(way: str, sizes: Sizes, rows: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Returns a step of a new model, which returns the loss. With trains=True it ends with the optimizer."""
    model = nn.Sequential(*(Experts(sizes, rows.device) for _ in range(sizes.layers)))
    if way != WAYS[0]:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    if way == WAYS[2]:
        fsdp2.enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(trains: bool = False) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows).float().square().mean()
        loss.backward()
        if trains:
            optimizer.step()
        return loss.detach()

    return step


def _time(step: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    step()
    wait()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Measures the named sizes, and writes them with the versions and the commit."""
    out, names = Path(sys.argv[1]), sys.argv[2:] or ["qwen3_30b_a3b", "deepseek_v3"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(key, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    models = {name: measure(name, device) for name in names}
    source = {
        "hardware": provenance.hardware(device.type, 1),
        "versions": provenance.versions(),
        "code_hash": provenance.hash_sources(),
        "commit": provenance.commit(),
    }
    out.write_text(json.dumps(source | {"models": models}, indent=2) + "\n")
    print(json.dumps(models, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
