"""Inside a node on GPUs: everything is enqueued on the caller's stream, and the host waits for nothing.

Operations of one communicator on several streams run in the order of their calls. Ranks push shards into their peers'
outputs; outputs that peers have not mapped go through a staging block, piece by piece. Sums travel through cells that
every rank has for every other, so no input is mapped. Small shards go as words with flags. `paths.py` chooses.

Hosts compare the calls of all ranks as they are made. In CUDA graphs the kernels compare them; copy engines compare
nothing.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.collectives.backends import paths
from ep_plugin.collectives.backends.watchdog import StreamWaits
from ep_plugin.collectives.blocks import Node
from ep_plugin.collectives.shards import addresses_of, key_of
from ep_plugin.errors import CaptureRefused
from ep_plugin.runtime.faults import disagreement
from ep_plugin.runtime.streams import CallerStreams
from ep_plugin.transport.peer import PeerBuffer

_STAGED = _C.place_word(_C.staging_block, 0)
_MOST_KEPT = 256  # launches that a communicator remembers


class Calls:
    """Compares, on the hosts, what the ranks of a node enqueue on their devices.

    Each rank posts its call, with the call's number, in host memory that all ranks map, and looks for the peers' posts
    of that number. The rank that calls second compares, so no rank waits. It raises before it enqueues anything, and
    its abort ends what the others have enqueued.
    """

    def __init__(self, node: Node) -> None:
        self._node: Node = weakref.proxy(node)
        self._rings = (ctypes.c_int64 * node.node_size)(*node.control.calls)
        self._ranks = ctypes.addressof(self._rings), node.node_size, node.index
        self._number = 0

    def compare(self, step: _C.Step, nbytes: int, element: int, place: int) -> None:
        """Raises DisagreementError if a peer's call of this number differs, naming this rank and the first such peer.

        nbytes: of a shard. element: of a sum, 0 for a gather. place: of the output in peer memory, see place_word.
        """
        self._number += 1
        different = _C.post_call(*self._ranks, self._number, nbytes, element, place)
        if different is not None:
            index, *values = different
            raise disagreement(self._node, step.name.lower(), self._node.group_rank(index), *values)


class CudaNode:
    """The memory, the streams and the small operations of one communicator inside a node."""

    def __init__(self, node: Node, streams: CallerStreams) -> None:
        self._node: Node = weakref.proxy(node)
        self._streams = streams
        self._calls = Calls(node)
        self._workspaces: dict[str, PeerBuffer] = {}
        self._kept: dict[tuple[Any, ...], Any] = {}  # what calls with the same memory or sizes launch again

    def close(self) -> None: ...

    def _workspace(self, name: str, nbytes: int) -> PeerBuffer:
        """Returns the ranks' memory of this name. Makes it, collectively, when it is first needed."""
        if name not in self._workspaces:
            self._refuse_first_in_graph(name)
            self._workspaces[name] = self._node.memory.allocate(nbytes, name)
        return self._workspaces[name]

    def _refuse_first_in_graph(self, name: str) -> None:
        """Raises CaptureRefused, before anything is done, if a CUDA graph's capture would have to make `name`."""
        if name not in self._workspaces and self._streams.capturing():
            raise CaptureRefused(
                f"{self._node.name}: expected one operation of this kind, size and memory before a CUDA graph is "
                f"captured, got the first, which makes {name}"
            )

    def _is_small(self, nbytes: int) -> bool:
        return paths.is_small(self._node.path, nbytes, self._node.node_size)

    def _keep(self, key: tuple[Any, ...], launch: Any) -> Any:
        if len(self._kept) == _MOST_KEPT:
            self._kept.clear()
        self._kept[key] = launch
        return launch

    def _exchange_words(self, shards: Sequence[torch.Tensor], own: torch.Tensor, element: int, scale: float) -> None:
        """Gathers or sums small shards as words with flags.

        Args:
            shards: in a gather, where each rank's shard goes; in a sum, this rank's shard for each rank.
            own: in a gather, this rank's shard; in a sum, where the sum goes.
            element: the dtype of a sum, -1 for a gather.
            scale: the factor of a sum.
        """
        node, nbytes = self._node, own.numel()
        words = self._workspace("words", _C.small_words_bytes(node.node_size))
        args = _C.SmallExchangeArgs(
            comm=node.comm,
            bytes=nbytes,
            scale=scale,
            element=element,
            num_ctas=paths.small_ctas(nbytes, node.node_size),
            words=words.table.address,
            own_words=words.ptrs[node.index],
            own=own.data_ptr(),
        )
        args.stream = self._streams.enter(args.num_ctas)
        args.set_shards(addresses_of(shards))
        node.kernels.small_exchange(args)


class CudaSumNode(CudaNode):
    """Sums: one kernel of a few CTAs reads the inputs where they are."""

    def scatter(self, out: torch.Tensor, shards: Sequence[torch.Tensor], element: int, scale: float) -> None:
        """out = scale * the sum over the ranks of their shards for this one."""
        node, nbytes = self._node, out.numel()
        if not self._streams.capturing():  # kernels compare a graph's calls
            self._calls.compare(_C.Step.REDUCE_SCATTER, nbytes, element, 0)
        if nbytes == 0:
            return
        if self._is_small(nbytes):
            self._exchange_words(shards, out, element, scale)
            return
        args = self._kept.get((nbytes, element, scale))
        if args is None:
            cells = self._workspace("cells", _C.channel_cells_bytes(node.node_size, node.sum_sms))
            args = _C.ReduceScatterArgs(
                comm=node.comm,
                bytes=nbytes,
                scale=scale,
                element=element,
                num_ctas=paths.scatter_sms(node.path, nbytes, node.node_size, node.sum_sms),
                cells=cells.table.address,
                own_cells=cells.ptrs[node.index],
            )
            self._keep((nbytes, element, scale), args)
        args.set_inputs(addresses_of(shards))
        args.output = out.data_ptr()
        args.stream = self._streams.enter(args.num_ctas)
        node.kernels.reduce_scatter(args)


class CudaGatherNode(CudaNode):
    """Gathers, by copy engines or by a kernel that pushes. All ranks pass outputs at the same place of the same block,
    or all pass memory that is in no block."""

    def __init__(self, node: Node, streams: CallerStreams) -> None:
        super().__init__(node, streams)
        self._changes = 0  # of the blocks when the kept launches were made
        self.waits = StreamWaits(node)  # last, since nothing closes it if a later step fails

    def close(self) -> None:
        self.waits.close()

    def gather(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Brings `shard`, which is this rank's of `outputs`, to every rank."""
        node, nbytes = self._node, shard.numel()
        if nbytes == 0:
            return self._compare(0, _STAGED, [])
        if self._is_small(nbytes):
            self._refuse_first_in_graph("words")
            self._compare(nbytes, _STAGED, outputs)
            return self._exchange_words(outputs, shard, -1, 1.0)
        key = shard.data_ptr(), nbytes, key_of(outputs)
        launch = self._kept_launch(key)
        if launch is not None:
            self._calls.compare(_C.Step.ALL_GATHER, nbytes, 0, launch[0].place)
            return self._push(*launch)
        found = node.blocks.locate(outputs)
        if found is None:
            self._refuse_first_in_graph("staging")
            self._compare(nbytes, _STAGED, outputs)
            launches = self._staged(shard, outputs)
        else:
            block, offsets = found
            place = _C.place_word(block, offsets[0])
            self._compare(nbytes, place, outputs)
            memory = node.blocks.memory_of(block)
            launches = [self._launch_of(shard, outputs, memory, offsets[node.index], block, place)]
        if len(launches) == 1 and not self._streams.capturing():
            self._keep(key, launches[0])
        for launch in launches:
            self._push(*launch)

    def _staged(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[tuple[Any, Sequence[int]]]:
        """Returns the launches of a gather through the staging blocks, one for each piece of the shard."""
        node, staging = self._node, self._workspace("staging", paths.STAGING_BYTES)
        step = paths.staged_bytes(node.node_size)
        launches = []
        for begin in range(0, shard.numel(), step):
            part = shard[begin : begin + step]
            parts = [output[begin : begin + step] for output in outputs]
            offset = node.index * part.numel()
            launches.append(self._launch_of(part, parts, staging, offset, _C.staging_block, _STAGED))
        return launches

    def _compare(self, nbytes: int, place: int, outputs: Sequence[torch.Tensor]) -> None:
        """Raises DisagreementError if a peer has called something else. In a capture, which the kernels compare, keeps
        the blocks that `outputs` lie in."""
        if not self._streams.capturing():
            return self._calls.compare(_C.Step.ALL_GATHER, nbytes, 0, place)
        blocks = self._node.blocks
        for block in {found[0] for output in outputs if (found := blocks.locate([output])) is not None}:
            blocks.keep_if_captured(block)

    def _kept_launch(self, key: tuple[Any, ...]) -> tuple[Any, Sequence[int]] | None:
        """Returns the launch of an earlier call with the same memory, if it is kept. A capture makes new launches."""
        if self._changes != self._node.blocks.changes:
            self._kept.clear()
            self._changes = self._node.blocks.changes
        return None if self._streams.capturing() else self._kept.get(key)

    def _launch_of(
        self,
        shard: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        memory: PeerBuffer,
        offset: int,
        block: int,
        place: int,
    ) -> tuple[Any, Sequence[int]]:
        """Returns the kernel's arguments except its stream and number, and the addresses on this rank that peers write.

        Args:
            shard, outputs: this rank's shard, and where each rank's shard goes here.
            memory: the ranks' blocks in which peers have the outputs, or their staging blocks.
            offset: where this rank's shard goes in each of them.
            block: their number.
            place: the outputs' place, see place_word.
        """
        node, nbytes = self._node, shard.numel()
        staging = memory.ptrs[node.index] if block == _C.staging_block else 0
        args = _C.AllGatherArgs(
            comm=node.comm,
            input=shard.data_ptr(),
            bytes=nbytes,
            blocks=memory.table.address,
            host_blocks=memory.table.host_address,
            offset=offset,
            staging=staging,
            place=place,
            block=block,
            num_ctas=paths.push_ctas(node.path, nbytes, node.node_size, mapped=not staging),
            captured=int(self._streams.capturing()),
            stream_words=self.waits.table.host_address,
            begun=self.waits.progress.data_ptr(),
            finished=self.waits.progress.data_ptr() + 8,
        )
        addresses = addresses_of(outputs)
        args.set_outputs(addresses)
        filled = [staging + index * nbytes for index in range(node.node_size)] if staging else list(addresses)
        del filled[node.index]
        return args, filled

    def _push(self, args: Any, filled: Sequence[int]) -> None:
        args.stream = self._streams.enter(max(args.num_ctas, args.captured))  # a graph's handshakes take an SM
        if args.num_ctas == 0 and not args.captured:
            self.waits.begin(args, filled)
        self._node.kernels.all_gather(args)
