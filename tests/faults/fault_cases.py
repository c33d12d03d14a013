"""What the fault tests share: small calls that work, ranks that die at a gate, and what a process has left behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import PeerTimeout

HIDDEN, TOPK, EXPERTS_PER_RANK = 8, 2, 2


_device = torch.device("cpu")


def here() -> torch.device:
    """Where this process's tensors and communicators live: the CPU, unless `on_cuda` has said otherwise."""
    return _device


def on_cuda(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(rank, *args)` of a CPU test on a GPU; ranks share GPUs where there are fewer."""
    global _device
    _device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(_device)
    return function(rank, *args)


def finish(comm: MoECommunicator) -> None:
    """Waits for what was enqueued, and raises what it found: on a GPU that is after the call has returned."""
    if comm.engine.device.type == "cuda":
        torch.cuda.synchronize()
    comm.check()


RAIL_CHUNKS = 4  # of communicators over several nodes


def open_communicator(size: int, **settings: Any) -> MoECommunicator:
    """A communicator of the default group with rows of HIDDEN float32 and TOPK experts per token."""
    base = {"num_experts": EXPERTS_PER_RANK * size, "hidden_size": HIDDEN, "topk": TOPK}
    if settings.get("mode") != "ll":
        base["rail_chunks"] = RAIL_CHUNKS
    return MoECommunicator(None, MoECommunicatorConfig(**(base | settings)), here())


def open_with_deadline(size: int, timeout_s: float, **settings: Any) -> MoECommunicator:
    """As open_communicator, with a deadline that does not hold for the construction."""
    comm = open_communicator(size, timeout_s=60, **settings)
    set_deadline(comm.engine, timeout_s)
    return comm


def set_deadline(engine: Any, timeout_s: float) -> None:
    """Makes later waits end after `timeout_s`. A busy machine may take longer than that to construct a communicator."""
    engine.timeout_s = engine.exchange.timeout_s = engine.within.timeout_s = engine.rails._timeout_s = timeout_s
    engine.comm.timeout_ns = int(timeout_s * 1e9)


def tokens_for(rank: int, size: int, count: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    """x ``[T, H]``, ids ``[T, K]`` and weights ``[T, K]``: every token goes to two ranks, all ranks in turn."""
    x = torch.arange(count * hidden, dtype=torch.float32, device=here()).reshape(count, hidden) + 1000 * rank
    first = torch.arange(count, device=here()) % (EXPERTS_PER_RANK * size)
    ids = torch.stack([first, (first + EXPERTS_PER_RANK) % (EXPERTS_PER_RANK * size)], dim=1)
    return x, ids, torch.full((count, TOPK), 0.5, device=here())


def round_trip(comm: MoECommunicator, count: int = 5) -> None:
    """A dispatch and a combine that must give every token back: each of its two experts contributes a half."""
    x, ids, weights = tokens_for(comm.rank, comm.size, count)
    out, handle = comm.dispatch(x, ids, weights)
    torch.testing.assert_close(comm.combine(out.tokens, handle, weights=out.weights), x)


def different_order(rank: int, deadline_s: float) -> PeerTimeout:
    """Two communicators, called in different order on two ranks; a third one goes on afterwards."""
    pair = [open_with_deadline(2, deadline_s) for _ in range(2)]
    third = open_communicator(2)
    dist.barrier()  # the ranks begin together: the deadline is for what follows
    with pytest.raises(PeerTimeout) as caught:
        round_trip(pair[rank])
    round_trip(third)
    for comm in (*pair, third):
        comm.close()
    return caught.value


def assert_says_different_order(errors: list[PeerTimeout]) -> None:
    for rank, error in enumerate(errors):
        assert (error.rank, error.step) == (1 - rank, "notify")
        assert "call communicators that share a device in the same order" in str(error)


def at_gate(comm: MoECommunicator, act: Callable[[], None]) -> None:
    """Calls `act` in a thread as soon as a kernel is held at its test gate."""
    board = comm.engine.boards.address

    def watch() -> None:
        while _C.gate_reached(board) == 0:
            time.sleep(0.001)
        act()

    threading.Thread(target=watch, daemon=True).start()


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


def wait_until_stopped(pid: int) -> None:
    """Waits until no thread of a process runs. os.kill() returns before that."""
    deadline = time.monotonic() + 20.0
    tasks = Path(f"/proc/{pid}/task")
    while {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def die_at_gate(comm: MoECommunicator) -> None:
    """Ends this process by SIGKILL as soon as a kernel is held at its test gate."""
    at_gate(comm, lambda: signal_self(signal.SIGKILL))


def replace_kernels(comm: MoECommunicator, **functions: Callable[[Any], None]) -> None:
    """Makes the communicator run `functions` in place of the kernels with their names."""
    names = "plan", "notify", "dispatch_send", "dispatch_recv", "combine_send", "combine_recv"
    comm.engine.kernels = SimpleNamespace(**{name: getattr(_C.cpu, name) for name in names} | functions)


def record_outputs(comm: MoECommunicator) -> dict[str, bytes]:
    """The bytes that the latest receive kernels have left in their outputs, under their names."""
    seen: dict[str, bytes] = {}

    def dispatch_recv(args: Any) -> None:
        _C.cpu.dispatch_recv(args)
        seen["dispatch_recv"] = ctypes.string_at(args.tokens, args.capacity * args.header.row_bytes)

    def combine_recv(args: Any) -> None:
        _C.cpu.combine_recv(args)
        seen["combine_recv"] = ctypes.string_at(args.out, args.routing.num_tokens * args.header.row_bytes)

    replace_kernels(comm, dispatch_recv=dispatch_recv, combine_recv=combine_recv)
    return seen


def nothing_left_behind() -> None:
    """Fails if this process still has open files or mapped blocks of ours."""
    files = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            files.append(os.readlink(entry))
    files = [file for file in files if _is_ours(file)]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if _is_ours(line)]
    assert not files and not maps, (files, maps)


def _is_ours(listed: str) -> bool:
    return "/memfd:ep_plugin-" in listed or "/dev/shm/ep_plugin-" in listed


def orphaned_names() -> list[str]:
    """Names of ours in shared memory that no living process holds."""
    orphans = []
    for path in Path("/dev/shm").glob("ep_plugin-*"):
        with contextlib.suppress(OSError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            orphans.append(path.name)
    return orphans
