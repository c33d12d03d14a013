"""Inputs and an oracle for DeepEP's interface, token by token in plain torch, from the interface's documentation."""

from __future__ import annotations

import dataclasses
import itertools
import os
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T", "Sent", "Received")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dispatch and combine on all ranks. tokens: T of each rank."""

    tokens: tuple[int, ...]
    hidden: int
    experts_per_rank: int
    topk: int
    dtype: torch.dtype = torch.bfloat16
    id_dtype: torch.dtype = torch.int64
    alignment: int = 1
    drop: float = 0.2
    seed: int = 0

    @property
    def num_experts(self) -> int:
        return self.experts_per_rank * len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What each rank sends, as lists over ranks."""

    x: list[torch.Tensor]
    scales: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    in_rank: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Received:
    """What one rank receives; source: the rank and the token there of each row."""

    x: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counts: list[int]
    source: list[tuple[int, int]]


def make(case: Case) -> Sent:
    """Fresh random inputs of all ranks, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    x, scales, ids, weights, in_rank = [], [], [], [], []
    for tokens in case.tokens:
        rows = torch.randn((tokens, case.hidden), generator=generator)
        x.append(rows.to(case.dtype))
        scales.append(torch.rand((tokens, max(1, case.hidden // 128)), generator=generator))
        chosen = torch.rand((tokens, case.num_experts), generator=generator).topk(case.topk, dim=1).indices
        dropped = torch.rand(chosen.shape, generator=generator) < case.drop
        ids.append(chosen.masked_fill(dropped, -1).to(case.id_dtype))
        weights.append(torch.rand((tokens, case.topk), generator=generator))
        in_rank.append(torch.tensor([[goes(row, rank, case) for rank in range(len(case.tokens))] for row in ids[-1]]))
        in_rank[-1] = in_rank[-1].reshape(tokens, len(case.tokens)).bool()
    return Sent(x=x, scales=scales, ids=ids, weights=weights, in_rank=in_rank)


def nodes_of(size: int) -> list[list[int]]:
    """The ranks of each emulated node, from this rank's environment. EP_TEST_HOSTS: so many hosts get ranks in turn."""
    hosts = int(os.environ.get("EP_TEST_HOSTS", "0"))
    if hosts:
        return [list(range(first, size, hosts)) for first in range(hosts)]
    per_node = int(os.environ.get("EP_PLUGIN_RANKS_PER_NODE", size))
    return [list(range(first, first + per_node)) for first in range(0, size, per_node)]


def tokens_per_node(in_rank: torch.Tensor) -> list[int] | None:
    """What get_dispatch_layout says of nodes."""
    nodes = nodes_of(in_rank.shape[1])
    return [int(in_rank[:, ranks].any(1).sum()) for ranks in nodes] if len(nodes) > 1 else None


def on(device: str, what: T) -> T:
    """`what`, its tensors on another device."""
    moved = {
        field.name: [tensor.to(device) for tensor in value]
        if isinstance(value, list) and value and torch.is_tensor(value[0])
        else value.to(device)
        if torch.is_tensor(value)
        else value
        for field in dataclasses.fields(what)
        for value in (getattr(what, field.name),)
    }
    return dataclasses.replace(what, **moved)


def goes(ids: torch.Tensor, rank: int, case: Case) -> bool:
    """Whether a token with these expert ids is sent to `rank`."""
    return any(expert >= 0 and expert // case.experts_per_rank == rank for expert in ids.tolist())


def received(case: Case, sent: Sent, rank: int) -> Received:
    """Rows by source rank, then source token; local ids or -1; weights, 0 where -1; counts rounded up."""
    first = rank * case.experts_per_rank
    rows, scales, ids, weights, source = [], [], [], [], []
    counts = [0] * case.experts_per_rank
    for origin, tokens in enumerate(case.tokens):
        for token in range(tokens):
            if not sent.in_rank[origin][token, rank]:
                continue
            local = [
                expert - first if first <= expert < first + case.experts_per_rank else -1
                for expert in sent.ids[origin][token].tolist()
            ]
            for expert in local:
                if expert >= 0:
                    counts[expert] += 1
            rows.append(sent.x[origin][token])
            scales.append(sent.scales[origin][token])
            ids.append(local)
            values = sent.weights[origin][token].tolist()
            weights.append([value if expert >= 0 else 0.0 for value, expert in zip(values, local, strict=True)])
            source.append((origin, token))
    while_aligned = [(count + case.alignment - 1) // case.alignment * case.alignment for count in counts]
    return Received(
        x=torch.stack(rows) if rows else sent.x[0].new_empty((0, case.hidden)),
        scales=torch.stack(scales) if scales else torch.empty((0, max(1, case.hidden // 128))),
        ids=torch.tensor(ids, dtype=case.id_dtype).reshape(len(rows), case.topk),
        weights=torch.tensor(weights, dtype=torch.float32).reshape(len(rows), case.topk),
        counts=while_aligned,
        source=source,
    )


def combined(case: Case, everyone: list[Received], values: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Float64 sums, over the ranks that a token went to, of `values` (one row per received row, for each rank)."""
    total = torch.zeros((case.tokens[rank], values[0].shape[1]), dtype=torch.float64, device=values[0].device)
    for got, rows in zip(everyone, values, strict=True):
        for row, (origin, token) in enumerate(got.source):
            if origin == rank:
                total[token] += rows[row].double()
    return total


def check_handle(handle: tuple[torch.Tensor, ...], sent: Sent, mine: Received, rank: int) -> None:
    """DeepEP's own tests find each source's rows by position 0 of a node's handle, and by -4 of several nodes'."""
    rows = torch.stack([in_rank.sum(0) for in_rank in sent.in_rank]).cumsum(0).int()
    if len(nodes_of(len(rows))) == 1:
        matrix, _, _, _, in_rank, _ = handle
        assert matrix.dtype is torch.int32 and torch.equal(matrix, rows)
        through = matrix[:, rank]
    else:
        in_rank, _, _, _, _, _, through, _, _, _ = handle
        assert through is handle[-4] and through.dtype is torch.int32 and torch.equal(through, rows[:, rank])
    assert torch.equal(in_rank, sent.in_rank[rank])
    for source, (begin, end) in enumerate(itertools.pairwise([0, *through.tolist()])):
        assert {origin for origin, _ in mine.source[begin:end]} <= {source}
