"""One arm on one rank: train, and let rank 0 write what was measured.

`launch.py` calls `run` in a fork, or runs ``python -m examples.compare.train OPTIONS_JSON RESULT_PATH``, under
torchrun's environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ep_plugin import env
from ep_plugin.integrations import fsdp2, status
from examples.compare.clock import ExchangeClock
from examples.compare.data import batch_at, read_text
from examples.compare.options import MODELS, Options

WARMUP_STEPS = 5


def train(options: Options) -> dict[str, Any]:
    """Train the arm; the result is the same on all ranks.

    Returns:
        losses: per step, the mean over ranks.
        emulation: the nodes that are emulated, or None.
        step_seconds: per step, of the slowest rank.
        served: by integration, the operations that ep_plugin served on rank 0, and those that it left to the framework.
        exchange_seconds, exchange_alone_seconds: per step, the mean over ranks, and without waiting for slower ranks.
            Absent for Megatron, for a dense model, and where shared experts run during the exchange.
        fsdp2_launches: what ep_plugin ran for FSDP2, or None.
    """
    device = _start_process_group()
    clock = ExchangeClock(device)
    # Megatron-core may be absent where the other models are trained.
    models = importlib.import_module(f"examples.compare.{MODELS[options.model].module}")
    model = models.build_model(options, clock)
    if options.enables_fsdp2:
        fsdp2.enable(model)
    optimizer = models.build_optimizer(model, options)
    losses, step_seconds, exchanges = _run_steps(model, optimizer, options, device, clock)
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
    }
    if exchanges.numel() and not options.overlaps:
        shortest, exchange_seconds = exchanges.clone(), exchanges.sum(dim=1)
        dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
        dist.all_reduce(exchange_seconds)
        result["exchange_seconds"] = (exchange_seconds / dist.get_world_size()).tolist()
        result["exchange_alone_seconds"] = shortest.sum(dim=1).tolist()
    return result


def _start_process_group() -> torch.device:
    # Presets are initialised shard by shard afterwards, so what this warns of is overwritten.
    warnings.filterwarnings("ignore", message="DTensor random operators")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    return torch.device("cpu")


def _run_steps(
    model: torch.nn.Module, optimizer: Any, options: Options, device: torch.device, clock: ExchangeClock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's loss and seconds of every step, float64 ``[steps]``, and the seconds of each dispatch and combine,
    float64 ``[steps, exchanges]``.
    """
    rank = dist.get_rank()
    path = Path(options.text) if options.text else None
    # One rank learns the byte pairs of a large vocabulary, and all train on the same ids.
    found = [read_text(path, model.vocab_size) if rank == 0 else None]
    dist.broadcast_object_list(found)
    measured = torch.zeros(2, options.steps, dtype=torch.float64)
    exchanges: list[list[float]] = []
    bar = tqdm(range(options.steps), desc=options.title, unit="step", disable=rank != 0, mininterval=1)
    for step in bar:
        numbers = range(step * options.micro_batches, (step + 1) * options.micro_batches)
        shape = {"batch": options.batch, "seq_len": options.seq_len}
        batches = [batch_at(found[0], **shape, seed=options.seed, step=at, rank=rank).to(device) for at in numbers]
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        start = time.perf_counter()
        value = backward(model, batches)
        optimizer.step()
        optimizer.zero_grad()
        value = value.item()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        measured[:, step] = torch.tensor([value, time.perf_counter() - start], dtype=torch.float64)
        exchanges.append(clock.take())
        bar.set_postfix(loss=f"{value:.3f}", refresh=False)
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


def run(options_json: str, result_path: str) -> None:
    options = Options(**json.loads(options_json))
    result = train(options)
    if dist.get_rank() == 0:
        Path(result_path).write_text(json.dumps({"options": asdict(options), **result}))
    dist.barrier()
    dist.destroy_process_group()


@record
def main() -> None:
    run(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo may still release the last collective's tensor. If it asks for the interpreter's lock while the
    # interpreter is torn down, the process aborts.
    os._exit(0)


if __name__ == "__main__":
    main()
