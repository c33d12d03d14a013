"""Wrong arguments and what the error says, for the CPU and for GPUs (fault_cases.here), and what ranks do with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ep_plugin import _C, DispatchLayout
from ep_plugin.errors import CommunicatorClosed
from tests.faults.fault_cases import here, open_communicator, round_trip, tokens_for

SIZE, COUNT = 2, 6
MOST = 50  # max_tokens_per_rank


class Good(NamedTuple):
    """Arguments that are right, and a device that is not the communicator's."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    away: torch.device


def good() -> Good:
    return Good(*tokens_for(0, SIZE, COUNT), torch.device("meta" if here().type == "cpu" else "cpu"))


def _changed(ids: torch.Tensor, index: tuple[int, ...], value: int) -> torch.Tensor:
    ids = ids.clone()
    ids[index] = value
    return ids


def _freed(tensor: torch.Tensor, left: int = 0, part: int | None = None) -> torch.Tensor:
    """A copy of `tensor`, or `part` columns of one, whose storage was resized to `left` bytes."""
    copy = tensor.clone()
    copy = copy if part is None else copy[:, :part]
    copy.untyped_storage().resize_(left)
    return copy


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


def _jagged(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(tensor), layout=torch.jagged)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=here())


# What is passed in place of a good argument, and what the error says: HERE and AWAY stand for the devices.
Wrong = Callable[[Good], dict[str, Any]]
DISPATCH: dict[str, tuple[Wrong, str]] = {
    "x on another device": (lambda g: {"x": g.x.to(g.away)}, "x: expected a tensor on HERE, got AWAY"),
    "ids on another device": (lambda g: {"topk_ids": g.ids.to(g.away)}, "topk_ids: expected a .* on HERE, got AWAY"),
    "weights on another device": (lambda g: {"topk_weights": g.weights.to(g.away)}, "topk_weights: .* HERE, got AWAY"),
    "scales on another device": (lambda g: {"scales": g.weights.to(g.away)}, "scales: .* HERE, got AWAY"),
    "x of an odd dtype": (
        lambda g: {"x": g.x.to(torch.complex64)},
        "x: expected one of torch.float32.*got torch.complex64",
    ),
    "x with three dimensions": (lambda g: {"x": g.x[None]}, r"x: expected 2 dimensions, got shape \(1, 6, 8\)"),
    "x with one dimension": (lambda g: {"x": g.x[0]}, r"x: expected 2 dimensions, got shape \(8,\)"),
    "rows of 20 bytes": (
        lambda g: {"x": _zeros(COUNT, 5)},
        r"x: expected .* multiple of 16 bytes, got 20 \(5 el",
    ),
    "rows of no bytes": (lambda g: {"x": g.x[:, :0]}, "x: expected .* multiple of 16 bytes, got 0"),
    "rows of a gigabyte": (
        lambda g: {"x": g.x[:, :1].expand(-1, 2**28)},
        "x: expected rows of at most 536870912 bytes, got 1073741824",
    ),
    "rows too wide": (lambda g: {"x": _zeros(COUNT, 12)}, "x: expected a hidden size of at most 8, got 12"),
    "strided rows": (
        lambda g: {"x": _zeros(COUNT, 16)[:, ::2]},
        r"x: expected contiguous rows .*got strides \(16, 2\)",
    ),
    "too many tokens": (
        lambda g: dict(zip(("x", "topk_ids", "topk_weights"), tokens_for(0, SIZE, MOST + 1), strict=True)),
        f"x: expected at most max_tokens_per_rank={MOST} tokens, got {MOST + 1}",
    ),
    "ids of a float dtype": (lambda g: {"topk_ids": g.ids.float()}, "topk_ids: expected .* torch.int64, got torch.fl"),
    "ids of a short dtype": (
        lambda g: {"topk_ids": g.ids.short()},
        "topk_ids: expected torch.int32 or torch.int64, got torch.int16",
    ),
    "ids of fewer tokens": (lambda g: {"topk_ids": g.ids[:-1]}, r"topk_ids: expected shape \(6, K\), got \(5, 2\)"),
    "ids with one dimension": (lambda g: {"topk_ids": g.ids[:, 0]}, r"topk_ids: expected shape \(6, K\), got \(6,\)"),
    "ids of no expert": (lambda g: {"topk_ids": g.ids[:, :0]}, "topk_ids: expected 1 to topk=2 experts .*, got 0"),
    "ids of too many experts": (
        lambda g: {"topk_ids": torch.cat([g.ids, g.ids], 1)},
        "topk_ids: expected 1 to topk=2 experts .*got 4",
    ),
    "strided ids": (
        lambda g: {"topk_ids": g.ids.t().contiguous().t()},
        r"topk_ids: expected a contiguous .*strides \(1, 6\)",
    ),
    "id above the last": (
        lambda g: {"topk_ids": _changed(g.ids, (3, 1), 4)},
        "topk_ids: expected -1 or 0 to 3, got 4 at token 3, position 1",
    ),
    "id below -1": (
        lambda g: {"topk_ids": _changed(g.ids, (5, 0), -2).int()},
        "topk_ids: expected -1 or 0 to 3, got -2 at token 5, position 0",
    ),
    "repeated id": (
        lambda g: {"topk_ids": _changed(g.ids, (2,), 1)},
        "topk_ids: expected distinct experts .*expert 1 twice at token 2",
    ),
    "weights of another shape": (
        lambda g: {"topk_weights": g.weights[:, :1]},
        r"topk_weights: expected shape \(6, 2\), got \(6, 1\)",
    ),
    "weights in a list": (lambda g: {"topk_weights": [0.5]}, "topk_weights: expected a tensor, got list"),
    "sparse weights": (
        lambda g: {"topk_weights": g.weights.to_sparse()},
        "topk_weights: expected a dense tensor, got one of layout torch.sparse_coo",
    ),
    "sparse x": (lambda g: {"x": g.x.to_sparse()}, "x: expected a dense tensor, got one of layout torch.sparse_coo"),
    "ids in rows of values": (lambda g: {"topk_ids": g.ids.to_sparse_csr()}, "topk_ids: expected .* torch.sparse_csr"),
    "nested x": (
        lambda g: {"x": torch.nested.nested_tensor(list(g.x))},
        "x: expected a dense tensor, got a nested one",
    ),
    "jagged x": (lambda g: {"x": _jagged(g.x)}, "x: expected a tensor with memory of its own, got NestedTensor"),
    "fake x": (lambda g: {"x": _fake(g.x)}, "x: expected a tensor with memory of its own, got FakeTensor"),
    "fake scales": (lambda g: {"scales": _fake(g.x)}, "scales: expected a tensor with .* own, got FakeTensor"),
    "functional ids": (
        lambda g: {"topk_ids": torch._to_functional_tensor(g.ids)},
        "topk_ids: expected a tensor with memory of its own, got a functional tensor",
    ),
    "freed x": (lambda g: {"x": _freed(g.x)}, "x: expected a storage of at least 192 bytes, got 0: it was freed"),
    "freed ids": (lambda g: {"topk_ids": _freed(g.ids, 90)}, "topk_ids: expected a storage of at least 96 .*, got 90"),
    "freed weights": (
        lambda g: {"topk_weights": _freed(g.weights)},
        "topk_weights: expected a storage .* 48 .*, got 0",
    ),
    "freed weights of a short dtype": (
        lambda g: {"topk_weights": _freed(g.weights.half())},
        "topk_weights: expected a storage of at least 24 bytes, got 0",
    ),
    "freed scales": (lambda g: {"scales": _freed(g.x)}, "scales: expected a storage of at least 192 bytes, got 0"),
    "freed rows that lie apart": (
        lambda g: {"x": _freed(_zeros(COUNT, 16), 350, part=8)},
        "x: expected a storage of at least 352 bytes, got 350",
    ),
    "scales in a list": (lambda g: {"scales": [1.0]}, "scales: expected a tensor, got list"),
    "weights that are integers": (
        lambda g: {"topk_weights": g.ids},
        "topk_weights: expected a floating-point dtype, got torch.int64",
    ),
    "scales of fewer tokens": (lambda g: {"scales": _zeros(5, 1)}, r"scales: expected shape \(6, S\), got \(5, 1\)"),
    "scales with one dimension": (lambda g: {"scales": _zeros(6)}, r"scales: expected shape \(6, S\), got \(6,\)"),
    "scales of half a gigabyte": (
        lambda g: {"scales": g.x.new_empty((COUNT, 2**29 + 1), dtype=torch.uint8)},  # which nobody touches
        "scales: expected at most 536870912 bytes for each token, got 536870913",
    ),
    "strided scales": (
        lambda g: {"scales": _zeros(6, 4)[:, ::2]},
        r"scales: expected a contiguous .*strides \(4, 2\)",
    ),
    "an unknown way to quantise": (
        lambda g: {"quantize": "e5m2"},
        "quantize: expected None or 'e4m3', got 'e5m2'",
    ),
    "quantised rows of 8 bytes": (
        lambda g: {"quantize": "e4m3"},
        r"x: expected .* multiple of 16 bytes, got 8 \(8 elements of torch.float8_e4m3fn\)",
    ),
    "negative capacity": (lambda g: {"capacity": -1}, "capacity: expected an integer of at least 0, rows, got -1"),
    "capacity that is no integer": (
        lambda g: {"capacity": 20.0},
        "capacity: expected an integer of at least 0, rows, got 20.0",
    ),
    "capacity beyond 32 bits": (
        lambda g: {"capacity": 2**31},
        "capacity: expected at most 2147483647 rows, got 2147",
    ),
    "capacity that is a truth": (lambda g: {"capacity": True}, "capacity: expected an integer .* got True"),
    "no x": (lambda g: {"x": None}, "x: expected a tensor, got NoneType"),
    "ids in a list": (lambda g: {"topk_ids": g.ids.tolist()}, "topk_ids: expected a tensor, got list"),
    "a handle that is a tensor": (
        lambda g: {"previous_handle": g.ids},
        "previous_handle: expected a DispatchHandle, got Tensor",
    ),
}
# The same for combine, in place of y: N rows were received, of 8 float32 each. Rows that lie apart by a multiple of 16
# bytes are not copied on their way.
WrongRows = Callable[[torch.Tensor, torch.device], dict[str, Any]]
COMBINE: dict[str, tuple[WrongRows, str]] = {
    "weights in a list": (lambda y, away: {"weights": [1.0]}, "weights: expected a tensor, got list"),
    "bias in a list": (lambda y, away: {"bias": [1.0]}, "bias: expected a tensor, got list"),
    "sparse y": (
        lambda y, away: {"y": y.to_sparse()},
        "y: expected a dense tensor, got one of layout torch.sparse_coo",
    ),
    "fake bias": (lambda y, away: {"bias": _fake(y[:6])}, "bias: expected a tensor with memory .* got FakeTensor"),
    "freed y": (lambda y, away: {"y": _freed(y)}, "y: expected a storage of at least 384 bytes, got 0"),
    "freed weights": (lambda y, away: {"weights": _freed(y[:, 0])}, "weights: expected a storage .* 48 bytes, got 0"),
    "freed bias": (lambda y, away: {"bias": _freed(y[:6])}, "bias: expected a storage of at least 192 bytes, got 0"),
    "y on another device": (lambda y, away: {"y": y.to(away)}, "y: expected a tensor on HERE, got AWAY"),
    "y that cannot be summed": (
        lambda y, away: {"y": y.to(torch.int32)},
        "y: expected one of torch.float32.*got torch.int32",
    ),
    "y with one dimension": (lambda y, away: {"y": y[0]}, r"y: expected 2 dimensions, got shape \(8,\)"),
    "rows of 12 bytes": (lambda y, away: {"y": y[:, :3].contiguous()}, "y: expected .* multiple of 16 bytes, got 12"),
    "rows of a gigabyte": (
        lambda y, away: {"y": y[:, :1].expand(-1, 2**28)},
        "y: expected rows of at most 536870912 bytes, got 1073741824",
    ),
    "strided rows": (
        lambda y, away: {"y": torch.cat([y, y], 1)[:, ::2]},
        r"y: expected a contiguous tensor, got strides \(16, 2\) for shape \(12, 8\)",
    ),
    "no y": (lambda y, away: {"y": None}, "y: expected a tensor, got NoneType"),
    "no handle": (lambda y, away: {"handle": None}, "handle: expected a DispatchHandle, got NoneType"),
    "too few rows": (lambda y, away: {"y": y[:-1]}, "y: expected the 12 rows that dispatch returned, got 11"),
    "weights of another shape": (
        lambda y, away: {"weights": _zeros(11)},
        r"weights: expected shape \(12,\), got \(11,\)",
    ),
    "weights that are integers": (
        lambda y, away: {"weights": _zeros(12).int()},
        "weights: expected a floating-point dtype",
    ),
    "weights on another device": (lambda y, away: {"weights": _zeros(12).to(away)}, "weights: .* HERE, got AWAY"),
    "bias of another shape": (lambda y, away: {"bias": _zeros(5, 8)}, r"bias: expected shape \(6, 8\), got \(5, 8\)"),
    "bias of another dtype": (
        lambda y, away: {"bias": _zeros(6, 8).double()},
        "bias: .* torch.float32 of y, got torch.float64",
    ),
    "strided bias": (
        lambda y, away: {"bias": _zeros(6, 16)[:, ::2]},
        r"bias: expected a contiguous .*strides \(16, 2\)",
    ),
}
# torch makes mkldnn tensors of floats on CPUs only. They say that they are strided and contiguous, and have no storage.
_MKLDNN = "expected a dense tensor, got one of layout torch._mkldnn"
DISPATCH_ON_CPU: dict[str, tuple[Wrong, str]] = {
    "mkldnn x": (lambda g: {"x": g.x.to_mkldnn()}, f"x: {_MKLDNN}"),
    "mkldnn ids": (lambda g: {"topk_ids": g.weights.to_mkldnn()}, f"topk_ids: {_MKLDNN}"),
    "mkldnn weights": (lambda g: {"topk_weights": g.weights.to_mkldnn()}, f"topk_weights: {_MKLDNN}"),
    "mkldnn scales": (lambda g: {"scales": g.weights.to_mkldnn()}, f"scales: {_MKLDNN}"),
}
COMBINE_ON_CPU: dict[str, tuple[WrongRows, str]] = {
    "mkldnn y": (lambda y, away: {"y": y.to_mkldnn()}, f"y: {_MKLDNN}"),
    "mkldnn weights": (lambda y, away: {"weights": _zeros(12).to_mkldnn()}, f"weights: {_MKLDNN}"),
    "mkldnn bias": (lambda y, away: {"bias": _zeros(6, 8).to_mkldnn()}, f"bias: {_MKLDNN}"),
}
DISPATCH_ON_CUDA: dict[str, tuple[Wrong, str]] = {
    "weights of double rows": (
        lambda g: {"x": g.x.double()},
        "topk_weights: expected None beside rows of torch.float64 on cuda, got weights",
    ),
}
COMBINE_ON_CUDA: dict[str, tuple[WrongRows, str]] = {
    "double rows": (lambda y, away: {"y": y.double()}, "y: expected one of .*float16 on cuda, got torch.float64"),
}


def _refused(call: Callable[..., Any], arguments: dict[str, Any], says: str, away: torch.device) -> None:
    pattern = says.replace("HERE", re.escape(str(here()))).replace("AWAY", re.escape(str(away)))
    with pytest.raises(ValueError, match=pattern):
        call(**arguments)


def wrong_dispatches(rank: int, layout: DispatchLayout) -> int:
    """Each wrong call on one rank, of which the others notice nothing, then a round trip. Returns the cases' number."""
    comm = open_communicator(SIZE, layout=layout, max_tokens_per_rank=MOST, timeout_s=15)
    unbounded = open_communicator(SIZE, layout=layout)
    g = good()
    right = {"x": g.x, "topk_ids": g.ids, "topk_weights": g.weights}
    table = DISPATCH | (DISPATCH_ON_CUDA if here().type == "cuda" else DISPATCH_ON_CPU)
    for turn, (wrong, says) in enumerate(table.values()):
        if rank == turn % SIZE:
            for call in (comm.dispatch, comm.dispatch_async):
                _refused(call, right | wrong(g), says, g.away)
        round_trip(comm)
    says = r"capacity: expected .*max_tokens_per_rank set.*got max_tokens_per_rank=None"
    _refused(unbounded.dispatch, right | {"capacity": 10}, says, g.away)
    many = _C.max_tokens + 1
    _refused(unbounded.dispatch, right | {"x": g.x[:1].expand(many, -1)}, f"x: expected at most .* got {many}", g.away)
    round_trip(unbounded)
    comm.close()
    unbounded.close()
    return len(table)


def wrong_combines(rank: int) -> int:
    """Wrong rows, and handles of another communicator, another shape, another layout."""
    comm, other = open_communicator(SIZE), open_communicator(SIZE)
    g = good()
    out, handle = comm.dispatch(g.x, g.ids, g.weights)
    table = COMBINE | (COMBINE_ON_CUDA if here().type == "cuda" else COMBINE_ON_CPU)
    for turn, (wrong, says) in enumerate(table.values()):
        if rank == turn % SIZE:
            for call in (comm.combine, comm.combine_async):
                _refused(call, {"y": out.tokens, "handle": handle} | wrong(out.tokens, g.away), says, g.away)
        round_trip(comm)
    for field, tensor in zip(handle._fields, handle[:-1], strict=False):
        freed = {field: _freed(tensor)}
        says = rf"handle\.{field}: expected a storage of at least {tensor.numel() * tensor.element_size()} bytes, got 0"
        _refused(comm.combine, {"y": out.tokens, "handle": handle._replace(**freed)}, says, g.away)
        cached = {"x": g.x, "topk_ids": g.ids, "previous_handle": handle._replace(**freed)}
        _refused(comm.dispatch, cached, f"previous_{says}", g.away)
    foreign = f"handle: expected one of communicator {other.number}, got one of communicator {comm.number}"
    _refused(other.combine, {"y": out.tokens, "handle": handle}, foreign, g.away)
    _refused(other.dispatch, {"x": g.x, "topk_ids": g.ids, "previous_handle": handle}, foreign, g.away)
    says = r"topk_ids: expected the shape \(6, 2\) of previous_handle, got \(5, 2\)"
    _refused(comm.dispatch, {"x": g.x[:5], "topk_ids": g.ids[:5], "previous_handle": handle}, says, g.away)
    torch.testing.assert_close(comm.combine(out.tokens, handle, weights=out.weights), g.x)
    round_trip(other)
    comm.close()
    other.close()
    with open_communicator(SIZE, layout=DispatchLayout.TOKEN_MAJOR) as comm:
        out, handle = comm.dispatch(g.x, g.ids, g.weights)
        says = r"weights: expected shape \(12, 2\), got \(12,\)"
        _refused(comm.combine, {"y": out.tokens, "handle": handle, "weights": _zeros(12)}, says, g.away)
    return len(table)


def use_after_close(rank: int) -> None:
    """Every use of a closed communicator, and of its handles, is refused."""
    comm = open_communicator(SIZE)
    x, ids, *_ = good()
    out, handle = comm.dispatch(x, ids)
    comm.close()
    uses = {
        "dispatch": lambda: comm.dispatch(x, ids),
        "cached dispatch": lambda: comm.dispatch(x, ids, previous_handle=handle),
        "dispatch_async": lambda: comm.dispatch_async(x, ids),
        "combine": lambda: comm.combine(out.tokens, handle),
        "combine_async": lambda: comm.combine_async(out.tokens, handle),
        "set_sms": lambda: comm.set_sms(dispatch_send_sms=4),
        "check": comm.check,
    }
    for use in uses.values():
        with pytest.raises(CommunicatorClosed, match="expected an open communicator, got a closed one") as caught:
            use()
        assert isinstance(caught.value, ValueError)
    comm.abort("nobody hears it")
