"""The machinery behind a communicator: its peer memory, pools, board and kernels, and how it fails and closes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.errors import CommunicatorClosed, DisagreementError, EpPluginError, NotSupported, PeerAborted
from ep_plugin.memory.board import Boards
from ep_plugin.memory.exchange import Exchange
from ep_plugin.memory.peer import PeerBuffer, open_memory
from ep_plugin.moe.faults import STEPS, error_of
from ep_plugin.moe.lanes import lanes_of

DISPATCH_POOL, COMBINE_POOL = 0, 1
_POOL_NAMES = ("dispatch pool", "combine pool")

_enqueue_locks: dict[torch.device, threading.RLock] = {}
_live: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """What one communicator owns. Construction is collective over `group`; so is every growth of a pool."""

    def __init__(self, group: dist.ProcessGroup | None, config: MoECommunicatorConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.kernels = _kernels_for(device)
        self.exchange = Exchange(group, timeout_s=config.timeout_s)
        self.rank, self.size, self.timeout_s = self.exchange.rank, self.exchange.size, self.exchange.timeout_s
        self.lock = _enqueue_locks.setdefault(device, threading.RLock())
        self.lanes = lanes_of(device)
        self.closed = False
        self._tickets = 0
        self._agree(config)
        self.name = f"communicator {self.exchange.name}"
        self.local_experts = config.num_experts // self.size
        self.boards = Boards(self.exchange, self.local_experts, device.type == "cuda")
        self.memory = open_memory(group, device, timeout_s=config.timeout_s)
        self._control = self.memory.allocate(_C.control_bytes(self.size, config.num_experts), "control")
        self._pools: list[PeerBuffer | None] = [None, None]
        self._state = torch.zeros(_C.state_bytes, dtype=torch.uint8, device=device)
        self.comm = self._comm_struct()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.exchange.barrier("construct communicator")
        _live.add(self)

    def _agree(self, config: MoECommunicatorConfig) -> None:
        """Refuses, before anything is allocated, what this group cannot serve or does not agree on."""
        if self.size > _C.max_ranks:
            raise NotSupported(f"group: expected at most {_C.max_ranks} ranks on one node, got {self.size}")
        if config.num_experts % self.size:
            raise ValueError(
                f"num_experts: expected a multiple of the group's {self.size} ranks, got {config.num_experts}"
            )
        mine = (config.describe(), self.device.type)
        for rank, theirs in enumerate(self.exchange.all_gather("agree on the config", list(mine))):
            if tuple(theirs) != mine:
                raise DisagreementError(
                    f"ranks disagree on the communicator: rank {self.rank} has {mine[0]} on {mine[1]}, "
                    f"rank {rank} has {theirs[0]} on {theirs[1]}"
                )

    def _comm_struct(self) -> Any:
        settings = env.settings()
        comm = _C.Comm(
            rank=self.rank,
            num_ranks=self.size,
            num_experts=self.config.num_experts,
            gate=STEPS.index(settings.test_gate) if settings.test_gate else 0,
            plain=int(settings.plain_kernels),
            timeout_ns=int(self.timeout_s * 1e9),
            state=self._state.data_ptr(),
            board=self.boards.device_address,
        )
        comm.set_control(list(self._control.ptrs))
        return comm

    # -- pools ---------------------------------------------------------------------------------------------------

    def pool_bytes(self, pool: int) -> int:
        block = self._pools[pool]
        return 0 if block is None else block.nbytes

    def grow(self, pool: int, nbytes: int) -> None:
        """Makes every rank's pool at least `nbytes` large. Collective: all ranks call it for the same operation.

        The old pool is given back only after every rank has finished whatever reads or writes it.
        """
        if self.lanes.capturing():
            raise EpPluginError(
                f"{self.name}: the {_POOL_NAMES[pool]} has {self.pool_bytes(pool)} bytes where {nbytes} are needed, "
                "and a CUDA graph is being captured: run one step of this shape before capturing"
            )
        self.lanes.drain()
        sizes = self.exchange.all_gather(f"grow {_POOL_NAMES[pool]}", nbytes)
        for rank, theirs in enumerate(sizes):
            if theirs != nbytes:
                raise DisagreementError(
                    f"{self.name}: ranks disagree on the {_POOL_NAMES[pool]}: {nbytes} bytes on rank {self.rank}, "
                    f"{theirs} bytes on rank {rank}: the shapes or dtypes of this call differ"
                )
        old = self._pools[pool]
        if old is not None:
            self._pools[pool] = None
            old.close()
        block = self.memory.allocate(nbytes, _POOL_NAMES[pool])
        self._pools[pool] = block
        self.comm.set_pool(pool, list(block.ptrs), block.nbytes)

    # -- operations ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """One operation of this communicator: refused after a fault or a close, told to peers when it fails here."""
        with self.lock:
            self.check()
            _announce(self, what)
            try:
                yield
            except (EpPluginError, ValueError):
                raise
            except BaseException as error:
                self.abort(f"{type(error).__name__} in {what}: {error}")
                raise

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def wait_totals(self, ticket: int) -> torch.Tensor:
        """The totals of notify `ticket`, int64 on the host. Raises what went wrong, or PeerTimeout at the deadline."""
        grace_s = 5.0  # the kernel's own deadline comes first, and says more
        if not self.boards.wait_ticket(ticket, self.timeout_s + grace_s):
            self.check()
            raise EpPluginError(f"{self.name}: the device did not finish step notify in {self.timeout_s + grace_s:g} s")
        return torch.tensor(self.boards.totals(), dtype=torch.int64)

    def check(self) -> None:
        """Raises the communicator's first error, if there is one; CommunicatorClosed after close."""
        if self.closed:
            raise CommunicatorClosed(f"{self.name} is closed: expected an open communicator")
        error = error_of(self)
        if error is not None:
            if not isinstance(error, EpPluginError):  # bad ids found on the device: the peers wait for this rank
                self.boards.tell_abort(str(error))
            raise error

    def abort(self, reason: str) -> None:
        """Ends the peers' waits in this communicator with PeerAborted(this rank, reason)."""
        if not self.closed and not isinstance(error_of(self), PeerAborted):
            self.boards.tell_abort(reason)

    def close(self) -> None:
        """Gives everything back; works whatever state this rank, the device or the peers are in."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            with contextlib.suppress(Exception):  # every kernel ends by itself; a broken device has nothing to drain
                self.lanes.drain()
            for block in (*self._pools, self._control):
                if block is not None:
                    block.close()
            self._pools = [None, None]
            self.memory.close()
            self.boards.close()


def _announce(engine: Engine, what: str) -> None:
    """Says on the boards of all of this process's communicators what this rank is in, for their peers' messages."""
    for other in list(_live):
        if not other.closed:
            other.boards.set_activity(f"in {what} of {engine.name}")


def abort_all(reason: str) -> None:
    """Tells the peers of every open communicator of this process that this rank has failed."""
    for engine in list(_live):
        engine.abort(reason)


def _kernels_for(device: torch.device) -> Any:
    if device.type == "cpu":
        return _C.cpu
    if device.type != "cuda":
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    if not hasattr(_C, "cuda"):
        raise ValueError(
            "device: expected cpu, since this build of ep_plugin has no CUDA kernels (no nvcc was found when it was "
            f"built), got {device}"
        )
    return _C.cuda
