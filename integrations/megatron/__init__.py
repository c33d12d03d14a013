"""Megatron-core: our token dispatcher under ``--moe-token-dispatcher-type flex``, in an unmodified training script.

    EP_PLUGIN=megatron torchrun pretrain_gpt.py --moe-token-dispatcher-type flex ...

or, in a script of one's own, before the model is built:

    import ep_plugin.integrations.megatron
    ep_plugin.integrations.megatron.switch_on()

Megatron-core 0.16.1 or newer. What is not supported is refused by name when the model is built.
"""

from __future__ import annotations

from megatron.core.transformer.moe import moe_layer

from ep_plugin import hooks
from ep_plugin.errors import NotSupported
from ep_plugin.integrations.megatron.dispatcher import EpPluginTokenDispatcher

__all__ = ["EpPluginTokenDispatcher", "switch_on"]

_REPLACED = "MoEFlexTokenDispatcher"


def switch_on() -> str:
    """MoE layers that are built from here on take our dispatcher where the configuration says "flex"."""
    if not hasattr(moe_layer, _REPLACED):
        raise NotSupported(
            f"ep_plugin.integrations.megatron: expected {_REPLACED} in {moe_layer.__name__}, as in 0.16.1, "
            "found none; leave megatron out of EP_PLUGIN"
        )
    setattr(moe_layer, _REPLACED, EpPluginTokenDispatcher)
    said = f"{moe_layer.__name__}.{_REPLACED} is {EpPluginTokenDispatcher.__name__}"
    hooks.record("megatron", "on", said)
    return said
