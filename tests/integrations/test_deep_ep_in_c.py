"""``Buffer``'s throughput calls by C: bits of known forms, and every call that Python must check again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.deep_ep.handles import Handle
from ep_plugin.errors import CommunicatorClosed
from tests.moe.in_c_cases import Watching
from tests.moe.moe_cases import named, on_ranks

EXPERTS, TOPK, HIDDEN = 4, 2, 256


class _Subclass(torch.Tensor):
    pass


class _InPython:
    """Counts the calls that Python checks."""

    def __init__(self) -> None:
        self.num = 0
        for name in ("_dispatch", "_combine"):
            mock.patch.object(deep_ep.Buffer, name, self._counting(getattr(deep_ep.Buffer, name))).start()

    def _counting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **more: Any) -> Any:
            self.num += 1
            return run(*given, **more)

        return counting


def _buffer() -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)


def _checking_buffer() -> deep_ep.Buffer:
    """A Buffer whose calls are all checked by Python."""
    buffer = _buffer()
    buffer._learn = lambda *_: None  # type: ignore[method-assign]
    return buffer


def _calls(buffer: deep_ep.Buffer) -> int:
    return sum(engine.control.num_calls for engine, *_ in buffer._in_c)


def _tokens(generator: torch.Generator, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOPK).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return x, ids, torch.rand(num_tokens, TOPK, generator=generator)


def _routed(buffer: deep_ep.Buffer, ids: torch.Tensor, weights: torch.Tensor | None) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    return {"topk_idx": ids, "topk_weights": weights} | layout


def _same(one: Any, other: Any, rows: int | None = None) -> None:
    """Compares results: values up to `rows`, the tensors' forms, and types."""
    assert type(one) is type(other)
    if isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _same(a, b, rows)
    elif isinstance(one, torch.Tensor):
        forms = [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_inference(), t.is_leaf) for t in (one, other)
        ]
        assert forms[0] == forms[1]
        assert torch.equal(*(t[:rows].contiguous().view(torch.uint8) if t.dim() else t for t in (one, other)))
    else:
        assert isinstance(one, deep_ep.EventOverlap) or one == other


def _same_handles(one: Handle, other: Handle, slots: int) -> None:
    assert type(one) is type(other) is Handle
    _same(one[0], other[0])
    _same(one[1], other[1], 0)  # kernels also note in it what they waited for
    _same(one[2], other[2])
    _same(one[3], other[3], slots)
    _same(one[4:], other[4:])
    assert one.routing._fields == other.routing._fields and one.routing.comm == other.routing.comm
    _same(one.routing.totals, other.routing.totals)


def _both(rank: int, size: int) -> None:
    """A Buffer that checks every call, beside one that checks the first call of a form."""
    checked, fast = both = _checking_buffer(), _buffer()
    python, generator = _InPython(), torch.Generator().manual_seed(rank)
    fp8 = torch.float8_e4m3fn
    for dtype, num_tokens, weighted, worst, alignment, sms in (
        (torch.bfloat16, 9, True, 0, 1, None),
        (torch.bfloat16, 9, True, 16 * size, 8, None),
        (torch.float32, 0, True, 0, 4, None),
        (fp8, 9, False, 0, 4, None),
        (fp8, 5, True, 200 * size, 1, 8),
        (torch.bfloat16, 9, True, 0, 1, 8),
    ):
        how: dict[str, Any] = {"config": None if sms is None else deep_ep.Config(sms)}
        for turn in range(3):
            with named((dtype, num_tokens, weighted, worst, alignment, sms, turn)):
                rows, ids, weights = _tokens(generator, num_tokens, dtype)
                x = (rows, torch.rand(num_tokens, 2, generator=generator)) if dtype is fp8 else rows
                routed = _routed(checked, ids, weights if weighted else None)
                more = how | {"expert_alignment": alignment, "num_worst_tokens": worst}
                before, ran = python.num, _calls(fast)
                made = [one.dispatch(x, **routed, **more) for one in both]
                handle = made[0][4]
                slots = int(handle[0][-1, rank])
                for part in range(6):
                    if part != 4:
                        _same(made[0][part], made[1][part], slots)
                _same_handles(handle, made[1][4], slots)
                again = [one.dispatch(x, of[4], **how) for one, of in zip(both, made, strict=True)]
                _same(*again, slots)
                _same(again[0][0], made[0][0], slots)
                given = made[0][0][0].float().bfloat16() if dtype is fp8 else made[0][0]
                bias = torch.ones(num_tokens, HIDDEN, dtype=given.dtype)
                for extra in ((None, None), (made[0][2], None), (None, bias), (made[0][2], bias)):
                    _same(*(one.combine(given, of[4], *extra, **how) for one, of in zip(both, made, strict=True)))
                assert turn == 0 or (python.num == before + 6 and _calls(fast) >= ran + 6)
    for one in both:
        one.destroy()


@pytest.mark.parametrize("size", [1, 2])
def test_checked_and_known_calls_make_the_same_bits(size: int) -> None:
    on_ranks(size, _both)


def _checked_again(rank: int, size: int) -> None:
    """After calls of a known form: each of these is checked again, and is right or refused."""
    buffer, python, generator = _buffer(), _InPython(), torch.Generator().manual_seed(3)
    x, ids, weights = _tokens(generator, 8)
    routed = _routed(buffer, ids, weights)
    bias = torch.ones_like(x)
    for _ in range(3):
        rows, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(x, **routed)
        bounded = buffer.dispatch(x, **routed, num_worst_tokens=size * 8)[4]
        for of in (handle, bounded):
            buffer.dispatch(x, of)
        buffer.combine(buffer.dispatch(x, bounded)[0], bounded)
        for extra in ((), (recv_weights,), (None, bias), (recv_weights, bias)):
            sums, *_ = buffer.combine(rows, handle, *extra)

    def is_checked(what: str, call: Callable[[], Any], refused: str = "", times: int = 1) -> Any:
        before, ran = python.num, _calls(buffer)
        with named(what):
            made = None
            if refused:
                with pytest.raises(ValueError, match=refused):
                    call()
                assert _calls(buffer) == ran
            else:
                made = call()
            assert python.num == before + times
            assert times or refused or _calls(buffer) == ran + 1
        return made

    def is_known(what: str, call: Callable[[], Any]) -> Any:
        return is_checked(what, call, times=0)

    def dispatch(rows: Any = x, handle: Any = None, **how: Any) -> Callable[[], Any]:
        return lambda: buffer.dispatch(rows, handle, **((routed if handle is None else {}) | how))

    def combine(y: Any = rows, of: Any = handle, **how: Any) -> Callable[[], Any]:
        return lambda: buffer.combine(y, of, **how)

    def same_dispatch(what: str, call: Callable[[], Any], times: int = 1) -> None:
        _same(is_checked(what, call, times=times)[:4], (rows, recv_idx, recv_weights, counts))

    def same_sums(what: str, call: Callable[[], Any], times: int = 1) -> None:
        _same(is_checked(what, call, times=times)[0], sums)

    same_dispatch("the same call", dispatch(), times=0)
    same_sums("the same combine", combine(bias=bias, topk_weights=recv_weights), times=0)

    # The rows.
    apart = torch.cat([x, x[:, :1]], 1)[:, :HIDDEN]
    same_dispatch("rows apart", dispatch(apart))
    same_dispatch("rows apart again", dispatch(apart), times=0)
    is_checked("rows in columns", dispatch(torch.stack([x, x], 2)[:, :, 0]), "x: expected contiguous rows")
    same_sums("rows of a combine apart", combine(torch.cat([rows, rows[:, :1]], 1)[:, :HIDDEN], bias=bias))
    same_sums("rows of a combine apart again", combine(torch.cat([rows, rows[:, :1]], 1)[:, :HIDDEN], bias=bias))
    of_subclass = is_checked("a subclass", dispatch(x.as_subclass(_Subclass)))[0]
    assert torch.equal(of_subclass.as_subclass(torch.Tensor), rows)
    assert torch.equal(is_checked("a subclass of ids", dispatch(topk_idx=ids.as_subclass(_Subclass)))[0], rows)
    same_dispatch("ids in columns", dispatch(topk_idx=ids.t().contiguous().t()))
    same_dispatch("ids in columns again", dispatch(topk_idx=ids.t().contiguous().t()))
    wants = x.clone().requires_grad_()
    assert not is_known("rows that need a gradient", dispatch(wants))[0].requires_grad
    assert not is_known("sums of rows that need a gradient", combine(rows.clone().requires_grad_()))[0].requires_grad
    freed = x.clone()
    freed.untyped_storage().resize_(x.nbytes - 1)
    is_checked("a storage that is too small", dispatch(freed), "expected a storage")
    freed = rows.clone()
    freed.untyped_storage().resize_(rows.nbytes - 1)
    is_checked("a storage that is too small, of a combine", combine(freed), "expected a storage")
    is_checked("another device", dispatch(x.to("meta")), "expected")
    is_checked("another device of a combine", combine(rows.to("meta")), "expected")
    is_checked("no tensor", dispatch("x"), "x: expected a tensor")
    is_checked("a list of rows and scales", dispatch([x, x]), "x: expected a tensor")
    is_checked("rows without scales", dispatch((x, None)), "x: expected a tensor")
    is_checked("three parts", dispatch((x, x, x)), "x: expected a tensor")
    is_checked("other rows", dispatch(x[:7]), "is_token_in_rank: expected")
    is_checked("fewer rows of a combine", combine(rows[1:]), "y: expected")
    same_dispatch("two dimensions of size 0 around", dispatch(x.view(8, HIDDEN)), times=0)

    # The routing.
    in_rank = routed["is_token_in_rank"]
    is_checked("an unknown id", dispatch(topk_idx=ids + 4), "topk_idx: expected ids from -1 to 3, got")
    is_checked("a repeated id", dispatch(topk_idx=torch.zeros_like(ids)), "is_token_in_rank: expected|distinct")
    is_checked("ranks that are not the ids'", dispatch(is_token_in_rank=~in_rank), "is_token_in_rank: expected")
    wrong = in_rank.clone()
    wrong[-1, -1] ^= True
    is_checked("one such rank", dispatch(is_token_in_rank=wrong), "is_token_in_rank: expected .* for token 7")
    across = torch.stack([in_rank, ~in_rank], 2)[:, :, 0]
    same_dispatch("ranks in columns", dispatch(is_token_in_rank=across))
    same_dispatch("ranks in columns again", dispatch(is_token_in_rank=across), times=0)
    is_checked(
        "wrong ranks in columns", dispatch(is_token_in_rank=torch.stack([~in_rank] * 2, 2)[:, :, 0]), "for token"
    )
    is_checked("int32 ids", dispatch(topk_idx=ids.int()))
    assert is_known("int32 ids again", dispatch(topk_idx=ids.int()))[1].dtype is torch.int32
    is_checked("wrong int32 ids", dispatch(topk_idx=ids.int(), is_token_in_rank=~in_rank), "for token")
    is_checked("int16 ids", dispatch(topk_idx=ids.short()), "topk_idx: expected torch.int64")
    is_checked(
        "weights of another dtype", dispatch(topk_weights=weights.double()), "topk_weights: expected torch.float32"
    )
    is_checked("weights of another shape", dispatch(topk_weights=weights[:, :1]), "topk_weights: expected")
    is_checked("int64 counts", dispatch(num_tokens_per_rank=routed["num_tokens_per_rank"].long()), "torch.int32")
    is_checked("no counts", dispatch(num_tokens_per_expert=None), "num_tokens_per_expert: expected the tensor")
    experts = torch.zeros(3 * size + 1, dtype=torch.int32)
    if size > 1:
        is_checked(
            "other experts", dispatch(num_tokens_per_expert=experts), "num_experts: expected a positive multiple"
        )
    without = is_checked("no ids", dispatch(topk_idx=None, topk_weights=None))
    assert without[1] is None and len(without[3]) == EXPERTS // size
    assert torch.equal(is_checked("its combine", combine(without[0], without[4]))[0], buffer.combine(rows, handle)[0])

    # Settings.
    for name, value, refused in (
        ("num_worst_tokens", 1, "0, or"),
        ("num_worst_tokens", False, "0, or"),
        ("num_worst_tokens", None, "0, or"),
        ("num_worst_tokens", 1.0 * size * 8, "0, or"),
        ("expert_alignment", 0, "an integer"),
        ("expert_alignment", 1.0, "an integer"),
    ):
        is_checked(f"{name}={value}", dispatch(**{name: value}), f"{name}: expected {refused}")
    is_checked("True is 1", dispatch(expert_alignment=True))
    is_checked("another alignment", dispatch(expert_alignment=3))
    assert is_known("that alignment", dispatch(expert_alignment=3))[3] == [-(-count // 3) * 3 for count in counts]
    is_checked("a large alignment", dispatch(expert_alignment=2**62))
    assert set(is_known("a large alignment again", dispatch(expert_alignment=2**62))[3]) <= {0, 2**62}
    is_checked("a larger one", dispatch(expert_alignment=2**80))
    assert set(is_checked("a larger one again", dispatch(expert_alignment=2**80))[3]) <= {0, 2**80}
    with pytest.raises(ValueError, match="config: expected None or an instance of Config"):
        buffer.dispatch(x, **routed, config=8)  # type: ignore[arg-type]
    after: dict[str, Any] = {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}
    for how in ({"async_finish": True}, {"previous_event": buffer.capture()}, after):
        same_dispatch(f"an event by {list(how)}", dispatch(**how), times=0)
        same_sums(f"an event of a combine by {list(how)}", combine(bias=bias, **how), times=0)
        _same(is_known(f"an event of a cached dispatch by {list(how)}", dispatch(x, handle, **how))[0], rows)
    assert dispatch(async_finish=True)()[-1].event is not None and dispatch()()[-1].event is None
    same_dispatch("rows of another form with an event", dispatch(torch.cat([x, x], 1)[:, :HIDDEN], **after))
    same_dispatch("and without one", dispatch(torch.cat([x, x], 1)[:, :HIDDEN]), times=0)
    alone = {"allocate_on_comm_stream": True}
    for call in (dispatch(**alone), combine(**alone)):
        is_checked("memory of the other stream", call, "allocate_on_comm_stream: expected", times=0)
    for call in (dispatch(previous_event=1), combine(previous_event=1)):
        is_checked("no event", call, "previous_event: expected", times=0)

    # Handles.
    is_checked("a handle and ids", dispatch(x, handle, topk_idx=ids), "topk_idx: expected None with a handle")
    is_checked(
        "a handle and weights", dispatch(x, handle, topk_weights=weights), "topk_idx: expected None with a handle"
    )
    for kind in (tuple, list, Handle):
        _same(is_known(f"parts in a {kind.__name__}", dispatch(x, kind(handle)))[0], rows)
        same_sums(f"a combine by parts in a {kind.__name__}", combine(of=kind(handle), bias=bias), times=0)
    saved = _saved(handle)
    assert type(saved) is tuple
    _same(is_known("saved parts", dispatch(x, saved))[0], rows)
    same_sums("a combine by saved parts", combine(of=saved, bias=bias), times=0)
    is_checked("five parts", dispatch(x, handle[:5]), "handle: expected what dispatch returned")
    is_checked("no tensor in it", dispatch(x, (*handle[:5], None)), "handle: expected what dispatch returned")
    is_checked("no handle", combine(of=1), "handle: expected what dispatch returned")
    is_checked("a low-latency handle", combine(of=(ids, ids, 8, HIDDEN, EXPERTS)), "handle: expected what dispatch")
    is_checked("parts in another order", combine(of=handle[::-1]), "handle")
    kept = handle[5].clone()
    kept[0] += 1
    with pytest.raises(CommunicatorClosed):
        buffer.combine(rows, (*handle[:5], kept))
    kept = handle[5].clone()
    kept[1] += 1
    is_checked("other totals", combine(of=(*handle[:5], kept)), "handle.recv_rows: expected")
    is_checked("fewer slots", combine(of=(*handle[:3], handle[3][:-1], *handle[4:])), "handle.recv_rows: expected")
    is_checked("a shorter plan", combine(of=(handle[0], handle[1][:-1], *handle[2:])), "handle.plan: expected")
    is_checked("other rows of a cached dispatch", dispatch(x[:7], handle), "topk_ids: expected shape")
    _same(is_known("a handle with num_worst_tokens", dispatch(x, bounded))[0][: len(rows)], rows)
    gone = buffer.dispatch(x, **routed)
    handle_of_gone = gone[4]
    y = gone[0]
    del gone
    gc.collect()
    same_sums("a handle alone", combine(y, handle_of_gone, bias=bias), times=0)

    # Combine.
    two = is_checked("two biases", combine(bias=(bias, bias)))[0]
    assert torch.equal(two, is_checked("two biases again", combine(bias=(bias, bias)))[0])
    is_checked("a bias of another dtype", combine(bias=bias.float()), "bias: expected torch.bfloat16")
    is_checked("a bias of another shape", combine(bias=bias[1:]), "bias: expected")
    is_checked("weights of another shape, of a combine", combine(topk_weights=recv_weights[:, :1]), "topk_weights")
    is_checked("weights of another dtype, of a combine", combine(topk_weights=recv_weights.double()), "topk_weights")

    # Rows of float64 have weights of float64, of which float32 is returned.
    for _ in range(3):
        wide = is_checked("float64", dispatch(x.double()))
        assert wide[2].dtype is torch.float32
        back = is_checked("a combine of float64", combine(wide[0], wide[4], topk_weights=wide[2]))
        assert back[0].dtype is torch.float64 and back[1].dtype is torch.float32

    # Watchers.
    with Watching():
        same_dispatch("a mode", dispatch())
        same_sums("a mode of a combine", combine(bias=bias))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        same_dispatch("a profiler", dispatch())
    torch.use_deterministic_algorithms(True)
    try:
        same_dispatch("filled memory", dispatch(), times=0)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        assert is_known("inference", dispatch())[0].is_inference()
    buffer.destroy()
    for call in (dispatch(), dispatch(x, handle), combine()):
        with pytest.raises(CommunicatorClosed, match="got one after destroy"):
            call()


def _saved(handle: Handle) -> Any:
    """The parts as an autograd.Function gets them back."""
    found: list[Any] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*handle)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            found.append(ctx.saved_tensors)
            return grad

    Saves.apply(torch.ones(1, requires_grad=True)).sum().backward()
    return found[0]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_checked_again(size: int) -> None:
    on_ranks(size, _checked_again)


def _sms(rank: int, size: int) -> None:
    """Each call has the SMs of its config, or of all Buffers, also in calls of known forms."""
    one, other = _buffer(), _buffer()
    python, (x, ids, weights) = _InPython(), _tokens(torch.Generator().manual_seed(3), 8)
    routed = _routed(one, ids, weights)
    rows, *_, handle, _ = one.dispatch(x, **routed)
    (engine, *_), *_ = one._in_c

    def sms_of(buffer: deep_ep.Buffer, num_sms: int | None = None) -> dict[str, Any]:
        config = None if num_sms is None else deep_ep.Config(num_sms)
        made = buffer.dispatch(x, **routed, config=config)
        asked = engine.asked_sms
        _same(made[0], rows)
        _same(buffer.dispatch(x, handle, config=config)[0], rows)
        buffer.combine(rows, handle, config=config)
        assert engine.asked_sms == asked
        return dict(asked)

    for buffer in (one, other):
        for num_sms in (None, 4, 8):
            for turn in range(2):
                before = python.num
                asked = sms_of(buffer, num_sms)
                assert asked.get("dispatch_send_sms") == asked.get("combine_send_sms") == num_sms
                assert turn == 0 or python.num == before
    for _ in range(2):  # two Buffers in turn
        assert sms_of(one, 4)["dispatch_send_sms"] == 4 and sms_of(other, 8)["dispatch_send_sms"] == 8
    try:
        deep_ep.Buffer.set_num_sms(6)
        assert [sms_of(one)["dispatch_send_sms"] for _ in range(2)] == [6, 6]
        deep_ep.Buffer.set_num_sms(2)
        assert [sms_of(other)["dispatch_send_sms"] for _ in range(2)] == [2, 2]
    finally:
        deep_ep.Buffer._asked_sms = None
    one.destroy()
    assert torch.equal(other.dispatch(x, handle)[0], rows)
    other.destroy()


@pytest.mark.parametrize("size", [1, 2])
def test_sms_of_known_calls(size: int) -> None:
    on_ranks(size, _sms)


def _several(rank: int, size: int) -> None:
    """A Buffer uses several communicators: each knows its own calls and handles."""
    buffer, python, generator = _buffer(), _InPython(), torch.Generator().manual_seed(3)
    x, ids, _ = _tokens(generator, 8)
    ways: dict[str, dict[str, Any]] = {}
    for experts in (EXPERTS, 2 * EXPERTS):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        for worst in (0, 8 * size, 200 * size):
            ways[f"{experts}, {worst}"] = {"topk_idx": ids, "num_worst_tokens": worst} | layout
    for turn in range(3):
        before, ran = python.num, _calls(buffer)
        made = {name: buffer.dispatch(x, **way) for name, way in ways.items()}
        assert turn == 0 or (python.num == before and _calls(buffer) == ran + len(ways))
        for name, (rows, *_, handle, _) in reversed(made.items()):
            with named((name, turn)):
                again = buffer.dispatch(x, handle)[0]
                n = int(handle[0][-1, rank])
                assert torch.equal(again[:n], rows[:n])
                assert torch.equal(buffer.combine(rows, handle)[0], x * handle[4].sum(1, keepdim=True))
        assert turn == 0 or (python.num == before and _calls(buffer) == ran + 3 * len(ways))
    assert len({int(handle[5][0]) for *_, handle, _ in made.values()}) == len(buffer._in_c) == len(ways)
    buffer.destroy()


@pytest.mark.parametrize("size", [1, 2])
def test_communicators_of_one_buffer(size: int) -> None:
    on_ranks(size, _several)


def _keeps_nothing(rank: int, size: int) -> None:
    buffer, (x, ids, weights) = _buffer(), _tokens(torch.Generator().manual_seed(3), 8)
    routed = _routed(buffer, ids, weights)

    def turn() -> None:
        rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **routed)
        buffer.dispatch(x, **routed, num_worst_tokens=8)
        buffer.dispatch(x, handle)
        buffer.combine(rows, handle, row_weights)

    for _ in range(300):  # the latest calls of the process are kept, up to 1000
        turn()
    gc.collect()
    before, calls = len(gc.get_objects()), _calls(buffer)
    given = (x, ids, weights, routed["is_token_in_rank"])
    used = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in given]
    for _ in range(300):
        turn()
    gc.collect()
    assert len(gc.get_objects()) - before < 50 and _calls(buffer) - calls == 1200
    assert used == [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in given]
    buffer.destroy()


def test_c_keeps_nothing() -> None:
    on_ranks(1, _keeps_nothing)


def _of_another_door(rank: int, size: int) -> None:
    """Forms that only MoECommunicator has checked are unknown to a Buffer, which takes fewer."""
    buffer, python, (x, ids, weights) = _buffer(), _InPython(), _tokens(torch.Generator().manual_seed(3), 8)
    routed = _routed(buffer, ids, weights)
    rows, *_, handle, _ = buffer.dispatch(x, **routed)
    comm = buffer._throughput_communicator(torch.device("cpu"), EXPERTS, None)
    for _ in range(3):
        out, of_comm = comm.dispatch(x, ids, weights.double())
        comm.combine(out.tokens, of_comm, out.weights)
    before = python.num
    with pytest.raises(ValueError, match="topk_weights: expected torch.float32"):
        buffer.dispatch(x, **routed | {"topk_weights": weights.double()})
    assert type(out).__name__ == "DispatchOutput" and type(handle) is Handle
    with pytest.raises(ValueError, match="handle: expected a DispatchHandle"):
        comm.combine(rows, handle)
    with pytest.raises(ValueError, match="handle: expected what dispatch returned"):
        buffer.combine(rows, of_comm)
    assert python.num == before + 2
    buffer.destroy()


def test_a_buffer_does_not_rely_on_the_checks_of_a_communicator() -> None:
    on_ranks(1, _of_another_door)
