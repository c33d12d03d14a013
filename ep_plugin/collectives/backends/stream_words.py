"""The words by which streams of a node's ranks shake hands, in host memory that every rank and every device maps."""

from __future__ import annotations

import contextlib

import torch

from ep_plugin import _C
from ep_plugin.collectives.blocks import tensor_at
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.shm import ShmMemory


class StreamWords:
    """Collective over the node. `addresses`: of each rank's words, for this device. `own`: this rank's, int64
    ``[2 (ready and done), blocks, ranks]``; see StreamWords in collectives.h.
    """

    def __init__(self, node: Exchange, device: torch.device) -> None:
        with contextlib.ExitStack() as made:
            memory = ShmMemory(node)
            made.callback(memory.close)
            block = memory.allocate(_C.stream_words_bytes, "stream words")
            made.callback(block.close)
            self.addresses = [_mapped(made, address, device) for address in block.ptrs]
            self._resources = made.pop_all()
        own = tensor_at(block.ptrs[node.rank], _C.stream_words_bytes, torch.device("cpu"))
        self.own = own.view(torch.int64).view(_C.stream_words_shape)

    def close(self) -> None:
        self._resources.close()


def _mapped(made: contextlib.ExitStack, address: int, device: torch.device) -> int:
    mapped = _C.register_host(address, _C.stream_words_bytes, device.index)
    made.callback(_unmap, address)
    return mapped


def _unmap(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # a broken device has forgotten it
        _C.unregister_host(address)
