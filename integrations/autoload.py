"""``EP_PLUGIN=megatron,transformers``: switches integrations on from the environment, in unmodified scripts.

PyTorch calls `start` at the end of ``import torch``, through the entry point ``torch.backends`` in pyproject.toml,
unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. Without the variable only this module and env.py are loaded.
"""

from __future__ import annotations

from ep_plugin import env


def start() -> None:
    """Switch on the integrations in EP_PLUGIN. ValueError for an unknown name, NotSupported for a missing module."""
    names = env.integrations()
    if names:
        from ep_plugin.integrations.hooks import switch_on

        switch_on(names)
