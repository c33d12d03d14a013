"""The legs between nodes: shards to and from the ranks of one index on all nodes, over the group's own backend.

Sums are sent and received. Shards that all nodes want go so too, but over NCCL through a communicator of the rail's
own, whose all-gather keeps more of a network busy than a send does.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ep_plugin.errors import NotSupported, PeerTimeout
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.topology import NodeMap

_TAG = 0x4550  # of messages between ranks that may exchange others of their own
CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """What has begun: works of the backend, and what is copied, (from, to) each, once they are over."""

    works: list[Any]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Rails:
    """This rank's end of its rail. `bytes_sent` counts what it has sent to other nodes since it was made."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup, node_map: NodeMap, device: torch.device) -> None:
        """exchange: one over `group`. NotSupported when the group's backend cannot send from the memory of `device`."""
        self._group, self._device = group, device
        self._rank = exchange.rank
        self._timeout_s = exchange.timeout_s
        self.bytes_sent = 0
        self.chunk_bytes = CHUNK_BYTES[device.type]
        self._ranks = node_map.rail(node_map.local_rank_of(self._rank))  # by node
        own = node_map.node_of(self._rank)
        # The next node first, so that no two nodes send to one at a time.
        self.nodes = [(own + step) % node_map.num_nodes for step in range(1, node_map.num_nodes)]
        self._together: Any = None
        self._aborted = self._waiting = False
        if device.type == "cuda" and self.nodes:
            _check_backend(group, device)

    def connect(self, exchange: Exchange) -> None:
        """Makes NCCL's communicator of this rail for `gather`, where the group's backend is NCCL. Collective.

        Not a group of torch.distributed's: to make one may take every rank of the job, as where NCCL splits the largest
        communicator, and these ranks may be all that are here.
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
        return UnderWay(works=[work], copies=[(arrived[node], into) for node, into in landing.items()])

    def start(
        self, sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]
    ) -> UnderWay:
        """Begins to send and receive uint8 tensors, (node, tensor) each."""
        self._refuse_after_abort()
        operations = []
        for node, tensor in sends:
            operations.append(self._operation(dist.isend, tensor, node))
            self.bytes_sent += tensor.numel()
        operations.extend(self._operation(dist.irecv, tensor, node) for node, tensor in receives)
        try:
            return UnderWay(works=dist.batch_isend_irecv(operations) if operations else [])
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self, under_way: UnderWay) -> None:
        """Until those have arrived: on GPUs the caller's stream waits, else the host, with a deadline."""
        self._waiting = True
        self._refuse_after_abort()
        for work in under_way.works:
            try:
                if self._device.type == "cuda":
                    work.wait()  # with a timeout the host would wait too; NCCL watches its own
                else:
                    work.wait(timeout=datetime.timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise self._lost(error) from error
        self._waiting = False
        for arrived, into in under_way.copies:
            into.copy_(arrived)

    def close(self) -> None:
        """Not collective. What peers have still to receive of this rank reaches them."""
        self._end("shutdown")

    def abort(self) -> None:
        """Ends what waits for a rank that is gone, also a wait of another thread. Nothing begins after it."""
        self._aborted = True
        self._end("abort")
        if self._waiting and self._device.type == "cpu":
            # Gloo ends a wait by nothing but an overdue one, which closes all connections of its group.
            backend: Any = self._group._get_backend(self._device)
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device=self._device)
                backend.recv([nothing], self._ranks[self.nodes[0]], _TAG + 1).wait(datetime.timedelta(milliseconds=1))

    def _refuse_after_abort(self) -> None:
        if self._aborted:
            raise self._lost(RuntimeError("the rail was aborted"))

    def _end(self, how: str) -> None:
        together, self._together = self._together, None
        if together is not None:
            _open.discard(together)
            with contextlib.suppress(RuntimeError):
                getattr(together, how)()

    def _lost(self, error: RuntimeError) -> PeerTimeout:
        """Backends do not say which of their peers is gone, and raise one kind of error for all that goes wrong."""
        others = [self._ranks[node] for node in self.nodes]
        return PeerTimeout(
            f"rank {self._rank} waited at most {self._timeout_s:g} s for rank{'s' if len(others) > 1 else ''} "
            f"{', '.join(map(str, others))} at step rail: {error}",
            others[0],
            "rail",
        )

    def _operation(self, kind: Any, tensor: torch.Tensor, node: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self._group, tag=_TAG, group_peer=self._ranks[node])


def serves_gpus(group: dist.ProcessGroup | None) -> bool:
    """Whether the group has a backend for GPU memory, and this process a GPU."""
    backends = dict(entry.split(":", 1) for entry in str(dist.get_backend_config(group)).split(","))
    # gloo and MPI call themselves a backend for CUDA tensors too.
    return backends.get("cuda") not in (None, "gloo", "mpi") and torch.cuda.is_available()


def _check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    if not serves_gpus(group):
        raise NotSupported(
            "group: expected a backend that sends GPU memory between nodes, such as NCCL, got "
            f"{dist.get_backend_config(group)} for {device}"
        )


_open: set[Any] = set()  # communicators that nobody has closed: a process that ends with one says so on its screen


@atexit.register
def _abort_open() -> None:
    """To shut them down could wait for peers that have failed, as this process may have."""
    while _open:
        with contextlib.suppress(RuntimeError):
            _open.pop().abort()
