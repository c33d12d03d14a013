"""DeepEP's throughput interface over MoECommunicator, for everything written against ``deep_ep.Buffer``.

    import ep_plugin.deep_ep as deep_ep     # or EP_PLUGIN=deep_ep and the script's own import deep_ep

The interface follows DeepEP 1.x: its README and the docstrings of ``deep_ep/buffer.py``. Any hidden size, any top-k and
any number of ranks that MoECommunicator takes are served, on GPUs and on CPUs.
"""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch

from ep_plugin.deep_ep.buffer import Buffer
from ep_plugin.deep_ep.tuning import Config
from ep_plugin.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]

__version__ = "1.2.1+ep_plugin"  # the DeepEP whose interface this is
topk_idx_t = torch.int64


def __getattr__(name: str) -> NoReturn:
    said = f"module {__name__!r} has no attribute {name!r}"
    if name == "ElasticBuffer":  # torchtitan asks for it, and tells its users only to install DeepEP 2
        said = f"{__name__} has DeepEP 1.2.1's Buffer, no ElasticBuffer; for DeepEP 2 leave deep_ep out of EP_PLUGIN"
        warnings.warn(said, stacklevel=2)
    raise AttributeError(said)
