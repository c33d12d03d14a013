"""What of Megatron's configuration this dispatcher does not serve: refused by name, when the model is built."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

from ep_plugin.config import MAX_TOPK
from ep_plugin.errors import NotSupported

# Megatron's own defaults: a number of SMs that nobody has asked for.
DEFAULT_SMS = {"deepep": ("moe_deepep_num_sms", 20), "hybridep": ("moe_hybridep_num_sms", 16)}


def check_config(config: Any, tp_size: int) -> None:
    """Raises NotSupported with the option's name, what was expected and what to do."""
    pairs = experts_per_token(config) * tp_size
    if pairs > MAX_TOPK:
        what = "num_moe_experts" if config.moe_pad_expert_input_to_capacity else "moe_router_topk"
        why = ", as a padded expert may take any token" if config.moe_pad_expert_input_to_capacity else ""
        raise NotSupported(
            f"{what}: expected at most {MAX_TOPK} times 1/{tp_size} (expert tensor parallel ranks){why}, got "
            f"{experts_per_token(config)}; use the alltoall dispatcher"
        )
    scopes = {getattr(scope, "name", str(scope)) for scope in getattr(config, "cuda_graph_scope", None) or ()}
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation != "none" and (not scopes or scopes & {"moe", "full_iteration"}):
        raise NotSupported(
            "cuda_graph_scope: expected scopes without whole MoE layers, such as attn, moe_router and moe_preprocess, "
            f"since the host learns how many rows arrive, got {', '.join(sorted(scopes)) or 'all'} with "
            f"cuda_graph_impl={implementation!r}"
        )


def experts_per_token(config: Any) -> int:
    """The most experts that a token may go to: with drop-and-pad, experts take tokens and not the other way round."""
    return config.num_moe_experts if config.moe_pad_expert_input_to_capacity else config.moe_router_topk


def alignment_of(config: Any) -> int:
    """Rows that each expert's group is rounded up to: what quantised grouped GEMMs need."""
    quantised = config.fp8 or config.fp4 or config.moe_router_padding_for_quantization
    return get_align_size_for_quantization(config) if quantised else 1


def sms_of(config: Any) -> dict[str, int]:
    """SMs of the communicator: by the shapes of operations, unless the option was given another number than its own."""
    option, default = DEFAULT_SMS.get(config.moe_flex_dispatcher_backend, ("", None))
    asked = getattr(config, option, default)
    if asked is None or asked == default:
        return {}
    return {"dispatch_send_sms": asked, "dispatch_recv_sms": 0, "combine_send_sms": asked, "combine_recv_sms": 0}
