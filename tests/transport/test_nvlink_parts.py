"""The parts of nvlink.py that need no GPU: the stand-in store, what keeps memory, and stale sockets."""

from __future__ import annotations

import datetime
import gc
import os
import socket
import weakref

import pytest
import torch
import torch.distributed as dist

from ep_plugin.errors import DisagreementError, EpPluginError, NotSupported, PeerTimeout
from ep_plugin.transport import nvlink, topology
from ep_plugin.transport.exchange import Exchange
from tests.transport.memory_ranks import run


def _exchange_handles(rank: int, size: int) -> None:
    exchange = Exchange()
    group = nvlink._HandleGroup(exchange)
    found = torch._C._distributed_c10d._resolve_process_group(group.name)
    assert (found.rank(), found.size()) == (rank, size)
    store = dist.PrefixStore("", group._store)  # C++ that calls the stand-in, as symmetric memory does
    for turn in range(3):
        # PyTorch's counters differ between the ranks here, as after a rendezvous of some of them.
        step = f"CUDASymmetricMemory/{turn + 10 * rank}"
        keys = [f"{step}/{peer}" for peer in range(size)]
        expected = [bytes([0, 255, peer, turn]) for peer in range(size)]
        store.set(keys[rank], expected[rank])
        if turn == 0:
            assert store.multi_get(keys) == expected
        else:
            for peer in range(size):
                store.wait([keys[peer]])
                assert store.get(keys[peer]) == expected[peer]
        store.barrier(f"{step}b", size, datetime.timedelta(seconds=1))
    with pytest.raises(EpPluginError, match="without setting its own key first"):
        store.get("CUDASymmetricMemory/99/0")
    group.close()
    group.close()
    with pytest.raises(RuntimeError):
        torch._C._distributed_c10d._resolve_process_group(group.name)

    late = nvlink._HandleGroup(exchange)
    exchange.barrier("once more")
    if rank == 0:
        exchange.timeout_s = 0.5
        with pytest.raises(PeerTimeout, match="'exchange memory handles' of .* for ranks 1, 2"):
            dist.PrefixStore("", late._store).set("CUDASymmetricMemory/3/0", b"x")


def test_handles_are_paired_by_turn_and_not_by_pytorchs_counter():
    run(3, _exchange_handles)


def _different_directories(rank: int, size: int) -> None:
    os.environ["TMPDIR"] = f"/tmp/of-rank-{rank}"
    topology._gpu_identity = lambda device: ("GPU-0", ())
    nvlink._use_cuda_backend = lambda device: None
    with pytest.raises(DisagreementError, match="TMPDIR: /tmp/of-rank-"):
        nvlink.NvlinkMemory(Exchange(), torch.device("cuda:0"))


def test_ranks_that_could_not_hand_each_other_descriptors_are_told():
    run(2, _different_directories)


class _Thing:
    pass


def test_kept_objects_outlive_their_keeper_and_end_when_dropped():
    forgotten, dropped = _Thing(), _Thing()
    seen = [weakref.ref(forgotten), weakref.ref(dropped)]
    keeper = nvlink._Kept(dropped)
    nvlink._Kept(forgotten)
    del forgotten, dropped
    gc.collect()
    assert seen[0]() is not None and seen[1]() is not None
    keeper.drop()
    assert seen[1]() is None
    assert seen[0]() is not None


def test_memory_is_kept_when_the_device_has_failed(monkeypatch):
    thing = _Thing()
    seen = weakref.ref(thing)
    keeper = nvlink._Kept(thing)
    del thing

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    nvlink._release(keeper, torch.device("cuda:0"))
    del keeper
    gc.collect()
    assert seen() is not None


def test_stale_socket_is_removed_and_a_live_one_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = tmp_path / f"symm_mem-{os.getpid()}"
    nvlink._remove_stale_socket()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as live:
        live.bind(str(path))
        nvlink._remove_stale_socket()
        assert path.exists()
    assert path.exists()
    nvlink._remove_stale_socket()
    assert not path.exists()


def test_other_backends_are_refused_by_name(monkeypatch):
    class Other:
        @staticmethod
        def get_backend(device: torch.device) -> str:
            return "NVSHMEM"

    monkeypatch.setattr(nvlink, "_symmetric_memory", lambda: Other)
    with pytest.raises(NotSupported, match="backend NVSHMEM is not supported: expected CUDA"):
        nvlink._use_cuda_backend(torch.device("cuda:0"))


def test_backend_is_chosen_when_there_is_none(monkeypatch):
    chosen = []

    class Unset:
        @staticmethod
        def get_backend(device: torch.device) -> None:
            return None

        set_backend = chosen.append

    monkeypatch.setattr(nvlink, "_symmetric_memory", lambda: Unset)
    nvlink._use_cuda_backend(torch.device("cuda:0"))
    assert chosen == ["CUDA"]
