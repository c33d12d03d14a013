"""The machinery behind a communicator: its peer memory, pools, board and kernels, and how it fails and closes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.config import SMS_FIELDS, DispatchLayout, MoECommunicatorConfig
from ep_plugin.errors import (
    CommunicatorClosed,
    DisagreementError,
    EpPluginError,
    NotSupported,
    PeerAborted,
    PeerTimeout,
)
from ep_plugin.memory.board import Boards
from ep_plugin.memory.exchange import Exchange
from ep_plugin.memory.peer import PeerBuffer, open_memory, transport_for
from ep_plugin.moe.faults import aborted_error, disagreement_on_pool, error_of
from ep_plugin.moe.lanes import lanes_of

DISPATCH_POOL, COMBINE_POOL = _C.Pool.DISPATCH, _C.Pool.COMBINE
# SMs of the sending and of the receiving kernel of each operation, and what they leave to others at least.
# quantize_sms: of a send that quantises, which computes for longer than it stores; dispatch_sms goes before it.
DEFAULT_SMS = {"dispatch_sms": 12, "quantize_sms": 20, "expand_sms": 64, "combine_sms": 20, "add_sms": 24}
RUN_TOGETHER = (("dispatch_sms", "expand_sms"), ("combine_sms", "add_sms"))
FREE_SMS = 32

_NOTHING_TO_DO = contextlib.nullcontext()

T = TypeVar("T")
_enqueue_locks: dict[torch.device, threading.RLock] = {}
_live: tuple[weakref.ref[Engine], ...] = ()  # replaced as a whole, under the lock; may be read without it
_live_lock = threading.Lock()


def _sms_of(config: MoECommunicatorConfig, device: torch.device) -> dict[str, int]:
    """SMs of each kernel: the configuration's, else the defaults, cut to a device that has fewer."""
    asked = {name: getattr(config, "dispatch_sms" if name == "quantize_sms" else name) for name in DEFAULT_SMS}
    if device.type != "cuda":
        return {name: default if asked[name] is None else asked[name] for name, default in DEFAULT_SMS.items()}
    usable = max(torch.cuda.get_device_properties(device).multi_processor_count - FREE_SMS, 2)
    share = min(1.0, usable / max(DEFAULT_SMS[first] + DEFAULT_SMS[second] for first, second in RUN_TOGETHER))
    sms = {
        name: max(1, int(default * share)) if asked[name] is None else asked[name]
        for name, default in DEFAULT_SMS.items()
    }
    if config.dispatch_sms is None:
        sms["quantize_sms"] = max(1, min(sms["quantize_sms"], usable - sms["expand_sms"]))
    return sms


class Engine:
    """What one communicator owns. Construction is collective over `group`; so is every growth of a pool."""

    def __init__(self, group: dist.ProcessGroup | None, config: MoECommunicatorConfig, device: torch.device) -> None:
        self.closed = True  # nothing to give back so far
        self.config = config
        self.device = device
        self.exchange = Exchange(group, timeout_s=config.timeout_s)
        self.name = f"communicator {self.exchange.name}"
        self.rank, self.size, self.timeout_s = self.exchange.rank, self.exchange.size, self.exchange.timeout_s
        self.lock = _enqueue_locks.setdefault(device, threading.RLock())
        self._error: Exception | None = None
        self._tickets = 0
        self.reserved = 0
        self._pools: list[PeerBuffer | None] = [None, None]
        self.asked_sms: dict[str, int | None] = {}
        self._captured = False
        self._running = False
        self._to_close = False
        self._resources = contextlib.ExitStack()
        try:
            self._construct(group)
        except BaseException as error:
            self.exchange.abort(f"{type(error).__name__}: {error}")
            self._resources.close()
            raise
        self.closed = False
        _add_to_live(self)
        _abort_on_uncaught_exceptions()

    def _construct(self, group: dist.ProcessGroup | None) -> None:
        config, device = self.config, self.device
        self.kernels = _kernels_for(device)
        self.config_hash = config.agreement_hash()
        self.flat = config.resolved_layout is DispatchLayout.FLAT
        self.layout = _C.Layout[config.resolved_layout.name]
        self.sms = _sms_of(config, device)
        _check_sms(config, device)
        self.lanes = lanes_of(device)
        self._agree(config)
        self.local_experts = config.num_experts // self.size
        self.meta_words = _C.meta_words(self.size, config.num_experts)
        self.boards = Boards(self.exchange, self.local_experts, device)
        self._resources.callback(self.boards.close)
        self.memory = open_memory(group, device, timeout_s=config.timeout_s)
        self._resources.callback(self.memory.close)
        self._control = self.memory.allocate(_C.control_bytes(self.size, config.num_experts), "control")
        self._state = torch.zeros(_C.state_bytes, dtype=torch.uint8, device=device)
        self.comm = self._comm_struct()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.exchange.barrier("construct communicator")
        self.exchange.watch = self.memory.exchange.watch = _watch_of(self)

    def set_sms(self, sms: dict[str, int | None]) -> None:
        """The SM counts of later operations: `sms` where it has them, else the configuration's."""
        unknown = set(sms) - set(SMS_FIELDS)
        if unknown:
            raise ValueError(f"set_sms: expected names among {', '.join(SMS_FIELDS)}, got {', '.join(sorted(unknown))}")
        given = {name: count for name, count in sms.items() if count is not None}
        config = dataclasses.replace(self.config, **given)  # type: ignore[arg-type]
        _check_sms(config, self.device)
        self.sms, self.asked_sms = _sms_of(config, self.device), sms

    def _agree(self, config: MoECommunicatorConfig) -> None:
        """Refuses, before anything is allocated, what this group cannot serve or does not agree on."""
        if self.size > _C.max_ranks:
            raise NotSupported(f"group: expected at most {_C.max_ranks} ranks on one node, got {self.size}")
        transport_for(self.device)
        mine = (config.describe(), self.device.type)
        for rank, theirs in enumerate(self.exchange.all_gather("agree on the config", list(mine))):
            if tuple(theirs) != mine:
                raise DisagreementError(
                    f"ranks disagree on the communicator: rank {self.rank} has {mine[0]} on {mine[1]}, "
                    f"rank {rank} has {theirs[0]} on {theirs[1]}"
                )
        if config.num_experts % self.size:
            raise ValueError(
                f"num_experts: expected a multiple of the group's {self.size} ranks, got {config.num_experts}"
            )

    def _comm_struct(self) -> Any:
        settings = env.settings()
        comm = _C.Comm(
            rank=self.rank,
            num_ranks=self.size,
            num_experts=self.config.num_experts,
            gate=_C.Step[(settings.test_gate or "none").upper()],
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

    def reserve(self, pool: int, nbytes: int) -> None:
        """Makes every rank's pool at least `nbytes` large. All ranks call it once for each operation, before its send.

        Growing is collective. A rank that goes on without it has been given rows of another size: whoever waits for it
        then raises DisagreementError.
        """
        if self.pool_bytes(pool) < nbytes:
            self._grow(pool, nbytes)
        self.reserved += 1
        self.boards.set_reserved_pools(self.reserved)

    def _grow(self, pool: int, nbytes: int) -> None:
        """The old pool is given back only after every rank has finished whatever reads or writes it."""
        name = f"{_C.Pool(pool).name.lower()} pool"
        if self.lanes.capturing():
            raise EpPluginError(
                f"{self.name}: the {name} has {self.pool_bytes(pool)} bytes where {nbytes} are needed, "
                "and a CUDA graph is being captured: run one step of this shape before capturing"
            )
        self.lanes.drain()
        self.exchange.watch = _watch_of(self, growing=(name, nbytes))
        sizes = self.exchange.all_gather(f"grow {name}", nbytes)
        self.exchange.watch = _watch_of(self)
        for rank, theirs in enumerate(sizes):
            if theirs != nbytes:
                raise disagreement_on_pool(self, name, nbytes, rank, f"{theirs}")
        old, self._pools[pool] = self._pools[pool], None
        if old is not None and not self._captured:  # a captured graph goes on writing to the pool it was captured with
            old.close()
        block = self.memory.allocate(nbytes, name)
        self._pools[pool] = block
        self.comm.set_pool(pool, list(block.ptrs), block.nbytes)

    # -- operations ----------------------------------------------------------------------------------------------

    def run(self, what: str, operation: Callable[..., T], *args: Any) -> T:
        """operation(self, *args): refused after a fault or a close, told to peers when it fails here."""
        with self.lock, _current(self.device):
            self.check()
            _announce(self, what)
            self._captured |= self.lanes.capturing()
            try:
                self._running = True
                return operation(self, *args)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    self.lanes.join()  # memory that kernels still use must not be given away meanwhile
                self._fail(error, what)
                raise
            finally:
                self._running = False
                if self._to_close:
                    self.close()

    def plan_words(self, num_tokens: int, topk: int) -> int:
        """Words of a handle's plan: meta, then send_pos [T,R], then pair_pos [T,K]."""
        return self.meta_words + num_tokens * (self.size + topk)

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def wait_totals(self, ticket: int) -> list[int]:
        """The totals of notify `ticket`, see Boards.totals. Raises what went wrong, or PeerTimeout at the deadline."""
        most_s = 2 * self.timeout_s + 5.0  # the kernel's own deadline starts later, comes first, and says more
        if not self.boards.wait_ticket(ticket, most_s):
            self.check()
            raise EpPluginError(f"{self.name}: the device did not finish step notify in {most_s:g} s")
        return self.boards.totals()

    def check(self) -> None:
        """Raises the communicator's first error, if there is one; CommunicatorClosed after close."""
        if self.closed:
            raise CommunicatorClosed(f"{self.name}: expected an open communicator, got a closed one")
        if self._error is None:
            error = error_of(self)
            if error is None:
                return
            self._remember(error)
        assert self._error is not None
        raise copy.copy(self._error)  # a raised one would keep its callers' tensors alive

    def abort(self, reason: str) -> None:
        """Ends every wait in this communicator, here and on the peers, with PeerAborted(this rank, reason)."""
        with contextlib.suppress(EpPluginError, ValueError):
            self.check()  # after a fault the peers know, or find out by their own deadline
            self._error = aborted_error(self, self.rank, reason)
            self.boards.tell_abort(reason)

    def close(self) -> None:
        """Gives everything back; works whatever state this rank, the device or the peers are in."""
        with self.lock:
            if self.closed:
                return
            if self._running:  # the caller is a signal's handler: the memory is in use until the operation has left
                self._to_close = True
                return self.abort("closed by a signal handler during an operation")
            self.closed = True
            with contextlib.suppress(Exception):  # every kernel ends by itself; a broken device has nothing to drain
                self.lanes.drain()
            self._pools = [None, None]
            self._resources.close()

    def __del__(self) -> None:
        if self.closed or sys.is_finalizing():  # the end of the process gives everything back
            return
        if self.device.type == "cuda":  # giving back waits for the device: not from wherever garbage is collected
            warnings.warn(f"{self.name} was dropped without close(); its memory is kept", ResourceWarning, stacklevel=1)
            return
        with contextlib.suppress(Exception):
            self.close()

    def _fail(self, error: BaseException, what: str) -> None:
        """An operation ends with `error` here: peers must not wait for the rest of it, nor later calls go on."""
        if self.closed or self._error is not None:
            return
        if isinstance(error, EpPluginError):
            self._remember(error)
            return
        reason = f"{type(error).__name__} in {what}: {error}".removesuffix(": ")
        self._error = EpPluginError(f"{self.name}: failed earlier on this rank: {reason}")
        self.boards.tell_abort(reason)

    def _remember(self, error: EpPluginError | ValueError) -> None:
        """The first error stays. Peers are told of one that they cannot see for themselves."""
        self._error = copy.copy(error)
        if not isinstance(error, (PeerTimeout, PeerAborted)):
            self.boards.tell_abort(str(error))


def _add_to_live(engine: Engine) -> None:
    global _live
    with _live_lock:
        _live = (*(ref for ref in _live if ref() is not None), weakref.ref(engine))


def _live_engines() -> list[Engine]:
    return [engine for ref in _live if (engine := ref()) is not None and not engine.closed]


def _announce(engine: Engine, what: str) -> None:
    """Says on the boards of all of this process's communicators what this rank is in, for their peers' messages."""
    activity = f"in {what} of {engine.name}"
    for other in _live_engines():
        other.boards.set_activity(activity)


def abort_all(reason: str) -> None:
    """Tells the peers of every open communicator of this process that this rank has failed."""
    for engine in _live_engines():
        engine.abort(reason)


@functools.cache
def _abort_on_uncaught_exceptions() -> None:
    """A script that dies of an exception tells its peers, who would else wait until their deadline."""
    previous, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == owner:  # a forked child is not the rank
            abort_all(f"{kind.__name__}: {error}")
        previous(kind, error, trace)

    sys.excepthook = hook


def _watch_of(engine: Engine, growing: tuple[str, int] | None = None) -> Callable[[], None]:
    """What ends an exchange early: an abort, or, with (name, bytes) of a growing pool, a peer that does not grow."""
    found = weakref.ref(engine)

    def watch() -> None:
        engine = found()
        if engine is None:
            return
        engine.check()
        if growing is not None:
            for rank in range(engine.size):
                if rank != engine.rank and engine.boards.reserved_pools_of(rank) > engine.reserved:
                    raise disagreement_on_pool(engine, *growing, rank, "no more than there are")

    return watch


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    if device.type == "cpu" or torch.cuda.current_device() == device.index:
        return _NOTHING_TO_DO
    return torch.cuda.device(device)


def _check_sms(config: MoECommunicatorConfig, device: torch.device) -> None:
    """A sending and a receiving kernel run at the same time, and leave SMs for whoever must run beside them."""
    if device.type != "cuda":
        return
    present = torch.cuda.get_device_properties(device).multi_processor_count
    sms = _sms_of(config, device)
    for first, second in RUN_TOGETHER:
        if sms[first] + sms[second] > present - FREE_SMS:
            raise ValueError(
                f"{first}: expected {first} + {second} to be at most {present - FREE_SMS}, which leaves {FREE_SMS} of "
                f"{present} SMs free, got {sms[first]} + {sms[second]}"
            )


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
