"""ElasticBuffer's messages between neighbours of a pipeline, and its all-gather sessions.

R: ranks of the group.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import counts
from ep_plugin.collectives.all_gather import HierarchicalAllGather
from ep_plugin.collectives.send_receive import MessageWork, SendReceive
from ep_plugin.deep_ep import arguments
from ep_plugin.deep_ep.shared import device_of
from ep_plugin.deep_ep.utils.math import align

SIZE_ALIGNMENT = 2 << 20
_PART_ALIGNMENT = 128  # of the tensors in a session's memory


class PipelineMessages:
    """The messages of one rank to its neighbours in the ring of ranks, at most `most_bytes` each.

    As in DeepEP a send returns when the tensor may change. `most_tensors` to each neighbour may be under way; the next
    one waits for the first.
    """

    def __init__(self, group: dist.ProcessGroup, most_bytes: int, most_tensors: int) -> None:
        """Collective."""
        self._most_bytes, self._most_tensors = most_bytes, most_tensors
        rank, size = group.rank(), group.size()
        self._neighbours = {(rank + 1) % size, (rank - 1) % size} - {rank}
        self._messages = SendReceive(group)
        counts.holds("deep_ep", self._messages)
        self._sends: defaultdict[int, deque[MessageWork]] = defaultdict(deque)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._check(tensor, "dst_rank_idx", to)
        sends = self._sends[to]
        while len(sends) >= self._most_tensors:
            sends.popleft().wait()
        sends.append(self._messages.send(tensor.detach().clone(), to))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._check(tensor, "src_rank_idx", source)
        self._messages.receive(tensor, source).wait()

    def close(self) -> None:
        self._messages.close()

    def _check(self, tensor: torch.Tensor, name: str, peer: int) -> None:
        if peer not in self._neighbours:
            raise ValueError(f"{name}: expected a neighbour in the ring, {sorted(self._neighbours)}, got {peer!r}")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            raise ValueError(f"t: expected a contiguous tensor, got {type(tensor).__name__}")
        if tensor.nbytes > self._most_bytes:
            raise ValueError(f"t: expected at most {self._most_bytes} bytes, as in pp_set_config, got {tensor.nbytes}")


class GatherSessions:
    """All-gathers into memory that peers have mapped. Each session uses this memory again from its start."""

    def __init__(self, group: dist.ProcessGroup, most_bytes: int, most_gathers: int) -> None:
        """Collective. most_bytes: of all gathered tensors of a session."""
        self._group, self._most_gathers = group, most_gathers
        self._gather = HierarchicalAllGather(group)
        counts.holds("deep_ep", self._gather)
        self._memory = self._gather.allocate(most_bytes, dtype=torch.uint8, device=device_of(group))
        self._begun = False
        self._used = self._count = 0
        self._in_place: dict[int, torch.Tensor] = {}  # by the address of this rank's part

    def begin(self) -> None:
        if self._begun:
            raise ValueError("create_agrs_session(): expected no session that is open, got one; destroy it first")
        self._begun = True

    def end(self) -> None:
        self._check_begun("destroy_agrs_session()")
        self._begun = False
        self._used = self._count = 0
        self._in_place.clear()

    def in_place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part of the memory of the next gather."""
        self._check_begun("agrs_get_inplace_tensor()")
        gathered = self._take(shape, dtype)
        mine = gathered[self._group.rank()]
        self._in_place[mine.data_ptr()] = gathered
        return mine

    def gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
        """Start a gather. Returns ``[R, *shape]``, and a function that makes the current stream wait for it."""
        self._check_begun("all_gather()")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            raise ValueError(f"t: expected contiguous tensors, got {type(tensor).__name__}")
        if self._count == self._most_gathers:
            raise ValueError(f"all_gather(): expected at most {self._most_gathers} in a session, as in agrs_set_config")
        gathered = self._in_place.get(tensor.data_ptr()) if tensor.numel() else None
        if gathered is None or gathered.shape[1:] != tensor.shape or gathered.dtype != tensor.dtype:
            gathered = self._take(tensor.shape, tensor.dtype)
        self._count += 1
        work = self._gather(gathered, tensor.detach(), async_op=True)
        assert work is not None
        return gathered, work.wait

    def close(self) -> None:
        self._gather.close()

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = self._group.size()
        nbytes = size * math.prod(shape) * dtype.itemsize
        end = self._used + nbytes
        if end > len(self._memory):
            raise ValueError(
                f"expected at most {len(self._memory)} gathered bytes in a session, as in agrs_set_config, got {end}"
            )
        taken = self._memory[self._used : end].view(dtype).view(size, *shape)
        self._used = align(end, _PART_ALIGNMENT)
        return taken

    def _check_begun(self, call: str) -> None:
        if not self._begun:
            raise ValueError(f"{call}: expected an open session, got none; agrs_new_session() opens one")


class ElasticMessages:
    """ElasticBuffer's calls for messages and for sessions. Not differentiable. `num_sms`, `num_qps`: no effect."""

    group: dist.ProcessGroup
    num_pp_qps = 0
    _pipeline: PipelineMessages | None = None
    _sessions: GatherSessions | None = None

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Return the bytes of the tensors under way to and from both neighbours, rounded up to 2 MiB."""
        return align(4 * num_max_tensor_bytes * num_max_inflight_tensors, SIZE_ALIGNMENT)

    @staticmethod
    def get_agrs_num_max_session_bytes(group: dist.ProcessGroup, shapes: Any, dtype: torch.dtype) -> int:
        """Return the bytes of a session that gathers tensors of these shapes: one shape, or a sequence of shapes."""
        each = shapes if len(shapes) and isinstance(shapes[0], Sequence) else (shapes,)
        return sum(align(group.size() * math.prod(shape) * dtype.itemsize, _PART_ALIGNMENT) for shape in each)

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup, num_max_session_bytes: int) -> int:
        """Return the bytes of the gathered tensors of a session, rounded up to 2 MiB."""
        return align(num_max_session_bytes, SIZE_ALIGNMENT)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int, num_qps: int = 0) -> None:
        """Prepare `pp_send` and `pp_recv`. Collective. No message may be under way."""
        arguments.check_at_least(
            1, num_max_tensor_bytes=num_max_tensor_bytes, num_max_inflight_tensors=num_max_inflight_tensors
        )
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = PipelineMessages(self.group, num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_send(self, t: torch.Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Send a contiguous tensor to the next or the previous rank. It may change afterwards, in stream order."""
        _made(self._pipeline, "pp_set_config").send(t, dst_rank_idx)

    def pp_recv(self, t: torch.Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receive the next tensor of the next or the previous rank into `t`, in stream order."""
        _made(self._pipeline, "pp_set_config").receive(t, src_rank_idx)

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Make the memory of sessions. Collective. No session may be open."""
        sizes = {"num_max_session_bytes": num_max_session_bytes}
        sizes["num_max_all_gathers_per_session"] = num_max_all_gathers_per_session
        arguments.check_at_least(1, **sizes)
        if self._sessions is not None:
            self._sessions.close()
        self._sessions = GatherSessions(self.group, num_max_session_bytes, num_max_all_gathers_per_session)

    def create_agrs_session(self) -> None:
        """Begin a session. Tensors of the session before are not valid any more."""
        _made(self._sessions, "agrs_set_config").begin()

    def destroy_agrs_session(self) -> None:
        """End the session."""
        _made(self._sessions, "agrs_set_config").end()

    @contextlib.contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """Open a session for a ``with`` block. enabled=False: open none."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            self.destroy_agrs_session()

    def agrs_get_inplace_tensor(self, shapes: Any, dtype: torch.dtype) -> Any:
        """Return a tensor that `all_gather` need not copy, or a tuple for several shapes. Valid in this session."""
        sessions = _made(self._sessions, "agrs_set_config")
        if len(shapes) and isinstance(shapes[0], Sequence):
            return tuple(sessions.in_place(shape, dtype) for shape in shapes)
        return sessions.in_place(shapes, dtype)

    def all_gather(self, t: torch.Tensor | Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Gather a contiguous tensor, or several, of every rank. Collective, in a session.

        Returns:
            ``[R, *shape]`` of each tensor, valid in this session, and a function. After its call the current stream
            waits for them.
        """
        sessions = _made(self._sessions, "agrs_set_config")
        pairs = [sessions.gather(one) for one in ([t] if isinstance(t, torch.Tensor) else t)]

        def wait() -> None:
            for _, each in pairs:
                each()

        return (*(gathered for gathered, _ in pairs), wait)

    def _close_messages(self) -> None:
        for made in (self._pipeline, self._sessions):
            if made is not None:
                made.close()


def _made(one: Any, by: str) -> Any:
    if one is None:
        raise ValueError(f"expected {by}() on every rank before this call, got none")
    return one
