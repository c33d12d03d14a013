"""Inputs of every rank from a seed, outputs that start as poison, and comparisons with the oracles.

Every rank makes the inputs of all ranks, so each can ask the oracle what it should have received.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ep_plugin import DispatchLayout, MoECommunicator, MoECommunicatorConfig
from ep_plugin.dtypes import weight_dtype
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput
from ep_plugin.moe.reference import ReferenceOutput, reference_combine, reference_dispatch
from tests.ranks import run_ranks, values

FLAT, TOKEN_MAJOR = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR
LAYOUTS = (FLAT, TOKEN_MAJOR)
ROUTINGS = ("random", "one expert", "last rank only", "own rank only", "all dropped", "even ranks drop")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call on all ranks. tokens: T of each rank. routing: one of ROUTINGS. drop: the share of pairs with id -1."""

    tokens: tuple[int, ...]
    num_experts: int
    hidden: int = 24
    topk: int = 2
    dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int64
    routing: str = "random"
    drop: float = 0.15
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of all ranks: lists over ranks of x ``[T, H]``, ids ``[T, K]``, weights ``[T, K]``, bias ``[T, H]``."""

    case: Case
    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    bias: list[torch.Tensor]

    def expected(self, layout: DispatchLayout, alignment: int = 1) -> list[ReferenceOutput]:
        """The output that every rank should receive."""
        return reference_dispatch(
            self.x,
            self.ids,
            self.weights,
            num_experts=self.case.num_experts,
            layout=layout,
            expert_alignment=alignment,
        )


def make_inputs(case: Case) -> Inputs:
    """Fresh random inputs of all ranks, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    x, ids, weights, bias = [], [], [], []
    for rank, tokens in enumerate(case.tokens):
        shape = (tokens, case.hidden)
        x.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype))
        bias.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype))
        ids.append(_routing(case, rank, generator).to(case.id_dtype))
        random = torch.randn((tokens, case.topk), generator=generator, dtype=torch.float64)
        weights.append(random.to(weight_dtype(case.dtype)))
    return Inputs(case=case, x=x, ids=ids, weights=weights, bias=bias)


def _routing(case: Case, rank: int, generator: torch.Generator) -> torch.Tensor:
    """``[T, K]`` distinct experts per token, or -1."""
    tokens, experts, per_rank = case.tokens[rank], case.num_experts, case.num_experts // case.size
    score = torch.rand((tokens, experts), generator=generator)
    if case.routing == "one expert":
        score[:, experts // 2] = 2.0
    ids = score.topk(case.topk, dim=1).indices
    owner = ids // per_rank
    dropped = torch.rand((tokens, case.topk), generator=generator) < case.drop
    if case.routing == "one expert":
        dropped = ids != experts // 2
    elif case.routing == "last rank only":
        dropped |= owner != case.size - 1
    elif case.routing == "own rank only":
        dropped |= owner != rank
    elif case.routing == "all dropped" or (case.routing == "even ranks drop" and rank % 2 == 0):
        dropped |= True
    return ids.masked_fill(dropped, -1)


# -- running on ranks ------------------------------------------------------------------------------------------------


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """The results of ``function(rank, size, *args)`` on each of ``size`` ranks."""
    return values(run_ranks(size, function, size, *args, timeout_s=timeout_s))


@contextlib.contextmanager
def named(what: Any) -> Iterator[None]:
    """Adds the case to a failure inside the block."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"in {what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New memory from torch holds NaN and the largest integers until it is written."""
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import the compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


RAIL_CHUNKS = 4  # over several nodes; the default is less for so few rows


def communicator(case: Case, layout: DispatchLayout = FLAT, **settings: Any) -> MoECommunicator:
    """A communicator of the default group that serves `case`."""
    base = {"num_experts": case.num_experts, "hidden_size": case.hidden, "topk": case.topk, "layout": layout}
    if settings.get("mode") != "ll":
        base["rail_chunks"] = RAIL_CHUNKS
    return MoECommunicator(None, MoECommunicatorConfig(**(base | settings)))


# -- comparing -------------------------------------------------------------------------------------------------------


def same_bits(what: str, actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Fails unless the two have the same type, shape and bytes."""
    if actual is None or expected is None:
        assert actual is expected, f"{what}: expected {expected}, got {actual}"
        return
    assert actual.dtype is expected.dtype, f"{what}: expected {expected.dtype}, got {actual.dtype}"
    assert actual.shape == expected.shape, f"{what}: expected {tuple(expected.shape)}, got {tuple(actual.shape)}"
    if not torch.equal(_bytes(actual), _bytes(expected)):
        differ = (_bytes(actual) != _bytes(expected)).nonzero()
        raise AssertionError(f"{what}: {len(differ)} bytes differ, the first at byte {int(differ[0])}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def check_dispatch(out: DispatchOutput, expected: ReferenceOutput) -> None:
    """Compares all results of a dispatch without capacity with the oracle, bit for bit."""
    same_bits("tokens", out.tokens, expected.tokens)
    same_bits("weights", out.weights, expected.weights)
    same_bits("topk_ids", out.topk_ids, expected.topk_ids)
    same_bits("row_expert_ids", out.row_expert_ids, expected.row_expert_ids)
    same_bits("num_tokens_per_expert", out.num_tokens_per_expert, expected.num_tokens_per_expert)
    same_bits("num_tokens_per_expert_cpu", out.num_tokens_per_expert_cpu, expected.num_tokens_per_expert.long())
    same_bits("expert_offsets", out.expert_offsets, expected.expert_offsets)
    assert out.overflow is None and out.required is None


def expert_rows(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Expert results: fresh random rows, so that a combine cannot pass by reading what dispatch left in memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, hidden), generator=generator, dtype=torch.float64).to(dtype)


def check_combine(
    comm: MoECommunicator, handle: DispatchHandle, inputs: Inputs, received: list[ReferenceOutput], weighted: bool
) -> torch.Tensor:
    """Combines fresh rows, compares with the oracle within the rounding that is allowed, and returns the result.

    Each partial row, each node's sum of several nodes, and the sum are rounded to the element type once.
    """
    case, rank = inputs.case, comm.rank
    y = [expert_rows(len(out.tokens), case.hidden, case.dtype, case.seed + r) for r, out in enumerate(received)]
    weights = [out.weights for out in received] if weighted else None
    result = comm.combine(y[rank], handle, weights=None if weights is None else weights[rank])
    exact = reference_combine(y, received, list(case.tokens), weights)[rank]
    magnitude = reference_combine(
        [rows.abs() for rows in y],
        received,
        list(case.tokens),
        None if weights is None else [weight.abs() for weight in weights],
    )[rank]
    close(f"combine, weighted={weighted}", result, exact, magnitude, case.dtype, roundings_of(comm))
    if case.dtype in (torch.bfloat16, torch.float16):
        rounded = rounded_combine(comm.engine.node_map.nodes, y, received, case, weights)[rank]
        nearly_equal(f"combine, weighted={weighted}", result, rounded)
    return result


def rounded_combine(
    nodes: tuple[tuple[int, ...], ...],
    y: list[torch.Tensor],
    received: list[ReferenceOutput],
    case: Case,
    weights: list[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """What every rank gets, rounded to the element type where a combine rounds, and summed in float64 between."""

    def partial_rows(rank: int) -> torch.Tensor:
        beside = None if weights is None else [weights[rank]]
        (rows,) = reference_combine([y[rank]], [received[rank]], [sum(case.tokens)], beside)
        return rows.to(case.dtype).double()

    sums = [torch.stack([partial_rows(rank) for rank in ranks]).sum(0) for ranks in nodes]
    if len(nodes) > 1:
        sums = [rows.to(case.dtype).double() for rows in sums]
    return list(torch.stack(sums).sum(0).to(case.dtype).split(list(case.tokens)))


def nearly_equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fails where more than 1 % of the elements differ. Near a tie, a sum in float32 may round to the other side."""
    differ = int((actual != expected).sum())
    assert differ <= 1 + actual.numel() // 100, f"{what}: {differ} of {actual.numel()} elements round otherwise"


def roundings_of(comm: MoECommunicator) -> int:
    """How often a combine rounds to the element type: per rank, per node if there are several, and at the owner."""
    return 3 if comm.engine.node_map.num_nodes > 1 else 2


def close(
    what: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    dtype: torch.dtype,
    roundings: int = 2,
) -> None:
    """Fails unless |actual - exact| is within so many roundings to `dtype`, and a few to float32 (float64).

    A rounding errs by half an epsilon of `magnitude`, that of the terms.
    """
    assert actual.dtype is dtype, f"{what}: expected {dtype}, got {actual.dtype}"
    assert actual.shape == exact.shape, f"{what}: expected {tuple(exact.shape)}, got {tuple(actual.shape)}"
    if actual.numel() == 0:
        return
    sums = torch.finfo(weight_dtype(dtype)).eps
    allowed = (roundings / 2 * torch.finfo(dtype).eps + 32 * sums) * magnitude + torch.finfo(dtype).smallest_normal
    excess = (actual.double() - exact).abs() - allowed
    assert not bool((~(excess <= 0)).any()), f"{what}: worst excess {float(excess.max())} of {tuple(actual.shape)}"


def round_trip(
    comm: MoECommunicator, inputs: Inputs, received: list[ReferenceOutput]
) -> tuple[DispatchOutput, DispatchHandle]:
    """Dispatches, and combines with and without weights. Compares all results with the oracles."""
    rank = comm.rank
    out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
    check_dispatch(out, received[rank])
    check_combine(comm, handle, inputs, received, weighted=True)
    check_combine(comm, handle, inputs, received, weighted=False)
    return out, handle


def ragged(size: int, most: int, seed: int = 0) -> tuple[int, ...]:
    """T of each rank, from 0 to `most`. If there are several ranks, one has 0 and one has `most`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, most + 1, (size,), generator=generator).tolist()
    tokens[seed % size] = most
    if size > 1:
        tokens[(seed + 1) % size] = 0
    return tuple(tokens)
