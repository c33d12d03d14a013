"""Megatron-core: our token dispatcher under ``--moe-token-dispatcher-type flex``, and our collectives under its
distributed optimizer, in an unmodified training script.

    EP_PLUGIN=megatron torchrun pretrain_gpt.py --moe-token-dispatcher-type flex ...

or, in your own script, before the model is built:

    import ep_plugin.integrations.megatron
    ep_plugin.integrations.megatron.enable()

It serves Megatron-core 0.16.1 up to, not including, 0.20; 0.17 and newer need Python 3.12. With any other version the
import raises NotSupported. Options that are not supported raise it when the model is built.
"""

from __future__ import annotations

from megatron.core import package_info  # megatron.core itself may still be importing, without a version

from ep_plugin import env
from ep_plugin.integrations import hooks

hooks.check_version("megatron", package_info.__version__)

from megatron.core.transformer.moe import moe_layer, token_dispatcher  # noqa: E402  after the check of the version

_OPTIONS = (
    "hidden_size num_moe_experts moe_router_topk moe_router_dtype moe_pad_expert_input_to_capacity "
    "moe_router_padding_for_quantization moe_flex_dispatcher_backend fp8 fp4"
)
hooks.check_signatures(
    "megatron",
    token_dispatcher,
    [
        "MoETokenDispatcher.__init__(self, config, pg_collection)",
        "MoEFlexTokenDispatcher.__init__(self, num_local_experts, local_expert_indices, config, pg_collection)",
        "MoEFlexTokenDispatcher.dispatch_preprocess(self, hidden_states, routing_map, probs)",
        "MoEFlexTokenDispatcher.token_dispatch(self, hidden_states, probs, async_finish, allocate_on_comm_stream)",
        "MoEFlexTokenDispatcher.dispatch_postprocess(self, hidden_states, probs)",
        "MoEFlexTokenDispatcher.combine_preprocess(self, hidden_states)",
        "MoEFlexTokenDispatcher.token_combine(self, hidden_states, async_finish, allocate_on_comm_stream)",
        "MoEFlexTokenDispatcher.combine_postprocess(self, hidden_states)",
        "MoEFlexTokenDispatcher.set_shared_experts(self, shared_experts)",
        *(f"TransformerConfig.{option}" for option in _OPTIONS.split()),
    ],
)

from ep_plugin.integrations.megatron import optimizer, pipeline  # noqa: E402  checked above
from ep_plugin.integrations.megatron.dispatcher import (  # noqa: E402
    EpPluginTokenDispatcher,
    dispatcher_or_stock,
    set_layer_number,
)

__all__ = ["EpPluginTokenDispatcher", "disable", "enable", "optimizer", "pipeline"]


def enable() -> None:
    """Replaces three parts of Megatron.

    - MoE layers that are built from now on use our dispatcher if their configuration says "flex".
    - The distributed optimizer uses our collectives.
    - Pipelines use our messages.
    """
    ours = dispatcher_or_stock if env.settings().fallback else EpPluginTokenDispatcher
    hooks.replace("megatron", moe_layer, "MoEFlexTokenDispatcher", ours)
    hooks.replace("megatron", moe_layer.BaseMoELayer, "set_layer_number", set_layer_number)
    optimizer.enable()
    pipeline.enable()


def disable() -> None:
    """Restores Megatron's own parts. MoE layers that exist keep our dispatcher. Call it between steps."""
    optimizer.disable()
    pipeline.disable()
    hooks.restore("megatron")
