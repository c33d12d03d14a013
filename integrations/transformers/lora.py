"""LoRA on experts that are divided among ranks: PEFT's ``target_parameters``.

PEFT parametrizes an expert parameter while the module runs, so that the parameter reads as ``W + scaling * B @ A``.
That fails for experts that transformers has divided, for two reasons. ``torch.baddbmm`` refuses W, a DTensor, together
with A and B, which are not. And FSDP2 gathers W in a hook before the module's forward, under the parameter's own name,
where a parametrization that was made earlier does not look.

Here the sum is made after that hook, of plain tensors, for the experts that this rank holds.

Each rank has the adapters of all experts, as PEFT made them, and zero gradients for experts that other ranks hold. So
the average over all ranks is the gradient of the mean loss, as for adapters elsewhere in the model, and a checkpoint
of the adapters is PEFT's own.

Shapes: E experts, E_l of them on this rank.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from ep_plugin import NotSupported
from ep_plugin.integrations import hooks

_MODULE = "peft.tuners.lora.layer"
_tp_sizes: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # by experts


def serve_adapters(experts: torch.nn.Module, tp_size: int) -> None:
    """Makes PEFT's adapters work on divided experts. tp_size: the number of ranks that share a batch of `experts`."""
    _tp_sizes[experts] = tp_size
    _wait_for_peft()


@functools.cache
def _wait_for_peft() -> None:
    hooks.after_import(_MODULE, _replace)


def _replace() -> None:
    """Replaces PEFT's method, which is private. A PEFT without it, or without what is used here, stays as it is."""
    wrapper_type: Any = getattr(sys.modules[_MODULE], "ParamWrapper", None)
    if not all(hasattr(wrapper_type, name) for name in ("_activate_lora", "get_param", "get_delta_factors")):
        return
    stock = wrapper_type._activate_lora

    @contextlib.contextmanager
    def _activate_lora(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
        is_divided = isinstance(wrapper.get_param(), DTensor)
        with (_adapted if is_divided else stock)(wrapper, active_adapters):
            yield

    wrapper_type._activate_lora = _activate_lora


@contextlib.contextmanager
def _adapted(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """Makes the experts of a ParamWrapper, if they run in this context, run with the adapted parameter."""
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    parameters = experts._parameters
    if (tp_size := _tp_sizes.get(experts, 1)) > 1:  # the average of gradients would be too small by this factor
        raise NotSupported(f"LoRA on experts: expected tp_size 1, got {tp_size}")
    factors = [wrapper.get_delta_factors(adapter) for adapter in active_adapters if adapter in wrapper.lora_A]
    given = adapted = None

    def adapt(*unused: Any) -> None:  # after FSDP2's hook
        nonlocal given, adapted
        given = parameters[name]
        parameters[name] = adapted = _add(given, factors)

    with experts.register_forward_pre_hook(adapt):
        try:
            yield
        finally:
            if adapted is not None and parameters[name] is adapted:  # FSDP2 may have put its shard there
                parameters[name] = given


def _add(parameter: torch.Tensor, factors: list[tuple[torch.Tensor, torch.Tensor, float]]) -> torch.Tensor:
    """Returns the adapted parameter of the experts that this rank holds, ``[E_l, ...]``.

    Args:
        parameter: ``[E, ...]``, sharded over experts, or not sharded.
        factors: for each adapter, matrices ``[E, ...]`` and a number: their product is added to the parameter.
    """
    if parameter.ndim != 3 or (isinstance(parameter, DTensor) and parameter.placements != (Shard(0),)):
        raise NotSupported(
            "LoRA on experts: expected a parameter of three dimensions, sharded over experts, got the shape "
            f"{tuple(parameter.shape)} and placements {getattr(parameter, 'placements', ())}"
        )
    local, first = parameter, 0
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        first = parameter.device_mesh.get_local_rank() * len(local)
    with torch.autocast(local.device.type, enabled=False):
        for left, right, scaling in factors:
            left, right = (factor[first : first + len(local)].to(local.dtype) for factor in (left, right))
            local = torch.baddbmm(local, left, right, alpha=scaling)
    return local
