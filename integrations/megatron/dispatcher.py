"""The token dispatcher: dispatch in FLAT rows, which the experts take as they are, and an unweighted combine.

Shapes: T tokens here, H hidden size, E experts, E_l on each expert-parallel rank, P expert-tensor-parallel ranks, K
experts per token, N rows received. Probabilities are applied inside the experts, so they travel with the rows and
carry gradients back.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from ep_plugin import MoECommunicator
from ep_plugin.errors import NotSupported
from ep_plugin.integrations.megatron.checks import alignment_of, check_config, experts_per_token, sms_of
from ep_plugin.integrations.megatron.routing import over_tensor_parallel, rounded_up, select
from ep_plugin.moe.registry import communicator


class EpPluginTokenDispatcher(MoETokenDispatcher):
    """Megatron's "flex" dispatcher over MoECommunicator: one exchange over all TP × EP ranks.

    Takes the place of MoEFlexTokenDispatcher; made once for each layer, and all layers of a group share a communicator.
    Construction is collective over the TP × EP group. It has no parameters: checkpoints are the stock ones.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        """Raises NotSupported for options that are not served, see `checks`."""
        super().__init__(config=config, pg_collection=pg_collection)
        check_config(config, self.tp_size)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.alignment = alignment_of(config)
        # As the communicator is made: Megatron's inference changes the configuration between calls.
        self.topk = experts_per_token(config)
        comm = MoECommunicator.shared(
            self.tp_ep_group,
            num_experts=config.num_moe_experts * self.tp_size,
            hidden_size=getattr(config, "moe_latent_size", None) or config.hidden_size,
            topk=self.topk * self.tp_size,
            expert_alignment=self.alignment,
            **sms_of(config),
        )
        self._number = comm.number  # and not the communicator: a model may be copied
        # Partial CUDA graphs hand these on from the router's graph to the exchange. Probabilities are no part of it:
        # they are handed on as results, with their gradients.
        self.cudagraph_attrs = ["token_indices"]
        self.token_indices: torch.Tensor | None = None
        self.token_probs: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self.handle: Any = None

    @property
    def _comm_manager(self) -> EpPluginTokenDispatcher:
        """Where the overlapping schedule of pipelines puts detached probabilities, and asks for counts."""
        return self

    def set_shared_experts(self, shared_experts: Any) -> NoReturn:
        raise NotSupported(
            "moe_shared_expert_overlap: expected False with the flex dispatcher, as in Megatron itself, got True; "
            "shared experts then run before the dispatch"
        )

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """int64 ``[E_l]`` on the host, padding included."""
        return self.tokens_per_expert

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states ``[..., H]``, routing_map bool and probs ``[T, E]``: rows ``[T, H]``, probs ``[T, P * K]``."""
        self.hidden_shape = hidden_states.shape
        ids, chosen = select(routing_map, probs, self.topk)
        self.token_indices, self.token_probs = over_tensor_parallel(ids, chosen, self.tp_size, self.num_local_experts)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), self.token_probs

    def token_dispatch(
        self,
        hidden_states: torch.Tensor,
        probs: torch.Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The exchange: rows ``[N, H]`` grouped by local expert, and their probabilities float32 ``[N]``.

        Ordered on the caller's stream, whatever `async_finish` and `allocate_on_comm_stream` say.
        """
        assert self.token_indices is not None
        out, self.handle = self._communicator.dispatch(
            hidden_states.contiguous(), self.token_indices.contiguous(), probs
        )
        assert out.num_tokens_per_expert_cpu is not None
        self.tokens_per_expert = rounded_up(out.num_tokens_per_expert_cpu, self.alignment)
        self.dispatched_probs = out.weights
        return out.tokens, out.weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Rows, counts and probabilities, as the experts take them."""
        if self._rows_are_freed:
            hidden_states = hidden_states.clone()
        if self.config.moe_router_dtype == "fp64":
            probs = probs.double()
        return hidden_states, self.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing: the exchange takes rows grouped by expert."""
        return hidden_states

    def token_combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """The experts' rows ``[N, H]`` back to their tokens, summed: ``[T, H]``."""
        handle, self.handle = self.handle, None
        return self._communicator.combine(hidden_states.contiguous(), handle)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` in the shape that the layer was given."""
        return hidden_states.view(self.hidden_shape)

    @property
    def _communicator(self) -> MoECommunicator:
        return communicator(self._number)

    @property
    def _rows_are_freed(self) -> bool:
        """Whether the overlapping schedule frees the rows under the experts: with the name "deepep" it takes them for
        rows that were permuted into others, which is what experts would then keep."""
        overlap = getattr(self.config, "overlap_moe_expert_parallel_comm", False)
        return bool(overlap) and self.config.moe_flex_dispatcher_backend != "hybridep"
