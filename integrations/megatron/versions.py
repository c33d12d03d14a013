"""Whether this Megatron-core is one that our dispatcher fits into: checked before anything is taken from it."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks
from ep_plugin.integrations.signatures import check_calls

# What 0.16.1 has, by class.
CALLS = {
    "MoETokenDispatcher": {"__init__": ("self", "config", "pg_collection")},
    "MoEFlexTokenDispatcher": {
        "__init__": ("self", "num_local_experts", "local_expert_indices", "config", "pg_collection"),
        "dispatch_preprocess": ("self", "hidden_states", "routing_map", "probs"),
        "token_dispatch": ("self", "hidden_states", "probs", "async_finish", "allocate_on_comm_stream"),
        "dispatch_postprocess": ("self", "hidden_states", "probs"),
        "combine_preprocess": ("self", "hidden_states"),
        "token_combine": ("self", "hidden_states", "async_finish", "allocate_on_comm_stream"),
        "combine_postprocess": ("self", "hidden_states"),
        "set_shared_experts": ("self", "shared_experts"),
    },
}
OPTIONS = (
    "hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_dtype",
    "moe_pad_expert_input_to_capacity",
    "moe_router_padding_for_quantization",
    "moe_flex_dispatcher_backend",
    "fp8",
    "fp4",
)
_ADVICE = "install megatron-core 0.16.1, or leave megatron out of EP_PLUGIN"


def check_version(version: str) -> None:
    """Raises NotSupported for a megatron-core that is too old or too new."""
    refused = hooks.INTEGRATIONS["megatron"].refuses(version)
    if refused:
        raise NotSupported(f"megatron-core: expected {refused.partition(';')[0]}; {_ADVICE}")


def check_interfaces(dispatchers: ModuleType, config: type[Any], version: str) -> None:
    """dispatchers: Megatron's module of them; config: its TransformerConfig. Raises NotSupported with what differs."""
    check_calls(dispatchers, CALLS, framework=f"megatron-core {version}", known="0.16.1", advice=_ADVICE)
    missing = set(OPTIONS) - {field.name for field in dataclasses.fields(config)}
    if missing:
        raise NotSupported(
            f"megatron-core {version}: expected {config.__name__}.{min(missing)}, as in 0.16.1, got none; {_ADVICE}"
        )
