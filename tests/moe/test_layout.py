"""The kernel that counts the tokens of each rank, node and expert, against plain torch.

The emulation of the CUDA kernels and tests/gpu run the same cases. Shapes: T tokens, K experts per token, E experts,
R ranks on N nodes.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

from ep_plugin import _C
from ep_plugin.deep_ep.layout import count_tokens
from ep_plugin.moe.across_nodes.tables import places_of_ranks
from ep_plugin.moe.legs import chunk_bounds
from ep_plugin.runtime.streams import current_stream, kernels_for
from ep_plugin.transport.topology import NodeMap
from tests.faults.fault_cases import here
from tests.moe.moe_cases import named, on_ranks, same_bits

POISON = 0x5B
GUARD = 64  # bytes behind those that the kernel may write
BEYOND = (-(2**63), -(2**40), -2, 0, 1, 2**31, 2**32, 2**63 - 1)  # added to E where they are not negative


class Case(NamedTuple):
    nodes: tuple[tuple[int, ...], ...]
    experts_per_rank: int
    topk: int
    tokens: int
    dropped: float = 0.2


CASES = {
    "one rank and expert": Case(((0,),), 1, 1, 5),
    "no tokens": Case(((0, 1),), 4, 3, 0),
    "no experts per token": Case(((0, 1), (2, 3)), 4, 0, 7),
    "all dropped": Case(((0, 1), (2, 3)), 2, 3, 20, 1.0),
    "nodes of one rank": Case(((0,), (1,), (2,)), 5, 9, 40),
    "interleaved nodes": Case(((0, 2), (1, 3)), 8, 6, 100),
    "nodes in any order": Case(((5, 0), (1, 3), (4, 2)), 3, 4, 61),
    "16 ranks of a node": Case((tuple(range(16)),), 7, 8, 300),
    "16 ranks of 4 nodes": Case(tuple(tuple(range(first, 16, 4)) for first in range(4)), 13, 8, 129),
    "more than one tile": Case(((0, 1, 2),), 11, 2, 4099),
    "more than 32 counts for each of 32 blocks": Case(((0, 1, 2), (3, 4, 5)), 301, 12, 33),
    "more ranks than bits": Case((tuple(range(0, 40, 2)), tuple(range(1, 40, 2))), 2, 5, 50),
    "more ids than experts": Case(((0, 1),), 2, 40, 9),
}


def _ids(case: Case, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ids ``[T, K]``. Tokens name some experts twice; some ids are dropped, and some are those of no expert."""
    E = len(case.nodes) * len(case.nodes[0]) * case.experts_per_rank
    generator = torch.Generator().manual_seed(seed)
    shape = case.tokens, case.topk
    ids = torch.randint(E, shape, generator=generator)
    ids = ids.masked_fill(torch.rand(shape, generator=generator) < case.dropped, -1)
    beyond = torch.tensor([E + add if 0 <= add < 2**62 else add for add in BEYOND])
    if dtype is torch.int32:
        beyond = beyond.clamp(-(2**31), 2**31 - 1)
    which = torch.randint(len(BEYOND), shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, beyond[which], ids).to(dtype)


def expected_layout(ids: torch.Tensor, num_experts: int, nodes: NodeMap) -> tuple[torch.Tensor, ...]:
    """The oracle: tokens of each rank, of each node and of each expert, int32, and is_token_in_rank."""
    known = (ids >= 0) & (ids < num_experts)
    chosen = torch.zeros((len(ids), num_experts + 1), dtype=torch.bool)
    chosen = chosen.scatter_(1, torch.where(known, ids, num_experts).long(), True)[:, :num_experts]
    in_rank = chosen.unflatten(1, (nodes.num_nodes * nodes.ranks_per_node, -1)).any(2)
    in_node = torch.stack([in_rank[:, list(ranks)].any(1) for ranks in nodes.nodes], dim=1)
    return *(each.sum(0, dtype=torch.int32) for each in (in_rank, in_node, chosen)), in_rank


def _guarded(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes + GUARD,), POISON, dtype=torch.uint8, device=here())


def _written(memory: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The written part of guarded memory, on the host."""
    assert (memory[-GUARD:] == POISON).all(), "the kernel has written behind its output"
    return memory[:-GUARD].view(dtype).view(shape).cpu()


def counts(rank: int, size: int) -> None:
    """All cases with ids of both types, into memory that was written before."""
    for name, case in CASES.items():
        nodes = NodeMap(case.nodes)
        R = nodes.num_nodes * nodes.ranks_per_node
        E, N = case.experts_per_rank * R, nodes.num_nodes if nodes.num_nodes > 1 else 0
        places = places_of_ranks(nodes, here())
        for seed, dtype in enumerate((torch.int64, torch.int32)):
            ids = _ids(case, dtype, seed)
            given, counted, in_rank = ids.to(here()), _guarded(4 * (R + N + E)), _guarded(case.tokens * R)
            kernels_for(here()).layout(
                _C.LayoutArgs(
                    ids=given.data_ptr(),
                    nodes=_C.Nodes(rank_place=places.data_ptr(), num_ranks=R, num_experts=E),
                    counts=counted.data_ptr(),
                    in_rank=in_rank.data_ptr(),
                    num_tokens=case.tokens,
                    topk=case.topk,
                    num_nodes=N,
                    id_bytes=given.element_size(),
                    stream=current_stream(here()),
                )
            )
            per_rank, per_node, per_expert, goes = expected_layout(ids, E, nodes)
            with named((name, dtype)):
                same_bits("is_token_in_rank", _written(in_rank, torch.bool, case.tokens, R), goes)
                expected = torch.cat([per_rank, per_node, per_expert] if N else [per_rank, per_expert])
                same_bits("counts", _written(counted, torch.int32, R + N + E), expected)


def messages(rank: int, size: int) -> None:
    """For each node: the header, what was left out, the tokens of each chunk for it, and the parts of those that go.

    Rows are numbered in each chunk. With room for few of them, the last ones are left out.
    """
    header = _C.Header(**{name: 2**40 + number for number, name in enumerate(_C.header_fields)})
    of_header = [getattr(header, name) for name in _C.header_fields]
    for name, case in CASES.items():
        node_map, seed = NodeMap(case.nodes), len(name)
        N, G = node_map.num_nodes, node_map.ranks_per_node
        R, E, own = N * G, N * G * case.experts_per_rank, seed % N
        places = places_of_ranks(node_map, here())
        for chunks, dtype, padded in (
            (1, torch.int64, 0),
            (3, torch.int32, 0),
            (3, torch.int64, 2),
            (1, torch.int32, 9),
        ):
            ids = _ids(case, dtype, seed)
            given, words = ids.to(here()), _C.message_words(chunks, G, E // N)
            written, rows, copy = _guarded(16 * N * words), _guarded(4 * case.tokens * N), _guarded(4 * ids.numel())
            waits = torch.tensor([0, 7 + seed, *[0] * N]).to(here())
            group = _C.Nodes(rank_place=places.data_ptr(), num_ranks=R, num_experts=E, num_chunks=chunks, node=own)
            group.waits = 0 if padded == 9 else waits.data_ptr()
            kernels_for(here()).layout(
                _C.LayoutArgs(
                    ids=given.data_ptr(),
                    nodes=group,
                    messages=written.data_ptr(),
                    rail_rows=rows.data_ptr(),
                    own_ids=copy.data_ptr(),
                    header=header,
                    num_tokens=case.tokens,
                    topk=case.topk,
                    num_nodes=N,
                    id_bytes=given.element_size(),
                    padded=padded,
                    stream=current_stream(here()),
                )
            )
            found, received = _written(written, torch.int64, 2, N, words)
            numbers = _written(rows, torch.int32, case.tokens, N)
            left_out, longest = 0, 0
            with named((name, chunks, padded)):
                valid = ids.where((ids >= 0) & (ids < E), -1).int()
                same_bits("own_ids", _written(copy, torch.int32, *ids.shape), valid)
                sizes = [len(of_header), _C.rail_overflow_words, 1, chunks, chunks * (G + E // N)]
                headers, rail_overflow, waited, counts, parts = found.split(sizes, 1)
                assert headers.tolist() == [of_header] * N
                for chunk, (first, last) in enumerate(itertools.pairwise(chunk_bounds(case.tokens, chunks))):
                    _, per_node, _, in_rank = expected_layout(ids[first:last], E, node_map)
                    assert counts[:, chunk].tolist() == per_node.tolist()
                    for node, ranks in enumerate(node_map.nodes):
                        is_there = in_rank[:, list(ranks)].any(1)
                        number, room = is_there.cumsum(0) - 1, padded if padded and node != own else case.tokens
                        goes = is_there & (number < room)
                        per_rank, _, per_expert, _ = expected_layout(ids[first:last][goes], E, node_map)
                        of_ranks, of_experts = per_rank[list(ranks)], per_expert.view(R, -1)[list(ranks)].flatten()
                        wanted = torch.cat([of_ranks, of_experts]).tolist()
                        assert parts[node].view(chunks, -1)[chunk].tolist() == wanted
                        expected = torch.where(goes & (node != own), number, -1).int()
                        same_bits("rail_rows", numbers[first:last, node].contiguous(), expected)
                        if node != own:
                            left_out += int((is_there & ~goes).sum())
                            longest = max(longest, int(is_there.sum()))
                told = [left_out, chunks * longest] if padded else [0, 0]
                assert rail_overflow.tolist() == [told] * N
                before = [7 + seed if group.waits else 0]
                assert waited.tolist() == [before] * N
                assert received[own, sizes[0] : sum(sizes[:3])].tolist() == told + before
                assert (int(waits[0]) > 0) == (group.waits != 0) and waits[1:].tolist() == [7 + seed, *[0] * N]


def returns_counts(rank: int, size: int) -> None:
    """The results are tensors of their own, from ids that lie apart in memory."""
    for case in (CASES["interleaved nodes"], CASES["16 ranks of a node"]):
        nodes = NodeMap(case.nodes)
        E = nodes.num_nodes * nodes.ranks_per_node * case.experts_per_rank
        wide = torch.rand(case.tokens, E).topk(2 * case.topk).indices
        ids = wide[:, ::2]
        per_rank, per_node, per_expert, in_rank = count_tokens(wide.to(here())[:, ::2], E, nodes)
        expected = expected_layout(ids, E, nodes)
        assert (per_node is None) == (nodes.num_nodes == 1)
        for got, wanted in zip((per_rank, per_node, per_expert, in_rank), expected, strict=True):
            if got is not None:
                same_bits("result", got.cpu(), wanted)
                assert got.is_contiguous() and not got.requires_grad
        per_rank.zero_()
        same_bits("num_tokens_per_expert", per_expert.cpu(), expected[2])
        for given in (torch._neg_view(-ids), ids.as_subclass(type("Ids", (torch.Tensor,), {}))):
            same_bits("is_token_in_rank", count_tokens(given.to(here()), E, nodes)[3].cpu(), expected[3])


def refuses_arguments(rank: int, size: int) -> None:
    """The kernel of GPUs refuses what it cannot do before it is launched."""
    of_group = {"num_ranks": 2, "num_experts": 4}
    given = {"num_tokens": 1, "topk": 1, "id_bytes": 8}
    wrong = {"num_tokens": -1, "topk": 2**30, "num_ranks": 0, "num_experts": 5, "num_nodes": 3, "id_bytes": 2}
    for name, value in wrong.items():
        group = _C.Nodes(**(of_group | {name: value} if name in of_group else of_group))
        args = _C.LayoutArgs(nodes=group, **(given if name in of_group else given | {name: value}))
        with named(f"{name} = {value}"), pytest.raises(ValueError, match=f"{name}: expected .*, got {value}"):
            kernels_for(here()).layout(args)


CHECKS: tuple[Any, ...] = (counts, messages, returns_counts)


@pytest.mark.parametrize("check", CHECKS)
def test_layout(check: Any) -> None:
    on_ranks(1, check)
