"""Shared memory between real processes: what is mapped where, its names, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import mmap
import os
import secrets
from pathlib import Path
from unittest import mock

import pytest
import torch

from ep_plugin import env
from ep_plugin.errors import EpPluginError, NotSupported, PeerAborted, PeerTimeout
from ep_plugin.transport import open_memory, shm, transport_for
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.shm import ShmMemory
from tests.transport.memory_ranks import die, run
from tests.transport.test_memory import SIZES, bytes_at, check_shared


@pytest.fixture
def prefix():
    """A prefix of this test's own for names in /dev/shm; none may be left when the test ends."""
    prefix = f"ep_plugin-test-{secrets.token_hex(4)}-"
    yield prefix
    assert names(prefix) == []


def names(prefix: str) -> list[str]:
    return glob.glob(f"/dev/shm/{prefix}*")


def use_names(prefix: str) -> None:
    """Makes this process unable to open its peers' unnamed blocks, and the names it uses recognisable."""
    shm._PREFIX = prefix
    opened = shm._opened

    def refuse_unnamed(offer: list[str], nbytes: int) -> contextlib.AbstractContextManager[int]:
        if offer[0].startswith("/proc"):
            raise PermissionError(errno.EACCES, "refused by the test", offer[0])
        return opened(offer, nbytes)

    shm._opened = refuse_unnamed


def num_mapped(text: str) -> int:
    with open("/proc/self/maps") as file:
        return sum(text in line for line in file)


def _allocate_both_ways(rank: int, size: int, prefix: str) -> None:
    shm._PREFIX = prefix
    _allocate_and_share(rank, size, prefix, named=False)
    if rank == size - 1:
        use_names(prefix)  # one rank cannot do without: all must follow
    _allocate_and_share(rank, size, prefix, named=True)


def _allocate_and_share(rank: int, size: int, prefix: str, named: bool) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    exchange = Exchange()
    memory = ShmMemory(exchange)
    assert memory.device == torch.device("cpu")
    buffers = []
    for nbytes in SIZES:
        buffers.append(memory.allocate(nbytes, f"block of {nbytes}"))
        check_shared(exchange, buffers[-1])
    assert memory._named == named
    assert names(prefix) == []
    assert num_mapped(prefix) == len(SIZES) * size
    assert len(os.listdir("/proc/self/fd")) <= descriptors

    assert all(ptr % mmap.PAGESIZE == 0 for buffer in buffers for ptr in buffer.ptrs)

    buffers[0].close()
    assert num_mapped(prefix) == (len(SIZES) - 1) * size
    memory.close()
    assert num_mapped(prefix) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_blocks_are_mapped_once_and_unmapped_when_closed(prefix, size):
    run(size, _allocate_both_ways, prefix)


def _no_memfd(rank: int, size: int, prefix: str) -> None:
    shm._PREFIX = prefix
    if rank == 0:

        def refuse(name: str, flags: int) -> int:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        os.memfd_create = refuse
    exchange = Exchange()
    with_names = ShmMemory(exchange)
    check_shared(exchange, with_names.allocate(4096, "block"))
    assert with_names._named
    with_names.close()


def test_names_serve_where_a_rank_has_no_memfd(prefix):
    run(2, _no_memfd, prefix)


def _refused_both_ways(rank: int, size: int, prefix: str) -> None:
    shm._PREFIX = prefix
    _refusals(rank, size, prefix)
    use_names(prefix)
    _refusals(rank, size, prefix)


def _refusals(rank: int, size: int, prefix: str) -> None:
    exchange = Exchange()
    memory = ShmMemory(exchange)
    with pytest.raises(EpPluginError, match=r"allocation of everything.*expected at most the \d+ bytes"):
        memory.allocate(1 << 60, "everything")

    # Rank 1 alone finds no space: it says why, the others say who, nobody keeps anything, and all go on.
    reserve = shm._reserve

    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        shm._reserve = full
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EpPluginError, match="allocation of block.*No space left on device") as caught:
        memory.allocate(4096, "block")
    assert isinstance(caught.value, PeerAborted) == (rank != 1)
    assert rank == 1 or caught.value.rank == 1
    del caught
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert num_mapped(prefix) == 0
    exchange.barrier("all have failed")
    assert names(prefix) == []
    shm._reserve = reserve
    buffer = memory.allocate(4096, "block")
    check_shared(exchange, buffer)
    memory.close()


def test_refused_allocations_leave_nothing_and_end_nothing(prefix):
    run(3, _refused_both_ways, prefix)


def _die_with_memory(rank: int, size: int, prefix: str, victims: tuple[int, ...]) -> None:
    shm._PREFIX = prefix
    exchange = Exchange()
    memories = [ShmMemory(exchange)]
    buffers = [memories[0].allocate(1 << 20, "unnamed block")]
    use_names(prefix)
    memories.append(ShmMemory(exchange))
    buffers.append(memories[1].allocate(1 << 20, "named block"))
    for buffer in buffers:
        ctypes.memset(buffer.ptrs[rank], rank + 1, buffer.nbytes)
    exchange.barrier("written")
    if rank in victims:
        die()
    exchange.timeout_s = 1.0
    with pytest.raises(PeerTimeout) as caught:
        memories[0].allocate(4096, "with a dead peer")
    assert caught.value.rank in victims
    for buffer in buffers:  # a dead rank's memory stays readable for those who mapped it
        assert [bytes_at(buffer, owner)[4242] for owner in range(size)] == [owner + 1 for owner in range(size)]
    for memory in memories:
        memory.close()
    assert num_mapped(prefix) == 0


@pytest.mark.deadline
@pytest.mark.parametrize("victims", [(1,), (0, 1, 2)], ids=["one dies", "all die"])
def test_nothing_stays_when_ranks_are_killed(prefix, victims):
    run(3, _die_with_memory, prefix, victims, killed=victims)


def _die_while_sharing(rank: int, size: int, prefix: str, moment: str, victims: tuple[int, ...]) -> None:
    shm._PREFIX = prefix
    memory = ShmMemory(Exchange())
    memory._named = True
    memory.exchange.timeout_s = 1.0
    if rank in victims:
        setattr(shm, moment, lambda *args: die())
    with pytest.raises(PeerTimeout) as caught:
        memory.allocate(4096, "block")
    assert caught.value.rank == victims[0]
    memory.close()


@pytest.mark.deadline
@pytest.mark.parametrize("moment", ["_reserve", "_map_all", "_opened"])
def test_survivors_remove_the_names_of_the_dead(prefix, moment):
    run(3, _die_while_sharing, prefix, moment, (1,), killed=(1,))


def _share_once(rank: int, size: int, prefix: str) -> None:
    shm._PREFIX = prefix
    memory = ShmMemory(Exchange())
    memory._named = True
    memory.allocate(4096, "block")
    memory.close()


def test_the_next_to_come_removes_the_names_of_those_who_all_died(prefix):
    run(2, _die_while_sharing, prefix, "_map_all", (0, 1), killed=(0, 1))
    assert len(names(prefix)) == 2
    run(2, _share_once, prefix)


def test_names_of_others_are_neither_opened_nor_removed(prefix, tmp_path):
    target, block, pipe = tmp_path / "target", f"/dev/shm/{prefix}block", f"/dev/shm/{prefix}pipe"
    target.touch()
    Path(block).touch()
    os.mkfifo(pipe)
    links = [f"/dev/shm/{prefix}link", f"/dev/shm/{prefix}device"]
    for link, to in zip(links, (target, "/dev/null"), strict=True):
        os.symlink(to, link)
    try:
        with mock.patch.object(shm, "_PREFIX", prefix), mock.patch("fcntl.flock", wraps=fcntl.flock) as locked:
            shm._sweep()
        assert sorted(names(prefix)) == sorted([pipe, *links]) and locked.call_count == 1
    finally:
        for path in names(prefix):
            os.unlink(path)


def _open(rank: int, size: int) -> None:
    env.os.environ.pop("EP_PLUGIN_TRANSPORT", None)
    memory = open_memory(Exchange(timeout_s=20.0), torch.device("cpu"))
    assert isinstance(memory, ShmMemory) and memory.exchange.timeout_s == 20.0
    check_shared(memory.exchange, memory.allocate(1000, "block"))
    memory.close()

    env.os.environ["EP_PLUGIN_RANKS_PER_NODE"] = "1"
    with pytest.raises(NotSupported, match="nodes share no memory: expected all 2 ranks on one node, got 2 nodes of 1"):
        open_memory(Exchange(), torch.device("cpu"))


def test_open_memory_for_cpus():
    run(2, _open)


def test_transport_follows_the_device(monkeypatch):
    monkeypatch.delenv("EP_PLUGIN_TRANSPORT", raising=False)
    assert transport_for(torch.device("cpu")) == "shm"
    assert transport_for(torch.device("cuda:1")) == "nvlink"
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got meta"):
        transport_for(torch.device("meta"))
    monkeypatch.setenv("EP_PLUGIN_TRANSPORT", "nvlink")
    assert transport_for(torch.device("cuda")) == "nvlink"
    with pytest.raises(ValueError, match="EP_PLUGIN_TRANSPORT: expected auto or shm for device cpu, got 'nvlink'"):
        transport_for(torch.device("cpu"))


def test_a_name_that_another_process_uses_is_not_swept(prefix, monkeypatch):
    monkeypatch.setattr(shm, "_PREFIX", prefix)
    block = shm._create_named(4096)
    shm._sweep()
    assert names(prefix) == [block.path]
    block.close()
    assert names(prefix) == []


@pytest.mark.parametrize("case", ["another path", "a link", "another size", "a token that is no token"])
def test_only_the_block_that_the_path_claims_is_opened(prefix, monkeypatch, tmp_path, case):
    monkeypatch.setattr(shm, "_PREFIX", prefix)
    token = secrets.token_hex(8)
    path, nbytes = f"/dev/shm/{prefix}{token}", 4096
    other = tmp_path / token
    other.write_bytes(bytes(nbytes))
    if case == "another path":
        path = str(other)
    elif case == "a link":
        os.symlink(other, path)
    elif case == "another size":
        with open(path, "wb") as file:
            file.write(bytes(nbytes + 1))
    else:
        path, token = f"/dev/shm/{prefix}../{token}", f"../{token}"
    try:
        with pytest.raises(OSError), shm._opened([path, token], nbytes):
            pass
    finally:
        if os.path.lexists(path) and path.startswith(f"/dev/shm/{prefix}"):
            os.unlink(path)


def test_a_block_is_opened_by_both_kinds_of_path(prefix, monkeypatch):
    monkeypatch.setattr(shm, "_PREFIX", prefix)
    for create in (shm._create_anonymous, shm._create_named):
        block = create(4096)
        with shm._opened([block.path, block.token], 4096) as fd:
            assert os.fstat(fd).st_size == 4096
        block.close()


@pytest.mark.parametrize("create", [shm._create_anonymous, shm._create_named], ids=["unnamed", "named"])
def test_a_block_of_another_user_is_refused_by_name(prefix, monkeypatch, create):
    monkeypatch.setattr(shm, "_PREFIX", prefix)
    user = os.geteuid()
    with contextlib.closing(create(4096)) as block:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # only root could give the block away
        said = f"expected a regular file of 4096 bytes of user {user + 1}, got .* 4096 bytes, user {user}$"
        with (
            pytest.raises(PermissionError, match=f"{block.path}: {said}"),
            shm._opened([block.path, block.token], 4096),
        ):
            pass


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tightest", ["", "job", "job/step"])
def test_the_tightest_cgroup_above_the_process_is_the_limit(monkeypatch, tmp_path, version, tightest):
    mount = tmp_path / "memory" if version == 1 else tmp_path
    limit, usage, cache = shm._CGROUP_V1 if version == 1 else shm._CGROUP_V2
    for directory in ("", "job", "job/step"):
        place = mount / directory
        place.mkdir(parents=True, exist_ok=True)
        (place / limit).write_text("1000" if directory == tightest else "5000")
        (place / usage).write_text("700")
        (place / "memory.stat").write_text(f"{cache} 50\n")
    own = tmp_path / "own"
    own.write_text("5:cpu,memory:/job/step\n0::/elsewhere\n" if version == 1 else "0::/job/step\n")
    monkeypatch.setattr(shm, "_CGROUP_ROOT", str(tmp_path))
    monkeypatch.setattr(shm, "_CGROUPS_OF_PROCESS", str(own))
    assert shm._container_available() == 350
