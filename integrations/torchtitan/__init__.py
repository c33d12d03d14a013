"""torchtitan: expert-parallel dispatch and combine of its MoE models through MoECommunicator.

    --override.imports ep_plugin.integrations.torchtitan.token_dispatcher

is the line to add to a training command; or EP_PLUGIN=torchtitan in the environment, and no line at all. Both take the
place of the default ("standard") communication backend. torchtitan 0.3.0, or a newer one whose dispatchers are called
in the same way; another is refused by name when this is imported.
"""

from __future__ import annotations

import torchtitan
from torchtitan.config import override
from torchtitan.models.common import token_dispatcher as stock

from ep_plugin.integrations import hooks
from ep_plugin.integrations.torchtitan.checks import check_dispatchers

check_dispatchers(stock, torchtitan.__version__)

from ep_plugin.integrations.torchtitan.dispatcher import (  # noqa: E402  their bases have been checked
    EpPluginPaddedTokenDispatcher,
    EpPluginTokenDispatcher,
)

__all__ = ["EpPluginPaddedTokenDispatcher", "EpPluginTokenDispatcher", "switch_on", "token_dispatcher"]

_REPLACED = {
    "AllToAllTokenDispatcher": EpPluginTokenDispatcher,
    "TorchAOTokenDispatcher": EpPluginPaddedTokenDispatcher,
}


@override(target=stock.AllToAllTokenDispatcher.Config, description="ep_plugin's dispatch and combine")
def token_dispatcher(config: stock.LocalTokenDispatcher.Config) -> EpPluginTokenDispatcher.Config:
    """The override: our dispatcher's configuration in the place of the all-to-all's, padding for FP8 included."""
    return EpPluginTokenDispatcher.Config(
        num_experts=config.num_experts, top_k=config.top_k, pad_multiple=getattr(config, "pad_multiple", None)
    )


def switch_on() -> str:
    """Models that are configured from here on have our dispatchers where they would have the all-to-all's.

    Called when the module of dispatchers has just been executed, before others take names from it.
    """
    for name, ours in _REPLACED.items():
        setattr(stock, name, ours)
    return f"{' and '.join(_REPLACED)} of {stock.__name__} are ep_plugin's"


hooks.record("torchtitan", "on", f"the override {__name__}.token_dispatcher is registered")
