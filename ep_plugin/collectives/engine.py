"""The engine of one all-gather or reduce-scatter object: peer memory, blocks, and the operations inside a node.

Shapes: R ranks in the group, N nodes of G ranks each, R = N * G.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.collectives.backends import cpu, cuda, paths
from ep_plugin.collectives.blocks import Blocks
from ep_plugin.collectives.control import take_set
from ep_plugin.runtime.group import GroupEngine
from ep_plugin.runtime.streams import CallerStreams, Streams, kernels_for
from ep_plugin.transport import open_memory, transport_for
from ep_plugin.transport.exchange import Exchange

_FIELDS = {"op": "operation", "bytes": "bytes of a shard", "place": "place in peer memory"}
_VALUES = {
    "op": {int(op): op.name.lower().replace("_", "-") for op in _C.CollectiveOp},
    "element": {int(element): element.name.lower() for element in _C.Element},
}


class CollectiveEngine(GroupEngine):
    """The operations of one object. Its construction is collective over `group`, and so is making another block."""

    inside: Any
    """The operations between the ranks of the node. There is no such attribute if the node has one rank."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, num_buffers: int, path: str, sum_sms: int | None
    ) -> None:
        """sum_sms: the most SMs for sums; None: the object gathers."""
        self.num_buffers, self.path, self.sum_sms = num_buffers, path, sum_sms or 0
        self.gathers = sum_sms is None
        if device.type == "cuda":
            self.sum_sms = paths.most_sum_sms(device, self.sum_sms)
        super().__init__(Exchange(group), device, group)

    def _construct(self, group: dist.ProcessGroup) -> None:
        self.kernels = kernels_for(self.device)
        self._agree()
        super()._construct(group, group)

    def _construct_node(self, group: dist.ProcessGroup) -> None:
        device, within = self.device, self.within
        streams = self.streams = Streams() if device.type == "cpu" else CallerStreams(device)
        self.memory = self._own(open_memory(within, device))
        self.control = take_set(group, within, self.memory)
        self._resources.callback(self.control.close)
        self.shared = self.control.buffers
        self._make_boards(self.control.board)
        self.blocks = Blocks(self, self.num_buffers)
        self._resources.callback(self.blocks.close)
        self.comm = self._comm_struct(self.control.block, num_experts=self.node_size)
        if self.node_size > 1:
            if not isinstance(streams, CallerStreams):
                self.inside = cpu.CpuNode(self)
            elif self.gathers:
                self.inside = cuda.CudaGatherNode(self, streams)
            else:
                self.inside = cuda.CudaSumNode(self, streams)
            self._resources.callback(self.inside.close)

    def _agree(self) -> None:
        """Refuses, before anything is allocated, settings on which ranks disagree."""
        transport_for(self.device)
        mine = [self.device.type, self.num_buffers, self.path, self.sum_sms]
        self.exchange.agree("the device, num_buffers, path and sms", ", ".join(map(str, mine)))

    def described(self, field: int, value: int) -> tuple[str, str]:
        name = _C.piece_fields[field] if field < len(_C.piece_fields) else "place"
        text = _VALUES.get(name, {}).get(value, str(value))
        if name == "place":
            block, offset = divmod(value, _C.place_word(1, 0))
            text = "none (not from allocate)" if block == _C.staging_block else f"byte {offset} of block {block}"
        return _FIELDS.get(name, name), text

    @property
    def rail_bytes_sent(self) -> int:
        """Bytes of shards, without status words."""
        return self.rails.bytes_sent - (0 if self.group_boards is None else self.group_boards.status_bytes_sent)
