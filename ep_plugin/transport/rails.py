"""The legs between nodes: shards to and from the ranks of one local rank on all nodes, over the group's own backend.

Sums are sent and received. Shards that all nodes want go so too, except over NCCL: there the rail has a communicator of
its own, whose all-gather uses more of the network's bandwidth than sends do.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ep_plugin.errors import NotSupported, PeerTimeout
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.topology import NodeMap

CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Sends and receives that have begun: (node, work of the backend) each; node None: a work for all nodes.

    copies: (from, to) each, to be made when the works are over.
    """

    works: list[tuple[int | None, Any]]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Rails:
    """This rank's end of its rail. `bytes_sent` counts what it has sent to other nodes since it was made."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup, node_map: NodeMap, device: torch.device) -> None:
        """exchange: one over `group`. NotSupported when the group's backend cannot send from the memory of `device`."""
        self._group, self._device = group, device
        self._rank = exchange.rank
        self._timeout_s = exchange.timeout_s
        self._name = exchange.name
        self.bytes_sent = 0
        self.chunk_bytes = CHUNK_BYTES[device.type]
        self._ranks = node_map.rail(node_map.local_rank_of(self._rank))  # by node
        own = node_map.node_of(self._rank)
        # The next node first, so that no two nodes send to one at a time.
        self.nodes = [(own + step) % node_map.num_nodes for step in range(1, node_map.num_nodes)]
        self._together: Any = None
        self._aborted = self._waiting = False
        if device.type == "cuda" and self.nodes and not serves_gpus(group):
            raise NotSupported(
                "group: expected a backend that sends GPU memory between nodes, such as NCCL, got "
                f"{dist.get_backend_config(group)} for {device}"
            )

    def connect(self, exchange: Exchange) -> None:
        """Makes NCCL's communicator of this rail for `gather`, where the group's backend is NCCL. Collective.

        It is no group of torch.distributed: to make one may take every rank of the job, as where NCCL splits the
        largest communicator, and perhaps only the ranks of this group are here.
        """
        if not self.nodes or self._device.type != "cuda" or not c10d.is_nccl_available():
            return
        backend = self._group._get_backend(self._device)
        if not isinstance(backend, c10d.ProcessGroupNCCL):
            return
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=self._timeout_s)
        options.config = backend.options.config
        store = exchange.store(f"rail{self._ranks[0]}")
        together = c10d.ProcessGroupNCCL(store, self._ranks.index(self._rank), len(self._ranks), options)
        together.eager_connect_single_device(self._device)
        self._together = together
        _open.add(together)

    def gather(self, part: torch.Tensor, landing: Mapping[int, torch.Tensor]) -> UnderWay:
        """Begins to send `part` to all other nodes, and to receive theirs of the same size, by node; uint8 tensors."""
        if self._together is None:
            return self.start([(node, part) for node in self.nodes], landing.items())
        self._refuse_after_abort()
        everyones = part.new_empty(len(self._ranks) * part.numel())
        self.bytes_sent += len(self.nodes) * part.numel()
        try:
            work = self._together._allgather_base(everyones, part)
        except RuntimeError as error:
            raise self._lost(error) from error
        arrived = everyones.chunk(len(self._ranks))
        return UnderWay(works=[(None, work)], copies=[(arrived[node], into) for node, into in landing.items()])

    def start(
        self, sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]
    ) -> UnderWay:
        """Begins to send and receive uint8 tensors, (node, tensor) each."""
        self._refuse_after_abort()
        legs = []
        for kind, tensors in ((dist.isend, sends), (dist.irecv, receives)):
            for node, tensor in tensors:
                leg = dist.P2POp(
                    kind, tensor, group=self._group, tag=self._tag(tensor.numel()), group_peer=self._ranks[node]
                )
                legs.append((node, leg))
                self.bytes_sent += tensor.numel() if kind is dist.isend else 0
        # NCCL begins all legs together. Gloo begins one after the other, so the node of a leg that fails is known.
        batches = [legs] if self._device.type == "cuda" else [[leg] for leg in legs]
        works: list[tuple[int | None, Any]] = []
        for batch in filter(None, batches):
            at = batch[0][0] if len(batch) == 1 else None
            try:
                works += [(at, work) for work in dist.batch_isend_irecv([leg for _, leg in batch])]
            except RuntimeError as error:
                raise self._lost(error, at) from error
        return UnderWay(works=works)

    def wait(self, under_way: UnderWay) -> None:
        """Waits until those have arrived: on GPUs the caller's stream does, else the host, with a deadline."""
        self._waiting = True
        self._refuse_after_abort()
        for node, work in under_way.works:
            try:
                if self._device.type == "cuda":
                    work.wait()  # with a timeout the host would wait too; NCCL watches its own
                else:
                    work.wait(timeout=datetime.timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise self._lost(error, node) from error
        self._waiting = False
        for arrived, into in under_way.copies:
            into.copy_(arrived)

    def close(self) -> None:
        """Not collective. Peers still receive what this rank has sent."""
        self._end("shutdown")

    def abort(self) -> None:
        """Ends waits for a rank that is gone, also those of another thread. Nothing begins after it."""
        self._aborted = True
        self._end("abort")
        if self._waiting and self._device.type == "cpu":
            # Only an overdue wait ends gloo's other waits: it closes all connections of its group.
            backend: Any = self._group._get_backend(self._device)
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device=self._device)
                backend.recv([nothing], self._ranks[self.nodes[0]], self._tag(-1)).wait(
                    datetime.timedelta(milliseconds=1)
                )

    def _tag(self, nbytes: int) -> int:
        """Messages meet only those of the same communicator and size: gloo ends a process that gets a longer message
        than it expects, and takes a shorter one for whole. NCCL knows no tags."""
        return zlib.crc32(f"ep_plugin {self._name} {nbytes}".encode()) >> 1

    def _refuse_after_abort(self) -> None:
        if self._aborted:
            raise self._lost(RuntimeError("the rail was aborted"))

    def _end(self, how: str) -> None:
        together, self._together = self._together, None
        if together is not None:
            _open.discard(together)
            with contextlib.suppress(RuntimeError):
                getattr(together, how)()

    def _lost(self, error: RuntimeError, node: int | None = None) -> PeerTimeout:
        """The error of a work for `node`. Its rank is a guess: a backend raises one kind of error for all failures."""
        others = [self._ranks[other] for other in ([node] if node is not None else self.nodes)]
        return PeerTimeout(
            f"rank {self._rank} waited at most {self._timeout_s:g} s for rank{'s' if len(others) > 1 else ''} "
            f"{', '.join(map(str, others))} at step rail: {error}",
            others[0] if len(others) == 1 else None,
            "rail",
        )


def serves_gpus(group: dist.ProcessGroup | None) -> bool:
    """Whether the group has a backend for GPU memory, and this process a GPU."""
    backends = dict(entry.split(":", 1) for entry in str(dist.get_backend_config(group)).split(","))
    # gloo and MPI call themselves a backend for CUDA tensors too.
    return backends.get("cuda") not in (None, "gloo", "mpi") and torch.cuda.is_available()


_open: set[Any] = set()  # communicators that nobody has closed: NCCL warns where a process ends with one
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's


@atexit.register
def _abort_open() -> None:
    """Aborts, since a shutdown could wait for peers that have failed."""
    while _open:
        with contextlib.suppress(RuntimeError):
            _open.pop().abort()
