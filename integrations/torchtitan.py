"""torchtitan: dispatch and combine of its MoE models through MoECommunicator.

    --override.imports ep_plugin.integrations.torchtitan.token_dispatcher

Add this option to the training command, or set EP_PLUGIN=torchtitan in the environment. Both replace the default
("standard") communication backend. It needs torchtitan 0.3.0, or a newer version whose dispatchers have the same
signatures. With any other version the import raises NotSupported.

Rows are FLAT, for torchtitan's grouped GEMMs, and combine applies the scores. Shapes, in torchtitan's letters: T tokens
here, D hidden size, K experts per token, E experts in all, e on this rank, R rows received.
"""

from __future__ import annotations

# ruff: noqa: E402  an old torchtitan is refused before names that it lacks are imported
import itertools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torchtitan

from ep_plugin import MoECommunicator
from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks

hooks.check_version("torchtitan", getattr(torchtitan, "__version__", None))

from torchtitan.config import override
from torchtitan.models.common import token_dispatcher as stock

from ep_plugin.integrations.communicators import communicator_or_none, in_layer
from ep_plugin.ranges import opener

__all__ = ["EpPluginPaddedTokenDispatcher", "EpPluginTokenDispatcher", "disable", "enable", "token_dispatcher"]

_THEIRS, _THEIR_PADDED = stock.AllToAllTokenDispatcher, stock.TorchAOTokenDispatcher
_numbers = itertools.count()  # numbers MoE layers, since a dispatcher cannot find out which layer of the model it is in
_MOST_HIDDEN = 1 << 24  # a limit, not a size: memory is allocated for the rows that are sent

_METHODS = (
    "dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)",
    "combine(self, routed_output_RD, metadata, x_TD)",
    "wire_meshes(self, ep_mesh)",
)
_PLAIN, _PADDED = "Config(num_experts, top_k)", "Config(num_experts, top_k, pad_multiple)"
_CLASSES = {
    "LocalTokenDispatcher": _PLAIN,
    "BaseEPTokenDispatcher": _PLAIN,
    "AllToAllTokenDispatcher": _PLAIN,
    "TorchAOTokenDispatcher": _PADDED,
}
hooks.check_signatures(
    "torchtitan",
    stock,
    [f"{name}.{member}" for name, config in _CLASSES.items() for member in (*_METHODS, config)],
    advice=" and ep_plugin out of the overrides",
)


class _NoGraphTrainer(NotSupported, AttributeError):
    """A refusal that is also an AttributeError, so that hasattr() returns False."""


class _Refused:
    """A class attribute that torchtitan's experimental graph_trainer reads. Our dispatcher does not have it."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise _NoGraphTrainer(
            "graph_trainer: expected AllToAllTokenDispatcher, whose steps it marks for its passes, got "
            f"{owner.__name__}; leave torchtitan out of EP_PLUGIN and ep_plugin out of the overrides"
        )


class EpPluginTokenDispatcher(stock.BaseEPTokenDispatcher):
    """torchtitan's token dispatcher over MoECommunicator.

    Each layer has a dispatcher. All layers of a group share a communicator.

    `wire_meshes` makes the communicator, collectively, and the dispatcher stores it. torchtitan compiles whole blocks,
    inside which nothing can be created or looked up.
    """

    _token_count_exchange = _Refused()

    @dataclass(kw_only=True, slots=True)
    class Config(stock.BaseEPTokenDispatcher.Config):
        """The dispatcher's configuration. pad_multiple: each expert's rows are padded to a multiple of it, for
        quantised grouped GEMMs."""

        pad_multiple: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pad_multiple = config.pad_multiple or 1
        self.communicator: MoECommunicator | None = None
        self._range, self._layer = opener(), f"torchtitan MoE layer {next(_numbers)}"
        self._own: Any = None  # torchtitan's dispatcher, if it serves in our place (fallback.py)

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Sets the mesh of expert parallelism. Without one, tokens stay on this rank."""
        self.ep_mesh, self.communicator = ep_mesh, None
        if ep_mesh is not None:
            self.communicator = communicator_or_none(
                "torchtitan",
                ep_mesh.get_group(),
                num_experts=self.num_experts,
                hidden_size=_MOST_HIDDEN,
                topk=self.top_k,
                expert_alignment=self.pad_multiple,
                device=ep_mesh.device_type,
            )
            if self.communicator is None:
                self._own = self._torchtitans()
                self._own.wire_meshes(ep_mesh=ep_mesh)
        elif self.pad_multiple > 1:
            raise NotSupported(
                "expert_parallel_degree: expected more than 1 for quantised experts with ep_plugin's dispatcher, got "
                "1; leave the override out"
            )

    def _torchtitans(self) -> Any:
        """Makes torchtitan's own dispatcher of the same configuration."""
        given: dict[str, Any] = {"num_experts": self.num_experts, "top_k": self.top_k}
        if self.pad_multiple > 1:
            return _THEIR_PADDED(_THEIR_PADDED.Config(**given, pad_multiple=self.pad_multiple))
        return _THEIRS(_THEIRS.Config(**given))

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, object]:
        """Dispatches tokens. Returns rows ``[R, D]`` grouped by local expert, the number of rows of each expert with
        padding ``[e]``, and combine's metadata."""
        if self._own is not None:
            if not torch.compiler.is_compiling():  # torch would compile again whenever a count has changed
                hooks.left("torchtitan")
            return self._own.dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        if self.communicator is None:
            return stock.LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        x, topk_ids = x_TD.contiguous(), topk_expert_ids_TK.contiguous()
        out, handle = in_layer(self._layer, self._range, self.communicator.dispatch, x, topk_ids, topk_scores_TK)
        counts = out.num_tokens_per_expert if self.pad_multiple == 1 else out.expert_offsets.diff()
        return out.tokens, counts, (handle, out.weights)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """Multiplies the experts' rows by their scores and sums them per token. Returns ``[T, D]``."""
        if self._own is not None:
            return self._own.combine(routed_output_RD, metadata, x_TD)
        if self.communicator is None:
            return stock.LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        rows, (handle, scores_R) = routed_output_RD.contiguous(), metadata
        return in_layer(self._layer, self._range, self.communicator.combine, rows, handle, scores_R)


class EpPluginPaddedTokenDispatcher(EpPluginTokenDispatcher):
    """The dispatcher for quantised experts. It pads each expert's group of rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(EpPluginTokenDispatcher.Config):
        """The dispatcher's configuration. pad_multiple: as in EpPluginTokenDispatcher.Config, but required."""

        pad_multiple: int | None


@override(target=stock.AllToAllTokenDispatcher.Config, description="ep_plugin's dispatch and combine")
def token_dispatcher(config: stock.LocalTokenDispatcher.Config) -> EpPluginTokenDispatcher.Config:
    """Returns our dispatcher's configuration in place of the all-to-all dispatcher's, including padding for FP8. This
    is the function that torchtitan's override calls."""
    return EpPluginTokenDispatcher.Config(
        num_experts=config.num_experts, top_k=config.top_k, pad_multiple=getattr(config, "pad_multiple", None)
    )


def enable() -> None:
    """Makes models that are configured from now on use our dispatchers in place of the all-to-all dispatchers.

    Call it right after torchtitan's module of dispatchers was executed, before other modules import names from it.
    """
    hooks.replace("torchtitan", stock, "AllToAllTokenDispatcher", EpPluginTokenDispatcher)
    hooks.replace("torchtitan", stock, "TorchAOTokenDispatcher", EpPluginPaddedTokenDispatcher)


def disable() -> None:
    """Makes models that are configured from now on use torchtitan's own dispatchers again. The override stays."""
    hooks.restore("torchtitan")
    hooks.record("torchtitan", "ready", _REGISTERED)


_REGISTERED = f"the override {__name__}.token_dispatcher is registered"
hooks.record("torchtitan", "ready", _REGISTERED)
