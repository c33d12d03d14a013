"""What high-throughput dispatch and combine share: the halves that run in csrc/control."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.errors import EpPluginError
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.moe.in_flight import Operation, Tensors


class HighThroughputOperation(Operation):
    """One operation on one node. `check` makes the object of C that runs it."""

    _engine: HighThroughputEngine
    _operation: Any  # _C.Dispatch or _C.Combine

    @abstractmethod
    def recorded(self, plan: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """Adds the operation to the statistics, on the caller's stream. plan, topk_ids: its handle's tensors."""

    def begin(self, operation: _C.Dispatch | _C.Combine) -> None:
        """Takes the object that `start` starts. Raises EpPluginError if C cannot run it though its check has passed."""
        if not operation.is_known:
            raise EpPluginError(f"{self._engine.name}: {self.name}: expected tensors with memory, got others")
        operation.shares_memory = self.shares_memory
        self._operation = operation

    def start(self) -> None:
        self._operation.start()

    def finish(self) -> Tensors:
        self._operation.finish(self.recorded)
        return self._results()

    def whole(self) -> Tensors:
        self._operation.whole(self.recorded)
        return self._results()

    def _results(self) -> Tensors:
        self._engine.check()
        results: Tensors = self._operation.results()
        return results

    def tensors(self) -> Tensors:
        found: Tensors = self._operation.tensors()
        return found
