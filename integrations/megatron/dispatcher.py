"""The token dispatcher: dispatches to FLAT rows, which experts take unchanged, and combines without weights.

Shapes: T tokens here, H hidden size, E experts of the model, E_l of them on each expert-parallel rank, P expert-tensor-
parallel ranks (each holds a slice of the same experts), K experts per token, N rows received. Rank (ep, tp) of the
TP × EP group has the number ep * P + tp. The communicator counts each slice as an expert: there are P * E slices, and a
token goes to P * K of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher

from ep_plugin.config import MAX_TOPK, in_one_kernel
from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks
from ep_plugin.integrations.communicators import communicator_of, in_layer
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.ranges import opener

SMS_OPTION = "moe_flex_dispatcher_num_sms"  # from 0.19 on; older versions have an option for each backend
# With these backends Megatron expects that experts take the rows of dispatch themselves, not a permuted copy.
UNPERMUTED = ("hybridep", "ncclep")


def dispatcher_or_stock(
    num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
) -> MoETokenDispatcher:
    """Makes our dispatcher. If ep_plugin does not serve the layer and EP_PLUGIN_FALLBACK=stock, makes Megatron's
    all-to-all dispatcher instead."""
    given = num_local_experts, local_expert_indices, config, pg_collection
    try:
        return EpPluginTokenDispatcher(*given)
    except NotSupported as error:
        if reason := _needs_flex(config):
            raise NotSupported(f"{error}; its all-to-all cannot take the place of ours: {reason}") from error
        if not falls_back("megatron", error):
            raise
    return StockTokenDispatcher(*given)


def _needs_flex(config: Any) -> str | None:
    """Returns the reason why a layer whose configuration says "flex" cannot have Megatron's all-to-all dispatcher, or
    None if it can."""
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "overlap_moe_expert_parallel_comm makes Megatron use the attributes of a flex dispatcher"
    if (config.fp8 or config.fp4) and config.moe_flex_dispatcher_backend in UNPERMUTED:
        return f"with FP8 or FP4 Megatron leaves the padding to the backend {config.moe_flex_dispatcher_backend}"
    return None


class StockTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher in the place of ours. It counts its operations as left to Megatron."""

    def token_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        hooks.left("megatron")
        return super().token_dispatch(*args, **kwargs)

    def token_combine(self, *args: Any, **kwargs: Any) -> Any:
        hooks.left("megatron")
        return super().token_combine(*args, **kwargs)


class EpPluginTokenDispatcher(MoETokenDispatcher):
    """Megatron's "flex" dispatcher over MoECommunicator: one exchange over all TP × EP ranks.

    It replaces MoEFlexTokenDispatcher. Each layer has one, and all layers of a group share a communicator. Construction
    is collective over the TP × EP group. It has no parameters, so checkpoints do not change.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        """Makes the dispatcher. Raises NotSupported for options that are not served."""
        super().__init__(config=config, pg_collection=pg_collection)
        # With drop-and-pad experts choose tokens, so a token may go to all of them. The number is stored, since
        # Megatron's inference changes the configuration between calls.
        self.topk = config.num_moe_experts if config.moe_pad_expert_input_to_capacity else config.moe_router_topk
        check_config(config, self.topk, self.tp_size)
        self.alignment = alignment_of(config)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self._communicator = communicator_of(
            "megatron",
            self.tp_ep_group,
            num_experts=config.num_moe_experts * self.tp_size,
            hidden_size=getattr(config, "moe_latent_size", None) or config.hidden_size,
            topk=self.topk * self.tp_size,
            expert_alignment=self.alignment,
            **sms_of(config),
        )
        # Partial CUDA graphs pass these attributes from the router's graph to the exchange. Probabilities are passed as
        # results, with their gradients.
        self.cudagraph_attrs = ["token_indices"]
        self.token_indices: torch.Tensor | None = None
        self.token_probs: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self.handle: Any = None
        self._range = opener()
        self.layer_number: int | None = None  # see set_layer_number

    @property
    def _comm_manager(self) -> EpPluginTokenDispatcher:
        """The object in which the pipelines' overlapping schedule stores detached probabilities and reads counts."""
        return self

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Makes shared experts run on a stream of their own, beside the exchange. Before 0.18 Megatron's own flex
        dispatcher cannot do so."""
        if not hasattr(shared_experts, "wait_current_stream"):
            raise NotSupported(
                "moe_shared_expert_overlap: expected False with the flex dispatcher before Megatron-core 0.18, as in "
                "Megatron itself, got True; shared experts then run before the dispatch"
            )
        super().set_shared_experts(shared_experts)

    def check_over_budget(self) -> None:
        """Does nothing: no token is dropped for a budget, since `check_config` refuses budgets."""

    def reset_over_budget(self) -> None: ...

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """Returns the rows of each local expert, padding included, int64 ``[E_l]`` on the host."""
        return self.tokens_per_expert

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selects each token's experts.

        hidden_states: ``[..., H]``. routing_map: bool ``[T, E]``. probs: ``[T, E]``. Returns rows ``[T, H]`` and their
        probabilities ``[T, P * K]``.
        """
        self.hidden_shape = hidden_states.shape
        if self.config.moe_pad_expert_input_to_capacity and self.topk < routing_map.size(1):
            routing_map = routing_map & (probs > 0)  # inference pads: such pairs have probability 0
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
        """Dispatches. Returns rows ``[N, H]`` grouped by local expert, and their probabilities float32 ``[N]``.

        The results are ordered on the caller's stream. `async_finish` and `allocate_on_comm_stream` have no effect.
        """
        assert self.token_indices is not None
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        out, self.handle = self._in_layer(
            self._communicator.dispatch, hidden_states.contiguous(), self.token_indices.contiguous(), probs
        )
        counts, alignment = out.num_tokens_per_expert_cpu, self.alignment
        assert counts is not None
        self.tokens_per_expert = counts if alignment == 1 else -(-counts // alignment) * alignment
        self.dispatched_probs = out.weights
        if shared is not None:
            shared.pre_forward_comm(hidden_states, wait_current_stream=False)
            shared.linear_fc1_forward_and_act(out.tokens)
        return out.tokens, out.weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Returns rows, counts and probabilities, as the experts take them."""
        # With the backend "deepep" the overlapping schedule expects experts to have permuted copies. It would free
        # these rows while experts still use them.
        overlap = getattr(self.config, "overlap_moe_expert_parallel_comm", False)
        if overlap and self.config.moe_flex_dispatcher_backend not in UNPERMUTED:
            hidden_states = hidden_states.clone()
        if self.config.moe_router_dtype == "fp64":
            probs = probs.double()
        return hidden_states, self.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the rows unchanged, since combine takes them grouped by expert."""
        return hidden_states

    def token_combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """Combines: sums the experts' rows ``[N, H]`` per token. Returns ``[T, H]``."""
        handle, self.handle = self.handle, None
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        return self._in_layer(self._communicator.combine, hidden_states.contiguous(), handle)

    def _in_layer(self, operation: Callable[..., Any], *args: Any) -> Any:
        if self.layer_number is None:
            return operation(*args)
        return in_layer(f"Megatron layer {self.layer_number}", self._range, operation, *args)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the rows ``[T, H]`` in the shape of the layer's input."""
        shared = self.shared_experts
        if shared is not None:
            shared.linear_fc2_forward(hidden_states)
            shared.post_forward_comm()
            hidden_states = hidden_states + shared.get_output()
        return hidden_states.view(self.hidden_shape)


_set_layer_number: Any = BaseMoELayer.set_layer_number


def set_layer_number(self: Any, layer_number: int) -> None:
    """Sets the number of a layer, and of its dispatcher. Replaces the method of BaseMoELayer."""
    _set_layer_number(self, layer_number)
    if self.token_dispatcher is not None:
        self.token_dispatcher.layer_number = layer_number


def alignment_of(config: Any) -> int:
    """Returns the multiple to which each expert's rows are padded.

    Megatron's function is used only if an option needs padding. If none does, the function returns at least 16 up to
    0.17, and 0 from 0.18 on.
    """
    needed = config.fp8 or config.fp4 or config.moe_router_padding_for_quantization
    needed = needed or getattr(config, "use_transformer_engine_op_fuser", False)
    return max(1, get_align_size_for_quantization(config)) if needed else 1


def select(routing_map: torch.Tensor, probs: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the experts of each token. Differentiable in `probs`.

    Args:
        routing_map: bool ``[T, E]``, with at most K experts per token. It alone selects pairs: under drop-and-pad it
            contains pairs of probability 0.
        probs: ``[T, E]``.
        topk: K.

    Returns:
        The expert ids, int64 ``[T, K]`` with -1 for dropped pairs, and their probabilities ``[T, K]``, which mean
        nothing for dropped pairs.
    """
    selected, ids = torch.topk(routing_map.view(torch.int8), topk, dim=1, sorted=False)  # 1, or 0 for dropped pairs
    return ids | (selected - 1), probs.gather(1, ids)


def over_tensor_parallel(
    ids: torch.Tensor, probs: torch.Tensor, tp_size: int, local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and probabilities ``[T, P * K]``: each pair once for each rank that has a slice of its expert."""
    if tp_size == 1:
        return ids, probs
    first = ids // local_experts * (tp_size * local_experts) + ids % local_experts
    slices = torch.arange(tp_size, device=ids.device) * local_experts
    copies = (first.unsqueeze(2) + slices).masked_fill((ids < 0).unsqueeze(2), -1)
    return copies.flatten(1), probs.unsqueeze(2).expand(-1, -1, tp_size).flatten(1)


def check_config(config: Any, topk: int, tp_size: int) -> None:
    """Raises NotSupported for an unsupported option, with its name, the expected and actual value, and the remedy."""
    if topk * tp_size > MAX_TOPK:
        option, why = "moe_router_topk", ""
        if config.moe_pad_expert_input_to_capacity:
            option, why = "num_moe_experts", ", since a padded expert may take any token"
        raise NotSupported(
            f"{option}: expected at most {MAX_TOPK} times 1/{tp_size} (expert tensor parallel ranks){why}, got {topk}; "
            "use the alltoall dispatcher"
        )
    option = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"  # before 0.18
    captured = {getattr(one, "name", str(one)) for one in getattr(config, option, None) or ()}
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation != "none" and (not captured or captured & {"moe", "full_iteration"}):
        raise NotSupported(
            f"{option}: expected no whole MoE layers, but parts such as attn, moe_router and moe_preprocess, since the "
            f"host learns how many rows arrive, got {', '.join(sorted(captured)) or 'all'} with "
            f"cuda_graph_impl={implementation!r}"
        )
    unserved: list[tuple[str, Any]] = [
        ("moe_paged_stash", False),
        ("moe_ncclep_static_shape", False),
        ("moe_ncclep_zero_copy", False),
    ]
    if config.moe_flex_dispatcher_backend != "ncclep":  # "ncclep" sizes a buffer by this factor, and drops nothing
        unserved.insert(0, ("moe_expert_rank_capacity_factor", None))
    for option, unset in unserved:
        if getattr(config, option, unset) != unset:
            raise NotSupported(
                f"{option}: expected {unset}, since dispatch returns the rows that arrive and drops none, got "
                f"{getattr(config, option)!r}"
            )


def sms_of(config: Any) -> dict[str, int]:
    """Returns the communicator's SM counts. They are empty, so that SMs are chosen by shape, if Megatron's option has
    its default."""
    option = SMS_OPTION if hasattr(config, SMS_OPTION) else f"moe_{config.moe_flex_dispatcher_backend}_num_sms"
    asked = getattr(config, option)
    if asked is None or asked == getattr(type(config), option):
        return {}
    return in_one_kernel(asked)
