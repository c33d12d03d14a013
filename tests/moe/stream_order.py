"""Stand-ins for a GPU's streams and for NCCL, which note who reads and writes what, and what it comes after.

Everything is done at once, in the order of the calls, so results are right whatever the streams' order is. What counts
is whether a GPU could have done it in another order: two accesses of one memory, at least one of them a write, on
different streams, without anything that orders the second after the first. Streams have vector clocks for that.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_plugin import _C
from ep_plugin.moe.across_nodes.nodes import Nodes
from ep_plugin.runtime.streams import Streams
from ep_plugin.transport.rail import Message, Rail

CALLER, OWN, RAIL = 0, 1, 2
NAMES = {CALLER: "caller", OWN: "own", RAIL: "rail"}
Clock = dict[int, int]


@dataclass
class Access:
    begin: int
    end: int
    write: bool
    stream: int
    count: int
    by: str


@dataclass
class Log:
    """What has been enqueued so far."""

    clocks: dict[int, Clock] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    current: int = CALLER
    accesses: list[Access] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    made_on: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By address: the bytes that torch has made, and on which stream."""
    host_may_wait: bool = True
    """Whether the host may read tensors. It reads totals that are its own, too, so this says nothing of others."""
    kept: list[Any] = field(default_factory=list)  # so that no memory is used twice

    def merge(self, later: int, earlier: Clock) -> None:
        clock = self.clocks[later]
        for stream, count in list(earlier.items()):
            clock[stream] = max(clock[stream], count)

    def use(self, stream: int, by: str, ranges: Sequence[tuple[int, int, bool]]) -> None:
        """One piece of work on `stream`; ranges: (address, bytes, whether it writes them)."""
        clock = self.clocks[stream]
        clock[stream] += 1
        for begin, nbytes, write in ranges:
            if begin == 0 or nbytes <= 0:
                continue
            now = Access(begin, begin + nbytes, write, stream, clock[stream], by)
            for known in self.accesses:
                if known.begin < now.end and now.begin < known.end and (known.write or write):
                    ordered = known.stream == stream or clock[known.stream] >= known.count
                    assert ordered, (
                        f"{by} on the {NAMES[stream]} stream is not ordered after {known.by} on the "
                        f"{NAMES[known.stream]} stream: {now.end - now.begin} bytes and {known.end - known.begin}"
                    )
            self.accesses.append(now)

    def all_before(self, stream: int) -> None:
        """Fails unless `stream` comes after every access: then all memory may be used again there."""
        clock = self.clocks[stream]
        late = [known for known in self.accesses if known.stream != stream and clock[known.stream] < known.count]
        assert not late, f"{late[0].by} on the {NAMES[late[0].stream]} stream may not be over"

    def check_made(self) -> None:
        """Memory that torch has made on the own stream is used there and by rails alone."""
        for access in self.accesses:
            for begin, (nbytes, stream) in self.made_on.items():
                if stream == OWN and access.begin < begin + nbytes and begin < access.end:
                    assert access.stream in (OWN, RAIL), f"{access.by} uses memory of the own stream"

    def order(self, kind: str, name: str = "") -> list[int]:
        return [at for at, event in enumerate(self.events) if event[0] == kind and event[1].startswith(name)]


class RecordingStreams(Streams):
    own = OWN

    def __init__(self, log: Log) -> None:
        self.log, self.captured = log, 0

    def caller(self) -> int:
        return CALLER

    def order_after(self, stream: int, *earlier: int) -> None:
        for one in earlier:
            self.log.merge(stream, self.log.clocks[one])

    def join(self) -> None:
        self.order_after(CALLER, OWN)

    def enter_on(self, stream: int, sms: int, needed: int) -> None:
        self.order_after(stream, OWN)

    @contextlib.contextmanager
    def on_own(self) -> Iterator[None]:
        before, self.log.current = self.log.current, OWN
        try:
            yield
        finally:
            self.log.current = before

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
        self.log.events.append(("host waits", "to_host"))
        self.log.use(self.log.current, "to_host", [_range(tensor, False)])
        return tensor, lambda: True

    def capturing(self) -> int:
        return self.captured


class RecordingKernels:
    """The kernels, and what each of them reads and writes."""

    def __init__(self, log: Log, kernels: Any, layout: Any) -> None:
        self._log, self._kernels, self._layout = log, kernels, layout

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        kernel = getattr(self._kernels, name)

        def launch(args: Any) -> None:
            self._log.events.append(("kernel", name))
            self._log.use(args.stream, name, list(_accesses(name, args, self._layout)))
            kernel(args)

        return launch


class RecordingRail(Rail):
    """As over NCCL: what crosses does so in a stream of its own, after the stream on which it has begun."""

    def __init__(self, log: Log, rail: Rail) -> None:
        super().__init__(rail._backend, rail.ident)
        self._log, self.together, self.captures, self.progress = log, True, True, self
        self.what, self._rail = "", Rail(rail._backend, rail.ident)

    def begin(self, *given: Any) -> Any:
        if isinstance(given[1], str):  # as progress
            self.what = given[1]
            return 0
        log, what = self._log, self.what
        log.events.append(("start", what))
        log.merge(RAIL, log.clocks[log.current])
        accesses = [(tensor.data_ptr() + begin, size, not sent) for _, tensor, begin, size, sent, _ in given[0]]
        log.use(RAIL, f"rail: {what}", accesses)
        return [_Work(log, what, dict(log.clocks[RAIL]), self._really(given[0]))]

    def _really(self, messages: Sequence[Message]) -> list[Any]:
        return self._rail.begin(messages)

    def follow(self, work: Any) -> None: ...

    def settle(self) -> None:
        self._log.merge(self._log.current, self._log.clocks[RAIL])

    def record(self, tensors: Any) -> None: ...

    def running(self) -> None: ...


class _Work:
    def __init__(self, log: Log, what: str, clock: Clock, works: list[Any]) -> None:
        self._log, self._what, self._clock, self._works = log, what, clock, works

    def wait(self) -> None:
        self._log.events.append(("wait", self._what))
        self._log.merge(self._log.current, self._clock)
        for work in self._works:
            work.wait(datetime.timedelta(seconds=30))


class TorchOnStreams(TorchDispatchMode):
    """torch's operations run on the current stream."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, log = func(*args, **kwargs), self._log
        reads = func is torch.ops.aten._local_scalar_dense.default
        assert log.host_may_wait or not reads, "the host reads a tensor"
        returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        log.kept += returned
        schema = func._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return result  # a view
        given = {each.name: value for each, value in zip(schema.arguments, args, strict=False)} | kwargs
        ranges = []
        name = str(func)
        like = name.startswith("aten.new_") or "_like." in name  # takes the first argument's shape, dtype and device
        for argument in schema.arguments[1:] if like else schema.arguments:
            write = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [leaf for leaf in tree_leaves(given.get(argument.name)) if isinstance(leaf, torch.Tensor)]
            ranges += [_range(part, write) for tensor in tensors for part in _parts(tensor)]
        if all(each.alias_info is None for each in schema.returns):
            for tensor in returned:
                ranges.append(_range(tensor, True))
                storage = tensor.untyped_storage()
                log.made_on[storage.data_ptr()] = storage.nbytes(), log.current
        log.use(log.current, name, ranges)
        return result


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The rows of a matrix that has gaps between them; else the tensor."""
    has_gaps = tensor.dim() == 2 and tensor.stride(0) > tensor.shape[1] and tensor.stride(1) == 1
    return list(tensor) if has_gaps else [tensor]


def _range(tensor: torch.Tensor, write: bool) -> tuple[int, int, bool]:
    if tensor.numel() == 0:
        return 0, 0, write
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), write


def _apart(rows: int, stride: int, row_bytes: int) -> int:
    """The extent of rows that begin `stride` bytes apart."""
    return (rows - 1) * stride + row_bytes if rows else 0


def _accesses(name: str, a: Any, layout: Any) -> Iterator[tuple[int, int, bool]]:
    """(address, bytes, whether written) of each memory but the peers'."""
    if name == "quantize":
        yield a.x, _apart(a.num_rows, a.x_stride, a.hidden), False
        yield a.rows, a.num_rows * a.hidden, True
        yield a.scales, a.num_rows * 4 * -(-a.hidden // 128), True
    elif name == "pack":
        yield a.rail_rows, 4 * a.num_tokens * a.num_nodes, False
        yield a.x, _apart(a.num_tokens, a.x_stride, a.row_bytes), False
        yield a.rows, a.num_rows * a.row_bytes, True
        for given, packed, nbytes in (
            (a.weights, a.packed_weights, a.weight_bytes),
            (a.scales, a.packed_scales, a.scale_bytes),
            (a.ids, a.packed_ids, 4 * a.topk),
        ):
            yield given, a.num_tokens * nbytes, False
            yield packed, a.num_rows * nbytes, True
    elif name == "combine_add":
        row, beside = a.hidden * (8 if a.element == _C.Element.FLOAT64 else 4), 4 * a.topk
        yield a.rail_rows, 4 * a.num_tokens * a.num_nodes, False
        yield a.bias, a.num_tokens * row, False
        for own, landed, out, nbytes in (
            (a.own, a.landed, a.out, row),
            (a.own_extra, a.landed_extra, a.extra_out, beside),
        ):
            yield own, a.num_tokens * nbytes, False
            yield landed, a.num_rows * nbytes, False
            yield out, a.num_tokens * nbytes, True
    elif name == "layout":
        yield a.nodes.waits, 8 * _C.waits_head_words, True
        yield a.ids, a.num_tokens * a.topk * a.id_bytes, False
        yield a.nodes.rank_place, 4 * a.nodes.num_ranks, False
        yield a.counts, 4 * (a.nodes.num_ranks + a.num_nodes + a.nodes.num_experts), True
        if a.messages:
            ranks = a.nodes.num_ranks // a.num_nodes
            sent = _messages_bytes(a.nodes, ranks, a.nodes.num_experts // a.num_nodes)
            yield a.messages, sent, True
            own = a.messages + sent + sent // a.num_nodes * a.nodes.node
            yield own + 8 * len(_C.header_fields), 8 * (_C.rail_overflow_words + 1), True
            yield a.rail_rows, 4 * a.num_tokens * a.num_nodes, True
            yield a.own_ids, 4 * a.num_tokens * a.topk, True
    elif name == "place":
        num_nodes = a.nodes.num_ranks // a.comm.num_ranks
        yield a.metas, 4 * layout.words * (1 + a.nodes.num_chunks), True
        halves = 2 if a.nodes.waits else 1
        yield a.messages, halves * _messages_bytes(a.nodes, a.comm.num_ranks, a.comm.num_experts), False
        yield a.nodes.waits, 8 * (_C.waits_head_words + num_nodes), True
        yield a.rail_rows, 4 * a.num_tokens * num_nodes, True
    elif name == "add_counts":
        for row in range(a.num_rows):
            yield a.counts + 4 * row * a.row_stride, 4 * a.num_columns, False
        yield a.sums, 8 * a.num_rows * a.num_columns, True
    else:
        yield from _accesses_of_segment(name, a, layout)


def _messages_bytes(nodes: Any, ranks: int, experts: int) -> int:
    """The bytes of the messages that a rank sends, with one for its own node. ranks, experts: of a node."""
    return 8 * nodes.num_ranks // ranks * _C.message_words(nodes.num_chunks, ranks, experts)


def _accesses_of_segment(name: str, a: Any, layout: Any) -> Iterator[tuple[int, int, bool]]:
    r = a.routing
    T, K, G = r.num_tokens, r.topk, a.comm.num_ranks
    plans, fresh = name in ("plan", "positions", "notify"), name == "dispatch_recv" and bool(a.fresh)
    yield r.topk_ids, 4 * T * K, name == "plan"
    yield r.send_pos, 4 * T * G, plans
    yield r.pair_pos, 4 * T * K, plans
    # Dispatch receive writes a part of meta that dispatch send leaves alone, which runs at the same time.
    first, last = (4 * layout.recv_chunk_end, 4 * layout.max_rows) if name.startswith("dispatch") else (0, 0)
    yield r.meta, first or 4 * layout.words, plans
    yield r.meta + last, 4 * layout.words - last, plans
    if name == "dispatch_recv":
        yield r.meta + first, last - first, fresh
    if name in ("dispatch_recv", "combine_send"):
        yield r.recv_rows, 4 * r.slots * K, fresh
    if plans:
        yield a.block_counts, 4, True
        if name == "plan" and not a.origins.messages:
            yield a.nodes.waits, 8 * _C.waits_head_words, True
        if name != "notify":
            yield a.ids, T * K * a.id_bytes, False
        if a.origins.messages:
            yield a.origins.messages, _messages_bytes(a.nodes, G, a.comm.num_experts), False
        return
    row, scale, weight = a.header.row_bytes, a.header.scale_bytes, a.header.weight_bytes
    if name == "dispatch_send":
        yield a.x, _apart(T, a.x_stride, row), False
        yield a.scales, _apart(T, a.scale_stride, scale), False
        yield a.weights, T * K * weight, False
    elif name == "dispatch_recv":
        for address, nbytes in (
            (a.tokens, a.capacity * row),
            (a.scales, a.capacity * scale),
            (a.weights, a.capacity * weight * (1 if a.row_expert_ids else K)),
            (a.topk_ids, (8 if a.wide_ids else 4) * a.capacity * K),
            (a.row_expert_ids, 4 * a.capacity),
            (a.expert_count, 4),
            (a.expert_offset, 4),
            (a.overflow, 16),
        ):
            yield address, nbytes, True
    elif name == "combine_send":
        yield a.y, a.rows * row, False
        yield a.weights, 4 * a.rows, False
        yield a.extra, 4 * a.rows, False
    elif name == "combine_recv":
        yield a.out, T * row, True
        yield a.extra, 4 * T * K, True
    else:
        raise AssertionError(f"what does {name} read and write?")


def as_on_gpus(comm: Any) -> Log:
    """From now on the communicator, which spans nodes, works as on GPUs."""
    log, engine = Log(), comm.engine
    nodes: Nodes = comm.new_dispatch.args[0]
    nodes.host_waits = False
    nodes.struct.waits = nodes._waits.data_ptr()
    engine.use(RecordingStreams(log))
    engine.kernels = RecordingKernels(log, engine.kernels, nodes.layout)
    engine.load._sums._streams, engine.load._sums._kernels = engine.streams, engine.kernels
    engine.rails._rail = RecordingRail(log, engine.rails._rail)
    return log
