"""The collectives of the integrations: a pair for each process group and device.

Operations of one pair match in the order of the calls, so groups must not share one unless all ranks use them in one
order. Within a model that holds, and FSDP2 makes a group for each module over the same ranks, while each pair keeps
memory. So a model that says so has one pair for such groups.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, counts
from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.errors import NotSupported
from ep_plugin.runtime.streams import current_stream, on_stream, record_stream
from ep_plugin.transport.groups import is_alive, timeout_of
from ep_plugin.transport.peer import PeerBuffer

# By device, the gathered bytes from which PyTorch's own collective gathers into memory that peers have not mapped. On
# GPUs such a gather costs ours one more copy, by SMs that the model wants: on 4 H200s NCCL is faster from this size on
# (187 us to 207; at 256 MiB 657 to 810). CPUs have no such limit.
STOCK_FROM_BYTES = {"cuda": 64 << 20}
_SUM_SMS = 24  # backward has the others
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)


class Pair:
    """The collectives over ``group`` on ``device``. Their first use is collective, as making them is not."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.num_users = group, device, 0
        self.all_gather = HierarchicalAllGather(group)
        self.reduce_scatter = HierarchicalReduceScatter(group, sms=_SUM_SMS)
        self._refused: dict[str, NotSupported] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        # By model, the bytes that each user asks for.
        self.sizes: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()

    def refused(self, name: str) -> NotSupported | None:
        """Why `all_gather` or `reduce_scatter` does not serve the group, the same on all ranks; None: it does.

        The first call for each name is collective.
        """
        if name not in self._refused and self.group.size() > 1:
            try:
                getattr(self, name).engine_on(self.device)
            except NotSupported as error:
                self._refused[name] = error.with_traceback(None)  # which would keep the callers' tensors
        return self._refused.get(name)

    def gathers_well(self, output: torch.Tensor) -> bool:
        """Whether our gather into ``output`` is as fast as PyTorch's or faster. The answer is the same on all ranks."""
        limit = STOCK_FROM_BYTES.get(output.device.type)
        return limit is None or output.nbytes < limit or self.group.size() == 1 or self.all_gather.maps(output)

    def why_left(self, name: str, output: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> str | None:
        """Names what the framework's own collective has to serve; None if `run` serves the call.

        The answer is the same on all ranks.
        """
        if name == "reduce_scatter" and not any(op == known for known in _SUMS):  # a ReduceOp knows its kind
            kinds = [kind for kind, known in dist.ReduceOp.RedOpType.__members__.items() if op == known]
            return f"reduce-scatters with the operation {', '.join(kinds) or op}"
        if name == "reduce_scatter" and not can_sum(output):
            return f"reduce-scatters of {output.dtype} on {output.device.type}"
        error = self.refused(name)
        if error is not None:
            return f"collectives over ranks {dist.get_process_group_ranks(self.group)} ({error})"
        if name == "all_gather" and not self.gathers_well(output):
            return "gathers of 64 MiB and more into memory that peers have not mapped"
        return None

    def run(self, name: str, output: torch.Tensor, shards: torch.Tensor, async_op: bool, **options: Any) -> Any:
        """Calls `all_gather` or `reduce_scatter`; with async_op, on GPUs, beside the current stream and after it.

        Returns:
            What the collective returns: its Work, or None without async_op.
        """
        collective = getattr(self, name)
        if not async_op:
            return collective(output, shards, **options)
        if self.device.type != "cuda":
            return collective(output, shards, async_op=True, **options)
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self.device)
        _C.order_streams(stream.cuda_stream, current_stream(self.device), self.device.index)
        record_stream(stream, (output, shards))  # the caller may free either before the stream has come to them
        with on_stream(stream):
            return collective(output, shards, async_op=True, **options)

    def peer_buffers(self) -> list[PeerBuffer]:
        """The open blocks of peer memory that both hold on this rank."""
        return [*self.all_gather.peer_buffers(), *self.reduce_scatter.peer_buffers()]

    def close(self) -> None:
        """Closes both, also if one raises."""
        with contextlib.closing(self.all_gather), contextlib.closing(self.reduce_scatter):
            pass


_Key = tuple[dist.ProcessGroup, torch.device]
_Ranks = tuple[tuple[int, ...], float]  # with the timeout
_pairs: dict[_Key, Pair] = {}
# Ranks and timeout of each process group as it was first seen: a script that changes the timeout later keeps its pair.
_ranks: weakref.WeakKeyDictionary[Any, _Ranks] = weakref.WeakKeyDictionary()
# By model, the first of its groups over the same ranks.
_first: weakref.WeakKeyDictionary[Any, dict[_Ranks, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # backward runs in a thread of autograd's


class PairUser:
    """A user of pairs. Its pairs stay open until it leaves or their group is destroyed."""

    def __init__(self, name: str) -> None:
        """name: the integration, which counts the memory of its pairs."""
        self._name = name
        self._keys: set[_Key] = set()

    def pair(self, group: dist.ProcessGroup, device: torch.device, model: Any = None) -> Pair:
        """The pair that serves `group` on `device`.

        Args:
            model: its groups over the same ranks, with the same timeout, share a pair. All ranks must use them in one
                order, or data of one group would reach another.
        """
        with _lock:
            if model is not None:
                group = _first_over_its_ranks(group, model)
            key = group, device
            if key not in _pairs:
                for gone in [each for each in _pairs if not is_alive(each[0])]:
                    _pairs.pop(gone).close()
                _pairs[key] = Pair(group, device)
            pair = _pairs[key]
            if key not in self._keys:
                counts.holds(self._name, pair)
                self._keys = (self._keys & _pairs.keys()) | {key}
                pair.num_users += 1
            return pair

    def leave(self) -> None:
        """Closes the pairs that nobody else uses."""
        with contextlib.ExitStack() as closing, _lock:
            for key in self._keys & _pairs.keys():
                pair = _pairs[key]
                pair.num_users -= 1
                counts.leaves(self._name, pair)
                if pair.num_users == 0:
                    closing.callback(_pairs.pop(key).close)
                for sizes in pair.sizes.values():
                    sizes.pop(self, None)
            self._keys.clear()


def _first_over_its_ranks(group: dist.ProcessGroup, model: Any) -> dist.ProcessGroup:
    ranks = _ranks.get(group)
    if ranks is None:
        ranks = _ranks[group] = tuple(dist.get_process_group_ranks(group)), timeout_of(group)
    groups = _first.setdefault(model, {})
    if ranks not in groups or not is_alive(groups[ranks]):
        groups[ranks] = group
    return groups[ranks]


def can_sum(tensor: torch.Tensor) -> bool:
    """Whether HierarchicalReduceScatter adds this dtype on this device."""
    on_cpus = () if tensor.is_cuda else (torch.float64,)
    return tensor.dtype in (torch.bfloat16, torch.float16, torch.float32, *on_cpus)
