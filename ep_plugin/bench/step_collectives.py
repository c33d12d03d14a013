"""The collectives of an FSDP2 step, noted as they are called, and called again with no compute beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench.timing import Run


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a parameter group's collective. place: of the collective, among those of all groups. how: what it was
    called with beside tensors of so many elements."""

    place: int
    output_numel: int
    input_numel: int
    dtype: torch.dtype
    device: torch.device
    how: dict[str, Any]

    @property
    def bytes_wire(self) -> int:
        """That a rank's peers send it, or take from it."""
        return abs(self.output_numel - self.input_numel) * self.dtype.itemsize


class Noted:
    """Serves a parameter group as `comm` does, and adds each call to `calls`."""

    def __init__(self, comm: Any, place: int, calls: list[Call]) -> None:
        self._comm, self._place, self._calls = comm, place, calls
        self.allocate = comm.allocate

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, async_op: bool = False, **how: Any
    ) -> Any:
        call = Call(
            place=self._place,
            output_numel=output_tensor.numel(),
            input_numel=input_tensor.numel(),
            dtype=output_tensor.dtype,
            device=output_tensor.device,
            how=how,
        )
        self._calls.append(call)
        return self._comm(output_tensor=output_tensor, input_tensor=input_tensor, async_op=async_op, **how)


def again(calls: Iterable[Call], comms: list[Any]) -> Run:
    """One after the other, by the collectives `comms`, in memory that calls of one size share."""
    memory: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    steps = []
    for call in calls:
        size = call.output_numel, call.input_numel, call.dtype
        if size not in memory:
            memory[size] = _memory_of(call, comms[call.place])
        steps.append((comms[call.place], *memory[size], call.how))

    def run() -> None:
        for comm, output, source, how in steps:
            comm(output_tensor=output, input_tensor=source, **how)

    return run


def _memory_of(call: Call, comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input as FSDP2 asks for them: a gather's input is part of its output; zeros."""
    where = {"dtype": call.dtype, "device": call.device}
    if call.output_numel > call.input_numel:
        output = comm.allocate((call.output_numel,), **where).zero_()
        return output, output.narrow(0, dist.get_rank(call.how["group"]) * call.input_numel, call.input_numel)
    source = comm.allocate((call.input_numel,), **where).zero_()
    return comm.allocate((call.output_numel,), **where), source
