"""Lowerings for torch.compile that keep our operators in the generated code, in the order of the program.

Inductor leaves out an operator whose results nobody reads. It counts results without elements as unread, such as the
sums of a rank without tokens. But the peers of that rank would wait for it. Inductor also reorders exchanges that do
not depend on each other. It goes by the sizes of their tensors, which differ between ranks.

An operator that PyTorch drops from the graph before inductor lowers it does not run. Inside a nested graph, such as a
branch of `torch.cond`, the order is kept among the operators of that graph.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import torch

_LOWERING = "torch._inductor.lowering"
_LATEST = "ep_plugin_latest"  # an attribute of a graph: the name of the latest of our operations in it
_lock = threading.Lock()
_kept: set[torch._ops.OpOverload] = set()


def keep(operator: torch._ops.OpOverload) -> None:
    """Registers how inductor lowers `operator`. Has no effect before inductor is imported, so every trace calls it."""
    with _lock:
        if _LOWERING in sys.modules and operator not in _kept:
            _register(operator)
            _kept.add(operator)


def _register(operator: torch._ops.OpOverload) -> None:
    lowering = importlib.import_module(_LOWERING)  # waits where another thread is importing it
    lowering.make_fallback(operator, layout_constraint=lowering.constrain_to_fake_tensors, warn=False)
    generate, virtualized = lowering.lowerings[operator], importlib.import_module("torch._inductor.virtualized")

    def lower(*inputs: Any) -> Any:
        graph = virtualized.V.graph
        number = len(graph.operations)
        results = generate(*inputs)
        (kernel,) = (made for made in graph.operations[number:] if getattr(made, "op_overload", None) is operator)
        kernel.has_side_effects = lambda: True
        earlier = getattr(graph, _LATEST, None)
        if earlier is not None:
            graph.additional_buffer_deps[kernel.get_operation_name()].add(earlier)
        setattr(graph, _LATEST, kernel.get_name())
        return results

    lowering.lowerings[operator] = lower
