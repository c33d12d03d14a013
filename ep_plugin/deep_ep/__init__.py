"""DeepEP's throughput interface over MoECommunicator, for everything written against ``deep_ep.Buffer``.

    import ep_plugin.deep_ep as deep_ep     # or EP_PLUGIN=deep_ep and the script's own import deep_ep

The interface follows DeepEP 1.x: its README and the docstrings of ``deep_ep/buffer.py``. Any hidden size, any top-k and
any number of ranks that MoECommunicator takes are served, on GPUs and on CPUs.
"""

from __future__ import annotations

import torch

from ep_plugin.deep_ep.buffer import Buffer
from ep_plugin.deep_ep.elastic import ElasticBuffer
from ep_plugin.deep_ep.elastic_handles import EPHandle
from ep_plugin.deep_ep.nodes import get_logical_domain_size, get_physical_domain_size
from ep_plugin.deep_ep.tuning import Config
from ep_plugin.deep_ep.utils import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]

__version__ = "1.2.1+ep_plugin"  # the DeepEP whose interface this is
topk_idx_t = torch.int64
