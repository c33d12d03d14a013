"""ep-bench wire: its checks see bytes that went astray.

There is no GPU here: its copies run on CPUs with kernels made of memory moves, over real peer memory.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin import _C
from ep_plugin.bench.suite import WrongResult
from ep_plugin.bench.suites import wire
from ep_plugin.bench.suites.wire import Wire, all_copies
from tests.ranks import run_ranks, values

RANKS = 3
BYTES = 2 * 57344
KINDS = ["store", "load", "tma_store", "tma_load", "ce_push", "ce_pull"]


class MovedMemory:
    """WireArgs, and in `run` what csrc/common/wire.h says of each kind; `shift`: bytes that copies are off by."""

    shift = 0
    only: tuple[int, int] | None = None  # the chunk and SMs that are, and no others

    def __init__(self, **fields: int) -> None:
        self.__dict__.update(fields)

    def set_pairs(self, sources: list[int], destinations: list[int]) -> None:
        self.pairs = list(zip(sources, destinations, strict=True))

    def run(self: Any) -> None:
        for source, destination in self.pairs:
            first = ctypes.string_at(source, self.chunk_bytes)
            for start in range(0, self.bytes, self.chunk_bytes):
                unit = start // self.chunk_bytes
                words = b"".join(word.to_bytes(4, "little", signed=True) for word in (unit, self.seed, ~unit, 0))
                content = {0: words * (self.chunk_bytes // 16), 2: first}.get(self.kind)
                if content is None:
                    content = ctypes.string_at(source + start, self.chunk_bytes)
                if self.kind not in (1, 3) or self.keep:
                    astray = self.only in (None, (self.chunk_bytes, self.num_sms)) and self.kind != 4
                    off = self.shift if astray else 0
                    ctypes.memmove(destination + start, content[off:] + content[:off], self.chunk_bytes)


def without_gpus(shift: int, only: tuple[int, int] | None = None) -> None:
    MovedMemory.shift, MovedMemory.only = shift, only
    _C.WireArgs, _C.wire = MovedMemory, MovedMemory.run
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)
    torch.cuda.synchronize = lambda _=None: None
    torch.cuda.current_stream = lambda _=None: SimpleNamespace(cuda_stream=0)


def check_gpu_copies(rank: int, shift: int) -> dict[str, str | None]:
    without_gpus(shift)
    found = {}
    copies = {copy.kind: copy for copy in all_copies(132)}
    measured = Wire(torch.device("cpu"), BYTES)
    for kind, copy in copies.items():
        found[kind] = measured.wrong(copy)
    measured.close()
    return found


def test_every_kind_of_copy_passes_its_check() -> None:
    for found in values(run_ranks(RANKS, check_gpu_copies, 0)):
        assert list(found) == KINDS
        assert set(found.values()) == {None}


def test_bytes_that_went_astray_are_found() -> None:
    for found in values(run_ranks(RANKS, check_gpu_copies, 4)):
        assert {kind for kind, problem in found.items() if problem is None} == {"ce_push", "ce_pull"}
        assert all("got others in" in problem for problem in found.values() if problem)


def check_all_gpu_copies(rank: int, shift: int, only: tuple[int, int] | None) -> list[str]:
    without_gpus(shift, only)
    measured = Wire(torch.device("cpu"), BYTES)
    found = [copy.name for copy in all_copies(132) if measured.wrong(copy)]
    measured.close()
    return found


@pytest.mark.parametrize(
    ("shift", "only", "names"),
    [
        (0, None, []),
        (4, (4096, 12), [f"{kind}_sm12" for kind in ("store", "load")]
         + [f"{kind}_c4096_sm12" for kind in ("tma_store", "tma_load")]),
    ],
    ids=["all right", "one chunk and number of SMs"],
)  # fmt: skip
def test_every_chunk_and_number_of_sms_is_compared(shift: int, only: tuple[int, int] | None, names: list[str]) -> None:
    assert values(run_ranks(RANKS, check_all_gpu_copies, shift, only)) == [names] * RANKS


def floor_rate(rank: int, shift: int) -> tuple[float, str] | list[str]:
    without_gpus(shift)
    wire.Wire.__init__.__defaults__ = (BYTES,)
    try:
        return wire.best_sm_store_rate(torch.device("cpu"), iterations=1)
    except WrongResult as error:
        return error.args[0]


def test_the_floors_rate_is_that_of_the_best_store() -> None:
    found = values(run_ranks(RANKS, floor_rate, 0))
    assert found[0] == found[1] == found[2]
    rate, case = found[0]
    assert rate > 0
    assert case in {"tma_store_c14336_sm16", "tma_store_c14336_sm48", "tma_store_c14336_sm132", "store_sm132"}


def test_stores_that_went_astray_give_no_floor() -> None:
    for found in values(run_ranks(RANKS, floor_rate, 4)):
        assert len(found) == 4 * RANKS
        assert found[0].startswith(
            "rank 0: tma_store_c14336_sm16 by wire: the bytes from rank 1: expected the sender's bytes"
        )


def test_names_say_kind_chunk_and_sms() -> None:
    names = [copy.name for copy in all_copies(132)]
    assert len(set(names)) == len(names)
    assert {"tma_store_c14336_sm16", "store_sm132", "ce_push", "ce_pull", "tma_load_c1024_sm4"} <= set(names)
    assert not any("sm132" in copy.name for copy in all_copies(108))


@pytest.mark.parametrize("chunk", [*wire.CHUNKS, wire.PIECE])
def test_chunks_divide_what_is_copied(chunk: int) -> None:
    assert wire.CUDA_BYTES % chunk == 0
