"""What every PeerMemory does, on each transport whose memory the host can read. A new one is a line in `MEMORIES`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import pytest

from ep_plugin.errors import CommunicatorClosed, DisagreementError, EpPluginError, PeerTimeout
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import PeerBuffer, PeerMemory
from ep_plugin.transport.shm import ShmMemory
from tests.transport.memory_ranks import die, run

Open: TypeAlias = Callable[[Exchange], PeerMemory]

SIZES = (1, 4096, 5000, 3 << 20)


def by_name(exchange: Exchange) -> PeerMemory:
    memory = ShmMemory(exchange)
    memory._named = True
    return memory


MEMORIES: dict[str, Open] = {"shm": ShmMemory, "shm by name": by_name}


@pytest.fixture(params=MEMORIES)
def open_memory(request: pytest.FixtureRequest) -> Open:
    """Opens the memory under test, on each rank."""
    return MEMORIES[request.param]


def bytes_at(buffer: PeerBuffer, rank: int) -> ctypes.Array:
    return (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.ptrs[rank])


def check_shared(exchange: Exchange, buffer: PeerBuffer) -> None:
    """Each rank's block is zero at first, is written by its owner, then by one peer, and all see both."""
    size, rank = exchange.size, exchange.rank
    assert len(buffer.ptrs) == size and len(set(buffer.ptrs)) == size
    assert all(ptr % 128 == 0 for ptr in buffer.ptrs)
    for owner in range(size):
        assert not any(bytes_at(buffer, owner)[:: max(1, buffer.nbytes // 1000)])
    exchange.barrier("seen zeros")
    ctypes.memset(buffer.ptrs[rank], rank + 1, buffer.nbytes)
    exchange.barrier("written")
    for owner in range(size):
        assert bytes(bytes_at(buffer, owner)) == bytes([owner + 1]) * buffer.nbytes
    exchange.barrier("read")
    bytes_at(buffer, (rank + 1) % size)[buffer.nbytes - 1] = 100 + rank
    exchange.barrier("written by a peer")
    for owner in range(size):
        assert bytes_at(buffer, owner)[buffer.nbytes - 1] == 100 + (owner - 1) % size
    exchange.barrier("done")


def _allocate_and_close(rank: int, size: int, open_memory: Open) -> None:
    exchange = Exchange()
    memory = open_memory(exchange)
    buffers = [memory.allocate(nbytes, f"block of {nbytes}") for nbytes in SIZES]
    for buffer in buffers:
        check_shared(exchange, buffer)
    buffers[0].close()
    buffers[0].close()
    with pytest.raises(CommunicatorClosed, match=f"block of {SIZES[0]}"):
        _ = buffers[0].ptrs
    assert bytes(bytes_at(buffers[1], rank))[:3] == bytes([rank + 1]) * 3
    memory.close()
    memory.close()
    assert all(buffer.closed for buffer in buffers)
    with pytest.raises(CommunicatorClosed):
        memory.allocate(16, "late")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_sees_every_block(open_memory: Open, size: int) -> None:
    run(size, _allocate_and_close, open_memory)


def _refuse(rank: int, size: int, open_memory: Open) -> None:
    exchange = Exchange()
    memory = open_memory(exchange)
    with pytest.raises(ValueError, match="nbytes of block: expected an integer of at least 1, got 0"):
        memory.allocate(0, "block")
    with pytest.raises(DisagreementError, match=r"\d+ bytes for block on rank \d, \d+ bytes for block on rank \d"):
        memory.allocate(4096 * (1 + rank), "block")
    with pytest.raises(DisagreementError, match="pool"):
        memory.allocate(4096, "pool" if rank == 1 else "block")
    with pytest.raises(EpPluginError, match=r"allocation of everything"):
        memory.allocate(1 << 60, "everything")
    check_shared(exchange, memory.allocate(4096, "block"))  # it stays usable
    memory.close()


def test_refused_allocations_end_nothing(open_memory: Open) -> None:
    run(3, _refuse, open_memory)


def _die_with_memory(rank: int, size: int, open_memory: Open) -> None:
    exchange = Exchange()
    memory = open_memory(exchange)
    buffer = memory.allocate(1 << 20, "block")
    ctypes.memset(buffer.ptrs[rank], rank + 1, buffer.nbytes)
    exchange.barrier("written")
    if rank == 1:
        die()
    exchange.timeout_s = 2.5
    with pytest.raises(PeerTimeout) as caught:
        memory.allocate(4096, "with a dead peer")
    assert caught.value.rank == 1
    # A dead rank's memory stays readable for those who mapped it.
    assert [bytes_at(buffer, owner)[4242] for owner in range(size)] == [owner + 1 for owner in range(size)]
    memory.close()


@pytest.mark.deadline
def test_a_dead_rank_is_named_and_its_memory_stays(open_memory: Open) -> None:
    run(3, _die_with_memory, open_memory, killed=(1,))
