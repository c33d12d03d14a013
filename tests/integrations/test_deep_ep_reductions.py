"""How often ElasticBuffer's combine rounds a sum: with allow_multiple_reduction=False once, bit for bit."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.deep_ep import elastic
from ep_plugin.deep_ep.shared import _users
from tests.integrations.deep_ep_cases import nodes_of
from tests.moe.moe_cases import on_ranks
from tests.moe.test_across_nodes import on_nodes


def _reduced_once(rank: int, size: int) -> None:
    """Every expert's row counts as it is, in the order of the token's choices, and a sum is rounded once."""
    T, H, local, K = 21, 64, 6, 7
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand((size, T, local * size), generator=generator).topk(K, 2).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    weights = torch.rand((size, T, K), generator=generator)
    answers = torch.randn((size, T, K, H), generator=generator).bfloat16()  # of each choice's expert
    biases = [torch.randn((T, H), generator=generator).bfloat16() for _ in range(2)]
    group = cast(Any, dist.group.WORLD)
    most = T + 3
    buffer = deep_ep.ElasticBuffer(group, allow_multiple_reduction=False, explicitly_destroy=True)
    for expand in (False, True):
        for sync in (True, False):
            x = torch.arange(rank * T, (rank + 1) * T).view(T, 1).expand(T, 8).float()  # a row says its token
            given = {"num_experts": local * size, "num_max_tokens_per_rank": most, "do_cpu_sync": sync}
            rows, _, got, handle, _ = buffer.dispatch(
                x, ids[rank], weights[rank], **given, do_expand=expand, expert_alignment=4
            )
            y = torch.full((len(rows), H), float("nan"), dtype=torch.bfloat16)
            valid = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            for number, _, *places in handle.recv_src_metadata[:valid].tolist():
                answer = answers[number // most, number % most]
                for choice, place in enumerate(places):
                    if place >= 0 and expand:
                        y[place] = answer[choice]
                here = ids[number // most, number % most] // local == rank
                if not expand:  # the rank's experts' sum, which the caller rounds
                    y[max(places)] = answer[here].float().sum(0).bfloat16()
            # The terms of a token without do_expand: a rank's sum in the place of its last choice.
            terms = answers[rank].masked_fill(ids[rank].unsqueeze(2) < 0, 0)
            if not expand:
                terms = _summed_by_rank(terms, ids[rank] // local)
            for bias, start in ((None, 0.0), (biases[0], biases[0].float()), (tuple(biases), sum(map(_wide, biases)))):
                for _ in range(2):  # the second time over the same pairs
                    sums, returned, _ = buffer.combine(y, handle, topk_weights=got, bias=bias)
                    expected = torch.zeros((T, H)) + start
                    for choice in range(K):
                        expected += terms[:, choice].float()
                    assert torch.equal(sums, expected.bfloat16()), (expand, sync, bias is None)
                    assert returned is not None
                    assert torch.equal(returned, weights[rank].masked_fill(ids[rank] < 0, 0))
            assert (handle.pairs is None) == (not expand and len(nodes_of(size)) == 1)
    buffer.destroy()
    assert not _users


def _wide(bias: torch.Tensor) -> torch.Tensor:
    return bias.float()


def _summed_by_rank(terms: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Terms ``[T, K, H]`` of each rank added up, rounded, and put in the place of its last choice; zeros elsewhere."""
    found = torch.zeros_like(terms)
    for token, of_token in enumerate(ranks.tolist()):
        for rank in set(of_token) - {-1}:
            choices = [choice for choice, other in enumerate(of_token) if other == rank]
            found[token, choices[-1]] = terms[token, choices].float().sum(0).bfloat16()
    return found


def test_without_multiple_reductions_every_row_counts_as_it_is() -> None:
    on_ranks(2, _reduced_once)
    on_nodes(2, 2, _reduced_once)


def _with_weights_here_and_there(rank: int, size: int) -> None:
    """Rank 0 passes no weights, the others do. Then a wrong bias, and the streams' memory."""
    T, H = 5, 64
    group = cast(Any, dist.group.WORLD)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=T, allow_multiple_reduction=False)
    ids = torch.tensor([[0, 2 * size - 1]]).repeat(T, 1)
    x, weights = torch.ones((T, H), dtype=torch.bfloat16), torch.rand((T, 2))
    for expand in (False, True):
        rows, _, got, handle, _ = buffer.dispatch(x, ids, weights, num_experts=2 * size, do_expand=expand)
        assert got is not None
        for _ in range(2):
            _, returned, _ = buffer.combine(rows, handle, topk_weights=got if rank else None)
            if rank:
                expected = weights.clone()
                expected[:, 0] = 0  # expert 0 is on rank 0
                assert returned is not None and torch.equal(returned, expected)
            else:
                assert returned is None
    for shape in ((1, H), (T, 1), (H,), (T - 1, H)):
        with pytest.raises(ValueError, match=f"bias: expected shape \\({T}, {H}\\), got"):
            buffer.combine(rows, handle, bias=torch.ones(shape, dtype=x.dtype))
    seen: list[Any] = []

    def ordered(operation: Any, device: torch.device, reads: Any, *_: Any) -> Any:
        results = operation()
        seen.append((reads, results))
        return *results, deep_ep.EventOverlap()

    rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, num_experts=2 * size, do_expand=True)
    with mock.patch.object(elastic, "ordered", ordered):
        buffer.combine(rows, handle)
        buffer.combine(rows, handle)
    made, used = seen
    assert any(part is handle.pairs for part in made[1])  # made on the operation's stream, then the caller's own
    assert any(part is handle.pairs for part in used[0])


def test_without_multiple_reductions_some_ranks_may_pass_no_weights() -> None:
    on_ranks(2, _with_weights_here_and_there)
    on_nodes(2, 1, _with_weights_here_and_there)


def _after_a_buffer(rank: int, size: int) -> None:
    """A handle outlives the buffer that used it first, and the communicator of its pairs."""
    T_max = 65  # tokens of two experts each have the next larger bound
    x, ids = torch.ones((3, 64)), torch.tensor([[0, size]]).repeat(3, 1)
    group = cast(Any, dist.group.WORLD)
    first, second = (
        deep_ep.ElasticBuffer(
            group, num_max_tokens_per_rank=T_max, allow_multiple_reduction=False, explicitly_destroy=True
        )
        for _ in range(2)
    )
    given: dict[str, Any] = {"num_experts": 2 * size, "do_expand": True, "do_cpu_sync": False}
    rows, _, _, handle, _ = first.dispatch(x, ids, **given)
    second.dispatch(x, ids, **given)
    assert torch.equal(first.combine(rows, handle)[0], 2 * x)
    first.destroy()
    assert torch.equal(second.combine(rows, handle)[0], 2 * x)
    second.destroy()


def test_a_handle_may_outlive_the_buffer_that_used_it_first() -> None:
    on_ranks(2, _after_a_buffer)


def _all_tokens_of_a_rank(rank: int, size: int) -> None:
    """Each pair counts as a token then: all of them have room on the way to the other node."""
    T, K = 128, 8
    x, ids = torch.ones((T, 64)), torch.arange(2 * K).roll(-8 * (1 - rank))[:K].repeat(T, 1)  # of the other node
    buffer = deep_ep.ElasticBuffer(
        cast(Any, dist.group.WORLD), num_max_tokens_per_rank=T, allow_multiple_reduction=False, explicitly_destroy=True
    )
    rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=2 * K, do_expand=True, do_cpu_sync=False)
    assert torch.equal(buffer.combine(rows, handle)[0], K * x)
    buffer.destroy()


def test_without_multiple_reductions_all_pairs_of_a_full_rank_cross() -> None:
    on_nodes(2, 1, _all_tokens_of_a_rank)


def _dispatches_without_copies(rank: int, size: int) -> None:
    """Later dispatches make no tensor on the device from numbers of the host, which would wait for the copy."""
    buffer = deep_ep.ElasticBuffer(cast(Any, dist.group.WORLD), num_max_tokens_per_rank=4)
    x, ids, made = torch.ones((3, 64)), torch.tensor([[rank]]).repeat(3, 1), torch.tensor
    copied: list[Any] = []

    def tensor(data: Any, **given: Any) -> torch.Tensor:
        if "pin_memory" not in given:  # the host does not wait for a copy of pinned memory
            copied.append((data, given))
        return made(data, **given)

    for number in range(2):
        with mock.patch.object(torch, "tensor", tensor):
            handle = buffer.dispatch(x, ids, num_experts=size, do_cpu_sync=False)[3]
        assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] == 3
        if number:
            assert not copied, copied
        copied.clear()


def test_over_nodes_a_dispatch_without_cpu_sync_copies_no_numbers_to_the_device() -> None:
    on_nodes(2, 2, _dispatches_without_copies)


def _domains_over_nodes(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    nodes = nodes_of(size)
    domains = len(nodes), len(nodes[0])
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=128)
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == domains
    assert deep_ep.get_logical_domain_size(group) == deep_ep.get_physical_domain_size(group) == domains
    assert rank == nodes[buffer.scaleout_rank_idx][buffer.scaleup_rank_idx]


def test_the_logical_domain_says_how_sums_are_made_over_nodes() -> None:
    on_nodes(2, 2, _domains_over_nodes)
