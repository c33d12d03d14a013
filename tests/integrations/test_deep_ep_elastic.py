"""ep_plugin.deep_ep's ElasticBuffer against a plain oracle on CPU ranks and emulated nodes, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, deep_ep
from ep_plugin.deep_ep.shared import _users
from ep_plugin.deep_ep.tuning import sms_that_fill
from ep_plugin.errors import CommunicatorClosed, NotSupported
from tests.integrations.deep_ep_cases import Case, Received, Sent, combined, make, nodes_of, on, received
from tests.integrations.on_cpus import run_torchtitans_deepep_here
from tests.moe.moe_cases import named, on_ranks, poisoned
from tests.moe.test_across_nodes import on_nodes

CASES = {
    2: [
        Case(tokens=(13, 7), hidden=128, experts_per_rank=4, topk=3, alignment=8),
        Case(tokens=(5, 0), hidden=24, experts_per_rank=1, topk=2, dtype=torch.float32, seed=1),
    ],
    3: [Case(tokens=(9, 0, 17), hidden=48, experts_per_rank=5, topk=9, alignment=4, seed=2)],
    4: [
        Case(tokens=(20, 3, 11, 8), hidden=256, experts_per_rank=8, topk=6, alignment=16, seed=4),
        Case(tokens=(6, 6, 6, 6), hidden=64, experts_per_rank=2, topk=1, drop=1.0, seed=5),
        Case(tokens=(0, 0, 0, 2), hidden=64, experts_per_rank=2, topk=2, id_dtype=torch.int32, seed=6),
    ],
}


@pytest.mark.parametrize("size", CASES)
def test_every_call_gives_what_the_oracle_says(size: int) -> None:
    on_ranks(size, _all_calls, CASES[size])


@pytest.mark.slow
def test_over_two_nodes() -> None:
    on_nodes(2, 2, _all_calls, CASES[4])


def _all_calls(rank: int, size: int, cases: list[Case], device: str = "cpu") -> None:
    memory = poisoned if device == "cpu" else contextlib.nullcontext
    buffer = deep_ep.ElasticBuffer(cast(Any, dist.group.WORLD), explicitly_destroy=True)
    for case in cases:
        sent = make(case)
        everyone = [on(device, received(case, sent, other)) for other in range(size)]
        sent = on(device, sent)
        for expand in (False, True):
            for sync in (True, False):
                for fp8 in (False, True):
                    with named((expand, sync, fp8, case)), memory():
                        _round_trip(buffer, case, sent, everyone, expand, sync, fp8)
    buffer.barrier(with_cpu_sync=True)
    buffer.destroy()
    assert not _users
    with pytest.raises(CommunicatorClosed, match="ElasticBuffer"):
        buffer.barrier()


def _expanded(case: Case, mine: Received) -> list[tuple[int, int] | None]:
    """The received token and its choice of each row, grouped by expert; None: padding."""
    rows: list[tuple[int, int] | None] = []
    for expert in range(case.experts_per_rank):
        rows += [(row, choice) for row, choice in (mine.ids == expert).nonzero().tolist()]
        rows += [None] * (-len(rows) % case.alignment)
    return rows


def _round_trip(
    buffer: deep_ep.ElasticBuffer, case: Case, sent: Sent, everyone: list[Received], expand: bool, sync: bool, fp8: bool
) -> None:
    rank, most = buffer.rank_idx, max(case.tokens)
    mine = everyone[rank]
    device = mine.x.device
    x: Any = sent.x[rank]
    rows_in = mine.x
    if fp8 and case.hidden % 16 == 0:
        x, rows_in = (x.to(torch.float8_e4m3fn), sent.scales[rank]), mine.x.to(torch.float8_e4m3fn)
    stats = torch.ones(case.experts_per_rank, dtype=torch.int32, device=device)
    out, ids, weights, handle, event = buffer.dispatch(
        x,
        topk_idx=sent.ids[rank],
        topk_weights=sent.weights[rank],
        cumulative_local_expert_recv_stats=stats,
        num_experts=case.num_experts,
        num_max_tokens_per_rank=most,
        expert_alignment=case.alignment,
        previous_event=buffer.capture(),
        previous_event_before_epilogue=deep_ep.EventOverlap(buffer.capture()),
        async_with_compute_stream=True,
        do_cpu_sync=sync,
        do_expand=expand,
        do_zero_padding=expand,
    )
    event.current_stream_wait()
    where = _expanded(case, mine) if expand else [(row, 0) for row in range(len(mine.x))]
    real = [row for row, pair in enumerate(where) if pair is not None]
    tokens = [pair[0] for pair in where if pair is not None]
    assert weights is not None
    n = len(where)
    exact = [int((mine.ids == expert).sum()) for expert in range(case.experts_per_rank)]
    assert stats.tolist() == [count + 1 for count in exact]

    def check_rows(got: Any) -> None:
        data = got[0] if isinstance(x, tuple) else got
        assert len(data) == n if sync else len(data) >= n
        assert torch.equal(data[real].float(), rows_in[tokens].float())
        assert not data[[row for row in range(n) if where[row] is None]].float().any()
        if isinstance(x, tuple):
            assert torch.equal(got[1][real], mine.scales[tokens])

    check_rows(out)
    expected_weights = torch.tensor([0.0 if pair is None else mine.weights[pair] for pair in where], device=device)
    if expand:
        assert ids is None and torch.equal(weights[:n], expected_weights)
    else:
        assert ids is not None and ids.dtype is case.id_dtype
        assert torch.equal(ids[:n], mine.ids) and bool((ids[n:] == -1).all())
        assert torch.equal(weights[:n], mine.weights)
    _check_handle(case, handle, mine, exact, sync, len(out[0] if isinstance(x, tuple) else out), where)

    cached, _, again, same, _ = buffer.dispatch(x, topk_weights=sent.weights[rank], handle=handle, do_expand=expand)
    assert same is handle and again is not None and torch.equal(again[:n], weights[:n])
    check_rows(cached)

    generator = torch.Generator().manual_seed(99 + rank)
    y = torch.zeros((handle.num_expanded_tokens, case.hidden), dtype=case.dtype, device=device)
    y[real] = torch.randn((len(real), case.hidden), generator=generator).to(device, case.dtype)
    w = torch.rand(weights.shape, generator=generator).to(device)
    bias, other = (
        torch.randn((case.tokens[rank], case.hidden), generator=generator).to(device, case.dtype) for _ in range(2)
    )
    sums, sum_weights, _ = buffer.combine(y, handle, topk_weights=w, bias=bias)
    events = {"previous_event": buffer.capture(), "previous_event_before_epilogue": buffer.capture()}
    paired, _, event = buffer.combine(y, handle, bias=(bias, other), **events, async_with_compute_stream=True)
    event.current_stream_wait()
    plain, none, _ = buffer.combine(y, handle)
    assert none is None
    # Every rank adds up its rows by token; the oracle then adds these over ranks.
    by_token = torch.zeros((len(mine.x), case.hidden), dtype=torch.float64, device=device)
    by_choice = torch.zeros((len(mine.x), case.topk), dtype=torch.float64, device=device)
    for row in real:
        token, choice = cast("tuple[int, int]", where[row])
        by_token[token] += y[row].double()
        if expand:
            by_choice[token, choice] += w[row].double()
        else:
            by_choice[token] = w[row].double()
    total = _combined(case, everyone, by_token, rank)
    tolerance = {"rtol": 2e-2, "atol": 4e-2} if case.dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(plain.double(), total, **tolerance)
    torch.testing.assert_close(sums.double(), total + bias.double(), **tolerance)
    torch.testing.assert_close(paired.double(), total + bias.double() + other.double(), **tolerance)
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(sum_weights, _combined(case, everyone, by_choice, rank).float())
    _, sum_weights, _ = buffer.combine(y, handle, topk_weights=None if rank == 0 else w)
    of_others = _combined(case, everyone, by_choice * (rank != 0), rank).float()
    assert (sum_weights is None) == (rank == 0)
    if sum_weights is not None:
        close(sum_weights, of_others)


def _combined(case: Case, everyone: list[Received], mine: torch.Tensor, rank: int) -> torch.Tensor:
    of_all: list[Any] = [None] * len(everyone)
    dist.all_gather_object(of_all, mine.cpu())
    return combined(case, everyone, of_all, rank).to(mine.device)


def _check_handle(
    case: Case,
    handle: deep_ep.EPHandle,
    mine: Received,
    exact: list[int],
    sync: bool,
    rows: int,
    where: list[tuple[int, int] | None],
) -> None:
    size, most = len(case.tokens), max(case.tokens)
    places = {rank: place for node in nodes_of(size) for place, rank in enumerate(node)}
    through = [sum(places[origin] <= place for origin, _ in mine.source) for place in range(max(places.values()) + 1)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == through
    aligned = torch.tensor(mine.counts).cumsum(0)
    ends = aligned - torch.tensor(mine.counts) + torch.tensor(exact) if handle.do_expand else aligned
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends.tolist()
    assert handle.num_recv_tokens_per_expert_list == (mine.counts if sync else [])
    assert handle.num_recv_tokens == (len(mine.x) if sync else size * most)
    assert handle.num_expanded_tokens == rows
    kept = [one for one in handle.tensors() if isinstance(one, torch.Tensor)]
    assert len(kept) == 3 + handle.do_expand and any(one is handle.routing for one in handle.tensors())
    metadata = handle.recv_src_metadata
    assert metadata.dtype is torch.int32 and metadata.shape == (handle.num_recv_tokens, 2 + case.topk)
    metadata = metadata[: len(mine.x)]
    assert metadata[:, 0].tolist() == [origin * most + token for origin, token in mine.source]
    expected = torch.full((len(mine.x), case.topk), -1, device=metadata.device)
    for row, pair in enumerate(where):
        if pair is not None and handle.do_expand:
            expected[pair] = row
    if not handle.do_expand:
        expected = torch.where(mine.ids >= 0, torch.arange(len(mine.x), device=mine.ids.device).unsqueeze(1), -1)
    assert torch.equal(metadata[:, 2:].long(), expected.to(metadata.device).long())
    assert handle.dst_buffer_slot_idx is handle.routing.plan
    unaligned = handle.num_unaligned_recv_tokens_per_expert
    assert (None if unaligned is None else unaligned.tolist()) == (exact if handle.do_expand else None)


def _columns(rank: int, size: int) -> None:
    buffer = deep_ep.ElasticBuffer(cast(Any, dist.group.WORLD), num_max_tokens_per_rank=4)
    x = torch.ones((3, 384)).to(torch.float8_e4m3fn)
    scales = torch.rand((3, 3), generator=torch.Generator().manual_seed(rank))
    ids = torch.zeros((3, 1), dtype=torch.int64)
    given: dict[str, Any] = {"num_experts": 2, "do_expand": True}
    for handle in (None, buffer.dispatch((x, scales), ids, **given)[3]):
        routed = {"topk_idx": ids, **given} if handle is None else {"handle": handle, "do_expand": True}
        plain = buffer.dispatch((x, scales), **routed)[0]
        columns = buffer.dispatch((x, scales), **routed, use_tma_aligned_col_major_sf=True)[0]
        assert torch.equal(columns[1], plain[1])
        if len(plain[0]):
            assert columns[1].stride() == (1, -(-len(plain[0]) // 4) * 4)
    rows = buffer.dispatch(torch.ones(3, 64), ids, **given, use_tma_aligned_col_major_sf=True)[0]
    assert torch.equal(rows, torch.ones((3 * size if rank == 0 else 0, 64)))  # there are no scales


def test_scales_may_be_stored_by_columns() -> None:
    on_ranks(2, _columns)


def test_size_hints_grow_with_the_sizes_and_domains_are_named() -> None:
    on_ranks(2, _hints)


def _hints(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint
    small, large = hint(group, 128, 4096, 8), hint(group, 512, 4096, 8)
    assert 0 < small < large and small % (2 << 20) == 0
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=128, hidden=4096, num_topk=8)
    assert buffer.num_bytes == small
    assert (buffer.get_logical_domain_size(), buffer.get_physical_domain_size()) == ((1, size), (1, size))
    assert deep_ep.get_logical_domain_size(group, allow_hybrid_mode=False) == (1, size)
    assert deep_ep.get_physical_domain_size(group) == (1, size)
    assert buffer.get_theoretical_num_qps(20) == 0
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert buffer.get_theoretical_num_sms(64, 8) == 0
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=132)),
    ):
        assert buffer.get_theoretical_num_sms(64, 8) == sms_that_fill(size, 64, 8, (0, 0, 0), 100)
        rates = {"nvlink_gbs": 200, "sm_read_gbs": 200, "sm_write_gbs": 50}
        assert buffer.get_theoretical_num_sms(64, 8, **rates) == sms_that_fill(size, 64, 8, (200, 200, 50), 100)
    for experts, topk, expected in ((63, 8, "num_experts"), (64, 0, "num_topk"), (64, 65, "num_topk")):
        with pytest.raises(ValueError, match=expected):
            buffer.get_theoretical_num_sms(experts, topk)


def test_sms_fill_the_links() -> None:
    measured = (0.0, 0.0, 0.0)
    # A token of two ranks: 3 loads and 4 stores of a row, of which one crosses the links.
    assert sms_that_fill(2, 1024, 512, (100, 100, 50), 100) == 12  # (3 / 100 + 4 / 50) * 100 = 11, made even
    assert sms_that_fill(2, 1024, 512, (200, 100, 50), 100) == 22  # links twice as fast
    counts = [sms_that_fill(ranks, 256, 8, measured, 100) for ranks in (2, 4, 8)]
    assert counts == sorted(counts, reverse=True)  # more of the rows cross
    assert all(count % 2 == 0 for count in counts)
    assert sms_that_fill(8, 256, 8, (1, 0, 0), 100) == 4
    assert sms_that_fill(2, 256, 8, (900, 0, 0), 51) == 50
    assert sms_that_fill(1, 1, 1, measured, 100) > 0  # a rank alone


def test_a_call_runs_after_both_events() -> None:
    on_ranks(2, _events)


def _events(rank: int, size: int) -> None:
    buffer = deep_ep.ElasticBuffer(cast(Any, dist.group.WORLD), num_max_tokens_per_rank=4)
    x, ids = torch.ones((3, 64)), torch.zeros((3, 1), dtype=torch.int64)
    order: list[str] = []

    class Event(deep_ep.EventHandle):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def current_stream_wait(self) -> None:
            order.append(self.name)

    def recording(name: str) -> Any:
        method = getattr(MoECommunicator, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return method(*args, **kwargs)

        return mock.patch.object(MoECommunicator, name, call)

    with recording("dispatch"), recording("combine_with_values"):
        for kind in (lambda event: event, deep_ep.EventOverlap):
            events = {
                "previous_event": kind(Event("previous")),
                "previous_event_before_epilogue": kind(Event("epilogue")),
            }
            for asynchronous in (False, True):
                given = events | {"async_with_compute_stream": asynchronous}
                rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=2, **given)
                buffer.dispatch(x, handle=handle, **given)
                buffer.combine(rows, handle, **given)
                assert order == [
                    *["previous", "epilogue", "dispatch"] * 2,
                    "previous",
                    "epilogue",
                    "combine_with_values",
                ]
                order.clear()
    for name in ("previous_event", "previous_event_before_epilogue"):
        wrong: Any = {name: 3}
        with pytest.raises(ValueError, match=f"{name}: expected None or an instance of EventOverlap, got int"):
            buffer.dispatch(x, ids, num_experts=2, **wrong)
        with pytest.raises(ValueError, match=f"{name}: expected None or an instance of EventOverlap, got int"):
            buffer.combine(rows, handle, **wrong)
    for bias in ((x, x, x), (x, x[:2]), (x, x.double()), [x, x], (x, None)):
        with pytest.raises(ValueError, match="bias: expected"):
            buffer.combine(rows, handle, bias=cast(Any, bias))


def test_what_is_not_served_is_refused_by_name() -> None:
    on_ranks(2, _refusals)


def _refusals(rank: int, size: int) -> None:
    buffer = deep_ep.ElasticBuffer(cast(Any, dist.group.WORLD), num_max_tokens_per_rank=4)
    for name in ("engram_write", "get_engram_storage_size_hint"):
        assert not hasattr(deep_ep.ElasticBuffer, name)
        with pytest.raises(NotSupported, match=rf"ElasticBuffer\.{name} is not supported"):
            getattr(buffer, name)
    with pytest.raises(NotSupported, match="num_cpu_bytes"):
        deep_ep.ElasticBuffer(cast(Any, dist.group.WORLD), num_cpu_bytes=2 << 20)
    x, ids = torch.ones((3, 64)), torch.zeros((3, 1), dtype=torch.int64)
    _, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=2, num_sms=4)
    assert handle.num_sms == 4
    with pytest.raises(NotSupported, match="channel_linked_list"):
        handle.channel_linked_list  # noqa: B018
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("topk_idx: expected None with a handle", {"handle": handle, "topk_idx": ids}),
        ("do_cpu_sync: expected None or False", {"handle": handle, "do_cpu_sync": True}),
        ("do_expand: expected False, as in the handle, got True", {"handle": handle, "do_expand": True}),
        ("expert_alignment: expected 1, as in the handle, got 8", {"handle": handle, "expert_alignment": 8}),
        ("handle: expected the EPHandle", {"handle": (1, 2)}),
        ("num_experts: expected a positive multiple", {"topk_idx": ids, "num_experts": 3}),
        (
            "at most num_max_tokens_per_rank=2 tokens, got 3",
            {"topk_idx": ids, "num_experts": 2, "num_max_tokens_per_rank": 2},
        ),
        ("topk_idx: expected a tensor without a handle", {"num_experts": 2}),
        ("num_experts: expected an integer without a handle", {"topk_idx": ids}),
        ("num_sms: expected 0 or an even number", {"topk_idx": ids, "num_experts": 2, "num_sms": 3}),
        ("do_zero_padding: expected False", {"topk_idx": ids, "num_experts": 2, "do_zero_padding": True}),
    ]
    for match, given in wrong:
        with pytest.raises(ValueError, match=match):
            buffer.dispatch(x, **given)
    rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=2)
    for change in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        floats = change(ids.float())
        got = f"expected a dense tensor, got one of layout {floats.layout}"
        for name, given in {"x": (change(x), ids), "topk_idx": (x, floats), "topk_weights": (x, ids, floats)}.items():
            with pytest.raises(ValueError, match=f"{name}: {got}"):
                buffer.dispatch(*given, num_experts=2)
        for name, given in {"x": (change(rows), handle), "topk_weights": (rows, handle, floats)}.items():
            with pytest.raises(ValueError, match=f"{name}: {got}"):
                buffer.combine(*given)
        with pytest.raises(ValueError, match=f"bias: {got}"):
            buffer.combine(rows, handle, bias=(x, change(x)))
    with pytest.raises(ValueError, match="explicitly_destroy"):
        buffer.destroy()


def test_torchtitans_backend_runs_forward_and_backward() -> None:
    pytest.importorskip("torchtitan.distributed")
    on_ranks(2, _torchtitan)


def _torchtitan(rank: int, size: int) -> None:
    """The functions of its operators, which it registers for CUDA alone."""
    sys.modules["deep_ep"] = deep_ep
    from torchtitan.distributed.deepep import deepep

    run_torchtitans_deepep_here()
    T, H, E, K = 16, 64, 2 * size, 2
    deepep.get_buffer(dist.group.WORLD, hidden=H, num_max_tokens_per_rank=T, num_topk=K)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((T, H), generator=generator).requires_grad_()
    ids = torch.rand((T, E), generator=generator).topk(K, 1).indices
    weights = torch.rand((T, K), generator=generator).requires_grad_()
    grad = torch.randn((T, H), generator=generator)
    ops = torch.ops.deepep
    rows, local, scores, _, handle = ops.dispatch(x, ids, weights, E, T, False)
    out = ops.combine(rows * (scores * (local >= 0)).sum(1, keepdim=True), handle, True)
    factors = weights.sum(1, keepdim=True)
    torch.testing.assert_close(out, x * factors)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad * factors)
    torch.testing.assert_close(weights.grad, (grad * x).sum(1, keepdim=True).expand(T, K))
    with torch.no_grad():  # its path for inference: expanded rows, no host in the way
        rows, _, scores, counts, handle = ops.dispatch(x, ids, weights, E, T, True)
        valid = int(counts.sum())
        y = torch.zeros_like(rows)
        y[:valid] = rows[:valid] * scores[:valid, None]
        torch.testing.assert_close(ops.combine(y, handle, False), x * factors)
