"""Low-latency dispatch and combine on GPUs: the CPU tests' cases, and CUDA graphs that are judged on the device.

Shapes: R ranks, T tokens of a rank, H hidden size, K experts per token, E_l experts of a rank, N = R * T rows of each.
"""

from __future__ import annotations

import itertools
import unittest.mock
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ep_plugin import DispatchHandle, DispatchOutput, MoECommunicator, MoECommunicatorConfig
from tests.gpu.checks import device_of
from tests.moe import low_latency_cases as cases
from tests.moe import test_low_latency as whole
from tests.moe import test_low_latency_autograd as autograd
from tests.moe import test_low_latency_halves as halves
from tests.moe.moe_cases import Case, make_inputs

# -- the CPU tests' cases ------------------------------------------------------------------------------------------

WHOLE = {
    "shapes": whole._all_shapes,
    "few ranks with many pairs": whole._few_ranks_with_many_pairs,
    "quantized": whole._quantized,
    "routings": whole._all_routings,
    "fewer pairs": whole._fewer_pairs,
    "weights of zero and NaN": whole._zero_weights,
    "bias": whole._bias,
    "smaller calls": whole._smaller_calls,
    "repeats": whole._repeats,
    "most tokens": whole._most_tokens,
    "gradients": autograd.gradients_of,
}
HALVES = {
    "either order": halves._either_order,
    "late": halves._late,
    "a third": halves._third,
    "others beside": halves._beside,
}
RANKS = {"shapes": 3, "repeats": 3, "gradients": 3} | dict.fromkeys(HALVES, 3)
"""Of cases that do not have 2 ranks."""


class OnDevice:
    """A communicator of a device that takes and returns tensors of the host, as the CPU tests have them."""

    def __init__(self, comm: MoECommunicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._comm.__exit__(*failure)

    def dispatch(self, *args: Any, **more: Any) -> tuple[DispatchOutput, DispatchHandle]:
        return _on_host(self._comm.dispatch(*self._moved(args), **self._moved_by_name(more)))

    def combine(self, *args: Any, **more: Any) -> torch.Tensor:
        return _on_host(self._comm.combine(*self._moved(args), **self._moved_by_name(more)))

    def dispatch_async(self, *args: Any) -> _HostWork:
        return _HostWork(self._comm.dispatch_async(*self._moved(args)))

    def combine_async(self, *args: Any) -> _HostWork:
        return _HostWork(self._comm.combine_async(*self._moved(args)))

    def _moved(self, values: Any) -> list[Any]:
        return [self._one(value) for value in values]

    def _moved_by_name(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._one(value) for name, value in values.items()}

    def _one(self, value: Any) -> Any:
        device = self._comm.engine.device
        if isinstance(value, DispatchHandle) and value.topk_ids.device != device:
            return value._replace(topk_ids=value.topk_ids.to(device))
        return value.to(device) if isinstance(value, torch.Tensor) else value


class _HostWork:
    def __init__(self, work: Any) -> None:
        self._work, self._result = work, None

    @property
    def done(self) -> bool:
        return self._work.done

    def wait(self) -> Any:
        if self._result is None:
            self._result = _on_host(self._work.wait())
        return self._result


def _on_host(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.cpu()
    if isinstance(result, DispatchOutput):
        return DispatchOutput._make(one if one is None else one.cpu() for one in result)
    if isinstance(result, DispatchHandle):
        return result
    return tuple(map(_on_host, result))


def on_device(rank: int, size: int, function: Callable[[int, int], None]) -> None:
    """A case of the CPU tests, by a communicator of this rank's device."""
    device = device_of(rank)

    def opened(group: Any, config: MoECommunicatorConfig) -> OnDevice:
        return OnDevice(MoECommunicator(group, config, device))

    with unittest.mock.patch.object(cases, "MoECommunicator", opened):
        function(rank, size)


def run_case(rank: int, size: int, name: str) -> None:
    on_device(rank, size, (WHOLE | HALVES)[name])


def many(rank: int, size: int, count: int) -> None:
    """`count` operations of each kind in which every row is compared."""
    on_device(rank, size, lambda rank, size: halves._many(rank, size, count))


def _half_precision(rank: int, size: int) -> None:
    for tokens, id_dtype in itertools.product(((5, 90), (9, 3)), (torch.int32, torch.int64)):
        case = Case(tokens=tokens, num_experts=8, hidden=40, topk=3, dtype=torch.float16, id_dtype=id_dtype)
        with cases.low_latency(case) as comm:
            cases.round_trip(comm, make_inputs(case))


def half_precision(rank: int, size: int) -> None:
    on_device(rank, size, _half_precision)


# -- CUDA graphs ---------------------------------------------------------------------------------------------------

T, FEW, H, K, EXPERTS_PER_RANK = 90, 7, 64, 3, 4
EAGER_EVERY = 50
TOLERANCE = 1e-5


class Batch(NamedTuple):
    """x ``[R, T, H]``, ids ``[R, T, K]`` and weights ``[R, T, K]`` of all ranks, or those of one."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


Step = Callable[[], tuple[DispatchOutput, torch.Tensor]]


def random_batch(size: int, generator: torch.Generator) -> Batch:
    """The same on every rank, on the host. Each rank has its own number of tokens with experts, from none to all."""
    shape = (size, T, K)
    valid = torch.randint(0, T + 1, (size, 1, 1), generator=generator)
    ids = torch.rand((size, T, EXPERTS_PER_RANK * size), generator=generator).topk(K, dim=2).indices
    dropped = (torch.rand(shape, generator=generator) < 0.15) | (torch.arange(T)[None, :, None] >= valid)
    return Batch(
        torch.randn((size, T, H), generator=generator),
        ids.masked_fill(dropped, -1),
        torch.rand(shape, generator=generator) + 0.1,
    )


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


def _recorded(device: torch.device, step: Step) -> Step:
    """The step in a CUDA graph. A host runs it again."""
    if device.type == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = step()

    def replay() -> tuple[DispatchOutput, torch.Tensor]:
        graph.replay()
        return made

    return replay


def replayed(rank: int, size: int, replays: int) -> int:
    """Replays of three graphs in turn, of other numbers of operations and tokens, with eager calls between them."""
    device, generator = device_of(rank), torch.Generator().manual_seed(size)
    config = MoECommunicatorConfig(
        num_experts=EXPERTS_PER_RANK * size,
        hidden_size=H,
        topk=K,
        mode="ll",
        max_tokens_per_rank=T,
        max_row_bytes=4 * H,
        timeout_s=60,
    )
    with MoECommunicator(None, config, device) as comm:
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
