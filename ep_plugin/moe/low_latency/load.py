"""Load statistics of low-latency communicators, from the counts in their dispatches' plans.

Shapes: R ranks, E_l local experts.
"""

from __future__ import annotations

import torch

from ep_plugin.moe.statistics import LoadStats, Sums
from ep_plugin.runtime.group import GroupEngine

_DISPATCH, _CACHED_DISPATCH, _COMBINE = "dispatch", "cached dispatch", "combine"


class LowLatencyLoad:
    """Counts the tokens of plans, and the waits that kernels measure."""

    def __init__(self, engine: GroupEngine, local_experts: int) -> None:
        self._rank, self._size, self._local_experts = engine.rank, engine.size, local_experts
        self._sums = Sums(engine.name, engine.streams, engine.kernels)
        self._waited = torch.zeros(engine.size, dtype=torch.int64, device=engine.device)

    def wait_cost(self) -> torch.Tensor | None:
        """Returns int64 ``[R]``, to which kernels add the nanoseconds that they wait for each rank. None if nothing is
        recorded."""
        return self._waited if Sums.recording else None

    def dispatched(self, plan: torch.Tensor, is_fresh: bool, layer: str | None) -> None:
        """Adds a dispatch. plan: int32, as LlPlanLayout of csrc/common/low_latency.h. layer: the layer that has started
        it."""
        if not Sums.recording:
            return
        if is_fresh:
            self._sums.add((_DISPATCH, layer), plan[: 2 * self._local_experts * self._size].unsqueeze(0))
        else:
            self._sums.counts[_CACHED_DISPATCH] += 1

    def combined(self) -> None:
        if Sums.recording:
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
            rail_bytes_sent=0,
            rail_bytes_received=0,
            waited_ns=waited,
        )

    def reset(self) -> None:
        """Starts at zero again. Waits for nothing."""
        self._sums.reset(self._waited.zero_)
