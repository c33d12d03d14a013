"""The suite `low-latency`: dispatch and combine in mode="ll", both halves in one and apart, and the same exchange by
collectives.

`t64` has T = 64 tokens per rank. `send` and `receive` are the halves of an operation. All ranks are released together
before each of them, so a receive half finds what the others have sent. `bytes_wire` counts the rows and scales that
cross to or from the busiest rank in its busier direction; routing and weights are left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

import ep_plugin.moe.operators  # noqa: F401  imported here, so that no timed call imports it
from ep_plugin.bench.exchange.peers import ALL_TO_ALL, find_peers
from ep_plugin.bench.exchange.workload import (
    DTYPES,
    SCALE_BLOCK,
    SHORT_NAMES,
    Batch,
    Workload,
    batches,
    expert_factors,
    other_rows,
    rows_on_the_wire,
)
from ep_plugin.bench.suite import BY_BACKEND, Row, Suite, Way, check_names, time_ways
from ep_plugin.bench.timing import Clock, Run, clock_of
from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchOutput
from ep_plugin.moe.reference import reference_dispatch, reference_quantize

OURS = "ep_plugin"
TOKENS = [1, 8, 32, 64, 128, 256]
SUMMABLE = ("float32", "bfloat16", "float16")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest sum


class Half:
    """A half of an operation: the call that is timed, between calls that are not."""

    def __init__(self, timed: Callable[[Any], Any], before: Callable[[], Any], after: Callable[[Any], object]) -> None:
        self._timed, self._before, self._after = timed, before, after

    def sample(self, clock: Clock) -> tuple[float, float]:
        given, made = self._before(), []
        sample = clock(lambda: made.append(self._timed(given)))
        self._after(made[0])
        return sample

    def __call__(self) -> None:
        self._after(self._timed(self._before()))


def clock_of_halves(clock: Clock) -> Clock:
    """A clock that times of a Half only its call."""
    return lambda run: run.sample(clock) if isinstance(run, Half) else clock(run)


class Scene:
    """The inputs of one T and dtype, ep_plugin's communicator, and the comparison with plain torch. Collective."""

    def __init__(self, workload: Workload, dtype: str, quantize: bool, device: torch.device) -> None:
        self.workload, self.device, self.rank = workload, device, dist.get_rank()
        self.quantize, self.element = ("e4m3" if quantize else None), DTYPES[dtype]
        made = batches(workload, self.element, device)
        self.everyone = [replace(batch, quantize=quantize) for batch in made]
        self.mine = self.everyone[self.rank]
        self.factors = expert_factors(workload, self.element, device)
        self.name = f"{'fp8' if quantize else SHORT_NAMES[dtype]}_t{workload.tokens}"
        self.turn = 0
        config = MoECommunicatorConfig(
            num_experts=workload.experts,
            hidden_size=workload.hidden,
            topk=workload.topk,
            max_tokens_per_rank=workload.tokens,
            max_row_bytes=workload.hidden * self.element.itemsize,
            mode="ll",
        )
        self.comm = MoECommunicator(None, config, device=device)

    def ways(self, peers: list[str]) -> list[Way]:
        """ep_plugin and the peers, which are named as `find_peers` takes them."""
        comm, mine = self.comm, self.mine
        out, handle = self.dispatch(mine)
        y = out.tokens.to(self.element)

        def start_dispatch(*_: Any) -> Any:
            return comm.dispatch_async(mine.x, mine.ids, quantize=self.quantize)

        def start_combine(*_: Any) -> Any:
            return comm.combine_async(y, handle, mine.weights)

        def wait(work: Any) -> Any:
            return work.wait()

        def nothing(*_: Any) -> None: ...

        runs: dict[str, Run] = {
            "dispatch": functools.partial(self.dispatch, mine),
            "dispatch_send": Half(start_dispatch, nothing, wait),
            "dispatch_receive": Half(wait, start_dispatch, nothing),
        }
        if self.quantize is None:
            runs["combine"] = lambda: comm.combine(y, handle, weights=mine.weights)
            runs["combine_send"] = Half(start_combine, nothing, wait)
            runs["combine_receive"] = Half(wait, start_combine, nothing)
        wire = self._bytes_wire(dedup=True)
        found = [self._way(what, OURS, run, self.check, wire) for what, run in runs.items()]
        for kind in (kind for name in peers for kind in find_peers(name)):
            impl = kind(self.workload, self.device)
            rows, state = impl.dispatch(mine)
            name = f"{'nccl' if self.device.type == 'cuda' else 'gloo'}_{ALL_TO_ALL}"
            peer_runs: dict[str, Run] = {"dispatch": functools.partial(impl.dispatch, mine)}
            if self.quantize is None:
                peer_runs["combine"] = functools.partial(impl.combine, rows.tokens, state)
            wire = self._bytes_wire(impl.dedup)
            # `moe` compares the peer's results.
            found += [self._way(what, name, run, nothing, wire) for what, run in peer_runs.items()]
        return found

    def _way(self, what: str, impl: str, run: Run, check: Callable[[], str | None], bytes_wire: int) -> Way:
        return Way(case=f"{what}_{self.name}", impl=impl, run=run, check=check, bytes_wire=bytes_wire)

    def dispatch(self, batch: Batch) -> tuple[DispatchOutput, Any]:
        return self.comm.dispatch(batch.x, batch.ids, quantize=self.quantize)

    def _bytes_wire(self, dedup: bool) -> int:
        return rows_on_the_wire(self.workload, [batch.ids for batch in self.everyone], dedup) * self.mine.row_bytes

    def check(self) -> str | None:
        """Compares a dispatch and a combine of other rows and routes with plain torch."""
        self.turn += 1
        everyone = other_rows(self.everyone, self.turn, reroute=True)
        mine, comm = everyone[self.rank], self.comm
        out, handle = self.dispatch(mine)
        given = [batch.x for batch in everyone], [batch.ids for batch in everyone], [b.weights for b in everyone]
        expected = reference_dispatch(*given, num_experts=self.workload.experts)[self.rank]
        if not torch.equal(out.num_tokens_per_expert, expected.num_tokens_per_expert):
            return "dispatch: other counts than plain torch"
        present = torch.arange(out.tokens.shape[1], device=self.device) < out.num_tokens_per_expert.unsqueeze(1)
        wanted = expected.tokens if self.quantize is None else reference_quantize(expected.tokens)[0]
        if not torch.equal(out.tokens[present].view(torch.uint8), wanted.view(torch.uint8)):
            return "dispatch: other rows than plain torch"
        if self.quantize is not None:
            return None
        local = self.factors.view(comm.size, -1)[self.rank].view(-1, 1, 1)
        y = (out.tokens * local).masked_fill(~present.unsqueeze(2), torch.nan)
        sums = comm.combine(y, handle, weights=mine.weights).double()
        factors = (self.factors[mine.ids].double() * mine.weights).sum(1, keepdim=True)
        exact = mine.x.double() * factors
        off = float((sums - exact).abs().max() / exact.abs().max())
        return None if off < _TOLERANCE[self.element] else f"combine: off by {off:.2g} of the largest sum"


@dataclass(frozen=True, kw_only=True)
class LowLatencySuite(Suite):
    """Low-latency dispatch and combine of few tokens, against all-to-all with sort and index."""

    command_name = "low-latency"
    defaults: ClassVar = {
        "cpu": {"ranks": 4, "tokens": TOKENS, "hidden": 1024, "topk": 4, "experts": 32, "dtype": "float32"}
        | {"peer": [ALL_TO_ALL]}
    }
    least: ClassVar = {"ranks": 1, "iterations": 1, "hidden": 128}

    tokens: Annotated[list[int], typer.Option(help="Tokens per rank, T; repeatable.")] = BY_BACKEND
    hidden: Annotated[int, typer.Option(help="Elements of a row, H: a multiple of 128.")] = BY_BACKEND
    topk: Annotated[int, typer.Option(help="Experts per token, K.")] = BY_BACKEND
    experts: Annotated[int, typer.Option(help="Experts in all, E.")] = BY_BACKEND
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16. FP8 rows are quantised from it.")] = BY_BACKEND
    peer: Annotated[list[str], typer.Option(help="all_to_all (the default), none, or an adapter, module:Class.")] = (
        BY_BACKEND
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", SUMMABLE, [self.dtype])
        if self.hidden % SCALE_BLOCK:
            raise ValueError(f"hidden: expected a multiple of {SCALE_BLOCK}, got {self.hidden}")
        for name in self.peer:
            find_peers(name)
        self.workloads()

    def workloads(self) -> list[Workload]:
        """The sizes of each T; routing is uniformly random."""
        sizes = {"ranks": self.ranks, "hidden": self.hidden, "topk": self.topk, "experts": self.experts}
        return [Workload(tokens=tokens, **sizes) for tokens in self.tokens]

    def measure(self, device: torch.device) -> dict[str, Any]:
        rows: list[Row] = []
        notes = []
        for workload in self.workloads():
            for quantize in (False, True):
                scene = Scene(workload, self.dtype, quantize, device)
                with contextlib.closing(scene.comm):
                    rows += time_ways(clock_of_halves(clock_of(device)), scene.ways(self.peer), self.iterations)
                    if not quantize:
                        size = scene.comm.engine.memory_bytes / 2**20
                        notes.append(f"a communicator for T = {workload.tokens} takes {size:,.1f} MiB of peer memory")
        return {"rows": rows, "notes": notes}
