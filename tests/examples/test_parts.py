"""How examples/compare divides a step, on traces made here: ranges of two host threads, kernels of two streams."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

from examples.compare import parts

MAIN, AUTOGRAD = 1, 2  # threads


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def op(name: str, ts: float, dur: float, number: int | None = None, *, backward: bool = False) -> dict[str, Any]:
    """An operation of the forward, or on autograd's thread of the backward."""
    args = {} if number is None else {"Sequence number": number, "Fwd thread id": int(backward)}
    return event("cpu_op", name, ts, dur, AUTOGRAD if backward else MAIN, **args)


def marked(name: str, ts: float, dur: float, tid: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, ts, dur, tid)


def launched(at: float, start: float, end: float, *, tid: int = MAIN, kind: str = "kernel") -> list[dict[str, Any]]:
    """A kernel, and the host's call that launched it."""
    number = int(at * 1000) + tid
    call = event("cuda_runtime", "cudaLaunchKernel", at, 1, tid, correlation=number)
    return [call, event(kind, "some_kernel", start, end - start, 7, correlation=number)]


HOST = [
    marked(parts.STEP, 0, 200),
    marked("part: loss", 1, 60),
    marked("part: attention", 5, 10),
    op("aten::mm", 6, 4, 1),
    marked("FSDP::pre_forward (layer)", 16, 9),
    op("fsdp::all_gather_copy_in", 17, 2),
    op("aten::copy_", 18, 1),
    op("c10d::_allgather_base_", 20, 3),
    op("aten::empty", 21, 1),
    marked("part: exchange", 30, 20),
    op("aten::sort", 31, 2, 2),
    marked("part: experts", 35, 5),
    op("aten::bmm", 36, 2, 3),
    op("autograd::engine::evaluate_function: BmmBackward0", 70, 8, backward=True),
    op("BmmBackward0", 71, 7, 3, backward=True),
    op("SortBackward0", 80, 5, 2, backward=True),
    op("MmBackward0", 90, 5, 1, backward=True),
    marked("FSDP::post_backward_reduce (layer)", 96, 4, AUTOGRAD),
    marked("Optimizer.step#AdamW.step", 110, 20),
]


def positive(found: dict[str, float]) -> dict[str, float]:
    return {part: value for part, value in found.items() if value}


def test_the_main_thread_is_divided_by_the_innermost_range_without_kernels() -> None:
    (found,) = parts.divide(HOST)
    assert positive(found) == {
        "other": 1 + 49 + 70,
        "loss": 4 + 1 + 5 + 11,
        "attention": 10,
        parts.COPIES: 2,
        parts.COLLECTIVES: 7,
        "exchange": 15,
        "experts": 5,
        "optimizer": 20,
    }
    assert sum(found.values()) == 200


def test_backward_on_the_main_thread_belongs_to_the_part_of_its_forward() -> None:
    here = [{**each, "tid": MAIN} for each in HOST]
    (found,) = parts.divide(here)
    assert (found["experts"], found["exchange"], found["attention"]) == (5 + 7, 15 + 5, 10 + 5)
    assert found[parts.COLLECTIVES] == 7 + 4
    assert sum(found.values()) == 200


def test_kernels_belong_to_the_range_that_launched_them_and_computing_hides_the_exchange() -> None:
    trace = [
        *HOST,
        *launched(7, 20, 40),  # attention
        *launched(32, 35, 60),  # exchange, on another stream: the first 5 beside attention
        *launched(37, 50, 55),  # experts, while tokens travel
        *launched(20.5, 58, 65, kind="gpu_memcpy"),  # gathers; the first 2 beside the exchange
        *launched(18.5, 65, 66, kind="gpu_memcpy"),  # FSDP2's copy-in
        *launched(73, 90, 100, tid=AUTOGRAD),  # backward of the experts
        *launched(82, 95, 110, tid=AUTOGRAD),  # of the exchange
        *launched(92, 110, 120, tid=AUTOGRAD),  # of attention
        *launched(97, 120, 125, tid=AUTOGRAD),  # reduces
        *launched(115, 130, 150),  # optimizer
        event("kernel", "of a call that the trace lacks", 160, 4, 7, correlation=1),
    ]
    (found,) = parts.divide(trace)
    assert positive(found) == {
        "attention": 20 + 10,
        "exchange": 10 + 5 + 10,
        "experts": 5 + 10,
        parts.COLLECTIVES: 5 + 5,
        parts.COPIES: 1,
        "optimizer": 20,
        "other": 4,
        "idle": 20 + 24 + 5 + 10 + 36,
    }
    assert sum(found.values()) == 200


def test_each_step_has_its_own_kernels_and_ends_cut_them() -> None:
    second = [{**each, "ts": each["ts"] + 200} for each in HOST]
    trace = [*HOST, *second, *launched(7, 190, 210), *launched(315, 350, 390)]
    first, last = parts.divide(trace)
    assert positive(first) == {"attention": 10, "idle": 190}
    assert positive(last) == {"attention": 10, "optimizer": 40, "idle": 150}


def test_every_part_that_a_range_can_name_is_in_the_table() -> None:
    assert set(parts._MODULES.values()) | {"router", parts.EXPERTS} <= set(parts.PARTS)
