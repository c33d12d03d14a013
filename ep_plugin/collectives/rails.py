"""The legs between nodes: shards to and from the ranks of one index on all nodes, over the group's own backend."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.engine import resolve_device
from ep_plugin.errors import NotSupported, PeerTimeout
from ep_plugin.topology import NodeMap

_TAG = 0x4550  # of messages between ranks that may exchange others of their own


class Rails:
    """This rank's end of its rail. `bytes_sent` counts what it has sent to other nodes since it was made."""

    def __init__(
        self, group: dist.ProcessGroup, node_map: NodeMap, rank: int, device: torch.device, timeout_s: float
    ) -> None:
        """NotSupported when the group's backend cannot send from the memory of `device`."""
        self._group = group
        self._on_gpu = device.type == "cuda"
        if self._on_gpu and node_map.spans_nodes:
            _check_backend(group, device)
        self._rank = rank
        self._timeout_s = timeout_s
        self.bytes_sent = 0
        ranks = node_map.rail(node_map.local_rank_of(rank))
        own = node_map.node_of(rank)
        # The next node first, so that no two nodes send to one at a time.
        self.nodes = [(own + step) % node_map.num_nodes for step in range(1, node_map.num_nodes)]
        self._rank_on = dict(enumerate(ranks))

    def start(self, sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]) -> Any:
        """Begins to send and receive uint8 tensors, (node, tensor) each; what `wait` takes."""
        operations = []
        for node, tensor in sends:
            operations.append(self._operation(dist.isend, tensor, node))
            self.bytes_sent += tensor.numel()
        operations.extend(self._operation(dist.irecv, tensor, node) for node, tensor in receives)
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self, works: Any) -> None:
        """Until those have arrived: on GPUs the caller's stream waits, else the host, with a deadline."""
        for work in works:
            try:
                if self._on_gpu:
                    work.wait()  # with a timeout the host would wait too; NCCL watches its own
                else:
                    work.wait(timeout=datetime.timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> PeerTimeout:
        """Backends do not say which of their peers is gone, and raise one kind of error for all that goes wrong."""
        others = [self._rank_on[node] for node in self.nodes]
        return PeerTimeout(
            f"rank {self._rank} waited at most {self._timeout_s:g} s for rank{'s' if len(others) > 1 else ''} "
            f"{', '.join(map(str, others))} at step rail: {error}",
            others[0],
            "rail",
        )

    def _operation(self, kind: Any, tensor: torch.Tensor, node: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self._group, tag=_TAG, group_peer=self._rank_on[node])


def _check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    if resolve_device(group, None).type != "cuda":
        raise NotSupported(
            "group: expected a backend that sends GPU memory between nodes, such as NCCL, got "
            f"{dist.get_backend_config(group)} for {device}"
        )
