"""Low-latency dispatch and combine in CUDA graphs, and what runs between their halves, judged on the device.

With EP_TEST_DEVICE=cpu steps run in place of graphs, on the CPU.

Shapes: R ranks, T tokens of a rank, H hidden size, K experts per token, E_l experts of a rank, N = R * T rows of each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ep_plugin import DispatchOutput, MoECommunicator, MoECommunicatorConfig, deep_ep
from tests.gpu.checks import device_of, synchronize

Result = TypeVar("Result")

T, FEW, H, K, EXPERTS_PER_RANK = 90, 7, 64, 3, 4
EAGER_EVERY = 50
TOLERANCE = 1e-5


class Batch(NamedTuple):
    """x ``[R, T, H]``, ids ``[R, T, K]`` and weights ``[R, T, K]`` of all ranks, or those of one."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def random_batch(size: int, generator: torch.Generator | None, device: torch.device | str = "cpu") -> Batch:
    """The same on every rank. Each rank has its own number of tokens with experts, from none to all.

    generator: None: the device's own, which a graph may record.
    """
    made: dict[str, Any] = {"generator": generator, "device": device}
    shape = (size, T, K)
    valid = torch.randint(0, T + 1, (size, 1, 1), **made)
    ids = torch.rand((size, T, EXPERTS_PER_RANK * size), **made).topk(K, dim=2).indices
    dropped = (torch.rand(shape, **made) < 0.15) | (torch.arange(T, device=device)[None, :, None] >= valid)
    return Batch(torch.randn((size, T, H), **made), ids.masked_fill(dropped, -1), torch.rand(shape, **made) + 0.1)


def judge(wrong: torch.Tensor, batch: Batch, rank: int, out: DispatchOutput, z: torch.Tensor) -> None:
    """Marks in `wrong`, bool ``[3]``, wrong counts, rows and sums. The host does not look. batch: of all ranks."""
    ids, x = batch.ids.flatten(0, 1), batch.x.flatten(0, 1)
    mine = torch.arange(EXPERTS_PER_RANK, device=x.device) + rank * EXPERTS_PER_RANK
    here = (ids[None] == mine[:, None, None]).any(2)  # [E_l, N]
    place = torch.where(here, here.cumsum(1) - 1, len(x))
    rows = x.new_zeros(EXPERTS_PER_RANK, len(x) + 1, H)
    rows.scatter_(1, place[:, :, None].expand(-1, -1, H), x.expand(EXPERTS_PER_RANK, -1, -1))
    counts = here.sum(1)
    present = torch.arange(len(x), device=x.device) < counts[:, None]
    share = torch.where(batch.ids[rank] >= 0, batch.weights[rank] * _factor(batch.ids[rank]), 0.0).sum(1, keepdim=True)
    exact = batch.x[rank] * share
    verdicts = (
        (out.num_tokens_per_expert != counts).any(),
        ((out.tokens != rows[:, :-1]) & present[:, :, None]).any(),
        (~((z - exact).abs() <= TOLERANCE * exact.abs())).any(),
    )
    wrong.logical_or_(torch.stack(verdicts))


def _factor(experts: torch.Tensor) -> torch.Tensor:
    return 0.5 + experts.float() / 16


def _step(comm: MoECommunicator, given: Batch, apart: bool = False) -> tuple[DispatchOutput, torch.Tensor]:
    """A dispatch, experts that multiply, a combine. apart: two dispatches between whose halves others run."""
    capacity = comm.size * len(given.x)
    if apart:
        first, second = (comm.dispatch_async(given.x, given.ids, capacity=capacity) for _ in range(2))
        second.wait()
        out, handle = first.wait()
    else:
        out, handle = comm.dispatch(given.x, given.ids, capacity=capacity)
    experts = torch.arange(EXPERTS_PER_RANK, device=out.tokens.device) + comm.rank * EXPERTS_PER_RANK
    y = out.tokens * _factor(experts)[:, None, None]
    work = comm.combine_async(y, handle, given.weights) if apart else None
    return out, comm.combine(y, handle, given.weights) if work is None else work.wait()


def _recorded(device: torch.device, step: Callable[[], Result]) -> Callable[[], Result]:
    """The step in a CUDA graph. A host runs it again."""
    if device.type == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = step()

    def replay() -> Result:
        graph.replay()
        return made

    return replay


def graph_config(size: int) -> MoECommunicatorConfig:
    return MoECommunicatorConfig(
        num_experts=EXPERTS_PER_RANK * size,
        hidden_size=H,
        topk=K,
        mode="ll",
        max_tokens_per_rank=T,
        max_row_bytes=4 * H,
        timeout_s=60,
    )


def replayed(rank: int, size: int, replays: int) -> int:
    """Replays of three graphs in turn, of other numbers of operations and tokens, with eager calls between them."""
    device, generator = device_of(rank), torch.Generator().manual_seed(size)
    with MoECommunicator(None, graph_config(size), device) as comm:
        static = Batch(*(part[rank].to(device) for part in random_batch(size, generator)))
        few = Batch(*(part[:FEW] for part in static))
        _step(comm, static)  # makes the memory
        graphs = [
            (T, _recorded(device, lambda: _step(comm, static))),
            (FEW, _recorded(device, lambda: [_step(comm, few) for _ in range(3)][-1])),
            (T, _recorded(device, lambda: _step(comm, static, apart=True))),
        ]
        wrong = torch.zeros((replays, 3), dtype=torch.bool, device=device)
        for turn in range(replays):
            batch = random_batch(size, generator)
            for to, source in zip(static, batch, strict=True):
                to.copy_(source[rank])
            everything = Batch(*(part.to(device) for part in batch))
            tokens, graph = graphs[turn % len(graphs)]
            judge(wrong[turn], Batch(*(part[:, :tokens] for part in everything)), rank, *graph())
            if turn % EAGER_EVERY == 0:
                judge(wrong[turn], everything, rank, *_step(comm, static))
        failed = wrong.nonzero().tolist()
        assert not failed, f"{len(failed)} wrong results of {replays} replays, first {failed[:5]}"
        comm.check()
    return replays


def compared(rank: int, size: int, count: int) -> int:
    """`count` operations of each kind, with many and few tokens in turn. Their graph makes and judges its batches."""
    device = device_of(rank)
    torch.manual_seed(size)  # the ranks make the same batches
    wrong = torch.zeros(3, dtype=torch.bool, device=device)
    with MoECommunicator(None, graph_config(size), device) as comm:

        def steps() -> None:
            for tokens in (T, FEW):
                batch = Batch(*(part[:, :tokens] for part in random_batch(size, None, device)))
                given = Batch(*(part[rank].contiguous() for part in batch))
                judge(wrong, batch, rank, *_step(comm, given))

        steps()
        graph = _recorded(device, steps)
        for done in range(2, count, 2):
            graph()
            if done % 1000 == 0:
                assert not wrong.any(), f"{wrong.tolist()}: wrong counts, rows or sums among {done} operations"
                dist.barrier()  # nobody waits for long
        assert not wrong.any(), wrong.tolist()
        comm.check()
    return count


# -- every option in a CUDA graph ----------------------------------------------------------------------------------

WIDE = 256  # elements of a row that is quantised or coded


class Options(NamedTuple):
    """Of one dispatch and one combine. through: whose interface they are of."""

    through: str
    dispatch: dict[str, Any] = {}  # noqa: RUF012
    combine: dict[str, Any] = {}  # noqa: RUF012


OURS, DEEP_EP = "MoECommunicator", "deep_ep.Buffer"
OPTIONS = {
    "bias": Options(OURS, {}, {"bias": True}),
    "e4m3": Options(OURS, {"quantize": "e4m3"}),
    "e4m3_pow2": Options(OURS, {"quantize": "e4m3_pow2"}),
    "e4m3_ue8m0": Options(OURS, {"quantize": "e4m3_ue8m0"}, {"bias": True}),
    "e4m3 in halves": Options(OURS, {"quantize": "e4m3", "apart": True}, {"bias": True}),
    "e4m3_ue8m0 in halves": Options(OURS, {"quantize": "e4m3_ue8m0", "apart": True}),
    "a known routing": Options(OURS, {"known": True}),
    "deep_ep": Options(DEEP_EP),
    "deep_ep, async_finish": Options(DEEP_EP, {"async_finish": True}, {"async_finish": True}),
    "deep_ep, async_finish, BF16": Options(DEEP_EP, {"async_finish": True, "use_fp8": False}),
    "deep_ep in halves": Options(DEEP_EP, {"return_recv_hook": True}, {"return_recv_hook": True}),
    "deep_ep, BF16, logfmt": Options(DEEP_EP, {"use_fp8": False}, {"use_logfmt": True}),
    "deep_ep, ue8m0, zero_copy": Options(DEEP_EP, {"round_scale": True, "use_ue8m0": True}, {"zero_copy": True}),
    "deep_ep, counters, out": Options(DEEP_EP, {"stats": True}, {"out": True}),
}


def _ours(comm: MoECommunicator, given: Batch, options: Options) -> list[torch.Tensor]:
    dispatch = dict(options.dispatch)
    bias = given.x * 3 if options.combine else None
    if dispatch.pop("known", False):
        dispatch["previous_handle"] = comm.dispatch(given.x + 1, given.ids)[1]
    if dispatch.pop("apart", False):  # two of each kind at a time, and others between their halves
        first, second = (comm.dispatch_async(given.x + i, given.ids, **dispatch) for i in (0, 1))
        other = second.wait()[0].tokens.to(given.x.dtype)
        out, handle = first.wait()
        works = [comm.combine_async(y, handle, given.weights, bias) for y in (out.tokens.to(given.x.dtype), other)]
        others, z = works[1].wait(), works[0].wait()
        return [out.num_tokens_per_expert, z, out.tokens, out.scales, others]
    out, handle = comm.dispatch(given.x, given.ids, **dispatch)
    z = comm.combine(out.tokens.to(given.x.dtype), handle, given.weights, bias)
    scales = [] if out.scales is None else [out.scales]
    return [out.num_tokens_per_expert, z, out.tokens, *scales]


def _deep_ep(buffer: deep_ep.Buffer, given: Batch, options: Options) -> list[torch.Tensor]:
    """Results as `_ours`, and then those that only DeepEP's interface has."""
    experts, dispatch, combine = EXPERTS_PER_RANK * buffer.group_size, dict(options.dispatch), dict(options.combine)
    device = given.x.device
    counters = []
    if dispatch.pop("stats", False):
        counters = [torch.zeros(EXPERTS_PER_RANK, dtype=torch.int32, device=device)]
        dispatch["cumulative_local_expert_recv_stats"] = counters[0]
        dispatch["dispatch_wait_recv_cost_stats"] = torch.zeros(buffer.group_size, dtype=torch.int64, device=device)
    received, counts, handle, event, hook = buffer.low_latency_dispatch(given.x, given.ids, T, experts, **dispatch)
    event.current_stream_wait()
    if hook is not None:
        hook()
    rows, *scales = received if isinstance(received, tuple) else (received,)
    y = rows.to(torch.bfloat16)
    if combine.get("zero_copy"):
        buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    if combine.pop("out", False):
        combine["out"] = torch.full_like(given.x, torch.nan)
    z, event, hook = buffer.low_latency_combine(y, given.ids, given.weights, handle, **combine)
    event.current_stream_wait()
    if hook is not None:
        hook()
    src_info, layout_range, *_ = handle
    return [counts, z, rows, *scales, src_info, layout_range, *counters]


def _same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> torch.Tensor:
    """bool: whether all bits are the same, of tensors ``[E_l, N, ...]`` those of the rows that there are."""
    verdicts = []
    for one, other in zip(mine, theirs, strict=True):
        differs = one.flatten().view(torch.uint8) != other.flatten().view(torch.uint8)
        if one.dim() >= 2 and len(one) == EXPERTS_PER_RANK and one.shape[1] > EXPERTS_PER_RANK:
            per_row = differs.view(*one.shape[:2], -1).any(2)
            differs = per_row & (torch.arange(one.shape[1], device=one.device) < mine[0][:, None])
        verdicts.append(differs.any())
    return ~torch.stack(verdicts).any()


def replayed_options(rank: int, size: int, name: str, replays: int) -> int:
    """Replays with new batches give the bits of the same calls outside of a graph, which other tests judge."""
    device, options = device_of(rank), OPTIONS[name]
    config = MoECommunicatorConfig(
        num_experts=EXPERTS_PER_RANK * size, hidden_size=WIDE, topk=K, mode="ll", max_tokens_per_rank=T, timeout_s=60
    )
    generator = torch.Generator().manual_seed(size)

    def given() -> Batch:
        batch = Batch(*(part[rank] for part in random_batch(size, generator)))
        return batch._replace(x=batch.x.repeat(1, WIDE // H).bfloat16())

    with contextlib.ExitStack() as stack:
        if options.through == OURS:
            call: Callable[..., list[torch.Tensor]] = _ours
            through: Any = stack.enter_context(MoECommunicator(None, config, device))
        else:
            call, through = _deep_ep, deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
            stack.callback(through.destroy)
        stack.enter_context(torch.no_grad())
        static = Batch(*(part.to(device) for part in given()))
        for _ in range(2):  # makes the memory, both buffers of zero_copy too
            call(through, static, options)
        replay = _recorded(device, lambda: call(through, static, options))
        same = torch.zeros(replays, dtype=torch.bool, device=device)
        for turn in range(replays):
            for to, source in zip(static, given(), strict=True):
                to.copy_(source)
            expected = [part.clone() for part in call(through, static, options)]
            same[turn] = _same(expected, replay())
        assert same.all(), f"replays {(~same).nonzero().flatten().tolist()} differ"
    return replays


LATE, LATE_S = 1, 1.0  # the rank that is late, and for how long


def counted(rank: int, size: int, replays: int) -> list[float]:
    """Statistics that captured calls were given grow in each replay: by the rows received, and by the waits for LATE.

    Returns, for many and few tokens, and for dispatch and combine, the least seconds that a replay has added.
    """
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    try:
        return [least for tokens in (T, FEW) for least in _counted(buffer, rank, size, tokens, replays)]
    finally:
        buffer.destroy()


def _counted(buffer: deep_ep.Buffer, rank: int, size: int, tokens: int, replays: int) -> list[float]:
    """A dispatch and its combine are in graphs of their own, so that a rank can be late in either."""
    device, experts, generator = device_of(rank), EXPERTS_PER_RANK * size, torch.Generator().manual_seed(size)

    def fresh() -> Batch:
        """Each rank has a row at LATE, so it waits for LATE in a combine too."""
        batch = Batch(*(part[:, :tokens] for part in random_batch(size, generator)))
        batch.ids[:, 0] = torch.tensor([LATE * EXPERTS_PER_RANK, *[-1] * (K - 1)])
        return batch._replace(x=batch.x.bfloat16())

    static = Batch(*(part[rank].to(device) for part in fresh()))
    rows = torch.zeros(EXPERTS_PER_RANK, dtype=torch.int32, device=device)
    costs = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2)]
    made: list[Any] = []

    def dispatch() -> None:
        made[:] = buffer.low_latency_dispatch(static.x, static.ids, T, experts, rows, costs[0], use_fp8=False)

    def combine() -> None:
        given = made[0].nan_to_num(), static.ids, static.weights, made[2]
        buffer.low_latency_combine(*given, combine_wait_recv_cost_stats=costs[1])

    dispatch()  # which makes the memory
    combine()
    for counts in (rows, *costs):
        counts.zero_()
    kinds = [_recorded(device, one) for one in (dispatch, combine)]
    expected, added = torch.zeros(EXPERTS_PER_RANK, dtype=torch.int32), torch.zeros((replays, 2))
    for turn in range(replays):
        batch = fresh()
        for to, source in zip(static, batch, strict=True):
            to.copy_(source[rank])
        for kind, run in enumerate(kinds):
            before = int(costs[kind][LATE])
            dist.barrier()
            time.sleep(LATE_S if rank == LATE else 0)
            run()
            added[turn, kind] = (int(costs[kind][LATE]) - before) / 1e9
        mine = torch.arange(EXPERTS_PER_RANK) + rank * EXPERTS_PER_RANK
        expected += (batch.ids[..., None] == mine).flatten(0, 2).sum(0)
        assert rows.tolist() == expected.tolist(), f"replay {turn}"
    return added.amin(0).tolist()


# -- what runs between the halves ----------------------------------------------------------------------------------


def sent_alone(rank: int, size: int) -> None:
    """Send halves end on the device, so no kernel waits there until the receive half.

    That of a dispatch ends before a peer has called; that of a second one needs peers that have called the first, and
    that of a combine needs their weights.
    """
    device = device_of(rank)
    with MoECommunicator(None, graph_config(size), device) as comm:
        batch = Batch(*(part.to(device) for part in random_batch(size, torch.Generator().manual_seed(size))))
        given = Batch(*(part[rank] for part in batch))
        _step(comm, given)

        def idle_everywhere() -> None:
            synchronize(device)  # a kernel that waited would give up, and the communicator refuse what follows
            comm.check()
            dist.barrier()

        if rank != 0:
            idle_everywhere()
        works = [comm.dispatch_async(given.x, given.ids)]
        if rank == 0:
            idle_everywhere()
        works.append(comm.dispatch_async(given.x, given.ids))
        idle_everywhere()
        out, handle = [work.wait() for work in works][1]
        experts = torch.arange(EXPERTS_PER_RANK, device=device) + rank * EXPERTS_PER_RANK
        y = out.tokens * _factor(experts)[:, None, None]
        work = comm.combine_async(y, handle, given.weights)
        idle_everywhere()
        z = work.wait()
        wrong = torch.zeros(3, dtype=torch.bool, device=device)
        judge(wrong, batch, rank, out, z)
        assert not wrong.any(), wrong.tolist()
        comm.check()
