"""What ranks on GPUs do in the tests of FSDP2. They share a gloo group, where PyTorch's own collectives cannot judge:
plain torch does, put into FSDP2 in the same places."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ep_plugin import _C
from ep_plugin.integrations import fsdp2
from ep_plugin.integrations.fsdp2.adapters import PluginAllGather, PluginReduceScatter
from ep_plugin.integrations.fsdp2.hooks import groups_of
from tests.collectives.collective_cases import reduced
from tests.gpu.checks import device_of
from tests.integrations import fsdp2_cases as cases

# By which errors of float32 grow with the parameters: optimizers that divide by gradients would make more of them.
_sgd = functools.partial(torch.optim.SGD, lr=1.0)


# -- plain torch in FSDP2's places ---------------------------------------------------------------------------------


class _InPlainTorch:
    """Shards go through host memory and gloo; each call is over when it returns."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def _from_all(self, mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """What each rank of the group has passed."""
        self.calls += 1
        given = mine.cpu().contiguous().view(torch.uint8)
        parts = [torch.empty_like(given) for _ in range(group.size())]
        dist.all_gather(parts, given, group=group)
        return [part.view(mine.dtype) for part in parts]


class _PlainGather(_InPlainTorch, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        output_tensor.copy_(torch.cat(self._from_all(input_tensor, group)))


class _PlainSum(_InPlainTorch, ReduceScatter):
    """As documented, in float32 and in rank order, so that it is ours to the bit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        size = group.size()
        whole = [part.view(size, -1) for part in self._from_all(input_tensor, group)]
        scales = {dist.ReduceOp.SUM: 1.0, dist.ReduceOp.AVG: 1 / size}
        scale = next((scale for known, scale in scales.items() if op == known), None)
        if scale is None:  # PREMUL_SUM, with its factor
            _, scale = op.__getstate__()
        output_tensor.copy_(reduced(whole, group.rank(), size, scale))


def _put_plain_torch_into(model: nn.Module) -> tuple[_PlainGather, _PlainSum]:
    plain = _PlainGather(), _PlainSum()
    for group in groups_of(model):
        group._all_gather_comm, group._reduce_scatter_comm = plain
    return plain


# -- every way of sharding and training ----------------------------------------------------------------------------


def run_cases(rank: int) -> dict[str, Any]:
    """Of each case, how ours differs from plain torch and what ran; or the error, so that one hides no other."""
    device, results = device_of(rank), {}
    for name, case in cases.CASES.items():
        try:
            results[name] = compare(case, device)
        except Exception:
            results[name] = traceback.format_exc()
    return results


def compare(case: cases.Case, device: torch.device) -> dict[str, Any]:
    case = dataclasses.replace(
        case, sums=case.sums or case.replicas > 1
    )  # between replicas gloo reduces, and only sums
    build = functools.partial(cases.build, case, device_type=device.type)
    train = functools.partial(cases.train, case, device=device, optimizer_of=_sgd)
    model = build()
    gather, total = _put_plain_torch_into(model)
    plain = train(model)
    model = build()
    fsdp2.enable(model)
    try:
        with cases.counting_stock_calls() as left:
            ours = train(model)
        ran = fsdp2.launches(model)
    finally:
        fsdp2.disable(model)
    return {
        **cases.difference(ours, plain),
        "ran": (ran.all_gathers, ran.reduce_scatters),
        "plain": (gather.calls, total.calls),
        "left": (left.all_gathers, left.reduce_scatters),
    }


# -- a rank alone --------------------------------------------------------------------------------------------------


class _Experts(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        options = {"device": device, "dtype": torch.bfloat16}
        self.up = nn.Parameter(torch.randn(4, 512, 256, **options) / 23)
        self.down = nn.Parameter(torch.randn(4, 256, 512, **options) / 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.bmm(torch.relu(torch.bmm(rows, self.up)), self.down)


def experts_alone(rank: int, ours: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of steps of two backwards; what copies and the memory of the last step."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(*(_Experts(device) for _ in range(3)))
    for experts in model:
        fully_shard(experts, mesh=init_device_mesh("cuda", (1,)), **options)
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)), **options)
    if ours:
        fsdp2.enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows, losses, gradients = torch.randn(4, 16, 512, device=device, dtype=torch.bfloat16), [], []

    def step() -> None:
        for _ in range(2):
            loss = model(rows).float().pow(2).mean()
            loss.backward()
            losses.append(loss.detach())

    for _ in range(5):
        step()
        gradients += [parameter.grad.to_local().float().norm() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    parameters = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return {
        "losses": torch.stack(losses).tolist(),
        "gradients": torch.stack(gradients).tolist(),
        "chunk_cat": any("chunk_cat" in name for name in names),
        "peak": (torch.cuda.max_memory_allocated() - before) / parameters,
    }


# -- no host synchronisation ---------------------------------------------------------------------------------------

HOLDS, HOLD_NS = 10, 1_000_000_000  # for so long at most


def steps_ahead_of_the_device(rank: int, width: int) -> tuple[bool, int, int]:
    """Whether the device had begun none of a step's work when the host was through with it, and our calls in it.

    A kernel holds the stream meanwhile: whoever waits for the device waits for as long as that does. Calls of ours are
    also told by PyTorch, which raises when they synchronise.
    """
    device = device_of(rank)
    case = cases.Case(fully_shard={"mp_policy": cases.BF16}, width=width)
    model = cases.build(case, device_type=device.type)
    fsdp2.enable(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ids = torch.randint(61, (5, 7), generator=torch.Generator().manual_seed(rank)).to(device)

    def step() -> None:
        nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    for _ in range(2):  # in the first of them the allocator may want memory that is still in use on the device
        torch.cuda.synchronize(device)
        dist.barrier()
        before = fsdp2.launches(model)
        with _held(device) as is_held, _synchronising_is_an_error(PluginAllGather, PluginReduceScatter):
            step()
            ahead = is_held()
        torch.cuda.synchronize(device)
    ran = fsdp2.launches(model)
    for parameter in model.parameters():
        assert parameter.to_local().isfinite().all()
    fsdp2.disable(model)
    return ahead, ran.all_gathers - before.all_gathers, ran.reduce_scatters - before.reduce_scatters


@contextmanager
def _held(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Nothing that is enqueued on the current stream meanwhile begins; yields what says whether that is still so."""
    stop = torch.zeros(1, dtype=torch.int64, device=device)
    one = torch.ones(1, dtype=torch.int64).pin_memory()
    beside, over = torch.cuda.Stream(device), torch.cuda.Event()
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    for _ in range(HOLDS):
        _C.hold(_C.HoldArgs(nanoseconds=HOLD_NS, num_sms=1, stop=stop.data_ptr(), stream=stream.cuda_stream))
    over.record(stream)
    try:
        yield lambda: not over.query()
    finally:
        with torch.cuda.stream(beside):
            stop.copy_(one, non_blocking=True)
        torch.cuda.synchronize(device)


@contextmanager
def _synchronising_is_an_error(*adapters: type) -> Iterator[None]:
    """In calls of these classes' objects: FSDP2's own code and the model's may synchronise."""
    names = ("allocate", "__call__")
    saved = [(adapter, name, getattr(adapter, name)) for adapter in adapters for name in names]

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watching(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return watching

    try:
        for adapter, name, call in saved:
            setattr(adapter, name, watched(call))
        yield
    finally:
        for adapter, name, call in saved:
            setattr(adapter, name, call)
