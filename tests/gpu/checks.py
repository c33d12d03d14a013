"""Routing problems for GPUs, each judged by the oracles on fresh random inputs; what the other GPU tests build on.

Ranks may share a GPU: rank r uses device r modulo the number of devices. With EP_TEST_DEVICE=cpu all ranks use the CPU.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import DispatchLayout, MoECommunicator, MoECommunicatorConfig
from ep_plugin.moe.reference import ReferenceOutput, reference_combine, reference_dispatch
from tests.moe.moe_cases import roundings_of
from tests.ranks import simt_asked

FLAT, TOKEN_MAJOR = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR


@dataclass(frozen=True)
class Case:
    """One routing problem. Rank r has max(0, tokens - ragged * r) tokens; `dropped` is the share of ids set to -1."""

    tokens: int = 200
    hidden: int = 512
    topk: int = 4
    experts_per_rank: int = 8
    dtype: torch.dtype = torch.bfloat16
    layout: DispatchLayout = FLAT
    alignment: int = 1
    ragged: int = 13
    dropped: float = 0.1
    only_rank: int | None = None
    ids: torch.dtype = torch.int64


CASES = {
    "plain": Case(),
    "token_major": Case(layout=TOKEN_MAJOR),
    "fp32": Case(dtype=torch.float32, hidden=4096, tokens=150),
    "fp32_token_major": Case(dtype=torch.float32, hidden=1028, tokens=150, topk=6, layout=TOKEN_MAJOR),
    "fp16": Case(dtype=torch.float16, hidden=4096, tokens=150),
    "fp16_int32_ids": Case(dtype=torch.float16, ids=torch.int32, topk=1),
    "aligned": Case(alignment=16, experts_per_rank=3, topk=3),
    "one_expert_each": Case(experts_per_rank=1, topk=1, hidden=64),
    "sixteen_byte_rows": Case(hidden=8, tokens=77),
    "wide_rows": Case(hidden=20_488, tokens=70, topk=2),
    "many_experts_per_token": Case(topk=100, experts_per_rank=128, tokens=65, hidden=128),
    "empty_ranks": Case(tokens=20, ragged=11),
    "all_dropped": Case(dropped=1.0, tokens=33),
    "one_rank_receives_all": Case(only_rank=0, topk=2),
    "real_widths": Case(tokens=600, hidden=7168, topk=8, experts_per_rank=32),
    "real_widths_token_major": Case(tokens=600, hidden=7168, topk=8, experts_per_rank=32, layout=TOKEN_MAJOR),
}


ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""All streams share one hardware queue, as Megatron-core asks for."""
ONE_KERNEL = {"dispatch_send_sms": 5, "dispatch_recv_sms": 0, "combine_send_sms": 6, "combine_recv_sms": 0}


def device_of(rank: int) -> torch.device:
    if simt_asked(os.environ) or os.environ.get("EP_TEST_DEVICE") == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def config_of(case: Case, size: int, **settings: Any) -> MoECommunicatorConfig:
    return MoECommunicatorConfig(
        num_experts=case.experts_per_rank * size,
        hidden_size=case.hidden,
        topk=min(case.topk, case.experts_per_rank * size),
        layout=case.layout,
        expert_alignment=case.alignment,
        **settings,
    )


@contextlib.contextmanager
def communicator(case: Case, rank: int, size: int, **settings: Any) -> Iterator[MoECommunicator]:
    with MoECommunicator(None, config_of(case, size, **settings), device_of(rank)) as comm:
        yield comm


def started(comm: MoECommunicator) -> float:
    """The time, once every rank of the default group has come here with its GPU idle.

    What follows begins on all ranks together: on an overloaded host they reach it further apart than the deadlines of
    fault tests.
    """
    synchronize(comm.engine.device)
    dist.barrier()
    return time.monotonic()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Inputs:
    """All ranks' inputs, on the CPU, equal on every rank."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    expected: list[ReferenceOutput]

    @property
    def tokens(self) -> list[int]:
        return [len(x) for x in self.x]


def make_inputs(case: Case, size: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    experts = case.experts_per_rank * size
    topk = min(case.topk, experts)
    x, ids, weights = [], [], []
    for rank in range(size):
        tokens = max(0, case.tokens - case.ragged * rank)
        x.append(torch.randn(tokens, case.hidden, generator=generator).to(case.dtype))
        first = 0 if case.only_rank is None else case.only_rank * case.experts_per_rank
        choices = experts if case.only_rank is None else case.experts_per_rank
        chosen = torch.rand(tokens, choices, generator=generator).topk(topk, dim=1).indices + first
        chosen[torch.rand(tokens, topk, generator=generator) < case.dropped] = -1
        ids.append(chosen.to(case.ids))
        weights.append(torch.rand(tokens, topk, generator=generator) + 0.1)  # a pair that is lost must show
    expected = reference_dispatch(
        x, ids, weights, num_experts=experts, layout=case.layout, expert_alignment=case.alignment
    )
    return Inputs(x, ids, weights, expected)


def assert_received(out: Any, expected: ReferenceOutput) -> None:
    """Bit for bit what the oracle says."""
    assert torch.equal(out.tokens.cpu(), expected.tokens), "tokens"
    if out.weights is not None:
        assert torch.equal(out.weights.cpu(), expected.weights), "weights"
    for name in ("topk_ids", "row_expert_ids"):
        ours, theirs = getattr(out, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours.cpu(), theirs), name
    assert torch.equal(out.num_tokens_per_expert.cpu(), expected.num_tokens_per_expert), "num_tokens_per_expert"
    assert torch.equal(out.expert_offsets.cpu(), expected.expert_offsets), "expert_offsets"
    if out.num_tokens_per_expert_cpu is not None:
        assert torch.equal(out.num_tokens_per_expert_cpu.int(), expected.num_tokens_per_expert), "counts on the host"


def assert_close(
    what: str, ours: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype, roundings: int = 2
) -> None:
    """Each element by itself: as exact as `roundings` to `dtype`, and sums in float32, can leave it.

    A combine rounds twice: every rank's partial sum, to the row's type for the wire, and the owner's sum of those. Over
    several nodes it also rounds each node's sum. Each costs half an epsilon of what is rounded, at most of `magnitude`,
    the sum of the terms' absolute values. In between, float32 takes half of its epsilon per term: 64 terms are allowed,
    and what is below the smallest normal number.
    """
    assert ours.shape == exact.shape, f"{what}: expected {tuple(exact.shape)}, got {tuple(ours.shape)}"
    rounded = (1 + torch.finfo(dtype).eps / 2) ** roundings - 1
    allowed = (rounded + 32 * torch.finfo(torch.float32).eps) * magnitude + torch.finfo(dtype).smallest_normal
    wrong = ~((ours.double().cpu() - exact).abs() <= allowed)  # NaN is wrong too
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.numel()} elements, first {wrong.nonzero()[0].tolist()}"


# -- what experts return -------------------------------------------------------------------------------------------


def share_of(case: Case, given: Inputs, holder: int, owner: int, seed: int) -> tuple[ReferenceOutput, torch.Tensor]:
    """What `holder`'s experts return for `owner`'s tokens, and the numbers of those rows at `holder`.

    Random rows, another for each (token, expert) or slot, so that nothing that dispatch left can stand for them. Only
    these are made: all ranks' rows together would take the CPU longer than anything else here.
    """
    out, begin = given.expected[holder], sum(given.tokens[:owner])
    theirs = (out.pair_token >= begin) & (out.pair_token < begin + given.tokens[owner])
    rows, pair_row = out.pair_row[theirs].unique(return_inverse=True)
    generator = torch.Generator().manual_seed((seed * 100 + holder) * 100 + owner)
    share = replace(
        out,
        tokens=torch.randn(len(rows), case.hidden, generator=generator).to(case.dtype),
        weights=out.weights[rows],
        pair_token=out.pair_token[theirs] - begin,
        pair_k=out.pair_k[theirs],
        pair_row=pair_row,
    )
    return share, rows


def expert_rows(case: Case, given: Inputs, holder: int, seed: int) -> torch.Tensor:
    """``[N, H]``: all that `holder`'s experts return. Rows without a pair, as padding has none, are NaN."""
    y = torch.full((len(given.expected[holder].tokens), case.hidden), torch.nan, dtype=case.dtype)
    for owner in range(len(given.x)):
        share, rows = share_of(case, given, holder, owner, seed)
        y[rows] = share.tokens
    return y


class CombineOracle:
    """Judges what `rank` gets when every rank combines its `expert_rows`. roundings: see `assert_close`."""

    def __init__(self, case: Case, given: Inputs, rank: int, seed: int, roundings: int = 2) -> None:
        self._roundings = roundings
        self._dtype, self._tokens = case.dtype, [given.tokens[rank]]
        self._shares = [share_of(case, given, holder, rank, seed)[0] for holder in range(len(given.x))]

    def check(self, what: str, z: torch.Tensor, *, weighted: bool, bias: torch.Tensor | None = None) -> None:
        assert z.dtype is self._dtype, f"{what}: expected {self._dtype}, got {z.dtype}"
        y = [share.tokens for share in self._shares]
        weights = [share.weights for share in self._shares] if weighted else None  # none is negative
        exact = reference_combine(y, self._shares, self._tokens, weights)[0]
        magnitude = reference_combine([rows.abs() for rows in y], self._shares, self._tokens, weights)[0]
        if bias is not None:
            exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
        assert_close(what, z, exact, magnitude, self._dtype, self._roundings)


def value_rows(given: Inputs, holder: int) -> torch.Tensor:
    """Values that travel beside the rows of `holder`, in the shape of its weights. Small integers: sums are exact."""
    values = given.expected[holder].weights
    return (torch.arange(values.numel()) % 1009 + holder).view(values.shape).to(values.dtype)


def value_sums(case: Case, given: Inputs, rank: int) -> torch.Tensor:
    """``[T, K]``: what `rank` gets when every rank combines its `value_rows`."""
    sums = torch.zeros(given.ids[rank].shape, dtype=given.expected[rank].weights.dtype)
    begin = sum(given.tokens[:rank])
    for holder, out in enumerate(given.expected):
        values = value_rows(given, holder)
        theirs = (out.pair_token >= begin) & (out.pair_token < begin + given.tokens[rank])
        token, k, row = out.pair_token[theirs] - begin, out.pair_k[theirs], out.pair_row[theirs]
        if case.layout is FLAT:
            sums[token, k] += values[row]
        else:  # a slot's pairs have one row, whose values count once
            row_of = torch.full((len(sums),), -1)
            row_of[token] = row
            went = row_of >= 0
            sums[went] += values[row_of[went]]
    return sums


def check_round(comm: MoECommunicator, case: Case, seed: int) -> None:
    """Dispatch, combine with and without weights and with values, and a dispatch over the same routing."""
    rank, size, device = comm.rank, comm.size, comm.engine.device
    given = make_inputs(case, size, seed)
    x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
    out, handle = comm.dispatch(x, ids, weights)
    assert_received(out, given.expected[rank])

    y = expert_rows(case, given, rank, seed).to(device)
    oracle = CombineOracle(case, given, rank, seed, roundings_of(comm))
    bias = given.x[rank].flip(0)
    z = comm.combine(y, handle, weights=out.weights, bias=bias.to(device))
    oracle.check("weighted combine", z, weighted=True, bias=bias)
    oracle.check("combine", comm.combine(y, handle), weighted=False)
    z, sums = comm.combine_with_values(y, handle, value_rows(given, rank).to(device))
    oracle.check("combine with values", z, weighted=False)
    assert torch.equal(sums.cpu(), value_sums(case, given, rank)), "sums of values"

    cached, _ = comm.dispatch(x.flip(1), ids, weights, previous_handle=handle)
    expected = given.expected[rank]
    assert_received(cached, replace(expected, tokens=expected.tokens.flip(1)))


def grid_in_one_kernel(rank: int, size: int) -> list[str]:
    """The same where the SMs that send also receive."""
    return grid(rank, size, **ONE_KERNEL)


def grid(rank: int, size: int, **settings: Any) -> list[str]:
    """Every case, on fresh inputs, twice where ranks are few. Returns the names of the cases that ran."""
    done = []
    for index, (name, case) in enumerate(CASES.items()):
        if case.topk > case.experts_per_rank * size:
            continue
        with communicator(case, rank, size, timeout_s=60, **settings) as comm:
            for seed in (2 * index, 2 * index + 1)[: 2 if size <= 4 else 1]:
                try:
                    check_round(comm, case, seed)
                except Exception as error:
                    error.add_note(f"case {name}, seed {seed}, rank {rank} of {size}")
                    raise
        done.append(name)
    return done
