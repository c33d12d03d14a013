"""The suite `low-latency`: dispatch and combine in mode="ll", both halves in one and apart, and the same exchange by
collectives.

`t64` has T = 64 tokens per rank. `send` and `receive` are the halves of an operation. All ranks are released together
before each of them, so a receive half finds what the others have sent. `bytes_wire` counts the rows and scales that
cross to or from the busiest rank in its busier direction; routing and weights are left out. `routing known`: the peer
has routed the same tokens before, and exchanges rows alone, without counts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

import ep_plugin.moe.operators  # noqa: F401  imported here, so that no timed call imports it
from ep_plugin import _C
from ep_plugin.bench.exchange.peers import ALL_TO_ALL, find_peers
from ep_plugin.bench.exchange.workload import (
    DTYPES,
    SCALE_BLOCK,
    SHORT_NAMES,
    SUMMABLE,
    Batch,
    Workload,
    batches,
    expert_factors,
    other_rows,
    rows_on_the_wire,
)
from ep_plugin.bench.suite import BY_BACKEND, CALLS_HELP, OURS, Row, Suite, Way, backend_of, check_names, time_ways
from ep_plugin.bench.timing import Clock, Run, Sample, clock_of
from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchOutput
from ep_plugin.moe.low_latency.engine import slots_of
from ep_plugin.moe.reference import reference_dispatch, reference_quantize

DEEP_EP = "deep_ep"  # also the name of its package
TOKENS = [1, 8, 32, 64, 128, 256]
CPU_SIZES: dict[str, Any] = {"hidden": 1024, "topk": 4, "experts": 32, "dtype": "bfloat16"}
CUDA_SIZES: dict[str, Any] = {"hidden": 7168, "topk": 8, "experts": 256, "dtype": "bfloat16"}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest sum


class Half:
    """A half of an operation: the call that is timed, between calls that are not."""

    def __init__(self, timed: Callable[[Any], Any], before: Callable[[], Any], after: Callable[[Any], object]) -> None:
        self._timed, self._before, self._after = timed, before, after

    def sample(self, clock: Clock) -> Sample:
        given, made = self._before(), []
        sample = clock(lambda: made.append(self._timed(given)))
        self._after(made[0])
        return sample

    def __call__(self) -> None:
        self._after(self._timed(self._before()))


def clock_of_halves(device: torch.device, calls: int = 1) -> Clock:
    """A clock that times of a Half only its call, and no two in a row."""
    clock, one = clock_of(device, calls), clock_of(device)
    return lambda run: run.sample(one) if isinstance(run, Half) else clock(run)


@dataclass(frozen=True)
class Inputs:
    """The tokens of every rank, which each rank can make, and factors in place of experts. name: of type and T."""

    workload: Workload
    everyone: list[Batch]
    element: torch.dtype
    quantize: str | None
    factors: torch.Tensor
    name: str

    def bytes_wire(self, dedup: bool) -> int:
        rows = rows_on_the_wire(self.workload, [batch.ids for batch in self.everyone], dedup)
        return rows * self.everyone[0].row_bytes

    def our_bytes_wire(self, what: str) -> int:
        """Of a dispatch or a combine of ours, or of a half. A combine of few pairs sends a row for each of them."""
        few = self.workload.tokens * self.workload.topk <= _C.ll_few_pairs
        return self.bytes_wire(dedup=not (few and what.startswith("combine")))

    def expert_rows(self, rank: int, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The rows of `rank` times its experts' factors. Rows that no token has are NaN."""
        local = self.factors.view(self.workload.ranks, -1)[rank].view(-1, 1, 1)
        return (tokens * local).masked_fill(~_present(tokens, counts).unsqueeze(2), torch.nan)


def inputs_of(workload: Workload, dtype: str, quantize: bool, device: torch.device) -> Inputs:
    element = DTYPES[dtype]
    everyone = [replace(batch, quantize=quantize) for batch in batches(workload, element, device)]
    return Inputs(
        workload=workload,
        everyone=everyone,
        element=element,
        quantize="e4m3" if quantize else None,
        factors=expert_factors(workload, element, device),
        name=f"{'fp8' if quantize else SHORT_NAMES[dtype]}_t{workload.tokens}",
    )


def config_of(workload: Workload, element: torch.dtype) -> MoECommunicatorConfig:
    return MoECommunicatorConfig(
        num_experts=workload.experts,
        hidden_size=workload.hidden,
        topk=workload.topk,
        max_tokens_per_rank=workload.tokens,
        max_row_bytes=workload.hidden * element.itemsize,
        mode="ll",
    )


def memory_note(workload: Workload, config: MoECommunicatorConfig) -> str:
    """What a communicator takes, on the workload's ranks and on 8."""
    shape = slots_of(config)[1]
    takes, on_8 = (_C.ll_block_bytes(ranks, shape) / 2**20 for ranks in (workload.ranks, 8))
    return (
        f"a communicator for T = {workload.tokens} takes {takes:,.1f} MiB of peer memory on each of {workload.ranks} "
        f"ranks; on 8 ranks {on_8:,.1f} MiB"
    )


def wrong_rows(
    inputs: Inputs, everyone: list[Batch], rank: int, tokens: torch.Tensor, counts: torch.Tensor
) -> str | None:
    """What differs from plain torch in the rows that `rank` has received."""
    given = [batch.x for batch in everyone], [batch.ids for batch in everyone], [b.weights for b in everyone]
    expected = reference_dispatch(*given, num_experts=inputs.workload.experts)[rank]
    if not torch.equal(counts, expected.num_tokens_per_expert):
        return "dispatch: other counts than plain torch"
    wanted = expected.tokens if inputs.quantize is None else reference_quantize(expected.tokens)[0]
    if not torch.equal(tokens.view(torch.uint8)[_present(tokens, counts)], wanted.view(torch.uint8)):
        return "dispatch: other rows than plain torch"
    return None


def wrong_sums(inputs: Inputs, mine: Batch, sums: torch.Tensor) -> str | None:
    """How far the sums of a rank's tokens are off, if too far."""
    exact = mine.x.double() * (inputs.factors[mine.ids].double() * mine.weights).sum(1, keepdim=True)
    off = float((sums.double() - exact).abs().max() / exact.abs().max())
    return None if off < _TOLERANCE[inputs.element] else f"combine: off by {off:.2g} of the largest sum"


def _present(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`[E_l, N]`: the rows that a token has."""
    return torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)


def _find_peers(name: str) -> list[Any]:
    """As `find_peers`. DeepEP's low-latency calls have a name, too."""
    return find_peers("ep_plugin.bench.exchange.deep_ep:DeepEp" if name == DEEP_EP else name)


class Scene:
    """The inputs of one T and dtype, ep_plugin's communicator, and the comparison with plain torch. Collective."""

    def __init__(self, workload: Workload, dtype: str, quantize: bool, device: torch.device) -> None:
        self.workload, self.device, self.rank = workload, device, dist.get_rank()
        self.inputs = inputs_of(workload, dtype, quantize, device)
        self.mine, self.quantize = self.inputs.everyone[self.rank], self.inputs.quantize
        self.turn = 0
        self.comm = MoECommunicator(None, config_of(workload, self.inputs.element), device=device)

    def ways(self, peers: list[str]) -> list[Way]:
        """ep_plugin and the peers, which are named as `find_peers` takes them."""
        comm, mine = self.comm, self.mine
        out, handle = self.dispatch(mine)
        y = out.tokens.to(self.inputs.element)

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
        ours = (self._way(what, OURS, run, self.inputs.our_bytes_wire(what)) for what, run in runs.items())
        found = [replace(way, check=self.check) for way in ours]
        for peer, kind in ((name, kind) for name in peers for kind in _find_peers(name)):
            impl = kind(self.workload, self.device)
            rows, state = impl.dispatch(mine)
            name, wire = peer, self.inputs.bytes_wire(impl.dedup)
            peer_runs: dict[str, Run] = {"dispatch": functools.partial(impl.dispatch, mine)}
            if self.quantize is None:
                peer_runs["combine"] = functools.partial(impl.combine, rows.tokens, state)
            if peer == ALL_TO_ALL:
                name = f"{backend_of(self.device)}_{ALL_TO_ALL}"
                known = functools.partial(impl.dispatch, mine, state)
                found.append(self._way("dispatch", f"{name}, routing known", known, wire))
            # `moe` compares the peer's results.
            found += [self._way(what, name, run, wire) for what, run in peer_runs.items()]
        return found

    def _way(self, what: str, impl: str, run: Run, bytes_wire: int) -> Way:
        return Way(case=f"{what}_{self.inputs.name}", impl=impl, run=run, bytes_wire=bytes_wire)

    def dispatch(self, batch: Batch) -> tuple[DispatchOutput, Any]:
        return self.comm.dispatch(batch.x, batch.ids, quantize=self.quantize)

    def check(self) -> str | None:
        """Compares a dispatch and a combine of other rows and routes with plain torch."""
        self.turn += 1
        everyone = other_rows(self.inputs.everyone, self.turn, reroute=True)
        mine = everyone[self.rank]
        out, handle = self.dispatch(mine)
        problem = wrong_rows(self.inputs, everyone, self.rank, out.tokens, out.num_tokens_per_expert)
        if problem or self.quantize is not None:
            return problem
        y = self.inputs.expert_rows(self.rank, out.tokens, out.num_tokens_per_expert)
        return wrong_sums(self.inputs, mine, self.comm.combine(y, handle, weights=mine.weights))


@dataclass(frozen=True, kw_only=True)
class LowLatencySizes(Suite):
    """The options that say what is exchanged."""

    least: ClassVar = {"ranks": 1, "iterations": 1, "hidden": 128}

    tokens: Annotated[list[int], typer.Option(help="Tokens per rank, T; repeatable.")] = BY_BACKEND
    hidden: Annotated[int, typer.Option(help="Elements of a row, H: a multiple of 128.")] = BY_BACKEND
    topk: Annotated[int, typer.Option(help="Experts per token, K.")] = BY_BACKEND
    experts: Annotated[int, typer.Option(help="Experts in all, E.")] = BY_BACKEND
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16. FP8 rows are quantised from it.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", SUMMABLE, [self.dtype])
        if self.hidden % SCALE_BLOCK:
            raise ValueError(f"hidden: expected a multiple of {SCALE_BLOCK}, got {self.hidden}")
        self.workloads()

    def workload_of(self, ranks: int, tokens: int) -> Workload:
        """Routing is uniformly random."""
        return Workload(ranks=ranks, tokens=tokens, hidden=self.hidden, topk=self.topk, experts=self.experts)

    def workloads(self) -> list[Workload]:
        """The sizes of each T."""
        return [self.workload_of(self.ranks, tokens) for tokens in self.tokens]


@dataclass(frozen=True, kw_only=True)
class LowLatencySuite(LowLatencySizes):
    """Low-latency dispatch and combine of few tokens, against all-to-all with sort and index."""

    command_name = "low-latency"
    defaults: ClassVar = {
        "cpu": {**CPU_SIZES, "ranks": 4, "calls": 8, "tokens": TOKENS, "peer": [ALL_TO_ALL]},
        "cuda": {**CUDA_SIZES, "ranks": None, "calls": 1, "tokens": TOKENS, "peer": None},
    }
    least: ClassVar = LowLatencySizes.least | {"calls": 1}

    peer: Annotated[list[str], typer.Option(help="all_to_all, deep_ep, none, or an adapter, module:Class.")] = (
        BY_BACKEND
    )
    calls: Annotated[int, typer.Option(help=f"{CALLS_HELP} Halves are timed one by one.")] = BY_BACKEND

    def __post_init__(self) -> None:
        if self.backend == "cuda" and self.peer is None:
            has_deep_ep = importlib.util.find_spec(DEEP_EP) is not None
            object.__setattr__(self, "peer", [ALL_TO_ALL, DEEP_EP] if has_deep_ep else [ALL_TO_ALL])
        super().__post_init__()
        for name in self.peer:
            _find_peers(name)

    def measure(self, device: torch.device) -> dict[str, Any]:
        rows: list[Row] = []
        notes = []
        for workload in self.workloads():
            for quantize in (False, True):
                scene = Scene(workload, self.dtype, quantize, device)
                with contextlib.closing(scene.comm):
                    rows += time_ways(clock_of_halves(device, self.calls), scene.ways(self.peer), self.iterations)
                if not quantize:
                    notes.append(memory_note(workload, scene.comm.config))
        return {"rows": rows, "notes": notes}
