"""Wrong arguments: a ValueError that says expected and actual, and the communicator goes on as if never called."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plugin import _C, DispatchLayout, MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import CommunicatorClosed, NotSupported
from tests.fault_cases import open_communicator, round_trip, tokens_for
from tests.ranks import run_ranks, values

SIZE, COUNT = 2, 6
MOST = 50  # max_tokens_per_rank

X, IDS, WEIGHTS = tokens_for(0, SIZE, COUNT)
WRONG_ID, TWICE = IDS.clone(), IDS.clone()
WRONG_ID[3, 1], TWICE[2] = 4, torch.tensor([1, 1])
BELOW = IDS.clone()
BELOW[5, 0] = -2

# What is passed in place of a good argument, and what the error says.
DISPATCH: dict[str, tuple[dict[str, Any], str]] = {
    "x on another device": ({"x": X.to("meta")}, "x: expected a tensor on cpu, got meta"),
    "ids on another device": ({"topk_ids": IDS.to("meta")}, "topk_ids: expected a tensor on cpu, got meta"),
    "weights on another device": ({"topk_weights": WEIGHTS.to("meta")}, "topk_weights: .* cpu, got meta"),
    "scales on another device": ({"scales": WEIGHTS.to("meta")}, "scales: .* cpu, got meta"),
    "x of an odd dtype": ({"x": X.to(torch.complex64)}, "x: expected one of torch.float32.*got torch.complex64"),
    "x with three dimensions": ({"x": X[None]}, r"x: expected 2 dimensions, got shape \(1, 6, 8\)"),
    "x with one dimension": ({"x": X[0]}, r"x: expected 2 dimensions, got shape \(8,\)"),
    "rows of 20 bytes": ({"x": torch.zeros(COUNT, 5)}, r"x: expected .* multiple of 16 bytes, got 20 \(5 elements"),
    "rows of no bytes": ({"x": X[:, :0]}, "x: expected .* multiple of 16 bytes, got 0"),
    "rows too wide": ({"x": torch.zeros(COUNT, 12)}, "x: expected a hidden size of at most 8, got 12"),
    "strided rows": ({"x": torch.zeros(COUNT, 16)[:, ::2]}, r"x: expected contiguous rows .*got strides \(16, 2\)"),
    "too many tokens": (
        dict(zip(("x", "topk_ids", "topk_weights"), tokens_for(0, SIZE, MOST + 1), strict=True)),
        f"x: expected at most max_tokens_per_rank={MOST} tokens, got {MOST + 1}",
    ),
    "ids of a float dtype": ({"topk_ids": IDS.float()}, "topk_ids: expected torch.int32 or torch.int64, got torch.fl"),
    "ids of a short dtype": (
        {"topk_ids": IDS.short()},
        "topk_ids: expected torch.int32 or torch.int64, got torch.int16",
    ),
    "ids of fewer tokens": ({"topk_ids": IDS[:-1]}, r"topk_ids: expected shape \(6, K\), got \(5, 2\)"),
    "ids with one dimension": ({"topk_ids": IDS[:, 0]}, r"topk_ids: expected shape \(6, K\), got \(6,\)"),
    "ids of no expert": ({"topk_ids": IDS[:, :0]}, "topk_ids: expected 1 to topk=2 experts per token, got 0"),
    "ids of too many experts": ({"topk_ids": torch.cat([IDS, IDS], 1)}, "expected 1 to topk=2 experts .*got 4"),
    "strided ids": ({"topk_ids": IDS.t().contiguous().t()}, r"topk_ids: expected a contiguous .*strides \(1, 6\)"),
    "id above the last": ({"topk_ids": WRONG_ID}, "topk_ids: expected -1 or 0 to 3, got 4 at token 3, position 1"),
    "id below -1": ({"topk_ids": BELOW.int()}, "topk_ids: expected -1 or 0 to 3, got -2 at token 5, position 0"),
    "repeated id": ({"topk_ids": TWICE}, "topk_ids: expected distinct experts .*expert 1 twice at token 2"),
    "weights of another shape": (
        {"topk_weights": WEIGHTS[:, :1]},
        r"topk_weights: expected shape \(6, 2\), got \(6, 1\)",
    ),
    "weights that are integers": (
        {"topk_weights": IDS},
        "topk_weights: expected a floating-point dtype, got torch.int64",
    ),
    "scales of fewer tokens": ({"scales": torch.ones(5, 1)}, r"scales: expected shape \(6, S\), got \(5, 1\)"),
    "scales with one dimension": ({"scales": torch.ones(6)}, r"scales: expected shape \(6, S\), got \(6,\)"),
    "strided scales": ({"scales": torch.ones(6, 4)[:, ::2]}, r"scales: expected a contiguous .*strides \(4, 2\)"),
    "negative capacity": ({"capacity": -1}, "capacity: expected at least 0 rows, got -1"),
}

# The same for combine; N rows were received, of 8 float32 each.
Arguments = Callable[[torch.Tensor], dict[str, Any]]
COMBINE: dict[str, tuple[Arguments, str]] = {
    "y on another device": (lambda y: {"y": y.to("meta")}, "y: expected a tensor on cpu, got meta"),
    "y that cannot be summed": (
        lambda y: {"y": y.to(torch.int32)},
        "y: expected one of torch.float32.*got torch.int32",
    ),
    "y with one dimension": (lambda y: {"y": y[0]}, r"y: expected 2 dimensions, got shape \(8,\)"),
    "rows of 12 bytes": (lambda y: {"y": y[:, :3].contiguous()}, "y: expected .* multiple of 16 bytes, got 12"),
    "strided rows": (lambda y: {"y": y.t().contiguous().t()}, "y: expected a contiguous tensor, got strides"),
    "too few rows": (lambda y: {"y": y[:-1]}, "y: expected the 12 rows that dispatch returned, got 11"),
    "weights of another shape": (
        lambda y: {"weights": torch.ones(11)},
        r"weights: expected shape \(12,\), got \(11,\)",
    ),
    "weights that are integers": (
        lambda y: {"weights": torch.ones(12).int()},
        "weights: expected a floating-point dtype",
    ),
    "weights on another device": (lambda y: {"weights": torch.ones(12).to("meta")}, "weights: .* cpu, got meta"),
    "bias of another shape": (lambda y: {"bias": torch.ones(5, 8)}, r"bias: expected shape \(6, 8\), got \(5, 8\)"),
    "bias of another dtype": (lambda y: {"bias": torch.ones(6, 8).double()}, "bias: .* torch.float32 of y, got .*64"),
    "strided bias": (lambda y: {"bias": torch.ones(8, 6).t()}, r"bias: expected a contiguous .*strides \(1, 6\)"),
}


def _wrong_calls(rank: int, layout: DispatchLayout) -> None:
    comm = open_communicator(SIZE, layout=layout, max_tokens_per_rank=MOST, timeout_s=15)
    unbounded = open_communicator(SIZE, layout=layout)
    good = {"x": X, "topk_ids": IDS, "topk_weights": WEIGHTS}
    calls = (comm.dispatch, comm.dispatch_async)
    for turn, (wrong, says) in enumerate(DISPATCH.values()):
        if rank == turn % SIZE:  # the others notice nothing
            for call in calls:
                with pytest.raises(ValueError, match=says):
                    call(**(good | wrong))
        if turn % 8 == 0:
            round_trip(comm)
    with pytest.raises(ValueError, match=r"capacity: expected .*max_tokens_per_rank set.*got max_tokens_per_rank=None"):
        unbounded.dispatch(**good, capacity=10)
    round_trip(comm)
    round_trip(unbounded)


@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_wrong_dispatch_arguments(layout: DispatchLayout) -> None:
    values(run_ranks(SIZE, _wrong_calls, layout))


def _wrong_combines(rank: int) -> None:
    comm, other = open_communicator(SIZE), open_communicator(SIZE)
    out, handle = comm.dispatch(X, IDS, WEIGHTS)
    for turn, (wrong, says) in enumerate(COMBINE.values()):
        if rank == turn % SIZE:
            given = {"y": out.tokens} | wrong(out.tokens)
            for call in (comm.combine, comm.combine_async):
                with pytest.raises(ValueError, match=says):
                    call(handle=handle, **given)
    foreign = f"handle: expected one of communicator {other.number}, got one of communicator {comm.number}"
    for use in (lambda: other.combine(out.tokens, handle), lambda: other.dispatch(X, IDS, previous_handle=handle)):
        with pytest.raises(ValueError, match=foreign):
            use()
    with pytest.raises(ValueError, match=r"topk_ids: expected the shape \(6, 2\) of previous_handle, got \(5, 2\)"):
        comm.dispatch(X[:5], IDS[:5], previous_handle=handle)
    torch.testing.assert_close(comm.combine(out.tokens, handle, weights=out.weights), X)
    round_trip(other)
    with open_communicator(SIZE, layout=DispatchLayout.TOKEN_MAJOR) as comm:
        out, handle = comm.dispatch(X, IDS, WEIGHTS)
        with pytest.raises(ValueError, match=r"weights: expected shape \(12, 2\), got \(12,\)"):
            comm.combine(out.tokens, handle, weights=torch.ones(12))


def test_wrong_combine_arguments_and_handles() -> None:
    values(run_ranks(SIZE, _wrong_combines))


def _after_close(rank: int) -> None:
    comm = open_communicator(SIZE)
    out, handle = comm.dispatch(X, IDS)
    comm.close()
    uses = {
        "dispatch": lambda: comm.dispatch(X, IDS),
        "cached dispatch": lambda: comm.dispatch(X, IDS, previous_handle=handle),
        "dispatch_async": lambda: comm.dispatch_async(X, IDS),
        "combine": lambda: comm.combine(out.tokens, handle),
        "combine_async": lambda: comm.combine_async(out.tokens, handle),
        "check": comm.check,
    }
    for use in uses.values():
        with pytest.raises(CommunicatorClosed, match="expected an open communicator, got a closed one") as caught:
            use()
        assert isinstance(caught.value, ValueError)
    comm.abort("nobody hears it")


def _after_it_is_gone(rank: int) -> None:
    x = X.clone().requires_grad_()
    comm = open_communicator(SIZE)
    out, _ = comm.dispatch(x, IDS)
    number = comm.number
    del comm
    with pytest.raises(CommunicatorClosed, match=f"expected the number of an open communicator, got {number}"):
        out.tokens.sum().backward()


@pytest.mark.parametrize("gone", [_after_close, _after_it_is_gone])
def test_use_after_the_end(gone: Callable[[int], None]) -> None:
    values(run_ranks(SIZE, gone))


def _wrong_groups(rank: int) -> None:
    with pytest.raises(ValueError, match="num_experts: expected a multiple of the group's 2 ranks, got 3"):
        open_communicator(SIZE, num_experts=3)
    for device in ("cuda:0", torch.device("cuda", 0)):
        _without_cuda()
        config = MoECommunicatorConfig(num_experts=4, hidden_size=8, topk=2)
        with pytest.raises(ValueError, match="expected cpu, since this build .*no CUDA kernels .*got cuda:0"):
            MoECommunicator(None, config, device=device)
    os.environ["EP_PLUGIN_RANKS_PER_NODE"] = "1"
    with pytest.raises(NotSupported, match="groups that span nodes are not supported in this release"):
        open_communicator(SIZE)
    del os.environ["EP_PLUGIN_RANKS_PER_NODE"]
    most, _C.max_ranks = _C.max_ranks, 1
    with pytest.raises(NotSupported, match="group: expected at most 1 ranks on one node, got 2"):
        open_communicator(SIZE)
    _C.max_ranks = most
    with pytest.raises(NotSupported, match=r'mode="ll" .*not served in this release'):
        open_communicator(SIZE, mode="ll")
    os.environ["EP_PLUGIN_TRANSPORT"] = "nvlink" if rank == 0 else "auto"
    wrong = "EP_PLUGIN_TRANSPORT: expected auto or shm for device cpu, got 'nvlink'"
    with pytest.raises(ValueError if rank == 0 else RuntimeError, match=wrong):
        open_communicator(SIZE)
    os.environ["EP_PLUGIN_TRANSPORT"] = "auto"
    with open_communicator(SIZE) as comm:
        round_trip(comm)


def _without_cuda() -> None:
    if hasattr(_C, "cuda"):
        del _C.cuda


def test_wrong_groups_devices_and_modes() -> None:
    values(run_ranks(SIZE, _wrong_groups))


def _cuda_tensors(rank: int) -> None:
    class OnCuda(torch.Tensor):
        """A tensor that says it lives on a GPU, for machines that have none."""

        device = torch.device("cuda", 0)

    _without_cuda()
    comm = open_communicator(SIZE)
    from ep_plugin.moe.validate import check_devices

    with pytest.raises(ValueError, match="x: expected a CPU tensor, since this build has no CUDA kernels, got cuda:0"):
        check_devices(comm.engine, x=X.as_subclass(OnCuda))


def test_cuda_tensors_in_a_build_without_cuda() -> None:
    values(run_ranks(SIZE, _cuda_tensors))


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"[Dd]efault process group|expected an initialised"):
        open_communicator(SIZE)
