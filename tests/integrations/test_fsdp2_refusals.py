"""Models and versions of PyTorch that FSDP2's integration does not serve: refused with what to do instead."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ep_plugin.errors import NotSupported
from tests.integrations import fsdp2_cases as cases
from tests.integrations.logs import logged_warnings
from tests.ranks import run_ranks, values


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Linear(2, 2),
            "expected modules wrapped by FSDP2, got Linear without any; call torch.distributed.fsdp.fully",
        ),
        (nn.Linear(2, 2).parameters(), "expected a torch.nn.Module, got generator"),
    ],
    ids=["not wrapped", "no module"],
)
@pytest.mark.parametrize("call", ["enable", "disable", "launches"])
def test_a_model_that_is_not_sharded_is_refused(model: Any, message: str, call: str) -> None:
    from ep_plugin.integrations import fsdp2

    with pytest.raises(ValueError, match=message):
        getattr(fsdp2, call)(model)


def test_other_wrappers_are_refused_by_name() -> None:
    (messages,) = values(run_ranks(1, _refusals))
    assert "FullyShardedDataParallel, which is FSDP1; use torch.distributed.fsdp.fully_shard" in messages[0]
    assert "DistributedDataParallel, which replicates and gathers nothing" in messages[1]


def _refusals(rank: int) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from ep_plugin.integrations import fsdp2

    fsdp1 = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its constructor wants a GPU
    nn.Module.__init__(fsdp1)
    messages = []
    for wrapped in (fsdp1, nn.parallel.DistributedDataParallel(nn.Linear(2, 2))):
        with pytest.raises(ValueError) as caught:
            fsdp2.enable(wrapped)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("setter", ["set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm"])
def test_setters_of_other_collectives_say_who_serves_the_model(setter: str) -> None:
    assert values(run_ranks(2, _other_collectives, setter)) == [None, None]


def _other_collectives(rank: int, setter: str) -> None:
    from ep_plugin.integrations import fsdp2

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    fsdp2.enable(model)
    says = rf"{setter}: expected collectives of PyTorch, got those of ep_plugin: call .*fsdp2\.disable\(model\) first"
    with pytest.raises(NotSupported, match=says):
        getattr(model, setter)(*([True] if "memory" in setter else []))
    fsdp2.disable(model)
    if "memory" in setter:
        getattr(model, setter)(False)  # PyTorch's own
    (group,) = fsdp2.hooks.groups_of(model)
    assert "set_symm_mem" not in vars(group) and "set_allocate_memory_from_process_group" not in vars(group)


def test_an_fsdp2_without_the_places_is_refused_by_version() -> None:
    (message,) = values(run_ranks(1, _without_the_places))
    assert message.startswith(f"FSDP2 of PyTorch {torch.__version__} is not supported: expected parameter groups with")


def _without_the_places(rank: int) -> str:
    from ep_plugin.errors import NotSupported
    from ep_plugin.integrations import fsdp2

    model = cases.build(cases.Case())
    del fsdp2.hooks.groups_of(model)[0]._reduce_scatter_comm
    with pytest.raises(NotSupported) as caught:
        fsdp2.enable(model)
    return str(caught.value)


@pytest.mark.parametrize("later", [False, True], ids=["a model", "what is sharded later"])
def test_an_fsdp2_without_the_places_is_left_to_pytorch_where_the_variable_says_so(later: bool) -> None:
    values(run_ranks(2, _left_without_the_places, later, env={"EP_PLUGIN_FALLBACK": "stock"}))


def _left_without_the_places(rank: int, later: bool) -> None:
    from ep_plugin.integrations import fsdp2, hooks

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    os.environ["RANK"] = str(rank)
    with logged_warnings() as said, mock.patch.object(fsdp2.hooks, "ADAPTERS", {"_moved": object}):
        if later:
            fsdp2.enable()
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        if not later:
            assert fsdp2.enable(model) == 0
        assert fsdp2.launches(model).parameter_groups == 0
    (row,) = (row for row in hooks.status() if row.name == "fsdp2")
    assert row.state == "stock" and "expected parameter groups with _moved" in row.detail
    assert [sentence.partition(":")[0] for sentence in said] == (
        ["fsdp2 is left to the framework (EP_PLUGIN_FALLBACK)"] if rank == 0 else []
    )
    model(torch.ones(2, 4)).sum().backward()
    assert row == next(row for row in hooks.status() if row.name == "fsdp2") and (row.served, row.left) == (0, 0)


def test_the_one_parameter_group_of_older_versions() -> None:
    """PyTorch 2.11: a state has one parameter group, or None, and no list of them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    from ep_plugin.integrations.fsdp2 import hooks

    group = SimpleNamespace(mesh_info=FSDPMeshInfo.__new__(FSDPMeshInfo))
    for present, expected in ((group, [group]), (None, [])):
        state = SimpleNamespace(_fsdp_param_group=present)
        assert list(hooks._groups_of_module(SimpleNamespace(_get_fsdp_state=lambda state=state: state))) == expected


THREADS = "group: expected ranks that are processes, got threads of one process (backend 'threaded')"


def test_threads_as_ranks_are_refused_by_name() -> None:
    assert values(run_ranks(1, _threads)) == [[THREADS] * 2]


def test_threads_as_ranks_are_left_to_pytorch_where_the_variable_says_so() -> None:
    (found,) = values(run_ranks(1, _threads, env={"EP_PLUGIN_FALLBACK": "stock"}))
    assert found == [f"0 groups, stock: {THREADS}, gradient 2.0"] * 2


def _threads(rank: int) -> list[str]:
    """FSDP2 on two ranks of the backend that PyTorch's own tests use."""
    from torch.testing._internal.distributed import multi_threaded_pg

    from ep_plugin.errors import NotSupported
    from ep_plugin.integrations import fsdp2, hooks
    from ep_plugin.integrations.groups import check_group

    def train(rank: int) -> str:
        dist.init_process_group("threaded", store=store, rank=rank, world_size=2)
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        try:
            count = fsdp2.enable(model)
        except NotSupported as error:
            return str(error)
        check_group("pipelining", dist.group.WORLD, "cpu")
        model(torch.ones(2, 4)).sum().backward()
        (row,) = (row for row in hooks.status() if row.name == "fsdp2")
        gradient = next(model.parameters()).grad.to_local().mean().item()
        return f"{count} groups, {row.state}: {row.detail}, gradient {gradient}"

    store = dist.HashStore()
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(train, range(2)))
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
