"""``EP_PLUGIN=megatron,transformers``: integrations switched on from the environment, in scripts that know none of us.

PyTorch calls `start` at the end of ``import torch``, through the entry point ``torch.backends`` that pyproject.toml
declares (not with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). Without the variable, this module and env.py are all that is
loaded.
"""

from __future__ import annotations

from ep_plugin import env


def start() -> None:
    """Switches on what EP_PLUGIN names. ValueError for a name that is not known, NotSupported for one not there yet."""
    names = env.integrations()
    if names:
        from ep_plugin.integrations.hooks import switch_on

        switch_on(names)
