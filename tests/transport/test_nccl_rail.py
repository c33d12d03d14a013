"""Messages that NCCL starts without PyTorch, with stand-ins for NCCL's functions and for CUDA's streams."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin import _C
from ep_plugin.transport import nccl
from ep_plugin.transport.progress import Progress
from ep_plugin.transport.rail import Rail

AFTER, STREAM, COMM, WORD, BYTES = 11, 22, 33, 44, 1  # BYTES: ncclUint8
_Pointer, _Int, _Size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_MESSAGE = ctypes.CFUNCTYPE(_Int, _Pointer, _Size, _Int, _Int, _Pointer, _Pointer)
_GATHER = ctypes.CFUNCTYPE(_Int, _Pointer, _Pointer, _Size, _Int, _Pointer, _Pointer)
_GROUP, _ERROR = ctypes.CFUNCTYPE(_Int), ctypes.CFUNCTYPE(_Pointer, _Int)


class Device:
    """NCCL and a GPU, which note what is called. `fails`: the function of NCCL that returns an error."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails, self.marks, self.at_send = "", 0, lambda: None
        self._text = ctypes.create_string_buffer(b"error 5")
        self._functions = [
            _GROUP(lambda: self._nccl("begin")),
            _GROUP(lambda: self._nccl("end")),
            _MESSAGE(lambda *given: (self.at_send(), self._nccl("send", *given))[1]),
            _MESSAGE(lambda *given: self._nccl("receive", *given)),
            _GATHER(lambda *given: self._nccl("gather", *given)),
            _ERROR(lambda error: ctypes.addressof(self._text)),
        ]
        self.addresses = [ctypes.cast(function, _Pointer).value for function in self._functions]

    def _nccl(self, name: str, *given: Any) -> int:
        self.calls.append((name, *given))
        return 5 if name == self.fails else 0

    def order_streams(self, later: int, earlier: int, device: int) -> None:
        self.calls.append(("order", later, earlier, device))

    def mark(self, stream: int, device: int) -> int:
        self.marks += 1
        return self.marks

    def drop_mark(self, mark: int) -> None:
        self.calls.append(("drop", mark))

    def order_after(self, stream: int, mark: int) -> None:
        self.calls.append(("wait", stream, mark))

    def write(self, word: int, value: int, stream: int) -> None:
        self.calls.append(("write", word, value, stream))


@pytest.fixture
def device() -> Device:
    return Device()


def rail_on(device: Device) -> Any:
    return _C.NcclRail(device.addresses, COMM, STREAM, 0, WORD, calls=device)


def test_messages_start_together_after_the_callers_work(device: Device) -> None:
    made = rail_on(device)
    assert made.start(AFTER, 7, [(1, 0x100, 64, True), (2, 0x200, 32, False)]) == 1
    assert device.calls == [
        ("order", STREAM, AFTER, 0),
        ("write", WORD, 7, STREAM),
        ("begin",),
        ("send", 0x100, 64, BYTES, 1, COMM, STREAM),
        ("receive", 0x200, 32, BYTES, 2, COMM, STREAM),
        ("end",),
        ("write", WORD, 0, STREAM),
    ]
    made.wait(1, 99)
    assert device.calls[-1] == ("wait", 99, 1)


def test_a_gather_and_a_message_without_a_number(device: Device) -> None:
    made = rail_on(device)
    made.gather(AFTER, 0, 0x100, 0x400, 64)
    gathers = [("gather", 0x100, 0x400, 64, BYTES, COMM, STREAM)]
    assert device.calls == [("order", STREAM, AFTER, 0), ("begin",), *gathers, ("end",)]


@pytest.mark.parametrize("fails", ["begin", "send", "end"])
def test_an_error_of_nccl_leaves_no_group_open(device: Device, fails: str) -> None:
    device.fails = fails
    with pytest.raises(RuntimeError, match="NCCL: error 5"):
        rail_on(device).start(AFTER, 0, [(1, 0x100, 64, True), (1, 0x100, 64, False)])
    names = [call[0] for call in device.calls]
    assert (
        names
        == {
            "begin": ["order", "begin"],
            "send": ["order", "begin", "send", "end"],
            "end": ["order", "begin", "send", "receive", "end"],
        }[fails]
    )


def test_marks_do_not_pile_up_and_old_messages_can_be_waited_for(device: Device) -> None:
    made = rail_on(device)
    for _ in range(300):
        made.start(AFTER, 0, [(1, 0x100, 64, True)])
    dropped = [call[1] for call in device.calls if call[0] == "drop"]
    assert dropped == list(range(1, 45))
    made.wait(300, 99)
    made.wait(1, 99)
    assert [call for call in device.calls if call[0] == "wait"] == [("wait", 99, 300), ("wait", 99, 45)]
    for wrong in (0, 301):
        with pytest.raises(ValueError, match="ticket: expected one that start"):
            made.wait(wrong, 99)
    del made
    assert sorted(call[1] for call in device.calls if call[0] == "drop") == list(range(1, 301))


def test_a_rail_that_has_ended_starts_nothing(device: Device) -> None:
    made = rail_on(device)
    made.end(1.0)
    with pytest.raises(RuntimeError, match="the rail has ended"):
        made.start(AFTER, 1, [(1, 0x100, 64, True)])
    assert not device.calls


def test_an_end_stops_the_messages_of_another_thread(device: Device) -> None:
    made, held, ending = rail_on(device), threading.Event(), threading.Event()
    device.at_send = lambda: (held.set(), ending.wait(20))
    errors: list[BaseException] = []

    def starts() -> None:
        try:
            made.start(AFTER, 0, [(1, 0x100, 64, True), (2, 0x100, 64, True)])
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=starts)
    thread.start()
    assert held.wait(20)
    began = time.monotonic()
    made.end(0.2)  # NCCL keeps the thread
    assert 0.2 <= time.monotonic() - began < 10
    ending.set()
    thread.join(20)
    assert "the rail has ended" in str(errors[0])
    assert [call[0] for call in device.calls] == ["order", "begin", "send", "end"], "no message after the end"


@pytest.fixture
def over_nccl(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rail]:
    """A rail with a backend that can only abort."""
    monkeypatch.setattr(nccl, "_current_stream", lambda device: AFTER)
    backend = SimpleNamespace(abort=lambda: device.calls.append("abort"))
    yield Rail(backend, "name", SimpleNamespace(), nccl.Direct(rail_on(device), torch.device("cuda", 0)))  # type: ignore[arg-type]


def test_a_rail_starts_messages_without_its_backend(over_nccl: Rail, device: Device) -> None:
    row, parts = torch.zeros(64, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    (work,) = over_nccl.begin([(1, row, 0, 64, True, 0), (1, parts, 8, 64, False, 0)], 3)
    begun = [(call[0], *call[1:5]) for call in device.calls if call[0] in ("send", "receive")]
    assert begun == [("send", row.data_ptr(), 64, BYTES, 1), ("receive", parts.data_ptr() + 8, 64, BYTES, 1)]
    assert ("write", WORD, 3, STREAM) in device.calls
    work.wait()
    assert device.calls[-1] == ("wait", AFTER, 1)
    over_nccl.gather(parts, row, 4).wait()
    assert ("gather", row.data_ptr(), parts.data_ptr(), 64, BYTES, COMM, STREAM) in device.calls
    assert device.calls[-1] == ("wait", AFTER, 2)
    over_nccl.abort()
    with pytest.raises(RuntimeError, match="the rail has ended"):
        over_nccl.begin([(1, row, 0, 64, True, 0)], 5)
    assert device.calls[-1] == "abort"


def test_messages_hold_their_memory_until_they_are_forgotten(over_nccl: Rail) -> None:
    row = torch.zeros(64, dtype=torch.uint8)
    (work,) = over_nccl.begin([(1, row, 0, 64, True, 0)])
    assert any(message[1] is row for message in work.tensors)


@pytest.mark.parametrize("what", ["no name", "no communicator", "no functions", "all"])
def test_a_backend_starts_what_nothing_else_can(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    named = {} if what == "no name" else {"_comm_ptr": lambda: 0 if what == "no communicator" else COMM}
    monkeypatch.setattr(nccl, "functions_of_nccl", lambda: None if what == "no functions" else Device().addresses)
    monkeypatch.setattr(torch.cuda, "device", _Current)
    progress: Progress = SimpleNamespace(stream=STREAM, word=WORD)  # type: ignore[assignment]
    made = nccl.direct_of(SimpleNamespace(**named), torch.device("cuda", 0), progress)
    assert (made is not None) == (what == "all")


class _Current:
    def __init__(self, device: torch.device) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_functions_are_those_of_pytorchs_nccl_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(**dict.fromkeys(nccl.FUNCTIONS, _GROUP(lambda: 0)))
    loaded.ncclGetVersion = lambda number: setattr(number._obj, "value", 22809) or 0
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: asked.append((name, mode & os.RTLD_NOLOAD)) or loaded)
    for version, found in ((22809, True), (22907, False)):
        monkeypatch.setattr(nccl, "version_of_nccl", lambda version=version: version)
        nccl.functions_of_nccl.cache_clear()
        assert (nccl.functions_of_nccl() is not None) == found
    assert asked[0] == ("libnccl.so.2", os.RTLD_NOLOAD), "a second NCCL must not be loaded"
    nccl.functions_of_nccl.cache_clear()
    monkeypatch.undo()
    assert torch.cuda.is_available() or nccl.functions_of_nccl() is None
    nccl.functions_of_nccl.cache_clear()
