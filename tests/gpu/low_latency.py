"""Low-latency dispatch and combine on GPUs: the CPU tests' cases."""

from __future__ import annotations

import itertools
import unittest.mock
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ep_plugin import DispatchHandle, DispatchOutput, MoECommunicator, MoECommunicatorConfig
from tests.gpu.checks import device_of
from tests.moe import low_latency_cases as cases
from tests.moe import test_low_latency as whole
from tests.moe import test_low_latency_autograd as autograd
from tests.moe import test_low_latency_halves as halves
from tests.moe.moe_cases import Case, make_inputs

Result = TypeVar("Result")

WHOLE = {
    "shapes of 2 ranks": whole._all_shapes,
    "shapes of 3 ranks": whole._all_shapes,
    "quantized": whole._quantized,
    "routings": whole._all_routings,
    "fewer pairs": whole._fewer_pairs,
    "weights of zero and NaN": whole._zero_weights,
    "bias": whole._bias,
    "smaller calls": whole._smaller_calls,
    "repeats": whole._repeats,
    "gradients": autograd.gradients_of,
}
HALVES = {
    "either order": halves._either_order,
    "late": halves._late,
    "a third": halves._third,
    "others beside": halves._beside,
    "collectives and messages beside": halves._collectives_beside,
}
RANKS = {"shapes of 3 ranks": 3, "repeats": 3, "gradients": 3} | dict.fromkeys(HALVES, 3)
"""Of cases that do not have 2 ranks."""


class OnDevice:
    """A communicator of a device that takes and returns tensors of the host, as the CPU tests have them."""

    def __init__(self, comm: MoECommunicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._comm.__exit__(*failure)

    def dispatch(self, *args: Any, **more: Any) -> tuple[DispatchOutput, DispatchHandle]:
        return self._finished(self._comm.dispatch(*self._moved(args), **self._moved_by_name(more)))

    def combine(self, *args: Any, **more: Any) -> torch.Tensor:
        return self._finished(self._comm.combine(*self._moved(args), **self._moved_by_name(more)))

    def dispatch_async(self, *args: Any) -> _HostWork:
        return _HostWork(self._comm.dispatch_async(*self._moved(args)), self._finished)

    def combine_async(self, *args: Any) -> _HostWork:
        return _HostWork(self._comm.combine_async(*self._moved(args)), self._finished)

    def _finished(self, result: Any) -> Any:
        """The result on the host, or the error that kernels found: the call has returned before they ran."""
        result = _on_host(result)
        self._comm.check()
        return result

    def _moved(self, values: Any) -> list[Any]:
        return [self._one(value) for value in values]

    def _moved_by_name(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._one(value) for name, value in values.items()}

    def _one(self, value: Any) -> Any:
        device = self._comm.engine.device
        if isinstance(value, DispatchHandle) and value.topk_ids.device != device:
            return value._replace(topk_ids=value.topk_ids.to(device))
        return value.to(device) if isinstance(value, torch.Tensor) else value


class _HostWork:
    def __init__(self, work: Any, finished: Callable[[Any], Any]) -> None:
        self._work, self._finished, self._result = work, finished, None

    @property
    def done(self) -> bool:
        return self._work.done

    def wait(self) -> Any:
        if self._result is None:
            self._result = self._finished(self._work.wait())
        return self._result


def _on_host(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.cpu()
    if isinstance(result, DispatchOutput):
        return DispatchOutput._make(one if one is None else one.cpu() for one in result)
    if isinstance(result, DispatchHandle):
        return result
    return tuple(map(_on_host, result))


def on_device(rank: int, function: Callable[..., Result], *args: Any) -> Result:
    """A case of the CPU tests, `function(rank, *args)`, by a communicator of this rank's device."""
    device = device_of(rank)

    def opened(group: Any, config: MoECommunicatorConfig) -> OnDevice:
        return OnDevice(MoECommunicator(group, config, device))

    with unittest.mock.patch.object(cases, "MoECommunicator", opened):
        return function(rank, *args)


def run_case(rank: int, size: int, name: str) -> None:
    on_device(rank, (WHOLE | HALVES)[name], size)


def many(rank: int, size: int, count: int) -> None:
    """`count` operations of each kind in which every row is compared."""
    on_device(rank, halves._many, size, count)


def _half_precision(rank: int, size: int) -> None:
    for tokens, id_dtype in itertools.product(((5, 90), (9, 3)), (torch.int32, torch.int64)):
        case = Case(tokens=tokens, num_experts=8, hidden=40, topk=3, dtype=torch.float16, id_dtype=id_dtype)
        with cases.low_latency(case) as comm:
            cases.round_trip(comm, make_inputs(case))


def half_precision(rank: int, size: int) -> None:
    on_device(rank, _half_precision, size)


def _few_and_many(rank: int, size: int) -> None:
    """Calls of either kind of kernel: few tokens, whose pairs go as words, and many, whose rows go to slots."""
    for tokens, quantize in ((5, None), (100, None), (100, "e4m3_pow2")):
        case = Case(tokens=(tokens,) * size, num_experts=4 * size, topk=3, dtype=torch.bfloat16, hidden=256)
        inputs = make_inputs(case)
        with cases.low_latency(case, timeout_s=120) as comm:
            if quantize is None:
                cases.round_trip(comm, inputs)
            else:
                out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], quantize=quantize)
                cases.check_rows(comm, out, inputs, quantize)


def few_and_many(rank: int, size: int) -> None:
    on_device(rank, _few_and_many, size)
