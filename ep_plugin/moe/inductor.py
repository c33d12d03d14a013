"""Our operators in the code that inductor generates for torch.compile: each runs, and in the order of the program.

Inductor leaves out an operator whose results nobody reads. It takes a result without elements for such, like the sums
of a rank without tokens, for which the peers of that rank would wait. It also reorders exchanges that do not depend on
each other, by the sizes of their tensors, which differ between ranks.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

_LOWERING = "torch._inductor.lowering"
_LATEST = "ep_plugin_latest"  # an attribute of a graph: the name of its latest operation of ours


def keep(operator: torch._ops.OpOverload) -> None:
    """Sees to it, once inductor has been imported. It is called while a compiler traces `operator`."""
    if _LOWERING not in sys.modules:
        return
    lowering = importlib.import_module(_LOWERING)  # waits where another thread is importing it
    if operator in lowering.lowerings:
        return
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
            graph.additional_star_deps[kernel.get_operation_name()].add(earlier)
        setattr(graph, _LATEST, kernel.get_name())
        return results

    lowering.lowerings[operator] = lower
