"""Reduce-scatter inside a node on GPUs: one kernel of few CTAs, which takes inputs as they lie and maps none of them.

Shards travel through slots that every rank has for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ep_plugin import _C
from ep_plugin.collectives.backends.cuda import MOST_KEPT, CudaNode, StreamLanes, sum_ctas
from ep_plugin.collectives.chunks import addresses_of

if TYPE_CHECKING:
    from ep_plugin.collectives.engine import CollectiveEngine


class CudaSumNode(CudaNode):
    def __init__(self, engine: CollectiveEngine, lanes: StreamLanes) -> None:
        super().__init__(engine, lanes)
        self._kept: dict[tuple[int, int, float], Any] = {}

    def scatter(self, out: torch.Tensor, shards: Sequence[torch.Tensor], element: int, scale: float) -> None:
        """out = scale * the sum over the ranks of their shards for this one."""
        nbytes = out.numel()
        if not self._lanes.capturing():  # a graph's calls are no host's
            self._calls.compare(_C.Step.REDUCE_SCATTER, nbytes, element, 0)
        if nbytes == 0:
            return
        if self._is_small(nbytes):
            return self._exchange_words(shards, [out] * self._engine.node_size, element, scale)
        args = self._args_of(nbytes, element, scale)
        args.set_inputs(addresses_of(shards))
        args.output = out.data_ptr()
        args.stream = self._lanes.enter()
        self._engine.kernels.reduce_scatter(args)

    def _args_of(self, nbytes: int, element: int, scale: float) -> Any:
        """A kernel's arguments but for what changes from call to call."""
        key = nbytes, element, scale
        args = self._kept.get(key)
        if args is None:
            slots = self._workspace("slots", _C.lane_slots_bytes(self._engine.node_size, self._engine.sum_sms))
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            args = self._kept[key] = _C.ReduceScatterArgs(
                comm=self._engine.comm,
                bytes=nbytes,
                scale=scale,
                element=element,
                num_ctas=sum_ctas(nbytes, self._engine.sum_sms),
            )
            args.set_slots(list(slots))
        return args
