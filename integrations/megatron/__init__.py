"""Megatron-core: our token dispatcher under ``--moe-token-dispatcher-type flex``, in an unmodified training script.

    EP_PLUGIN=megatron torchrun pretrain_gpt.py --moe-token-dispatcher-type flex ...

or, in a script of one's own, before the model is built:

    import ep_plugin.integrations.megatron
    ep_plugin.integrations.megatron.switch_on()

Megatron-core 0.16.1, or a newer one whose dispatchers are called in the same way; another is refused by name when this
is imported. What is not supported is refused by name when the model is built.
"""

from __future__ import annotations

from megatron.core import package_info  # megatron.core itself may be on its way, and have no version yet

from ep_plugin.integrations import hooks
from ep_plugin.integrations.megatron.versions import check_interfaces, check_version

check_version(package_info.__version__)

from megatron.core.transformer.moe import moe_layer, token_dispatcher  # noqa: E402  of a version that has them
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

check_interfaces(token_dispatcher, TransformerConfig, package_info.__version__)

from ep_plugin.integrations.megatron.dispatcher import EpPluginTokenDispatcher  # noqa: E402  its base has been checked

__all__ = ["EpPluginTokenDispatcher", "switch_on"]

_REPLACED = "MoEFlexTokenDispatcher"


def switch_on() -> str:
    """MoE layers that are built from here on take our dispatcher where the configuration says "flex"."""
    setattr(moe_layer, _REPLACED, EpPluginTokenDispatcher)
    said = f"{moe_layer.__name__}.{_REPLACED} is {EpPluginTokenDispatcher.__name__}"
    hooks.record("megatron", "on", said)
    return said
