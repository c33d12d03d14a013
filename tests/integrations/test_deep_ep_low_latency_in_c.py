"""``Buffer``'s low-latency calls by C: bits of known forms, and every call that Python must check again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.errors import CommunicatorClosed
from tests.moe.in_c_cases import Checks, calls_of, defined_rows
from tests.moe.moe_cases import named, on_ranks

FORMATS: dict[str, dict[str, bool]] = {
    "bfloat16": {"use_fp8": False},
    "e4m3": {},
    "e4m3_pow2": {"round_scale": True},
    "e4m3_ue8m0": {"round_scale": True, "use_ue8m0": True},
}
EXPERTS, TOPK, MOST = 4, 2, 12


class _Subclass(torch.Tensor):
    pass


def _buffer() -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)


def _calls(buffer: deep_ep.Buffer) -> int:
    return sum(calls_of(comm) for comm in buffer._low_latency.values())


def _tokens(generator: torch.Generator, num_tokens: int, hidden: int = 128) -> tuple[torch.Tensor, ...]:
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOPK).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return x, ids, torch.rand(num_tokens, TOPK, generator=generator)


def _forms(tensors: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.storage_offset(), t.requires_grad, t.is_inference()) for t in tensors]


def _same_dispatches(one: Any, other: Any, fp8: bool) -> None:
    """Compares two dispatches: all that they define, the tensors' forms, and the storage of the plans."""
    (got, count, handle), (got2, count2, handle2) = one[:3], other[:3]
    assert (
        torch.equal(count, count2) and handle[2:] == handle2[2:] and list(map(type, handle)) == list(map(type, handle2))
    )
    pairs = list(zip(got, got2, strict=True)) if fp8 else [(got, got2)]
    for a, b in (*pairs, (handle[0][:, :, None], handle2[0][:, :, None])):
        assert all(map(torch.equal, defined_rows(a, count), defined_rows(b, count)))
    assert _forms(got if fp8 else [got]) == _forms(got2 if fp8 else [got2])
    assert _forms(handle[:2]) == _forms(handle2[:2]) and torch.equal(handle[1], handle2[1])
    assert len({part.untyped_storage().nbytes() for part in (*handle[:2], *handle2[:2])}) == 1
    assert handle2[0].untyped_storage().data_ptr() == handle2[1].untyped_storage().data_ptr()


def _received(made: Any) -> Any:
    hook = made[-1]
    if hook is not None:
        hook()
        hook()  # nothing to receive any more
    return made


def _both(rank: int, size: int) -> None:
    """A Buffer that checks every call, beside one that checks the first of a form. Each has statistics of its own."""
    checked, _ = both = _buffer(), _buffer()
    checks = Checks()
    checked._opened = lambda *_: None  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(rank)
    counters = [(torch.zeros(EXPERTS // size, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)) for _ in both]
    for name, how in FORMATS.items():
        for counts, halves, id_dtype in (
            (False, False, torch.int64),
            (True, True, torch.int32),
            (True, False, torch.int64),
        ):
            stats = counters if counts else [(None, None)] * 2
            for turn in range(3):
                with named((name, counts, halves, id_dtype, turn)):
                    before = checks.num
                    x, ids, weights = _tokens(generator, 9, 640)
                    ids = ids.to(id_dtype)
                    made = [
                        _received(one.low_latency_dispatch(x, ids, MOST, EXPERTS, *of, return_recv_hook=halves, **how))
                        for one, of in zip(both, stats, strict=True)
                    ]
                    _same_dispatches(*made, name != "bfloat16")
                    assert type(made[0][3]) is type(made[1][3])
                    if name == "bfloat16":
                        _same_combines(both, made, ids, weights, [of[1] for of in stats], halves)
                    assert turn == 0 or checks.num == before
    assert torch.equal(counters[0][0], counters[1][0]) and int(counters[1][0].sum()) > 0
    assert all(bool((costs >= 0).all()) for _, costs in counters)
    for one in both:
        one.destroy()


def _same_combines(both: Any, made: Any, ids: torch.Tensor, weights: torch.Tensor, costs: Any, halves: bool) -> None:
    out = torch.empty(9, 640, dtype=torch.bfloat16)
    fewer = ids.masked_fill(torch.arange(18).view(9, 2) % 5 == 0, -1)
    for how in ({}, {"out": out}, {"use_logfmt": True}):
        sums = []
        for one, of, cost in zip(both, made, costs, strict=True):
            y = of[0].nan_to_num().clamp(-4, 4)
            handle = list(of[2]) if halves else of[2]
            given = (y, fewer, weights, handle)
            result = one.low_latency_combine(*given, return_recv_hook=halves, combine_wait_recv_cost_stats=cost, **how)
            _received(result)
            assert (result[0] is out) == ("out" in how)
            sums.append(result[0].clone())
        assert torch.equal(*sums), how


@pytest.mark.parametrize("size", [1, 2])
def test_checked_and_known_calls_make_the_same_bits(size: int) -> None:
    on_ranks(size, _both)


def _checked_again(rank: int, size: int) -> None:
    """After calls of a known form: each of these is checked again, and is right or refused."""
    buffer, checks, generator = _buffer(), Checks(), torch.Generator().manual_seed(3)
    x, ids, weights = _tokens(generator, 8)
    for _ in range(3):
        y, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        expected = buffer.low_latency_combine(y.nan_to_num(), ids, weights, handle)[0]
        buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)
    y = y.nan_to_num()

    def is_checked(what: str, call: Callable[[], Any], refused: str = "", times: int = 1) -> Any:
        before = checks.num
        with named(what):
            made = None
            if refused:
                ran = _calls(buffer)
                with pytest.raises(ValueError, match=refused):
                    call()
                assert _calls(buffer) == ran
            else:
                made = call()
                assert checks.num == before + times
        return made

    def is_known(what: str, call: Callable[[], Any]) -> Any:
        return is_checked(what, call, times=0)

    def dispatch(*given: Any, **how: Any) -> Callable[[], Any]:
        return lambda: buffer.low_latency_dispatch(*(given + (x, ids, MOST, EXPERTS)[len(given) :]), **how)

    def combine(*given: Any, **how: Any) -> Callable[[], Any]:
        return lambda: buffer.low_latency_combine(*(given + (y, ids, weights, handle)[len(given) :]), **how)

    is_checked("an unknown id", dispatch(x, ids + 4), "topk_idx: expected ids from -1 to 3, got")
    is_checked("a repeated id", dispatch(x, torch.zeros_like(ids)), "topk_ids: expected distinct experts")
    is_checked("other tokens", dispatch(x, ids, 7), "topk_idx: expected at most num_max_dispatch_tokens_per_rank=7")
    is_checked("another number of experts", dispatch(x, ids, MOST, -EXPERTS), "num_experts: expected")
    is_checked("a name", dispatch(x, ids, "12"), "num_max_dispatch_tokens_per_rank: expected")
    is_checked("no tensor", dispatch(None), "x: expected a tensor")
    is_checked("exponents alone", dispatch(use_ue8m0=True), "use_ue8m0: expected False")
    is_known("an event", dispatch(async_finish=True))
    is_known("an event of a combine", combine(async_finish=True))
    is_known("a number for a flag", dispatch(use_fp8=1))
    is_known("ids in columns, which are copied", dispatch(x, ids.t().contiguous().t()))
    columns = combine(y, ids, weights.t().contiguous().t())
    assert torch.equal(is_known("weights in columns, which are copied", columns)[0], expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        is_known("a profiler", dispatch())
    torch.use_deterministic_algorithms(True)
    try:
        nobody = torch.full_like(ids, -1)
        assert is_known("filled memory", dispatch(x, nobody, use_fp8=False))[0].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    is_checked("a subclass", dispatch(x.as_subclass(_Subclass), ids.as_subclass(_Subclass)))
    is_checked("an unknown id of a combine", combine(y, ids + 4), "topk_idx: expected ids from -1 to 3, got")
    src_info, layout_range, *sizes = handle
    whole = src_info.untyped_storage()
    for words in (src_info.storage_offset(), 0):  # in memory of its own, and in memory that begins where the plan does
        place = torch.empty(words + src_info.numel(), dtype=torch.int32)[words:].view_as(src_info).copy_(src_info)
        is_checked("a copied handle", combine(y, ids, weights, (place, layout_range, *sizes)), "no copy")
    longer = torch.empty(whole.nbytes() // 4 + 1, dtype=torch.int32)
    moved = longer[src_info.storage_offset() :][: src_info.numel()].view_as(src_info).copy_(src_info)
    is_checked("a handle in other memory", combine(y, ids, weights, (moved, layout_range, *sizes)), "no copy")
    fewer = y, ids[:, :1].contiguous(), weights[:, :1].contiguous()
    is_checked("a handle for another top-k", combine(*fewer), "for this topk_idx")
    small = y.clone()
    small.untyped_storage().resize_(y.nbytes - 1)
    is_checked("a storage that is too small", combine(small), "expected a storage")
    buffer.get_next_low_latency_combine_buffer(handle)[:] = y
    assert torch.equal(is_known("zero copy", combine(zero_copy=True))[0], expected)
    is_checked("zero copy of other rows", combine(y[:1], zero_copy=True), "x: expected")
    costs = torch.zeros(size, dtype=torch.int64)  # a new form, whose first combine is without copies
    buffer.get_next_low_latency_combine_buffer(handle)[:] = y
    is_checked("zero copy of a new form", combine(zero_copy=True, combine_wait_recv_cost_stats=costs))
    assert torch.equal(is_known("the same form", combine(combine_wait_recv_cost_stats=costs))[0], expected)
    wants = x.clone().requires_grad_()
    assert not is_known("rows that need a gradient", dispatch(wants, use_fp8=False))[0].requires_grad
    first, second = dispatch(return_recv_hook=True)(), dispatch(return_recv_hook=True)()
    is_checked("a third dispatch", dispatch(return_recv_hook=True), "dispatch to be received .* 2 un-received")
    is_checked("a third dispatch in one", dispatch(), "dispatch to be received .* 2 un-received")
    for one in (second, first):
        one[4]()
    buffer.destroy()
    for call in (dispatch(), combine(), dispatch(return_recv_hook=True)):
        with pytest.raises(CommunicatorClosed, match="got one after destroy"):
            call()


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_checked_again(size: int) -> None:
    on_ranks(size, _checked_again)


def _of_another_door(rank: int, size: int) -> None:
    """Forms that only MoECommunicator has checked, and takes, are unknown to a Buffer, which takes fewer."""
    buffer, checks, generator = _buffer(), Checks(), torch.Generator().manual_seed(3)
    x, ids, weights = _tokens(generator, 8)
    buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    (comm,) = buffer._low_latency.values()
    before = checks.num
    for rows in (x.half(), x):
        for _ in range(3):
            out, _ = comm.dispatch(rows, ids, capacity=size * MOST)
    assert checks.num == before + 2
    with pytest.raises(ValueError, match="x: expected torch.bfloat16"):
        buffer.low_latency_dispatch(x.half(), ids, MOST, EXPERTS, use_fp8=False)
    tokens, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    assert len(handle) == 5 and handle[2:] == (MOST, 128, EXPERTS)
    out, routing = comm.dispatch(x, ids, capacity=size * MOST)
    assert type(out).__name__ == "DispatchOutput" and routing.topk_ids.dtype is torch.int32
    assert checks.num == before + 2
    with pytest.raises(ValueError, match="handle: expected"):
        comm.combine(tokens, handle, weights)
    buffer.destroy()


def test_a_buffer_does_not_rely_on_the_checks_of_a_communicator() -> None:
    on_ranks(1, _of_another_door)


def _waits(rank: int, size: int) -> None:
    """Rank 1 is late in calls that C runs. The statistics of rank 0 say so."""
    buffer, (x, ids, weights) = _buffer(), _tokens(torch.Generator().manual_seed(3), 8)
    cost, back = (torch.zeros(size, dtype=torch.int64) for _ in range(2))

    def be_late(is_late: bool) -> None:
        dist.barrier()
        if is_late and rank == 1:
            threading.Event().wait(0.3)

    def trip(late: str) -> None:
        for halves in (False, True):
            be_late(late == "dispatch")
            how: dict[str, Any] = {"return_recv_hook": halves}
            made = _received(buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, None, cost, use_fp8=False, **how))
            be_late(late == "combine")
            given = made[0].nan_to_num(), ids, weights, made[2]
            _received(buffer.low_latency_combine(*given, combine_wait_recv_cost_stats=back, **how))

    trip("")
    before = _calls(buffer)
    for late, mine in (("dispatch", cost), ("combine", back)):
        for counted in (cost, back):
            counted.zero_()
        trip(late)
        if rank == 0:
            assert 0.4 < float(mine[1]) / 1e9 < 30 and float(mine[0]) < float(mine[1]) / 2
    assert _calls(buffer) - before == 12
    dist.barrier()
    buffer.destroy()


def test_statistics_of_waiting() -> None:
    on_ranks(2, _waits)


def _keeps_nothing(rank: int, size: int) -> None:
    buffer, (x, ids, weights) = _buffer(), _tokens(torch.Generator().manual_seed(3), 8)
    out = torch.empty_like(x)

    def turn() -> None:
        for halves in (False, True):
            made = _received(buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False, return_recv_hook=halves))
            y = made[0].nan_to_num()
            _received(buffer.low_latency_combine(y, ids, weights, made[2], return_recv_hook=halves, out=out))
        buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, return_recv_hook=True)  # a hook that nobody calls
        buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)

    for _ in range(200):  # the latest calls of the process are kept, up to 1000
        turn()
    gc.collect()
    before, calls = len(gc.get_objects()), _calls(buffer)
    used = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, ids, weights, out)]
    for _ in range(200):
        turn()
    gc.collect()
    assert len(gc.get_objects()) - before < 50 and _calls(buffer) - calls > 1000
    assert used == [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, ids, weights, out)]
    buffer.destroy()


def test_c_keeps_nothing() -> None:
    on_ranks(1, _keeps_nothing)


def _with_masks(rank: int, size: int) -> None:
    """Calls of a Buffer that masks ranks go to C directly until it has a second size: then calls exchange masks."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
    (x, ids, _), (wide, *_) = (_tokens(torch.Generator().manual_seed(3), 8, hidden) for hidden in (128, 256))
    buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)
    assert buffer._opened(x, MOST, None, EXPERTS) is not None
    buffer.low_latency_dispatch(wide, ids, MOST, EXPERTS)
    assert buffer._opened(x, MOST, None, EXPERTS) is None
    buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)
    buffer.destroy()


def test_masks_of_several_sizes() -> None:
    on_ranks(2, _with_masks)
