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
            is_rank = _is_rank()
            if env.settings().only_ranks and not is_rank:
                return
            hooks.enable(names)
            if not env.settings().children:
                _keep_from_children(is_rank)
        except (ValueError, EpPluginError) as error:
            raise SwitchError(error) from None
        hooks.warn_at_exit(names)


def _is_rank() -> bool:
    """Whether a launcher or multiprocessing started this process. A script that a user starts may be a launcher."""
    import multiprocessing

    # A spawned process imports the script before it has a parent_process().
    is_spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    return env.launcher().rank is not None or is_spawned or multiprocessing.parent_process() is not None


def _keep_from_children(is_rank: bool) -> None:
    """EP_PLUGIN_CHILDREN=0: of what this process starts, only ranks use EP_PLUGIN, and a rank's children do not."""
    if is_rank:
        env.keep_from_children()
        return
    import multiprocessing.util

    env.keep_from_programs()
    # Forks are ranks, too, but do not import torch again.
    multiprocessing.util.register_after_fork(SwitchError, lambda _: env.keep_from_children())
