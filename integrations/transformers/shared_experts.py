"""Shared experts that run while their block's tokens are on the way to the routed ones.

    model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V3", distributed_config=config)
    overlap_shared_experts(model)

A block of transformers' runs its routed experts and then, on its own input, the shared ones: on GPUs that computation
stands still while tokens travel and while the host waits to hear how many come. Here it begins as soon as the dispatch
has; the block's own call gets what it has made.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import NotSupported
from ep_plugin.integrations.transformers.expert_parallel import exchange_of

_NAMES = ("shared_experts", "shared_expert")


class SharedAhead:
    """The shared experts of one block. `forward` stands in place of theirs."""

    def __init__(self, block: torch.nn.Module, shared: torch.nn.Module) -> None:
        self.kind = type(block).__name__
        self.shared = shared
        self.run = shared.forward
        self.given: torch.Tensor | None = None  # the input of the block that is running
        self.made: torch.Tensor | None = None  # of it
        self.ran = False  # the block has called the shared experts itself
        self.ahead = False  # they are being run ahead

    def enter(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block's hook, before its forward."""
        self.given = args[0] if args else kwargs.get("hidden_states")
        self.made, self.ran = None, False

    def leave(self, block: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        """A block's hook, after its forward, also one that has failed or that a recomputation has left early."""
        self.given = self.made = None

    def start(self) -> None:
        """Runs the shared experts on the block's input; called while its tokens travel."""
        if self.ran:
            raise NotSupported(
                f"overlap_shared_experts: expected {self.kind} to run its shared experts after the routed ones, got "
                "them before, so that there is nothing to overlap; leave such a model without it"
            )
        if self.given is None:  # the routed experts run outside of their block
            return
        self.ahead = True
        try:
            self.made = self.shared(self.given)
        finally:
            self.ahead = False

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.ahead:
            return self.run(hidden_states)
        self.ran = True
        given, made, self.made = self.given, self.made, None
        if made is None:
            return self.run(hidden_states, *args, **kwargs)
        if given is not hidden_states or args or kwargs:
            raise NotSupported(
                f"overlap_shared_experts: expected {self.kind} to run its shared experts on the block's own input and "
                "nothing else, got other arguments; leave such a model without it"
            )
        return made


def overlap_shared_experts(model: torch.nn.Module) -> int:
    """Lets each block's shared experts run while its tokens are dispatched; returns how many blocks have some.

    Once, after the model is loaded, and on every rank or none. Outputs and gradients are the same to the bit. Raises
    ValueError where no block has both shared experts and routed ones that ep_plugin serves; a block that does not run
    the shared ones after the routed, on its own input alone, raises NotSupported in its first forward.
    """
    found = 0
    for block in model.modules():
        exchange = exchange_of(getattr(block, "experts", None))
        shared = next((module for name in _NAMES if (module := getattr(block, name, None)) is not None), None)
        if exchange is None or shared is None:
            continue
        found += 1
        if exchange.meanwhile is None:
            ahead = SharedAhead(block, shared)
            block.register_forward_pre_hook(ahead.enter, with_kwargs=True)
            block.register_forward_hook(ahead.leave, always_call=True)
            shared.forward = ahead.forward  # type: ignore[method-assign]
            exchange.meanwhile = ahead.start
    if not found:
        raise ValueError(
            "model: expected blocks with shared experts, and routed ones whose exchange is ep_plugin's, found none in "
            f"{type(model).__name__}"
        )
    return found
