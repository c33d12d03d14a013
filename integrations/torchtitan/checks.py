"""Whether torchtitan's dispatchers are those that ours take the place of: another version's may be called otherwise."""

from __future__ import annotations

from types import ModuleType

from ep_plugin.integrations.signatures import check_calls

# What 0.3.0 has, by class: the parameters of its methods and of its configuration.
_CALLS = {
    "dispatch": ("self", "x_TD", "topk_scores_TK", "topk_expert_ids_TK", "num_local_tokens_per_expert_E"),
    "combine": ("self", "routed_output_RD", "metadata", "x_TD"),
    "wire_meshes": ("self", "ep_mesh"),
}
_PLAIN = {**_CALLS, "Config": ("num_experts", "top_k")}
_PADDED = {**_CALLS, "Config": ("num_experts", "top_k", "pad_multiple")}
EXPECTED = {
    "LocalTokenDispatcher": _PLAIN,
    "BaseEPTokenDispatcher": _PLAIN,
    "AllToAllTokenDispatcher": _PLAIN,
    "TorchAOTokenDispatcher": _PADDED,
}


def check_dispatchers(stock: ModuleType, version: str) -> None:
    """stock: torchtitan's module of dispatchers. Raises NotSupported with what is called otherwise there."""
    advice = "install torchtitan 0.3.0, or leave torchtitan out of EP_PLUGIN and ep_plugin out of the overrides"
    check_calls(stock, EXPECTED, framework=f"torchtitan {version}", known="0.3.0", advice=advice)
