"""Wrong arguments: a ValueError that says expected and actual, and the communicator goes on as if never called."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ep_plugin import _C, DispatchLayout, HierarchicalAllGather, MoECommunicator, MoECommunicatorConfig, SendReceive
from ep_plugin.errors import CommunicatorClosed, NotSupported
from ep_plugin.transport import open_memory
from ep_plugin.transport.exchange import Exchange
from tests.faults.bad_input_cases import (
    COMBINE,
    COMBINE_ON_CPU,
    DISPATCH,
    DISPATCH_ON_CPU,
    SIZE,
    good,
    use_after_close,
    wrong_combines,
    wrong_dispatches,
)
from tests.faults.fault_cases import open_communicator, round_trip
from tests.ranks import run_ranks, values


@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_wrong_dispatch_arguments(layout: DispatchLayout) -> None:
    assert values(run_ranks(SIZE, wrong_dispatches, layout)) == [len(DISPATCH | DISPATCH_ON_CPU)] * SIZE


def test_wrong_combine_arguments_and_handles() -> None:
    assert values(run_ranks(SIZE, wrong_combines)) == [len(COMBINE | COMBINE_ON_CPU)] * SIZE


def _after_it_is_gone(rank: int) -> None:
    x, ids, *_ = good()
    x.requires_grad_()
    comm = open_communicator(SIZE)
    out, _ = comm.dispatch(x, ids)
    number = comm.number
    del comm
    with pytest.raises(CommunicatorClosed, match=f"expected the number of an open communicator, got {number}"):
        out.tokens.sum().backward()


@pytest.mark.parametrize("gone", [use_after_close, _after_it_is_gone])
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
    with pytest.raises(NotSupported, match="nodes share no memory: expected all 2 ranks on one node, got 2 nodes of 1"):
        open_memory(Exchange(), torch.device("cpu"))
    del os.environ["EP_PLUGIN_RANKS_PER_NODE"]
    most, _C.max_ranks = _C.max_ranks, 1
    with pytest.raises(NotSupported, match="group: expected at most 1 ranks on one node, got 2"):
        open_communicator(SIZE)
    _C.max_ranks = most
    os.environ["EP_PLUGIN_TRANSPORT"] = "nvlink" if rank == 0 else "auto"
    wrong = "EP_PLUGIN_TRANSPORT: expected auto or shm for device cpu, got 'nvlink'"
    with pytest.raises(ValueError if rank == 0 else RuntimeError, match=wrong):
        open_communicator(SIZE)
    os.environ["EP_PLUGIN_TRANSPORT"] = "auto"
    with open_communicator(SIZE) as comm:
        round_trip(comm)


def _no_groups_devices_or_configs(rank: int) -> None:
    config = MoECommunicatorConfig(num_experts=4, hidden_size=8, topk=2)
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    mesh, of_rank_0 = init_device_mesh("cpu", (SIZE,)), DeviceMesh("cpu", [0])
    wrong: list[tuple[Any, str]] = [
        ("world", "group: expected a process group that this rank belongs to, got 'world'"),
        (gone, "group: expected a process group that has not been destroyed, got"),
        (init_device_mesh("cpu", (SIZE, 1)), r"group: expected a mesh of one dimension, such as .*, got DeviceMesh"),
        (dist.GroupMember.NON_GROUP_MEMBER, "group: expected a process group that this rank belongs to, got -100"),
    ]
    if rank != 0:
        wrong.append((of_rank_0, "group: expected a process group that this rank belongs to, got DeviceMesh"))
    for group, says in wrong:
        for make in (MoECommunicator, MoECommunicator.shared, lambda group, _: HierarchicalAllGather(group)):
            with pytest.raises(ValueError, match=says):
                make(group, config)
    devices: list[tuple[Any, str]] = [
        ("banana", "device: expected cpu, cuda, or cuda with an index, got 'banana'"),
        ("meta", "device: expected cpu or cuda, got meta"),
        (1.5, "device: expected cpu, cuda, or cuda with an index, got 1.5"),
    ]
    if not torch.cuda.is_available():
        devices += [(device, f"device: expected cpu, since .*, got {device}") for device in ("cuda", "cuda:0")]
    for device, says in devices:
        for make in (MoECommunicator, MoECommunicator.shared):
            with pytest.raises(ValueError, match=says):
                make(None, config, device=device)
        with pytest.raises(ValueError, match=says):
            HierarchicalAllGather().allocate(8, torch.float32, device)
    for none in (None, {"num_experts": 4}):
        with pytest.raises(ValueError, match=f"config: expected a MoECommunicatorConfig, got {type(none).__name__}"):
            MoECommunicator(None, none)
    with pytest.raises(ValueError, match="config: expected a MoECommunicatorConfig, got dict"):
        MoECommunicator.shared(None, {"num_experts": 4})
    with MoECommunicator(mesh, config, "cpu:0") as comm:
        round_trip(comm)
    assert MoECommunicator.shared(mesh, config) is MoECommunicator.shared(mesh.get_group(), config)
    assert all(made(mesh).group is mesh.get_group() for made in (HierarchicalAllGather, SendReceive))


def test_what_is_no_group_device_or_config() -> None:
    values(run_ranks(SIZE, _no_groups_devices_or_configs))


def _sharded(rank: int) -> None:
    g, mesh = good(), init_device_mesh("cpu", (SIZE,))
    says = "expected a tensor with memory of its own, got DTensor"
    with open_communicator(SIZE) as comm:
        for call in (comm.dispatch, comm.dispatch_async):
            with pytest.raises(ValueError, match=f"x: {says}"):
                call(DTensor.from_local(g.x, mesh), g.ids)
        out, handle = comm.dispatch(g.x, g.ids)
        for use in (comm.combine, comm.combine_async):
            with pytest.raises(ValueError, match=f"bias: {says}"):
                use(out.tokens, handle, bias=DTensor.from_local(g.x, mesh))
    with HierarchicalAllGather() as gather, pytest.raises(ValueError, match=f"input_tensor: {says}"):
        gather(g.x.new_empty(SIZE * g.x.numel()), DTensor.from_local(g.x.flatten(), mesh))


def test_sharded_tensors_are_refused() -> None:
    values(run_ranks(SIZE, _sharded))


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
    from ep_plugin.moe.arguments import check_devices

    with pytest.raises(ValueError, match="x: expected a CPU tensor, since this build has no CUDA kernels, got cuda:0"):
        check_devices(comm.engine, x=good().x.as_subclass(OnCuda))


def test_cuda_tensors_in_a_build_without_cuda() -> None:
    values(run_ranks(SIZE, _cuda_tensors))


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"[Dd]efault process group|expected an initialised"):
        open_communicator(SIZE)
