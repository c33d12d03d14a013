"""One arm of an example on one rank: train a model through one set of collectives and write what was measured.

Run by ``_launch.py`` as ``python _training.py OPTIONS_JSON RESULT_PATH`` under torchrun's
environment.
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
from typing import NoReturn

import torch
import torch.distributed as dist
from _clock import ExchangeClock, register_timed
from _data import batch_at, read_text
from _models import build_model
from _options import MEGATRON, TrainOptions
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ep_plugin.integrations import fsdp2

WARMUP_STEPS = 5


def train(options: TrainOptions) -> dict:
    """Train and return, equal on all ranks and per step: the loss (mean over ranks) and the seconds of the step (of the
    slowest rank); where an exchange is timed, its seconds too (mean over ranks, and without waiting for slower
    ranks), but not one that shared experts run beside; where FSDP2 is served by ep_plugin, what ran there.
    """
    device = _start_process_group()
    clock = ExchangeClock(device)
    if options.architecture == MEGATRON:
        model, timed = importlib.import_module("_megatron").build_model(options), False
    else:
        model, timed = _of_transformers(options, clock), options.ep_implementation is not None and not options.overlap
    if options.fsdp2 == "ep_plugin":
        fsdp2.enable(model)
    losses, step_seconds, exchanges = _run_steps(model, options, device, clock)
    dist.all_reduce(step_seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    result = {
        "implementation": options.arm,
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "world_size": dist.get_world_size(),
        "losses": (losses / dist.get_world_size()).tolist(),
        "step_seconds": step_seconds.tolist(),
    }
    if timed:
        shortest, exchange_seconds = exchanges.clone(), exchanges.sum(dim=1)
        dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
        dist.all_reduce(exchange_seconds)
        result["exchange_seconds"] = (exchange_seconds / dist.get_world_size()).tolist()
        result["exchange_alone_seconds"] = shortest.sum(dim=1).tolist()
    if options.fsdp2 == "ep_plugin":
        result["fsdp2_launches"] = asdict(fsdp2.launches(model))
    return result


def _of_transformers(options: TrainOptions, clock: ExchangeClock) -> torch.nn.Module:
    exchange = options.ep_implementation
    if exchange != "ep_plugin":
        return build_model(options, ep_implementation=register_timed(exchange, clock) if exchange else None)
    integration = importlib.import_module("ep_plugin.integrations.transformers")
    model = build_model(options, ep_implementation=register_timed(exchange, clock))
    if options.overlap:
        integration.overlap_shared_experts(model)
    return model


def _start_process_group() -> torch.device:
    # Presets are initialised shard by shard afterwards (`build_model`), so what this warns of is overwritten.
    warnings.filterwarnings("ignore", message="DTensor random operators")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    return torch.device("cpu")


def _run_steps(
    model: torch.nn.Module, options: TrainOptions, device: torch.device, clock: ExchangeClock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's loss and seconds of every step, float64 ``[steps]``, and the seconds of each dispatch and combine of
    every step, float64 ``[steps, exchanges]``.
    """
    text = _text_of_rank_0(options, model.vocab_size)
    optimizer = torch.optim.AdamW(
        _groups_by_mesh(model), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda" or None
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    rank = dist.get_rank()
    measured = torch.zeros(2, options.steps, dtype=torch.float64)
    exchanges: list[list[float]] = []
    bar = tqdm(range(options.steps), desc=options.arm, unit="step", disable=rank != 0, mininterval=1)
    for step in bar:
        batches = [
            batch_at(
                text,
                batch=options.batch,
                seq_len=options.seq_len,
                seed=options.seed,
                step=step * options.micro_batches + micro,
                rank=rank,
            ).to(device)
            for micro in range(options.micro_batches)
        ]
        start = time.perf_counter()
        value = _backward(model, batches)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        value = value.item()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        measured[:, step] = torch.tensor([value, time.perf_counter() - start], dtype=torch.float64)
        exchanges.append(clock.take())
        bar.set_postfix(loss=f"{value:.3f}", refresh=False)
    losses, step_seconds = measured.to(device)
    return losses, step_seconds, torch.tensor(exchanges, dtype=torch.float64, device=device)


def _text_of_rank_0(options: TrainOptions, vocab_size: int) -> torch.Tensor:
    """One rank learns the pairs of a vocabulary, and all train on the same ids."""
    path = Path(options.text) if options.text else None
    found = [read_text(path, vocab_size) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    (text,) = found
    assert text is not None
    return text


def _backward(model: torch.nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss of ``batches``, whose gradients add up; the last one's backward reduces them over the ranks."""
    total = torch.zeros((), device=batches[0].device)
    for number, tokens in enumerate(batches, 1):
        if len(batches) > 1:
            model.set_requires_gradient_sync(number == len(batches))
        loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
        loss.backward()
        total += loss.detach()
    return total


def _groups_by_mesh(model: torch.nn.Module) -> list[dict]:
    """One parameter group per device mesh: a fused update takes tensors of one mesh only."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def write_result(options: TrainOptions, result_path: Path) -> None:
    """Train, and let rank 0 write the result as JSON. Every rank leaves the process group closed."""
    result = train(options)
    if dist.get_rank() == 0:
        result_path.write_text(json.dumps({"options": asdict(options), **result}))
    dist.barrier()
    dist.destroy_process_group()


def leave() -> NoReturn:
    """End a rank that has finished, without tearing the interpreter down, as multiprocessing ends its
    workers.

    A thread of gloo may be about to let go of the last collective's tensor. When it asks for the interpreter
    lock while the interpreter is being torn down, the process aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@record
def main() -> None:
    write_result(TrainOptions(**json.loads(sys.argv[1])), Path(sys.argv[2]))
    leave()


if __name__ == "__main__":
    main()
