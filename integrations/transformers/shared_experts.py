"""Shared experts that run while their block's tokens are on the way to the routed ones.

    model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V3", distributed_config=config)
    overlap_shared_experts(model)

A block of transformers' runs its routed experts and then, on its own input, the shared ones: on GPUs that computation
stands still while tokens travel and while the host waits to hear how many come. Here it begins as soon as the dispatch
has; the block's own call gets what it has made.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

import torch

from ep_plugin import NotSupported
from ep_plugin.integrations.transformers.expert_parallel import exchange_of

_NAMES = ("shared_experts", "shared_expert")


class Made(NamedTuple):
    """What the shared experts have made of a block's input, as it was then."""

    given: torch.Tensor
    version: int
    output: torch.Tensor


class SharedAhead:
    """The shared experts of one block. `forward` stands in place of theirs."""

    def __init__(self, block: torch.nn.Module, shared: torch.nn.Module) -> None:
        self.kind = type(block).__name__
        self.shared = shared
        self.run = shared.forward
        self.given: torch.Tensor | None = None  # the input of the block that is running
        self.made: Made | None = None
        self.ran = False  # the block has called the shared experts itself

    def enter(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block's hook, before its forward."""
        self.given = args[0] if args else kwargs.get("hidden_states")

    def leave(self, block: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        """A block's hook, after its forward, also one that has failed or that a recomputation has left early."""
        if output is not None and self.made is not None:
            warnings.warn(
                f"overlap_shared_experts: expected {self.kind} to run its shared experts, got a forward without them: "
                "they have run ahead for nothing",
                stacklevel=2,
            )
        self.given, self.made, self.ran = None, None, False

    def check(self) -> None:
        """NotSupported where they cannot run ahead; called before tokens are sent."""
        shared = self.shared
        if self.ran:
            raise self._unfit("to run its shared experts after the routed ones, got them before")
        if shared._forward_pre_hooks or shared._backward_hooks or shared._backward_pre_hooks:
            raise self._unfit("to have shared experts with hooks after their forward alone, got others")

    def start(self) -> None:
        """Runs the shared experts on the block's input; called while its tokens travel.

        Their forward alone: their hooks run when the block calls them.
        """
        given = self.given
        if given is not None:  # or the routed experts run outside of their block
            self.made = Made(given, given._version, self.run(given))

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.ran = True
        made, self.made = self.made, None
        if made is None:
            return self.run(hidden_states, *args, **kwargs)
        if made.given is not hidden_states or made.version != hidden_states._version or args or kwargs:
            raise self._unfit(
                "to run its shared experts on the block's own input and nothing else, got other arguments"
            )
        return made.output

    def _unfit(self, expected: str) -> NotSupported:
        return NotSupported(f"overlap_shared_experts: expected {self.kind} {expected}; leave such a model without it")


def overlap_shared_experts(model: torch.nn.Module) -> int:
    """Lets each block's shared experts run while its tokens are dispatched; returns how many blocks have some.

    Once, after the model is loaded, and on every rank or none. Outputs and gradients are the same to the bit, but for
    experts that draw random numbers, which they do in another order. Raises ValueError where no block has both shared
    experts and routed ones that ep_plugin serves, NotSupported where shared experts take more than the block's input; a
    block that does not run them after the routed ones, on that input alone, raises it in its first forward.
    """
    found = 0
    for block in model.modules():
        exchange = exchange_of(block._modules.get("experts"))
        shared = next((module for name in _NAMES if (module := block._modules.get(name)) is not None), None)
        if exchange is None or shared is None:
            continue
        found += 1
        if exchange.meanwhile is None:
            ahead = SharedAhead(block, shared)
            if _required(shared) > 1:
                raise ahead._unfit("to give its shared experts nothing but its input, got ones that require more")
            block.register_forward_pre_hook(ahead.enter, with_kwargs=True)
            block.register_forward_hook(ahead.leave, always_call=True)
            shared.forward = ahead.forward  # type: ignore[method-assign]
            exchange.meanwhile = ahead
    if not found:
        raise ValueError(
            "model: expected blocks with shared experts, and routed ones whose exchange is ep_plugin's, found none in "
            f"{type(model).__name__}"
        )
    return found


def _required(shared: torch.nn.Module) -> int:
    """Arguments without which it cannot be called."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(shared.forward).parameters.values()
    return sum(parameter.default is parameter.empty and parameter.kind not in kinds for parameter in parameters)
