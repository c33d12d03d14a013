"""Peer memory between GPUs: ranks in gloo groups, sharing GPUs where there are fewer GPUs than ranks."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.distributed as dist

from ep_plugin import env
from ep_plugin.errors import CommunicatorClosed, DisagreementError, EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.transport import open_memory
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.nvlink import NvlinkMemory, _symmetric_memory
from ep_plugin.transport.peer import PeerBuffer, PeerMemory
from tests.transport.memory_ranks import die, run

MIB = 1 << 20
# Free memory of a device says nothing where other tests take some of it at the same time.
_ALONE = "PYTEST_XDIST_WORKER" not in env.os.environ


def device_of(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.synchronize()  # makes the context current, which the driver calls below need
    return device


def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def write(ptr: int, data: bytes) -> None:
    status = driver().cuMemcpyHtoD_v2(ctypes.c_uint64(ptr), data, ctypes.c_size_t(len(data)))
    assert status == 0, f"cuMemcpyHtoD: error {status}"
    torch.cuda.synchronize()


def read(ptr: int, nbytes: int) -> bytes:
    data = ctypes.create_string_buffer(nbytes)
    status = driver().cuMemcpyDtoH_v2(data, ctypes.c_uint64(ptr), ctypes.c_size_t(nbytes))
    assert status == 0, f"cuMemcpyDtoH: error {status}"
    return data.raw


def check_shared(memory: PeerMemory, buffer: PeerBuffer) -> None:
    """Each rank's block is zero at first, is written by its owner, then by one peer at its end, and all see both."""
    exchange = memory.exchange
    rank, size, nbytes = exchange.rank, exchange.size, buffer.nbytes
    assert len(set(buffer.ptrs)) == size and all(ptr % 128 == 0 for ptr in buffer.ptrs)
    for owner in range(size):
        assert read(buffer.ptrs[owner], nbytes) == bytes(nbytes)
    exchange.barrier("seen zeros")
    write(buffer.ptrs[rank], bytes([rank + 1]) * nbytes)
    exchange.barrier("written")
    for owner in range(size):
        assert read(buffer.ptrs[owner], nbytes) == bytes([owner + 1]) * nbytes
    exchange.barrier("read")
    write(buffer.ptrs[(rank + 1) % size] + nbytes - 1, bytes([100 + rank]))
    exchange.barrier("written by a peer")
    for owner in range(size):
        assert read(buffer.ptrs[owner] + nbytes - 1, 1) == bytes([100 + (owner - 1) % size])
    exchange.barrier("done")


def _allocate_grow_close(rank: int, size: int) -> None:
    device = device_of(rank)
    saved = dict(env.os.environ)
    memory = open_memory(Exchange(), device)
    assert isinstance(memory, NvlinkMemory) and memory.device == device
    buffers = [memory.allocate(nbytes, f"block of {nbytes}") for nbytes in (16, 5000, 3 * MIB)]
    for buffer in buffers:
        check_shared(memory, buffer)
    assert dict(env.os.environ) == saved

    # Growth: a freed block's memory may come back, and must come back zeroed.
    for nbytes in (4 * MIB, 8 * MIB):
        buffers.pop().close()
        buffers.append(memory.allocate(nbytes, "grown block"))
        check_shared(memory, buffers[-1])
    assert read(buffers[0].ptrs[rank], 1) == bytes([rank + 1])

    free_before = torch.cuda.mem_get_info(device)[0]
    large = memory.allocate(512 * MIB, "large block")
    memory.exchange.barrier("all have the large block")
    if _ALONE:
        assert torch.cuda.mem_get_info(device)[0] <= free_before - 256 * MIB
    memory.exchange.barrier("all have looked")
    large.close()
    large.close()
    memory.exchange.barrier("all have closed it")
    if _ALONE:
        assert torch.cuda.mem_get_info(device)[0] >= free_before - 256 * MIB
    memory.close()
    memory.close()
    with pytest.raises(CommunicatorClosed):
        _ = buffers[0].ptrs
    with pytest.raises(CommunicatorClosed):
        memory.allocate(16, "late")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_sees_every_block(size: int) -> None:
    run(size, _allocate_grow_close)


def _pytorchs_own_rendezvous(group: dist.ProcessGroup, device: torch.device) -> None:
    """Moves PyTorch's counter, as other users of symmetric memory in this process do."""
    tensor = _symmetric_memory().empty_strided_p2p((1024,), (1,), torch.uint8, device, group.group_name)
    with env.symmetric_memory_variables():
        _symmetric_memory().rendezvous(tensor, group.group_name)


def _subgroups_first(rank: int, size: int) -> None:
    device = device_of(rank)
    pair = dist.new_group([0, 1])
    others = dist.new_group([2, 1])
    if rank in (0, 1):
        _pytorchs_own_rendezvous(pair, device)
        of_pair = open_memory(Exchange(pair), device)
        check_shared(of_pair, of_pair.allocate(4096, "block of the pair"))
        check_shared(of_pair, of_pair.allocate(8192, "second block of the pair"))
    world = open_memory(Exchange(), device)
    first = world.allocate(4096, "block of all")
    check_shared(world, first)
    if rank in (1, 2):
        of_others = open_memory(Exchange(others), device)
        assert of_others.exchange.rank == dist.get_rank(others)
        check_shared(of_others, of_others.allocate(4096, "block of the others"))
        of_others.close()
    check_shared(world, world.allocate(MIB, "another block of all"))
    assert read(first.ptrs[rank], 1) == bytes([rank + 1])
    if rank in (0, 1):
        of_pair.close()
    world.close()


@pytest.mark.gpu(1)
def test_groups_that_have_exchanged_differently_often_still_meet() -> None:
    run(3, _subgroups_first)


def _refusals(rank: int, size: int) -> None:
    device = device_of(rank)
    memory = open_memory(Exchange(), device)
    with pytest.raises(DisagreementError, match="ranks disagree on an allocation"):
        memory.allocate(4096 * (rank + 1), "block")
    with pytest.raises(EpPluginError, match="allocation of everything"):
        memory.allocate(1 << 48, "everything")
    check_shared(memory, memory.allocate(4096, "block after the refusals"))

    # One rank alone fails while the blocks are mapped: the others are told why, also in the middle of it.
    if rank == 1:

        def fail(*args: object) -> None:
            raise RuntimeError("made to fail")

        memory._group._store.set = fail
    with pytest.raises(EpPluginError, match="mapping of doomed failed: .*made to fail") as caught:
        memory.allocate(4096, "doomed")
    assert isinstance(caught.value, PeerAborted) == (rank != 1)
    memory.close()


@pytest.mark.gpu(1)
def test_refused_allocations_are_told_to_all() -> None:
    run(3, _refusals)


def _one_dies(rank: int, size: int) -> None:
    memory = open_memory(Exchange(), device_of(rank))
    buffer = memory.allocate(MIB, "block")
    write(buffer.ptrs[rank], bytes([rank + 1]) * 100)
    memory.exchange.barrier("written")
    if rank == 1:
        die()
    memory.exchange.timeout_s = 2.0
    with pytest.raises(PeerTimeout) as caught:
        memory.allocate(MIB, "with a dead peer")
    assert caught.value.rank == 1
    memory.close()


@pytest.mark.gpu(1)
def test_survivors_of_a_dead_rank_are_told_and_close() -> None:
    run(3, _one_dies, killed=(1,))


def _left_open(rank: int, size: int) -> None:
    memory = open_memory(Exchange(), device_of(rank))
    memory.allocate(MIB, "never closed")
    memory.exchange.barrier("allocated")


@pytest.mark.gpu(1)
def test_a_process_that_closes_nothing_ends_well() -> None:
    run(2, _left_open)


def _device_fails(rank: int, size: int) -> None:
    memory = open_memory(Exchange(), device_of(rank))
    buffer = memory.allocate(MIB, "block")
    memory.exchange.barrier("allocated")
    if rank == 0:
        out_of_bounds = torch.full((1,), 1 << 40, dtype=torch.int64, device=memory.device)
        with pytest.raises(RuntimeError):  # at the launch where CUDA_LAUNCH_BLOCKING is set
            torch.zeros(4, device=memory.device).gather(0, out_of_bounds)  # a device-side assertion: no context is left
            torch.cuda.synchronize()
    buffer.close()
    memory.close()


@pytest.mark.gpu(1)
def test_close_after_the_device_has_failed_does_not_end_the_process() -> None:
    run(2, _device_fails)
