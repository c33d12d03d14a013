"""The machinery behind a communicator: its peer memory, pools, board and kernels, and how it fails and closes."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.config import SMS_FIELDS, DispatchLayout, MoECommunicatorConfig
from ep_plugin.errors import CaptureRefused, DisagreementError, EpPluginError, NotSupported
from ep_plugin.moe.high_throughput import sms
from ep_plugin.moe.high_throughput.expected import Expected
from ep_plugin.moe.high_throughput.faults import described, disagreement_on_pool
from ep_plugin.runtime.base import BaseEngine, kernels_for
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.faults import error_of
from ep_plugin.runtime.streams import Lanes, lanes_of
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import PeerBuffer, open_memory, transport_for

if TYPE_CHECKING:
    from ep_plugin.moe.high_throughput.routing import LatestRouting

DISPATCH_POOL, COMBINE_POOL = _C.Pool.DISPATCH, _C.Pool.COMBINE


class Engine(BaseEngine):
    """What one communicator owns. Construction is collective over `group`; so is every growth of a pool."""

    lanes: Lanes

    def __init__(self, group: dist.ProcessGroup | None, config: MoECommunicatorConfig, device: torch.device) -> None:
        self.config = config
        self._tickets = 0
        self.reserved = 0
        self.latest_routing: LatestRouting | None = None
        self.expected = Expected()
        self._pools: list[PeerBuffer | None] = [None, None]
        self.asked_sms: dict[str, int | None] = {}
        super().__init__(Exchange(group, timeout_s=config.timeout_s), device, group)

    def _construct(self, group: dist.ProcessGroup | None) -> None:
        config, device = self.config, self.device
        self.kernels = kernels_for(device)
        self.config_hash = config.agreement_hash()
        self.flat = config.resolved_layout is DispatchLayout.FLAT
        self.layout = _C.Layout[config.resolved_layout.name]
        self._usable_sms = sms.usable_sms(device)
        self._sms = self._as_asked({})
        self.lanes = lanes_of(device)
        self._agree(config)
        self.local_experts = config.num_experts // self.size
        self.num_totals = _C.num_totals + self.local_experts
        self.meta_words = _C.meta_words(self.size, config.num_experts)
        self.boards = Boards(self.exchange, self.local_experts, device)
        self._resources.callback(self.boards.close)
        self.memory = open_memory(group, device, timeout_s=config.timeout_s)
        self._resources.callback(self.memory.exchange.close)
        self._resources.callback(self.memory.close)
        self._resources.callback(self._forget_pools)
        self._control = self.memory.allocate(_C.control_bytes(self.size, config.num_experts), "control")
        self._state = torch.zeros(_C.state_bytes, dtype=torch.uint8, device=device)
        self.comm = self._comm_struct()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.exchange.barrier("construct communicator")
        self.exchange.watch = self.memory.exchange.watch = _watch_of(self)

    def set_sms(self, counts: dict[str, int | None]) -> None:
        """The SM counts of later operations: `counts` where it has them, else the configuration's."""
        unknown = set(counts) - set(SMS_FIELDS)
        if unknown:
            raise ValueError(f"set_sms: expected names among {', '.join(SMS_FIELDS)}, got {', '.join(sorted(unknown))}")
        before, self._sms = self._sms, self._as_asked(counts)
        self.asked_sms = counts
        if any((old.receiving == 0) != (new.receiving == 0) for old, new in zip(before, self._sms, strict=True)):
            self.lanes.meet()  # what receives changes its lane, where it would find the epoch of the operation before

    def dispatch_sms(self, num_tokens: int, row_bytes: int, topk: int, quantize: bool) -> sms.KernelSms:
        """For so many tokens of this rank, and rows as they travel. Ranks may differ."""
        small = num_tokens <= sms.SMALL_BATCH_TOKENS
        return sms.dispatch_sms(self._sms[0], self._usable_sms, self.size, small, row_bytes, topk, quantize)

    def combine_sms(self, num_tokens: int, row_bytes: int, topk: int) -> sms.KernelSms:
        """The same for so many tokens of this rank, and partial rows. (TOKEN_MAJOR rows are sums already.)"""
        small, terms_of = num_tokens <= sms.SMALL_BATCH_TOKENS, topk if self.flat else 1
        return sms.combine_sms(self._sms[1], self._usable_sms, self.size, small, row_bytes, terms_of)

    def _as_asked(self, counts: dict[str, int | None]) -> tuple[sms.AskedSms, sms.AskedSms]:
        given = {name: count for name, count in counts.items() if count is not None}
        config = dataclasses.replace(self.config, **given)  # type: ignore[arg-type]
        return sms.asked_of({name: getattr(config, name) for name in SMS_FIELDS}, self._usable_sms)

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
        if self.device.type == "cuda" and config.num_experts + self.size > _C.most_keys:
            raise ValueError(
                f"num_experts: expected at most {_C.most_keys - self.size} on cuda with {self.size} ranks, "
                f"got {config.num_experts}"
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
            raise CaptureRefused(
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

    def plan_words(self, num_tokens: int, topk: int) -> int:
        """Words of a handle's plan: meta, then send_pos [T,R], then pair_pos [T,K]."""
        return self.meta_words + num_tokens * (self.size + topk)

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def knows(self, ticket: int) -> bool:
        """Whether the totals of notify `ticket` are there."""
        return self.boards.wait_ticket(ticket, 0.0)

    def wait_totals(self, ticket: int, copy: torch.Tensor, expert_counts: torch.Tensor) -> list[int]:
        """The totals of notify `ticket`, see Boards.totals. Raises what went wrong, or PeerTimeout at the deadline."""
        most_s = 2 * self.timeout_s + 5.0  # the kernel's own deadline starts later, comes first, and says more
        if not self.boards.wait_ticket(ticket, most_s):
            self.check()
            raise EpPluginError(f"{self.name}: the device did not finish step notify in {most_s:g} s")
        return self.boards.totals(copy, expert_counts)

    def found_error(self) -> EpPluginError | ValueError | None:
        return error_of(self)

    def described(self, field: int, value: int) -> tuple[str, str]:
        return described(field, value)

    def _forget_pools(self) -> None:
        self._pools = [None, None]


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
