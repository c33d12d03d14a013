"""Runs shared experts while their block's tokens are dispatched to the routed ones.

    model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V3", distributed_config=config)
    overlap_shared_experts(model)

A block of transformers runs its routed experts, and then its shared experts on the block's input. So a GPU is idle
while tokens are sent and while the host waits for their number. With this module the shared experts start right after
the dispatch. The block's own call of them returns the early result.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch

from ep_plugin import NotSupported
from ep_plugin.integrations.transformers.expert_parallel import exchanges

_NAMES = ("shared_experts", "shared_expert")


class SharedAhead:
    """The shared experts of one block. `SharedAhead.forward` replaces their forward."""

    def __init__(self, block: torch.nn.Module, shared: torch.nn.Module) -> None:
        self.kind = type(block).__name__
        self.shared = shared
        self.run = shared.forward
        self.given: torch.Tensor | None = None  # the input of the block that is running
        # The input of the shared experts, its version, and their output for it.
        self.made: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self.ran = False  # whether the block has called the shared experts

    def enter(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs as the block's hook before its forward."""
        self.given = args[0] if args else kwargs.get("hidden_states")

    def leave(self, block: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Runs as the block's hook after its forward, also if the forward failed or a recomputation left it early."""
        if output is not None and self.made is not None:
            warnings.warn(
                f"overlap_shared_experts: expected {self.kind} to run its shared experts, got a forward without them; "
                "their early result is unused",
                stacklevel=2,
            )
        self.given, self.made, self.ran = None, None, False

    def check(self) -> None:
        """Raises NotSupported if the shared experts cannot run early. Called before tokens are sent."""
        shared = self.shared
        if self.ran:
            raise self._unfit("to run its shared experts after the routed ones, got them before")
        if shared._forward_pre_hooks or shared._backward_hooks or shared._backward_pre_hooks:
            raise self._unfit("to have shared experts with hooks after their forward alone, got others")

    def start(self) -> None:
        """Runs the forward of the shared experts on the block's input. Their hooks run when the block calls them."""
        given = self.given
        if given is not None:  # None: the routed experts run outside of their block
            self.made = given, given._version, self.run(given)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.ran = True
        made, self.made = self.made, None
        if made is None:
            return self.run(hidden_states, *args, **kwargs)
        given, version, output = made
        if given is not hidden_states or version != hidden_states._version or args or kwargs:
            raise self._unfit("to run its shared experts on the block's own input alone, got other arguments")
        return output

    def _unfit(self, expected: str) -> NotSupported:
        return NotSupported(f"overlap_shared_experts: expected {self.kind} {expected}; leave such a model without it")


def overlap_shared_experts(model: torch.nn.Module) -> int:
    """Makes each block's shared experts run while its tokens are dispatched.

    Call it once, after the model is loaded, on every rank or on none. Outputs and gradients are bit-identical, unless
    experts draw random numbers: the order of draws changes.

    Returns:
        The number of blocks with shared experts.

    Raises:
        ValueError: no block has both shared experts and routed experts that ep_plugin serves.
        NotSupported: shared experts take more than the block's input. A block that runs them before the routed experts,
            or on another input, raises it in its first forward.
    """
    found = 0
    for block in model.modules():
        exchange = exchanges.get(id(block._modules.get("experts")))
        shared = next((module for name in _NAMES if (module := block._modules.get(name)) is not None), None)
        if exchange is None or shared is None:
            continue
        found += 1
        if exchange.meanwhile is None:
            ahead = SharedAhead(block, shared)
            try:
                inspect.signature(shared.forward).bind(None)
            except TypeError:
                raise ahead._unfit("to give its shared experts its input alone, got ones that require more") from None
            block.register_forward_pre_hook(ahead.enter, with_kwargs=True)
            block.register_forward_hook(ahead.leave, always_call=True)
            shared.forward = ahead.forward
            exchange.meanwhile = ahead
    if not found:
        raise ValueError(
            "model: expected blocks with shared experts, and routed ones whose exchange is ep_plugin's, found none in "
            f"{type(model).__name__}"
        )
    return found
