"""ep_plugin.deep_ep against an independent oracle on 2 to 6 CPU ranks; what it refuses; how it is found by its name.

The file is long because all of it tests one interface, that of Buffer's throughput calls.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.deep_ep.shared import _users
from ep_plugin.errors import CommunicatorClosed, NotSupported
from tests.integrations import deep_ep_cases
from tests.integrations.deep_ep_cases import Case, Received, Sent, combined, make, on, received
from tests.moe.moe_cases import named, on_ranks, poisoned

CASES = {
    2: [
        Case(tokens=(13, 7), hidden=128, experts_per_rank=4, topk=3),
        Case(tokens=(5, 0), hidden=24, experts_per_rank=1, topk=2, dtype=torch.float32, seed=1),
    ],
    3: [
        Case(tokens=(9, 0, 17), hidden=40, experts_per_rank=5, topk=9, alignment=4, seed=2),
        Case(tokens=(4, 4, 4), hidden=2880, experts_per_rank=2, topk=2, seed=3),
    ],
    4: [
        Case(tokens=(20, 3, 11, 8), hidden=256, experts_per_rank=8, topk=6, alignment=16, seed=4),
        Case(tokens=(6, 6, 6, 6), hidden=64, experts_per_rank=2, topk=1, drop=1.0, seed=5),
        Case(tokens=(0, 0, 0, 2), hidden=64, experts_per_rank=2, topk=2, id_dtype=torch.int32, seed=6),
    ],
    6: [Case(tokens=(8, 1, 0, 14, 5, 5), hidden=72, experts_per_rank=3, topk=4, seed=7)],
}


@pytest.mark.parametrize("size", CASES)
def test_every_call_gives_what_the_oracle_says(size: int) -> None:
    on_ranks(size, _all_calls, CASES[size])


def _all_calls(rank: int, size: int, cases: list[Case], device: str = "cpu") -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 30)
    memory = poisoned if device == "cpu" else contextlib.nullcontext
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, size, dist.group.WORLD)
    for case in cases:
        sent = make(case)
        everyone = [on(device, received(case, sent, other)) for other in range(size)]
        sent = on(device, sent)
        for call in (_with_topk, _rank_only, _fp8, _worst_case, _asynchronous, _few_sms):
            with named((call.__name__, case)), memory():
                call(buffer, case, sent, everyone)


def _layout(buffer: deep_ep.Buffer, case: Case, sent: Sent) -> dict[str, torch.Tensor]:
    rank, size = buffer.rank, buffer.group_size
    per_rank, per_rdma, per_expert, in_rank, _ = buffer.get_dispatch_layout(sent.ids[rank], case.num_experts)
    assert (None if per_rdma is None else per_rdma.tolist()) == deep_ep_cases.tokens_per_node(sent.in_rank[rank])
    assert per_rank.dtype is per_expert.dtype is torch.int32 and in_rank.dtype is torch.bool
    assert torch.equal(in_rank, sent.in_rank[rank])
    assert per_rank.tolist() == [int(sent.in_rank[rank][:, other].sum()) for other in range(size)]
    assert per_expert.tolist() == [int((sent.ids[rank] == expert).sum()) for expert in range(case.num_experts)]
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    return layout if per_rdma is None else layout | {"num_tokens_per_rdma_rank": per_rdma}


def _with_topk(buffer: deep_ep.Buffer, case: Case, sent: Sent, everyone: list[Received], **how: Any) -> None:
    rank = buffer.rank
    layout, mine = _layout(buffer, case, sent), everyone[rank]
    topk = {"topk_idx": sent.ids[rank], "topk_weights": sent.weights[rank], "expert_alignment": case.alignment}
    x, ids, weights, counts, handle, event = buffer.dispatch(sent.x[rank], **layout, **topk, **how)
    event.current_stream_wait()
    _same(x, mine.x)
    _same(ids, mine.ids)
    _same(weights, mine.weights)
    assert counts == mine.counts and all(type(count) is int for count in counts)
    deep_ep_cases.check_handle(handle, sent, mine, rank)
    _combines(buffer, case, everyone, handle, **how)
    # A cached dispatch brings other rows the same way.
    again, *rest, event = buffer.dispatch(-sent.x[rank], handle=handle, **how)
    event.current_stream_wait()
    _same(again, -mine.x)
    assert rest == [None, None, None, None]
    _combines(buffer, case, everyone, handle, **how)
    # So does what is left of the handle after save_for_backward(*handle) under hooks that copy.
    copied = tuple(part.clone() for part in handle)
    again, *_, event = buffer.dispatch(-sent.x[rank], handle=copied, **how)
    event.current_stream_wait()
    _same(again, -mine.x)
    _combines(buffer, case, everyone, copied, **how)


def _rank_only(buffer: deep_ep.Buffer, case: Case, sent: Sent, everyone: list[Received]) -> None:
    rank, mine = buffer.rank, everyone[buffer.rank]
    layout = _layout(buffer, case, sent)
    x, ids, weights, counts, handle, _ = buffer.dispatch(sent.x[rank], **layout, expert_alignment=case.alignment)
    _same(x, mine.x)
    assert ids is None and weights is None and counts == mine.counts
    deep_ep_cases.check_handle(handle, sent, mine, rank)
    _combines(buffer, case, everyone, handle, columns=buffer.group_size)
    _same(buffer.dispatch(sent.x[rank], handle=handle)[0], mine.x)


def _fp8(buffer: deep_ep.Buffer, case: Case, sent: Sent, everyone: list[Received]) -> None:
    if case.hidden % 16:
        return
    rank, mine = buffer.rank, everyone[buffer.rank]
    rows = sent.x[rank].to(torch.float8_e4m3fn)
    layout = _layout(buffer, case, sent)
    scales = sent.scales[rank].T.contiguous().T  # column-major, as a quantising kernel may leave them
    (x, recv_scales), ids, *_, handle, _ = buffer.dispatch(
        (rows, scales), **layout, topk_idx=sent.ids[rank], topk_weights=sent.weights[rank]
    )
    for got in ((x, recv_scales), buffer.dispatch((rows, scales), handle=handle)[0]):
        assert isinstance(got, tuple)
        _same(got[0].view(torch.uint8), mine.x.to(torch.float8_e4m3fn).view(torch.uint8))
        _same(got[1], mine.scales)
    _same(ids, mine.ids)


def _worst_case(buffer: deep_ep.Buffer, case: Case, sent: Sent, everyone: list[Received]) -> None:
    rank, mine, size = buffer.rank, everyone[buffer.rank], buffer.group_size
    worst, rows = size * max(case.tokens) + 3, len(mine.source)
    layout = _layout(buffer, case, sent)
    for topk in ({"topk_idx": sent.ids[rank], "topk_weights": sent.weights[rank]}, {}):
        x, ids, weights, counts, handle, _ = buffer.dispatch(sent.x[rank], **layout, **topk, num_worst_tokens=worst)
        assert len(x) == worst and counts == []
        deep_ep_cases.check_handle(handle, sent, mine, rank)
        _same(x[:rows], mine.x)
        if topk:
            _same(ids[:rows], mine.ids)
            _same(weights[:rows], mine.weights)
            assert len(ids) == len(weights) == worst and bool((ids[rows:] == -1).all())
        assert len(buffer.dispatch(sent.x[rank], handle=handle)[0]) == worst
        _combines(buffer, case, everyone, handle, worst - rows, 0 if topk else buffer.group_size)


def _asynchronous(buffer: deep_ep.Buffer, case: Case, sent: Sent, everyone: list[Received]) -> None:
    """Each call after an event of its own: a call waits for nothing that was launched after its event."""

    def after_now(call: Callable[..., Any]) -> Callable[..., Any]:
        how = {"async_finish": True, "allocate_on_comm_stream": True}
        return lambda *args, **given: call(*args, **given, previous_event=buffer.capture(), **how)

    asynchronous = SimpleNamespace(
        rank=buffer.rank,
        group_size=buffer.group_size,
        get_dispatch_layout=buffer.get_dispatch_layout,
        dispatch=after_now(buffer.dispatch),
        combine=after_now(buffer.combine),
    )
    _with_topk(cast("deep_ep.Buffer", asynchronous), case, sent, everyone)


def _few_sms(buffer: deep_ep.Buffer, case: Case, sent: Sent, everyone: list[Received]) -> None:
    _with_topk(buffer, case, sent, everyone, config=deep_ep.Config(4, 8, 256))


def _combines(
    buffer: deep_ep.Buffer,
    case: Case,
    everyone: list[Received],
    handle: tuple[torch.Tensor, ...],
    extra_rows: int = 0,
    columns: int = 0,
    **how: Any,
) -> None:
    """Combine with and without bias, and of weights that are not 0 where the expert is elsewhere. Then one to which
    rank 0 brings no weights, as a caller does that has got no row."""
    rank = buffer.rank
    generator = torch.Generator().manual_seed(case.seed + 100)
    device = everyone[rank].x.device
    y = [torch.randn((len(got.source), case.hidden), generator=generator).to(device, case.dtype) for got in everyone]
    beside = [torch.rand((len(got.source), columns or case.topk), generator=generator).to(device) for got in everyone]
    bias = [torch.randn((case.tokens[rank], case.hidden), generator=generator).to(device, case.dtype) for _ in range(2)]
    mine = torch.nn.functional.pad(y[rank], (0, 0, 0, extra_rows), value=float("nan"))
    my_weights = torch.nn.functional.pad(beside[rank], (0, 0, 0, extra_rows), value=float("nan"))
    exact = combined(case, everyone, y, rank)
    for given in (None, bias[0], tuple(bias)):
        out, weights, event = buffer.combine(mine, handle, topk_weights=my_weights, bias=given, **how)
        event.current_stream_wait()
        added = [] if given is None else bias[: 2 if isinstance(given, tuple) else 1]
        _near(out, exact + sum(one.double() for one in added), case.dtype)
        assert weights is not None
        _near(weights, combined(case, everyone, beside, rank), torch.float32)
    plain, none, event = buffer.combine(mine, handle)
    event.current_stream_wait()
    assert none is None
    _near(plain, exact, case.dtype)
    beside[0].zero_()
    out, weights, event = buffer.combine(mine, handle, topk_weights=None if rank == 0 else my_weights, **how)
    event.current_stream_wait()
    _near(out, exact, case.dtype)
    assert (weights is None) == (rank == 0)
    if weights is not None:
        _near(weights, combined(case, everyone, beside, rank), torch.float32)


def _same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype is expected.dtype and actual.shape == expected.shape, (actual.dtype, actual.shape)
    assert torch.equal(actual, expected)


def _near(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the type: partial rows, the bias and the sum are rounded once each."""
    assert actual.dtype is dtype and actual.shape == exact.shape
    assert not actual.requires_grad
    torch.testing.assert_close(actual.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


# -- buffers ---------------------------------------------------------------------------------------------------------


def test_buffers_of_one_group_share_communicators_until_the_last_is_destroyed() -> None:
    on_ranks(2, _destroyed)


def _destroyed(rank: int, size: int) -> None:
    case = CASES[2][0]
    sent = make(case)
    everyone = [received(case, sent, other) for other in range(size)]
    first, second = (deep_ep.Buffer(explicitly_destroy=True) for _ in range(2))
    _with_topk(first, case, sent, everyone)
    _with_topk(second, case, sent, everyone)
    assert list(_users.values()) == [2]
    first.destroy()
    _with_topk(second, case, sent, everyone)
    with pytest.raises(CommunicatorClosed, match="expected one that is in use, got one after destroy"):
        first.get_dispatch_layout(sent.ids[rank], case.num_experts)
    dist.barrier()
    second.destroy()
    assert not _users
    _with_topk(deep_ep.Buffer(), case, sent, everyone)
    with pytest.raises(ValueError, match="expected a Buffer made with explicitly_destroy=True, got False"):
        deep_ep.Buffer().destroy()


def test_bounds_of_many_sizes_share_communicators() -> None:
    on_ranks(2, _many_bounds)


def _many_bounds(rank: int, size: int) -> None:
    buffer = deep_ep.Buffer(explicitly_destroy=True)
    for tokens in ((40, 40), (41, 40), (64, 50), (3, 100), (129, 129), (250, 200)):
        case = Case(tokens=tokens, hidden=16, experts_per_rank=2, topk=2, seed=tokens[0])
        sent = make(case)
        mine = received(case, sent, rank)
        layout = _layout(buffer, case, sent)
        bound = size * max(tokens) + 2 * rank  # each rank names its own, and both are enough
        x = buffer.dispatch(sent.x[rank], **layout, topk_idx=sent.ids[rank], num_worst_tokens=bound)[0]
        assert len(x) == bound
        _same(x[: len(mine.source)], mine.x)
    assert len(_users) == 2  # for up to 128 tokens a rank, and for up to 256


def _double_rows(rank: int, size: int) -> None:
    case = CASES[2][0]
    sent, buffer = make(case), deep_ep.Buffer()
    layout = _layout(buffer, case, sent)
    given = {"topk_idx": sent.ids[rank], "topk_weights": sent.weights[rank]} | layout
    rows, _, weights, _, handle, _ = buffer.dispatch(sent.x[rank].double(), **given)
    assert weights.dtype is torch.float32
    out, back, _ = buffer.combine(rows, handle, topk_weights=weights)
    assert (out.dtype, back.dtype) == (torch.float64, torch.float32)


def test_weights_beside_double_rows_are_floats() -> None:
    on_ranks(2, _double_rows)


def test_wrong_arguments_are_refused_with_expected_and_actual() -> None:
    on_ranks(2, _refusals)


def _refusals(rank: int, size: int) -> None:
    case = CASES[2][0]
    sent, buffer = make(case), deep_ep.Buffer()
    x, ids, weights = sent.x[rank], sent.ids[rank], sent.weights[rank]
    layout = _layout(buffer, case, sent)
    tokens = len(x)

    def refused(message: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=message):
            buffer.dispatch(**({"x": x, "topk_idx": ids, "topk_weights": weights} | layout | changed))

    for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"):
        returned = f"{name}: expected the tensor that get_dispatch_layout returned, or a handle=, got"
        refused(f"{returned} None", **{name: None})
        refused(f"{returned} list", **{name: layout[name].tolist()})
    refused(r"num_tokens_per_rank: expected torch.int32 of shape \[2\], got", num_tokens_per_rank=torch.zeros(3))
    refused(r"num_tokens_per_expert: expected torch.int32 of shape \[E\], got", num_tokens_per_expert=torch.zeros(8))
    refused(
        rf"is_token_in_rank: expected torch.bool of shape \[{tokens}, 2\], got torch.int32",
        is_token_in_rank=layout["is_token_in_rank"].int(),
    )
    refused("is_token_in_rank: expected (True|False) for token", is_token_in_rank=~layout["is_token_in_rank"])
    for value in (1, -1, "64", 64.0, True):
        refused(f"num_worst_tokens: expected 0, or an integer of at least .* got {value!r}", num_worst_tokens=value)
    refused("topk_weights: expected torch.float32", topk_weights=weights.bfloat16())
    refused("topk_weights: expected None without topk_idx", topk_idx=None)
    refused(r"topk_idx: expected torch.int64 of shape \[T, K\], got torch.float32", topk_idx=weights)
    refused("expert_alignment: expected an integer of at least 1, got 0", expert_alignment=0)
    refused("expert_alignment: expected an integer of at least 1, got 'a'", expert_alignment="a")
    refused("topk_idx: expected None or an instance of Tensor, got list", topk_idx=[[1]])
    refused("topk_weights: expected None or an instance of Tensor, got list", topk_weights=[1.0])
    refused("config: expected None or an instance of Config, got int", config=5)
    refused("previous_event: expected None or an instance of EventOverlap, got int", previous_event=3)
    refused("handle: expected what dispatch returned, got str", handle="h")
    refused(r"handle: expected what dispatch returned, 6 or 10 tensors, got \(Tensor, int\)", handle=(x, 1))
    refused(r"in their order, the last one torch.int64 in host memory, got torch.bfloat16 of shape", handle=[x] * 6)
    with pytest.raises(ValueError, match="handle: expected what dispatch returned, got NoneType"):
        buffer.combine(x, None)
    with pytest.raises(ValueError, match="num_experts: expected a positive multiple of the group's 2 ranks, got a"):
        buffer.get_dispatch_layout(ids, "a")
    refused("allocate_on_comm_stream: expected False without", allocate_on_comm_stream=True)
    refused("num_experts: expected a positive multiple", num_tokens_per_expert=torch.zeros(7, dtype=torch.int32))
    with pytest.raises(ValueError, match="num_experts: expected a positive multiple of the group's 2 ranks, got 9"):
        buffer.get_dispatch_layout(ids, 9)
    handle = buffer.dispatch(x, **layout, topk_idx=ids, topk_weights=weights)[4]
    with pytest.raises(ValueError, match="topk_idx: expected None with a handle"):
        buffer.dispatch(x, handle=handle, topk_idx=ids)
    with pytest.raises(ValueError, match=r"topk_weights: expected torch.float32 of shape"):
        buffer.combine(x, handle, topk_weights=weights[: tokens - 1])
    refused("x: expected a tensor, or a tuple of rows and scales, got a list of .Tensor, Tensor.", x=[x, weights])
    refused("x: expected a tensor, or a tuple of rows and scales, got a tuple of .Tensor.", x=(x,))
    refused("x: expected a tensor, or a tuple of rows and scales, got NoneType", x=None)
    refused(r"x: expected rows of shape \[T, H\], got shape \[128\]", x=x[0])
    biases = {
        r"a tensor or a tuple of two, got a tuple of .Tensor.": (x,),
        r"a tensor or a tuple of two, got a tuple of .Tensor, NoneType.": (x, None),
        r"a tensor or a tuple of two, got a list of .Tensor, Tensor.": [x, x],
        rf"bfloat16 of shape .{tokens}, 128., got torch.float32 of shape": (x, x.float()),
        rf"bfloat16 of shape .{tokens}, 128., got torch.bfloat16 of shape .1, 128.": (x, x[:1]),
    }
    for message, bias in biases.items():
        with pytest.raises(ValueError, match=rf"bias: expected .*{message}"):
            buffer.combine(x, handle, bias=bias)
    _refuses_what_is_not_dense(refused, buffer, x, ids, weights, handle)
    with pytest.raises(ValueError, match="x: expected a tensor, got NoneType"):
        buffer.combine(None, handle)


def _refuses_what_is_not_dense(
    refused: Callable[..., None],
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    handle: Any,
) -> None:
    for change in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        rows, factors = change(x), change(weights)
        got = f"expected a dense tensor, got one of layout {rows.layout}"
        refused(f"x: {got}", x=rows)
        refused(f"scales: {got}", x=(x, factors))
        refused(f"topk_idx: {got}", topk_idx=factors)
        refused(f"topk_weights: {got}", topk_weights=factors)
        refused(f"num_tokens_per_rank: {got}", num_tokens_per_rank=factors)
        with pytest.raises(ValueError, match=f"topk_idx: {got}"):
            buffer.get_dispatch_layout(factors, 8)
        for name, given in {
            "x": {"x": rows},
            "topk_weights": {"x": x, "topk_weights": factors},
            "bias": {"x": x, "bias": (x, rows)},
        }.items():
            with pytest.raises(ValueError, match=f"{name}: {got}"):
                buffer.combine(**given, handle=handle)


def test_what_is_not_there_is_refused_by_name() -> None:
    on_ranks(1, _not_there)


def _not_there(rank: int, size: int) -> None:
    with pytest.raises(NotSupported, match=r"Buffer\(comm=...\): expected the default, got comm set"):
        deep_ep.Buffer(comm=object())
    with pytest.raises(ValueError, match="group: expected a process group that this rank belongs to, got 'world'"):
        deep_ep.Buffer("world")
    destroyed = dist.new_group([0])
    dist.destroy_process_group(destroyed)
    with pytest.raises(ValueError, match="group: expected a process group that has not been destroyed, got"):
        deep_ep.Buffer(destroyed)
    buffer = deep_ep.Buffer()
    with pytest.raises(ValueError, match="get_local_buffer_tensor.*: expected .* low_latency_mode=True"):
        buffer.get_local_buffer_tensor(torch.uint8)
    with pytest.raises(AttributeError, match="internode"):
        buffer.internode  # noqa: B018
    with pytest.raises(AttributeError, match="internode"):
        deep_ep.Buffer.internode  # noqa: B018


def test_configs_hints_and_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", deep_ep.Buffer.num_sms)  # both as they are, also afterwards
    monkeypatch.setattr(deep_ep.Buffer, "_asked_sms", None)
    assert deep_ep.Buffer.num_sms == 20  # DeepEP's: callers subtract it from the SMs that there are
    for ranks in (1, 3, 24):
        for config in (deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)):
            assert config == deep_ep.Config()
            assert config.get_nvl_buffer_size_hint(14336, ranks) == config.get_rdma_buffer_size_hint(14336, ranks) == 0
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.get_combine_config(8).num_sms == deep_ep.Buffer.num_sms == 24
    with pytest.raises(ValueError, match="new_num_sms: expected an even number of at least 2, got 7"):
        deep_ep.Buffer.set_num_sms(7)
    with pytest.raises(ValueError, match="num_sms: expected an integer of at least 1 or None, got 0"):
        deep_ep.Config(0)


@pytest.mark.slow
def test_it_is_found_under_deep_eps_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "import deep_ep\n"
        "from deep_ep import Buffer\n"
        "from deep_ep.utils import EventHandle, EventOverlap\n"
        "from deep_ep.utils.envs import init_dist\n"
        "from deep_ep.utils.math import calc_diff, hash_tensor, per_token_cast_back, per_token_cast_to_fp8\n"
        "from deep_ep.utils.testing import bench, bench_kineto\n"
        "try:\n    from deep_ep import HybridEPBuffer\nexcept ImportError:\n    print('no hybrid')\n"
        "import ep_plugin.deep_ep, ep_plugin.deep_ep.utils\n"
        "assert deep_ep is ep_plugin.deep_ep and deep_ep.utils is ep_plugin.deep_ep.utils\n"
        "assert deep_ep.utils.math is ep_plugin.deep_ep.utils.math and calc_diff is deep_ep.utils.math.calc_diff\n"
        "with EventOverlap(EventHandle()) as event: print(type(event) is deep_ep.EventOverlap)\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"EP_PLUGIN": "deep_ep"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["no hybrid", "True"]
