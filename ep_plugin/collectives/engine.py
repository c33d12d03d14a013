"""The engine of one all-gather or reduce-scatter object: peer memory, blocks, and the operations inside a node.

Shapes: R ranks in the group, N nodes of G ranks each, R = N * G.
"""

from __future__ import annotations

from array import array

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.collectives.backends import paths
from ep_plugin.collectives.backends.watchdog import StreamWaits
from ep_plugin.collectives.blocks import Blocks
from ep_plugin.collectives.control import take_set
from ep_plugin.errors import CaptureRefused
from ep_plugin.runtime.base import running
from ep_plugin.runtime.faults import disagreement
from ep_plugin.runtime.group import GroupEngine
from ep_plugin.runtime.streams import CudaStreams, Streams, kernels_for
from ep_plugin.transport import open_memory, transport_for
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import PeerBuffer

_FIELDS = {"op": "operation", "bytes": "bytes of a shard", "place": "place in peer memory"}
_VALUES = {
    "op": {int(op): op.name.lower().replace("_", "-") for op in _C.CollectiveOp},
    "element": {int(element): element.name.lower() for element in _C.Element},
}


class CollectiveEngine(GroupEngine):
    """The operations of one object. Its construction is collective over `group`, and so is making another block.

    Operations inside the node are in C (csrc/control/collectives.h), which calls the methods below for what needs
    Python. On GPUs everything is enqueued on the caller's stream, in the order of the calls, and the host waits for
    nothing. Ranks push shards into their peers' outputs; outputs that peers have not mapped go through a staging block,
    piece by piece. Sums travel through cells that every rank has for every other, so no input is mapped. Small shards
    go as words with flags. Hosts compare the calls of all ranks as they are made. In CUDA graphs the kernels compare
    them; copy engines compare nothing.

    Attributes:
        inside: the operations between the ranks of the node.
        workspaces: the memory of the node's ranks that operations on GPUs need besides blocks, by name.
        waits: on GPUs, the gathers by copy engines.
    """

    waits: StreamWaits

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
        self.streams = Streams() if device.type == "cpu" else CudaStreams(device)
        self.memory = self._own(open_memory(within, device))
        self.control = take_set(group, within, self.memory)
        self._resources.callback(self.control.close)
        self.shared = self.control.buffers
        self._make_boards(self.control.board)
        self.inside = _node_of(self)
        self.blocks = Blocks(self, self.num_buffers)
        self._resources.callback(self.blocks.close)
        self.comm = self._comm_struct(self.control.block, num_experts=self.node_size)
        self.inside.set_comm(self.comm)
        self.workspaces: dict[str, PeerBuffer] = {}
        if device.type == "cuda" and self.node_size > 1:
            self.serve_gpus(self.kernels.collectives)
            if self.gathers:
                self.watch(StreamWaits(self))

    def serve_gpus(self, kernels: int) -> None:
        """Makes operations run on GPUs. kernels: the address of their CollectiveKernels."""
        inside = self.inside
        inside.kernels, inside.order, inside.calls = kernels, self.streams.order, self.control.calls
        inside.ways = paths.ways(self.path, self.node_size, self.sum_sms)

    def watch(self, waits: StreamWaits) -> None:
        """Makes gathers by copy engines known to `waits`."""
        self.waits = waits
        self._resources.callback(waits.close)
        self.inside.stream_words, self.inside.progress = waits.table.host_address, waits.progress.data_ptr()

    def make_workspace(self, number: int) -> None:
        """Makes memory on the ranks of the node, collectively."""
        name, nbytes = {
            _C.staging_block: ("staging", paths.STAGING_BYTES),
            _C.words_block: ("words", _C.small_words_bytes(self.node_size)),
            _C.cells_block: ("cells", _C.channel_cells_bytes(self.node_size, self.sum_sms)),
        }[number]
        if self.streams.capturing():
            raise CaptureRefused(
                f"{self.name}: expected one operation of this kind, size and memory before a CUDA graph is captured, "
                f"got the first, which makes {name}"
            )
        self.workspaces[name] = self.memory.allocate(nbytes, name)
        self.set_memory(number, self.workspaces[name])

    def set_memory(self, number: int, memory: PeerBuffer) -> None:
        """Makes operations find a block or a workspace by this number."""
        table = memory.table
        self.inside.set_memory(number, memory.ptrs, memory.nbytes, table.address, table.host_address)

    def keep_blocks(self, outputs: list[torch.Tensor]) -> None:
        """Keeps the blocks of outputs that a CUDA graph uses."""
        if self.streams.capturing():
            for number in {self.inside.block_of(output) for output in outputs} - {-1}:
                self.blocks.keep_if_captured(number)

    def calls_differ(self, difference: tuple[int, int, int, int, int]) -> None:
        """Raises DisagreementError. difference: step, local rank of the peer, field, value here, value there."""
        step, peer, *values = difference
        raise disagreement(self, _C.Step(step).name.lower(), self.group_rank(peer), *values)

    def begin_stream_wait(self, gather: tuple[int, int, int, bytes]) -> None:
        """Notes a gather by copy engines, before it is enqueued.

        gather: its number, block and bytes of a shard, and where each rank's shard is written here, as uint64.
        """
        number, block, nbytes, written = gather
        addresses = array("Q", written)
        del addresses[self.index]
        self.waits.begin(number, block, addresses, nbytes)

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


def _node_of(engine: CollectiveEngine) -> _C.CollectiveNode:
    device = engine.device
    index = -1 if device.type == "cpu" else device.index
    address = engine.boards.address
    return _C.CollectiveNode(engine, running, device, engine.call_log, engine.name, address, index)
