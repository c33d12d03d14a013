"""Gathers and scatters with wrong arguments: each is refused with what was expected, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from tests.collectives.collective_cases import gather_ones, scatter_ones
from tests.ranks import run_ranks, values

# What is passed in place of the good arguments of a gather (output, input) of 2 ranks, and what the error says.
F32, META = torch.float32, torch.device("meta")
BAD_GATHERS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "output too small": (lambda: (torch.empty(9), torch.ones(5)), "output_tensor: expected 2 x 5 elements.*got 9"),
    "output too large": (lambda: (torch.empty(11), torch.ones(5)), "output_tensor: expected 2 x 5 elements.*got 11"),
    "dtypes that differ": (
        lambda: (torch.empty(10, dtype=torch.int32), torch.ones(5)),
        "output_tensor: expected dtype torch.float32 as of input_tensor, got torch.int32",
    ),
    "devices that differ": (
        lambda: (torch.empty(10, device=META), torch.ones(5)),
        "output_tensor: expected device cpu as of input_tensor, got meta",
    ),
    "another device": (
        lambda: (torch.empty(10, device=META), torch.ones(5, device=META)),
        "device: expected cpu as in the first call, got meta",
    ),
    "output with gaps": (lambda: (torch.empty(20)[::2], torch.ones(5)), "output_tensor: expected a contiguous tensor"),
    "input with gaps": (lambda: (torch.empty(10), torch.ones(10)[::2]), "input_tensor: expected a contiguous tensor"),
    "no tensor": (lambda: ([], torch.ones(5)), "output_tensor: expected a tensor, got list"),
}


BAD_SIZES: list[tuple[Any, str]] = [
    (-1, r"size: expected no negative extent, got \(-1,\)"),
    ((2, -3), r"size: expected no negative extent, got \(2, -3\)"),
    (2**62, "size: expected at most 140737488355328 bytes, got 18446744073709551616"),
    ((2**40, 2**40), "size: expected at most 140737488355328 bytes"),
    ("8", "size: expected an integer or a sequence of integers, got '8'"),
    (("8",), r"size: expected an integer or a sequence of integers, got \('8',\)"),
    (True, "size: expected an integer or a sequence of integers, got True"),
    (1.5, "size: expected an integer or a sequence of integers, got 1.5"),
    (None, "size: expected an integer or a sequence of integers, got None"),
]


def _bad_gathers(rank: int) -> None:
    gather = HierarchicalAllGather()
    gather_ones(gather, 5)
    for name, (make, said) in BAD_GATHERS.items():
        with pytest.raises(ValueError, match=said):
            gather(*make())
            raise AssertionError(name)
    with pytest.raises(ValueError, match="tensor_list: expected 2 tensors, one for each rank, got 3"):
        gather.all_gather([torch.empty(5)] * 3, torch.ones(5))
    with pytest.raises(ValueError, match=r"tensor_list\[1\]: expected 5 elements, got 6"):
        gather.all_gather([torch.empty(5), torch.empty(6)], torch.ones(5))
    with pytest.raises(ValueError, match="group: expected .*, which this object serves"):
        gather(torch.empty(10), torch.ones(5), group=dist.new_group())
    for size, said in BAD_SIZES:
        with pytest.raises(ValueError, match=said):
            gather.allocate(size, torch.float32)
    with pytest.raises(ValueError, match="dtype: expected a torch.dtype, got 'float32'"):
        gather.allocate(1, "float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device: expected cpu as in the first call, got meta"):
        gather.allocate(10, torch.uint8, META)
    assert gather_ones(gather, 5).tolist() == [1.0] * 10  # nothing was launched


def test_bad_gathers_say_what_was_expected_and_launch_nothing() -> None:
    values(run_ranks(2, _bad_gathers))


def _bad_scatters(rank: int) -> None:
    scatter = HierarchicalReduceScatter()
    scatter_ones(scatter, 5)
    whole, out = torch.ones(10), torch.empty(5)
    for given, said in (
        ((torch.empty(6), whole), "input_tensor: expected 2 x 6 elements, one output_tensor for each rank, got 10"),
        ((out.to(torch.int32), whole.to(torch.int32)), "dtype: expected one of torch.float32, .*got torch.int32"),
        ((out, whole.double()), "input_tensor: expected dtype torch.float32 as of output_tensor, got torch.float64"),
        ((out, whole.to(META)), "input_tensor: expected device cpu as of output_tensor, got meta"),
    ):
        with pytest.raises(ValueError, match=said):
            scatter(*given)
    with pytest.raises(ValueError, match="op: expected SUM, AVG or PREMUL_SUM, got RedOpType.MAX"):
        scatter(out, whole, op=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="op: expected PREMUL_SUM with a number as its factor, got Tensor"):
        scatter(out, whole, op=dist._make_nccl_premul_sum(torch.ones(1)))
    assert scatter_ones(scatter, 5).tolist() == [2.0] * 5


def test_bad_scatters_say_what_was_expected_and_launch_nothing() -> None:
    values(run_ranks(2, _bad_scatters))


@pytest.mark.parametrize("given", [0, -1, True, 1.5, None])
def test_bad_num_buffers(given: Any) -> None:
    with pytest.raises(ValueError, match="num_buffers: expected an integer of at least 1, got"):
        HierarchicalAllGather(num_buffers=given)


@pytest.mark.parametrize("given", [0, 65, True, 24.0, None])
def test_bad_sms(given: Any) -> None:
    with pytest.raises(ValueError, match="sms: expected an integer from 1 to 64, got"):
        HierarchicalReduceScatter(sms=given)


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="group: expected an initialised torch.distributed process group, got none"):
        HierarchicalAllGather()
