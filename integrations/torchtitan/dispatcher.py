"""torchtitan's token dispatcher over MoECommunicator: FLAT rows for its grouped GEMMs, scores applied in combine.

Shapes, in torchtitan's letters: T tokens here, D hidden size, K experts per token, E experts in all, e on this rank,
R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from ep_plugin import DispatchHandle, MoECommunicator
from ep_plugin.errors import NotSupported

_MOST_HIDDEN = 1 << 24  # a limit and not a size: what is allocated follows from the rows that are sent


@dataclass(frozen=True, kw_only=True)
class DispatchMetadata:
    """What combine needs of the dispatch: its routing, and the scores float32 ``[R]`` that came with the rows."""

    handle: DispatchHandle
    scores_R: torch.Tensor


class _NoGraphTrainer(NotSupported, AttributeError):
    """Also for hasattr()."""


class _Step:
    """One of the all-to-all's own steps, which torchtitan's experimental graph_trainer marks for its passes."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise _NoGraphTrainer(
            "graph_trainer: expected AllToAllTokenDispatcher, whose steps it marks for its passes, got "
            f"{owner.__name__}; leave torchtitan out of EP_PLUGIN and ep_plugin out of the overrides"
        )


class EpPluginTokenDispatcher(BaseEPTokenDispatcher):
    """One for each layer; those of a group share a communicator, made when the mesh is known, collectively.

    It is made then and held, since torchtitan compiles whole blocks, where nothing can be made or looked up.
    """

    _token_count_exchange = _Step()

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """pad_multiple: rows that each expert's group is rounded up to, for quantised grouped GEMMs."""

        pad_multiple: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pad_multiple = config.pad_multiple or 1
        self.communicator: MoECommunicator | None = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Installs the mesh of expert parallelism; without one, tokens stay here."""
        if ep_mesh is None and self.pad_multiple > 1:
            raise NotSupported(
                "expert_parallel_degree: expected more than 1 for quantised experts with ep_plugin's dispatcher, got "
                "1; leave the override out"
            )
        self.ep_mesh = ep_mesh
        self.communicator = None
        if ep_mesh is not None:
            self.communicator = MoECommunicator.shared(
                ep_mesh.get_group(),
                num_experts=self.num_experts,
                hidden_size=_MOST_HIDDEN,
                topk=self.top_k,
                expert_alignment=self.pad_multiple,
                device=ep_mesh.device_type,
            )

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, object]:
        """Rows ``[R, D]`` grouped by local expert, rows of each ``[e]`` (padding included), and what combine needs."""
        if self.communicator is None:
            return LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        out, handle = self.communicator.dispatch(x_TD.contiguous(), topk_expert_ids_TK.contiguous(), topk_scores_TK)
        counts = out.expert_offsets.diff()
        assert out.weights is not None
        return out.tokens, counts, DispatchMetadata(handle=handle, scores_R=out.weights)

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: Any,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        """The experts' rows times their scores, summed per token: ``[T, D]``."""
        if self.communicator is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        return self.communicator.combine(routed_output_RD.contiguous(), metadata.handle, weights=metadata.scores_R)


class EpPluginPaddedTokenDispatcher(EpPluginTokenDispatcher):
    """What quantised experts ask for: the same, with groups that are rounded up."""

    @dataclass(kw_only=True, slots=True)
    class Config(EpPluginTokenDispatcher.Config):
        """pad_multiple: as in EpPluginTokenDispatcher.Config, and needed."""

        pad_multiple: int | None
