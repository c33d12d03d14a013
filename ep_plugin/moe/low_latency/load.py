"""Load statistics of low-latency communicators, from the counts in their dispatches' plans.

Shapes: R ranks, E_l local experts.
"""

from __future__ import annotations

import torch

from ep_plugin import _C
from ep_plugin.moe.statistics import LoadStats, Sums, current_layer
from ep_plugin.runtime.group import GroupEngine

_DISPATCH, _CACHED_DISPATCH, _COMBINE = "dispatch", "cached dispatch", "combine"


class LowLatencyLoad:
    """Counts the tokens of plans, and the waits that kernels measure."""

    def __init__(self, engine: GroupEngine, local_experts: int, control: _C.LowLatency) -> None:
        """control: counts what has come from other nodes."""
        self._rank, self._size, self._local_experts = engine.rank, engine.size, local_experts
        self._rails, self._control = engine.rails, control
        self._sums = Sums(engine.name, engine.streams, engine.kernels)
        self._waited = torch.zeros(engine.size, dtype=torch.int64, device=engine.device)
        self._rail_bytes_before = (0, 0)  # at the last reset

    # C calls these three while load is recorded.

    def started(self) -> tuple[torch.Tensor, str | None]:
        """Returns int64 ``[R]``, to which a kernel adds the nanoseconds that it waits for each rank, and the layer that
        starts the operation."""
        return self._waited, current_layer()

    def dispatched(self, plan: torch.Tensor | None, layer: str | None) -> None:
        """Adds a dispatch that `layer` has started.

        plan: begins with the ranges of LlPlanLayout in csrc/common/low_latency.h, contiguous; None: the dispatch has
        used an earlier routing.
        """
        if plan is None:
            self._sums.counts[_CACHED_DISPATCH] += 1
        else:
            ranges = plan.view(torch.int32).flatten()[: 2 * self._local_experts * self._size]
            self._sums.add((_DISPATCH, layer), ranges.unsqueeze(0))

    def combined(self) -> None:
        """Adds a combine."""
        self._sums.counts[_COMBINE] += 1

    def read(self) -> LoadStats:
        """Returns the load. Waits for the operations that are enqueued."""
        counts, shape = self._sums.counts, (self._local_experts, self._size, 2)  # a range is a count and a first row
        sums, waited = self._sums.read(lambda: self._waited)
        found = {layer: ranges.view(shape)[:, :, 0].t() for (_, layer), ranges in sums.items()}
        tokens = torch.zeros(self._size, self._local_experts, dtype=torch.int64, device="cpu")
        return LoadStats(
            rank=self._rank,
            num_experts=self._size * self._local_experts,
            dispatches=sum(counts[_DISPATCH, layer] for layer in found),
            cached_dispatches=counts[_CACHED_DISPATCH],
            combines=counts[_COMBINE],
            tokens=sum(found.values(), tokens),
            layers={layer: of_layer.contiguous() for layer, of_layer in found.items() if layer is not None},
            dropped_ids=None,
            dropped_rows=0,
            link_bytes_sent=None,
            link_bytes_received=None,
            rail_bytes_sent=self._rails.bytes_sent - self._rail_bytes_before[0],
            rail_bytes_received=self._control.leg_bytes_received - self._rail_bytes_before[1],
            waited_ns=waited,
        )

    def reset(self) -> None:
        """Starts at zero again. Waits for nothing."""
        self._sums.reset(self._waited.zero_)
        self._rail_bytes_before = self._rails.bytes_sent, self._control.leg_bytes_received
