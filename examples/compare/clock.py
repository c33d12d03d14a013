"""The time that a training step spends in dispatch and combine.

Four marks surround the exchange: tokens enter it, rows reach the experts, the experts' rows leave them, and combined
tokens come out. Each mark is the identity. It notes the time in forward and again in backward, which runs through the
marks the other way. Dispatch is from entry to experts, combine from experts to exit. A rank's time includes its wait
for slower peers. The last rank waits for nobody, so the shortest time of all ranks is the exchange itself.
"""

from __future__ import annotations

import itertools
import time

import torch
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ep_plugin.integrations.transformers.expert_parallel import EpPluginExpertParallel
from examples.compare.parts import EXCHANGE, EXPERTS, part_range

_ENTER, _ROWS, _RESULTS, _EXIT = range(4)


class ExchangeClock:
    """Collects marks and turns them into seconds. On CUDA a mark is an event on the current stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[int, float | torch.cuda.Event]] = []

    def note(self, place: int) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((place, event))
        else:
            self._marks.append((place, time.perf_counter()))

    def take(self) -> list[float]:
        """Seconds of each dispatch and combine since the last call, in the order they ran, which all ranks share.

        On CUDA the device must be idle.
        """
        marks, self._marks = self._marks, []
        return [
            start.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - start
            for (first, start), (second, end) in itertools.pairwise(marks)
            if {first, second} in ({_ENTER, _ROWS}, {_RESULTS, _EXIT})
        ]


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, clock: ExchangeClock, place: int) -> torch.Tensor:
        ctx.clock, ctx.place = clock, place
        clock.note(place)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.note(ctx.place)
        return grad, None, None


def register_timed(name: str, clock: ExchangeClock) -> str:
    """Register the implementation `name` again, with marks around its exchange; returns the new name."""
    base: type[EPImplementation] = EPImplementationInterface()[name]

    class Timed(base):
        def __init__(self, experts, ep_mesh, tp_mesh):
            super().__init__(experts, ep_mesh, tp_mesh)
            if isinstance(self, EpPluginExpertParallel):  # its _run calls experts_forward for some experts only
                return
            forward = self.experts_forward

            def marked(rows, expert_ids, weights):
                rows = _Mark.apply(rows, clock, _ROWS)
                with part_range(EXPERTS):
                    results = forward(rows, expert_ids, weights)
                return _Mark.apply(results, clock, _RESULTS)

            self.experts_forward = marked

        def _run(self, out):
            out = out._replace(tokens=_Mark.apply(out.tokens, clock, _ROWS))
            with part_range(EXPERTS):
                results = super()._run(out)
            return _Mark.apply(results, clock, _RESULTS)

        def __call__(self, hidden_states, top_k_index, top_k_weights):
            hidden_states = _Mark.apply(hidden_states, clock, _ENTER)
            with part_range(EXCHANGE):
                output = super().__call__(hidden_states, top_k_index, top_k_weights)
            clock.note(_EXIT)
            if output.requires_grad:
                # Not a mark, since FSDP2 does not allow views as outputs. Not a hook of the tensor either: FSDP2's own,
                # which gathers the experts' parameters, would run after it.
                output.grad_fn.register_prehook(lambda grads: clock.note(_EXIT))
            return output

    EPImplementationInterface.register(f"timed {name}", Timed)
    return f"timed {name}"
