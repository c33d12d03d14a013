"""``EP_PLUGIN=megatron,transformers``: enables integrations from the environment, in unmodified scripts.

PyTorch calls `start` at the end of ``import torch``, through the entry point ``torch.backends`` in pyproject.toml,
unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. Without the variable only this module and env.py are loaded.
"""

from __future__ import annotations

from ep_plugin import env


class SwitchError(BaseException):
    """EP_PLUGIN cannot be served. PyTorch wraps each Exception of `start` into one whose text hides ours."""


def start() -> None:
    """Enable the integrations in EP_PLUGIN. SwitchError for an unknown name, a missing module or a late import."""
    names = env.integrations()
    if names:
        from ep_plugin.errors import EpPluginError
        from ep_plugin.integrations import hooks

        try:
            hooks.enable(names)
            if not env.settings().children and env.launcher().rank is not None:  # a launcher's children are the ranks
                env.keep_from_children()
        except (ValueError, EpPluginError) as error:
            raise SwitchError(error) from None
        hooks.warn_at_exit(names)
