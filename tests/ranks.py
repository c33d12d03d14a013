"""Runs a function on several ranks, each a process of its own, and says how each one ended."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

# Imported once, before ranks are forked: autograd, checkpointing, Megatron and torchtitan pull in the compiler, seconds
# for each rank. None of it may touch a GPU by being imported, since CUDA does not survive a fork. The compiler's back
# end asks for the GPUs that it finds.
_PRELOADED = ["pytest", "torch", "torch.distributed.tensor", "torch._dynamo"]
_PRELOADED += [] if torch.backends.cuda.is_built() else ["torch._inductor.compile_fx"]
# Where Python writes no bytecode, each rank would compile these.
_PRELOADED += ["ep_plugin.moe.communicator", "ep_plugin.collectives.all_gather", "ep_plugin.collectives.reduce_scatter"]
_PRELOADED += ["tests.ranks", "tests.moe.moe_cases", "tests.faults.fault_cases", "tests.collectives.collective_cases"]

# Imported once, too, for tests that name the framework. Each framework has a server, which stays until the end.
_OF_FRAMEWORKS = {
    "": [],
    "transformers": [
        "transformers.distributed.expert_parallel",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "transformers.models.deepseek_v3.modeling_deepseek_v3",
    ],
    "megatron": [
        "megatron.core.distributed",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.core.transformer.moe.moe_layer",
    ],
}
_servers = {"": forkserver._forkserver}
_environment = dict(os.environ)  # of servers: a test that sets variables may be the first that needs one

_LINES = 100  # of a rank's notes that a failure shows
_notes: TextIO | None = None  # the file of a rank that run_ranks has started; None: stderr
_began = time.monotonic()


@dataclass
class Outcome:
    """How a rank ended: what it returned, or what it raised, or only its exit code.

    notes: the end of what it has noted. If it was left at the deadline, that is where each of its threads was.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0
    notes: str = ""


def note(what: str) -> None:
    """Says what this rank comes to, for the message of a failure."""
    print(f"{time.monotonic() - _began:6.1f} s: {what}", file=_notes or sys.stderr, flush=True)


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    env: dict[str, str] | None = None,
    start: str = "forkserver",
    framework: str = "",
) -> list[Outcome]:
    """Calls `function(rank, *args)` in `size` processes that share a gloo group, and returns how each ended.

    `function` is importable by name. `start`: how multiprocessing starts them. `framework`: which the ranks, forked by
    a server, have imported. The group's store lives in the calling process, so it outlives every rank. Whoever is left
    at the deadline is killed, and its outcome then has neither a value nor an error.
    """
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        start_server(framework)
    if simt_asked(os.environ | (env or {})):
        from tests.emulation.build import build

        build()  # before time runs for the ranks
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder, str(rank)) for rank in range(size)]
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            stuck_at = time.monotonic() + 0.98 * timeout_s
            target_args = (theirs, rank, size, store.port, env or {}, function, args, timeout_s, notes[rank], stuck_at)
            process = context.Process(target=_rank_main, args=target_args, daemon=True)
            with unittest.mock.patch.object(
                forkserver, "connect_to_new_process", _servers[framework].connect_to_new_process
            ):
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            outcomes = _collect(pipes, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for outcome, path in zip(outcomes, notes, strict=True):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            outcome.notes = "\n".join(lines[-_LINES:])
        return outcomes


def start_server(framework: str = "") -> None:
    """Starts the process that ranks are forked from, unless it runs."""
    server = _servers.setdefault(framework, forkserver.ForkServer())
    server.set_forkserver_preload([*_PRELOADED, *_OF_FRAMEWORKS[framework], "tests.frozen"])
    with unittest.mock.patch.dict(os.environ, _environment, clear=True):
        server.ensure_running()


def simt_asked(environment: Mapping[str, str]) -> bool:
    """Whether ranks on CPUs run the kernels of GPUs (tests/emulation)."""
    return environment.get("EP_TEST_KERNELS") == "simt"


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; an AssertionError with the trace of the first that failed, and the notes of all."""
    noted = "\n".join(f"rank {rank} noted:\n{outcome.notes}" for rank, outcome in enumerate(outcomes) if outcome.notes)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise AssertionError(f"rank {rank}: {outcome.error!r}\n{outcome.trace}\n{noted}") from outcome.error
        assert outcome.exitcode == 0, f"rank {rank} ended with exit code {outcome.exitcode} and no result\n{noted}"
    return [outcome.value for outcome in outcomes]


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Outcome]:
    outcomes = [Outcome() for _ in processes]
    heard = [_hear(*pair, deadline) for pair in zip(outcomes, pipes, strict=True)]
    for number, (outcome, process) in enumerate(zip(outcomes, processes, strict=True)):
        process.join(max(1.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        outcome.exitcode = process.exitcode
        if not heard[number]:  # what it said since the deadline, such as that its own has passed too
            _hear(outcome, pipes[number], deadline)
    return outcomes


def _hear(outcome: Outcome, pipe: Connection, deadline: float) -> bool:
    """Whether the rank has said how it ended, before the deadline or, after that, so far."""
    try:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return False
        outcome.value, outcome.error, outcome.trace, outcome.seconds = pickle.loads(pipe.recv_bytes())
    except EOFError:
        pass  # it died without a word: its exit code says how
    return True


def _rank_main(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    env: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    notes: Path,
    stuck_at: float,
) -> None:
    global _notes, _began
    os.environ.update(env)
    _began, _notes = time.monotonic(), notes.open("w")
    faulthandler.dump_traceback_later(max(0.1, stuck_at - _began), file=_notes)
    nodes = int(os.environ.get("EP_TEST_NODES", "1"))
    if nodes > 1 and size % nodes == 0:
        os.environ.setdefault("EP_PLUGIN_RANKS_PER_NODE", str(size // nodes))
    torch.set_num_threads(1)
    value, error, trace = None, None, ""
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        _wait_for_all(store, size)
        if simt_asked(os.environ):
            from tests import emulation as simt

            simt.serve_cpus()
        value = function(rank, *args)
    except BaseException as caught:
        error, trace = caught, traceback.format_exc()
    pipe.send_bytes(_pickled((value, error, trace, time.monotonic() - _began)))
    if error is None:
        dist.destroy_process_group()


def _wait_for_all(store: dist.Store, size: int) -> None:
    """Until all ranks have connected to each other: one that ends or dies at once would end that of the others too."""
    if store.add("tests/connected", 1) == size:
        store.set("tests/all connected", "")
    store.wait(["tests/all connected"])


def _pickled(result: tuple[Any, BaseException | None, str, float]) -> bytes:
    _, error, trace, seconds = result
    try:
        return pickle.dumps(result)
    except Exception as problem:
        return pickle.dumps((None, RuntimeError(repr(error or problem)), f"{trace}\nnot picklable: {problem}", seconds))
