"""Hugging Face transformers: importing this registers ``DistributedConfig(ep_implementation="ep_plugin")``.

    import ep_plugin.integrations.transformers

    config = DistributedConfig(ep_size=8, fsdp_size=8, ep_implementation="ep_plugin")
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=config)

It serves every mixture-of-experts model whose expert-parallel plan dispatches its experts. With
``EP_PLUGIN=transformers`` in the environment it also serves the default, ``ep_implementation="auto"``. After
``overlap_shared_experts(model)`` shared experts run during the dispatch. ``InferenceConfig`` and
``low_latency(model, max_tokens_per_rank=64)`` are for inference. ``LoadCallback`` logs load statistics. After
``CheckpointCallback(trainer)``, or with ``Checkpoints`` in a loop of one's own, a run can be continued. The import
raises ``NotSupported`` for a version of transformers without such plans.
"""

from __future__ import annotations

# ruff: noqa: E402  an old transformers is refused before names that it lacks are imported
import importlib
from typing import TYPE_CHECKING, Any

import transformers

from ep_plugin.integrations import hooks

hooks.check_version("transformers", transformers.__version__)

from transformers.distributed.expert_parallel import EPImplementationInterface

from ep_plugin.integrations.transformers.expert_parallel import AutoEpPlugin, EpPluginExpertParallel
from ep_plugin.integrations.transformers.inference import InferenceConfig, low_latency
from ep_plugin.integrations.transformers.shared_experts import overlap_shared_experts

if TYPE_CHECKING:
    from ep_plugin.integrations.transformers.checkpoints import CheckpointCallback, Checkpoints
    from ep_plugin.integrations.transformers.load import LoadCallback

EPImplementationInterface.register("ep_plugin", EpPluginExpertParallel)
_REGISTERED = 'ep_implementation="ep_plugin" is registered'
hooks.record("transformers", "ready", _REGISTERED)

__all__ = [
    "AutoEpPlugin",
    "CheckpointCallback",
    "Checkpoints",
    "EpPluginExpertParallel",
    "InferenceConfig",
    "LoadCallback",
    "disable",
    "enable",
    "low_latency",
    "overlap_shared_experts",
]


_LATER = {"CheckpointCallback": "checkpoints", "Checkpoints": "checkpoints", "LoadCallback": "load"}


def __getattr__(name: str) -> Any:
    """Imports the classes that need Trainer's modules at their first use.

    EP_PLUGIN imports this module while a model's module is being imported, and Trainer's modules may need that module.
    """
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ep_plugin.integrations.transformers.{_LATER[name]}"), name)


def enable() -> None:
    """Makes "auto", the default, exchange tokens through ep_plugin in models that are loaded from now on.

    Other values of ``ep_implementation`` keep their meaning.
    """
    names = EPImplementationInterface._global_mapping
    hooks.replace("transformers", names, "auto", AutoEpPlugin, 'ep_implementation="auto", the default')


def disable() -> None:
    """Makes "auto" mean transformers' own exchange again, in models that are loaded from now on."""
    hooks.restore("transformers")
    hooks.record("transformers", "ready", _REGISTERED)
