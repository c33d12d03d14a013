"""DeepSpeed's ZeRO-3 and ZeRO-2 train with their gathers and sums through ep_plugin.

`make test-huggingface` runs it, in an environment that has DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin.integrations import status
from tests.moe.moe_cases import on_ranks

pytest.importorskip("deepspeed", reason="needs deepspeed; `make test-huggingface` installs it")

STEPS, H = 5, 48


def _train(stage: int, dtype: torch.dtype, device: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of this rank, and all parameters."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(H, 3 * H), torch.nn.Tanh(), torch.nn.Linear(3 * H, H)).to(dtype)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_scatter": True,
            "overlap_comm": True,
        },
        "bf16": {"enabled": dtype is torch.bfloat16},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn((4, H), generator=generator).to(device, dtype)
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = [parameter.detach().cpu() for parameter in model.parameters()]
    engine.destroy()
    return losses, parameters


def _row() -> Any:
    (row,) = [row for row in status() if row.name == "deepspeed"]
    return row


def trains_like_stock(rank: int, size: int, stage: int, dtype: torch.dtype, device: str) -> None:
    os.environ.update(DS_ACCELERATOR=device, LOCAL_RANK=str(rank))
    import deepspeed
    from deepspeed.comm.torch import TorchBackend

    from ep_plugin.integrations import deepspeed as ours

    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    stock = TorchBackend.all_gather_into_tensor, TorchBackend.reduce_scatter_tensor
    expected = _train(stage, dtype, device)
    assert _row().served == 0
    ours.enable()
    ours.enable()
    got = _train(stage, dtype, device)
    served = _row().served
    assert served >= (3 * STEPS if stage == 3 else STEPS), served
    ours.disable()
    assert (TorchBackend.all_gather_into_tensor, TorchBackend.reduce_scatter_tensor) == stock
    again = _train(stage, dtype, device)
    assert _row().served == served
    assert again[0] == expected[0]
    # Two terms have one sum. More are added in float32 in rank order, where others have an order of their own.
    limits = dict(rtol=0, atol=0) if size == 2 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got, expected, **limits)


def _leaves_the_rest(rank: int, size: int) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed
    from deepspeed.comm import ReduceOp

    from ep_plugin.integrations import deepspeed as ours

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    ours.enable()
    summed, gathered = torch.empty(3), torch.empty(3 * size, dtype=torch.uint8)
    deepspeed.comm.reduce_scatter_fn(summed, torch.full((3 * size,), float(rank)), op=ReduceOp.MAX)
    assert summed.tolist() == 3 * [size - 1.0]
    assert (_row().served, _row().left) == (0, 1)
    pair = dist.new_group([0, 1])
    if rank == 2:
        assert deepspeed.comm.allgather_fn(gathered[:6], gathered[:3], group=pair) is None
    else:
        deepspeed.comm.allgather_fn(gathered[:6], torch.full((3,), rank, dtype=torch.uint8), group=pair)
        work = deepspeed.comm.reduce_scatter_fn(summed, torch.full((6,), 1.0 + rank), group=pair, async_op=True)
        work.wait()
        assert gathered[:6].tolist() == [0, 0, 0, 1, 1, 1]
        assert summed.tolist() == 3 * [3.0]
        strided = torch.full((6, 2), 1.0 + rank)[:, 0]
        deepspeed.comm.reduce_scatter_fn(summed, strided if rank else strided.contiguous(), group=pair)
        assert summed.tolist() == 3 * [3.0]
        assert (_row().served, _row().left) == (3, 1)
    ours.disable()


def _compiles(rank: int, size: int) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed

    from ep_plugin.integrations import deepspeed as ours

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    ours.enable()

    @torch.compile(backend="eager", fullgraph=True)
    def gather(part: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(size * len(part))
        deepspeed.comm.all_gather_into_tensor(whole, part)
        return whole + 1

    assert gather(torch.full((2,), float(rank))).tolist() == [1.0 + peer for peer in range(size) for _ in range(2)]


def _wrapper(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(*args, **kwargs)


def _outlives_a_wrapper(rank: int, size: int) -> None:
    """Somebody wraps our methods. Below the wrappers, ours call stock while they are disabled."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed
    from deepspeed.comm.torch import TorchBackend

    from ep_plugin.integrations import deepspeed as ours

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    ours.enable()
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(TorchBackend, name, _wrapper(getattr(TorchBackend, name)))
    for turn, served in enumerate((2, 2, 4)):
        whole, total = torch.empty(size), torch.empty(1)
        deepspeed.comm.allgather_fn(whole, torch.tensor([float(rank + turn)]))
        assert whole.tolist() == [float(peer + turn) for peer in range(size)]
        deepspeed.comm.reduce_scatter_fn(total, torch.arange(float(size)) + turn)
        assert total.item() == size * (rank + turn)
        assert (_row().served, _row().left) == (served, 0)
        ours.enable() if turn else ours.disable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "size"), [(3, 2), (3, 4), (2, 2)])
def test_zero_trains_like_stock(stage: int, size: int, dtype: torch.dtype) -> None:
    on_ranks(size, trains_like_stock, stage, dtype, "cpu")


def test_other_operations_are_left_to_deepspeed() -> None:
    on_ranks(3, _leaves_the_rest)


@pytest.mark.parametrize("case", [_compiles, _outlives_a_wrapper])
def test_others_may_compile_and_wrap_the_methods(case: Callable[[int, int], None]) -> None:
    on_ranks(2, case)
