"""One arm on one rank: train, and let rank 0 return what was measured.

`launch.py` starts ranks that call `run`, or runs ``python -m examples.compare.train OPTIONS_JSON RESULT_PATH`` where
RANK and WORLD_SIZE are set.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ep_plugin import env
from ep_plugin.bench.launch import end_process, run_on_ranks
from ep_plugin.integrations import fsdp2, status
from examples.compare import models, parts  # here, so that ranks are forked from a process that has imported it
from examples.compare.clock import ExchangeClock
from examples.compare.data import batch_at, read_text
from examples.compare.options import MODELS, Options

WARMUP_STEPS = 5


def train(options: Options, device: torch.device) -> dict[str, Any]:
    """Train the arm in the default group; the result is the same on all ranks.

    Returns:
        losses: per step, the mean over ranks.
        emulation: the nodes that are emulated, or None.
        step_seconds: per step, of the slowest rank.
        served: by integration, the operations that ep_plugin served on rank 0, and those that it left to the framework.
        memory_mib: of rank 0: ``peers``, memory of ep_plugin that peers map, and ``peak``, the most that PyTorch had
            allocated on the GPU, or None.
        exchange_seconds, exchange_alone_seconds: per step, the mean over ranks, and without waiting for slower ranks.
            Absent for Megatron, for a dense model, and where shared experts run during the exchange.
        fsdp2_launches: what ep_plugin ran for FSDP2, or None.
        profiled: with the option `table`, what `parts.measure` found in steps after all others.
    """
    clock = ExchangeClock(device)
    is_megatron = MODELS[options.model].module == "megatron"  # which may be absent where other models are trained
    module = importlib.import_module("examples.compare.megatron") if is_megatron else models
    model = module.build_model(options, clock)
    if options.enables_fsdp2:
        fsdp2.enable(model)
    optimizer = module.build_optimizer(model, options)
    run_step = _stepper(model, optimizer, options, device)
    losses, step_seconds, exchanges = _run_steps(run_step, options, device, clock)
    dist.all_reduce(step_seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    result = {
        "process_group": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "world_size": dist.get_world_size(),
        "emulation": env.settings().emulation,
        "losses": (losses / dist.get_world_size()).tolist(),
        "step_seconds": step_seconds.tolist(),
        "fsdp2_launches": asdict(fsdp2.launches(model)) if options.enables_fsdp2 else None,
        "served": {row.name: {"served": row.served, "left": row.left} for row in status() if row.served or row.left},
        "memory_mib": {"peers": sum(row.peer_bytes for row in status()) / 2**20, "peak": _peak_mib(device)},
    }
    if exchanges.numel() and not options.overlaps:
        shortest, exchange_seconds = exchanges.clone(), exchanges.sum(dim=1)
        dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
        dist.all_reduce(exchange_seconds)
        result["exchange_seconds"] = (exchange_seconds / dist.get_world_size()).tolist()
        result["exchange_alone_seconds"] = shortest.sum(dim=1).tolist()
    if options.table:
        result["profiled"] = parts.measure(run_step, options.steps, clock.take, device)
    return result


def _peak_mib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


def _stepper(
    model: torch.nn.Module, optimizer: Any, options: Options, device: torch.device
) -> Callable[[int], tuple[float, float]]:
    """Returns a function that runs the step of a number, and returns this rank's loss and seconds."""
    rank = dist.get_rank()
    path = Path(options.text) if options.text else None
    # One rank learns the byte pairs of a large vocabulary, and all train on the same ids.
    found = [read_text(path, model.vocab_size) if rank == 0 else None]
    dist.broadcast_object_list(found)
    shape = {"batch": options.batch, "seq_len": options.seq_len}

    def run(step: int) -> tuple[float, float]:
        numbers = range(step * options.micro_batches, (step + 1) * options.micro_batches)
        batches = [batch_at(found[0], **shape, seed=options.seed, step=at, rank=rank).to(device) for at in numbers]
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        start = time.perf_counter()
        with record_function(parts.STEP):
            value = backward(model, batches)
            optimizer.step()
            optimizer.zero_grad()
            value = value.item()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return value, time.perf_counter() - start

    return run


def _run_steps(
    run: Callable[[int], tuple[float, float]], options: Options, device: torch.device, clock: ExchangeClock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's loss and seconds of every step, float64 ``[steps]``, and the seconds of each dispatch and combine,
    float64 ``[steps, exchanges]``.
    """
    measured = torch.zeros(2, options.steps, dtype=torch.float64)
    exchanges: list[list[float]] = []
    bar = tqdm(range(options.steps), desc=options.title, unit="step", disable=dist.get_rank() != 0, mininterval=1)
    for step in bar:
        measured[:, step] = torch.tensor(run(step), dtype=torch.float64)
        exchanges.append(clock.take())
        bar.set_postfix(loss=f"{measured[0, step]:.3f}", refresh=False)
    losses, step_seconds = measured.to(device)
    return losses, step_seconds, torch.tensor(exchanges, dtype=torch.float64, device=device)


def backward(model: torch.nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss of `batches`, whose gradients add up. Only the last backward reduces them over the ranks."""
    total = torch.zeros((), device=batches[0].device)
    for number, tokens in enumerate(batches, 1):
        if len(batches) > 1:
            model.set_requires_gradient_sync(number == len(batches))
        loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
        loss.backward()
        total += loss.detach()
    return total


def backend() -> str:
    """Of ranks, as `run_on_ranks` names it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """The options and `train`'s result. given: Options' fields."""
    # Presets are initialised shard by shard afterwards, so what this warns of is overwritten.
    warnings.filterwarnings("ignore", message="DTensor random operators")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # by which transformers chooses the device
    return {"options": given, **train(Options(**given), device)}


def main(options: str, result: str) -> None:
    ranks = env.launcher().world_size
    found = run_on_ranks(ranks, backend(), run, json.loads(options), timeout=None)
    Path(result).write_text(json.dumps(found))
    end_process()


if __name__ == "__main__":
    main(*sys.argv[1:])
