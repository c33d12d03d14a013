"""Hugging Face transformers: importing this registers ``DistributedConfig(ep_implementation="ep_plugin")``.

    import ep_plugin.integrations.transformers

    config = DistributedConfig(ep_size=8, fsdp_size=8, ep_implementation="ep_plugin")
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=config)

Every mixture-of-experts model whose expert-parallel plan dispatches its experts takes it. With
``EP_PLUGIN=transformers`` in the environment the default, ``ep_implementation="auto"``, takes it too. After
``overlap_shared_experts(model)`` shared experts run while tokens travel. Raises ``ImportError`` for a transformers
without that plan.
"""

from __future__ import annotations

import transformers
from packaging.version import Version

if Version(transformers.__version__).release < (5, 23):
    raise ImportError(
        "ep_plugin.integrations.transformers: expected transformers 5.23 or newer, where the exchange of "
        f"expert parallelism can be chosen, got {transformers.__version__}"
    )

from transformers.distributed.expert_parallel import EPImplementationInterface

from ep_plugin.integrations import hooks
from ep_plugin.integrations.transformers.expert_parallel import AutoEpPlugin, EpPluginExpertParallel
from ep_plugin.integrations.transformers.shared_experts import overlap_shared_experts

EPImplementationInterface.register("ep_plugin", EpPluginExpertParallel)
hooks.record("transformers", "on", 'ep_implementation="ep_plugin" is registered')

__all__ = ["AutoEpPlugin", "EpPluginExpertParallel", "overlap_shared_experts", "switch_on"]


def switch_on() -> str:
    """Makes "auto", the default, exchange tokens through ep_plugin; what a script names itself keeps its meaning."""
    EPImplementationInterface.register("ep_plugin", EpPluginExpertParallel)
    EPImplementationInterface.register("auto", AutoEpPlugin)
    return 'ep_implementation="auto", the default, and "ep_plugin" exchange tokens through MoECommunicator'
