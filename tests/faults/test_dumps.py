"""Ranks that fail write their latest calls (EP_PLUGIN_DUMP), and `ep-doctor --merge` says who was where."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.collectives.send_receive import SendReceive
from ep_plugin.doctor.__main__ import main
from ep_plugin.doctor.dumps import merge
from ep_plugin.doctor.findings import FAILURE, OK, WARNING, Finding
from ep_plugin.errors import EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.runtime import calls
from tests.faults.fault_cases import die_at_gate, open_with_deadline, round_trip, set_deadline
from tests.ranks import run_ranks, values

SIZE, VICTIM, DEADLINE_S = 3, 1, 1.5


def _killed(rank: int) -> str:
    """The victim is killed in its second dispatch."""
    if rank == VICTIM:
        os.environ["EP_PLUGIN_TEST_GATE"] = "notify"
    comm = open_with_deadline(SIZE, DEADLINE_S)
    held_at, comm.engine.comm.gate = comm.engine.comm.gate, 0
    round_trip(comm)
    comm.engine.comm.gate = held_at
    if rank == VICTIM:
        die_at_gate(comm)
    with pytest.raises(PeerTimeout) as caught:
        round_trip(comm)
    comm.close()
    return str(caught.value)


def _one_fails(rank: int) -> str:
    """The victim raises an error of its own between two operations, and its peers abort."""
    with pytest.raises(ZeroDivisionError if rank == VICTIM else PeerAborted) as caught, \
            open_with_deadline(SIZE, 30) as comm:  # fmt: skip
        round_trip(comm)
        dist.barrier()
        if rank == VICTIM:
            raise ZeroDivisionError("a bad batch")
        round_trip(comm)
    return str(caught.value)


def _one_is_late(rank: int) -> str:
    """The victim comes to its second dispatch when its peers have given up. It finds their rows, and fails later."""
    comm = open_with_deadline(SIZE, DEADLINE_S)
    round_trip(comm)
    if rank == VICTIM:
        dist.barrier()
    with pytest.raises(PeerTimeout) as caught:
        for _ in range(3):
            round_trip(comm)
    if rank != VICTIM:
        dist.barrier()
    comm.close()
    return str(caught.value)


def _messages(rank: int) -> str:
    """Nobody sends what rank 0 waits for."""
    with SendReceive() as messages:
        set_deadline(messages._engine, 1)
        work = messages.receive(torch.zeros(4), 1) if rank == 0 else None
        dist.barrier()
        if work is None:
            dist.barrier()
            return ""
        with pytest.raises(PeerTimeout) as caught:
            work.wait()
        dist.barrier()
        return str(caught.value)


def dumped(folder: Path, size: int, function: Callable[[int], Any]) -> dict[str, Any]:
    """Runs the ranks, and returns the files that they wrote."""
    run_ranks(size, function, env={"EP_PLUGIN_DUMP": str(folder)})
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


def of(findings: list[Finding], subject: str, level: str) -> str:
    """The sentence of the only finding of this subject and level."""
    [found] = [one for one in findings if (one.subject, one.level) == (subject, level)]
    assert bool(found.do) == (level != OK)
    return found.what


@pytest.mark.deadline
def test_a_killed_rank_left_no_file_and_the_others_say_where_it_was(tmp_path: Path) -> None:
    files = dumped(tmp_path, SIZE, _killed)
    assert set(files) == {"rank0.json", "rank2.json"}
    for rank in (0, 2):
        [one] = files[f"rank{rank}.json"]["communicators"]
        [failure] = one["failures"]
        assert (failure["error"], failure["rank"], failure["step"]) == ("PeerTimeout", VICTIM, "notify")
        assert (one["ranks"], one["epochs"]) == ([0, 1, 2], {"construction": 1, "dispatch": 2, "combine": 1})
        own = failure["boards"][str(rank)]["waits"]
        assert (own["rank"], own["step"]) == (VICTIM, "notify") and own["expected"] > own["seen"]
        assert failure["boards"][str(VICTIM)] == {"last": f"in dispatch of {one['name']}", "waits": None}
        last = files[f"rank{rank}.json"]["calls"][-1]
        assert (last["kind"], last["number"], last["epoch"], last["ended"]) == ("dispatch", 4, 2, None)
        assert last["nbytes"] == 5 * 8 * 4
    findings = merge(tmp_path)
    assert "saw it last in dispatch of communicator" in of(findings, "rank 1", FAILURE)
    assert "ranks 0, 2 waited for it in vain" in of(findings, "rank 1", FAILURE)
    assert of(findings, one["name"], OK) == "ranks 0, 2 in dispatch 2"
    assert "PeerTimeout" in of(findings, "rank 0", OK)


def test_a_rank_that_fails_by_itself_comes_first(tmp_path: Path) -> None:
    files = dumped(tmp_path, SIZE, _one_fails)
    assert len(files) == SIZE
    files["rank0.json"]["communicators"][0]["failures"][0]["time"] -= 60  # its clock, or it was noted first
    (tmp_path / "rank0.json").write_text(json.dumps(files["rank0.json"]))
    findings = merge(tmp_path)
    assert "ZeroDivisionError: a bad batch" in of(findings, "rank 1", FAILURE)
    assert findings[0].subject == "rank 1"
    assert {one.level for one in findings if one.subject in ("rank 0", "rank 2")} == {OK}
    assert not [one for one in findings if one.level != OK and one.subject != "rank 1"]


@pytest.mark.deadline
def test_a_late_rank_is_behind_though_it_goes_on_when_the_others_have_failed(tmp_path: Path) -> None:
    assert len(dumped(tmp_path, SIZE, _one_is_late)) == SIZE
    findings = merge(tmp_path)
    [name] = {one.subject for one in findings if one.subject.startswith("communicator")}
    assert of(findings, name, OK) == "ranks 0, 2 in dispatch 2; rank 1 after combine 1"
    assert of(findings, name, FAILURE) == "behind: rank 1 after combine 1, while ranks 0, 2 came further"


@pytest.mark.deadline
def test_messages_say_what_is_waited_for(tmp_path: Path) -> None:
    files = dumped(tmp_path, 2, _messages)
    last = files["rank0.json"]["calls"][-1]
    assert (last["kind"], last["part"], last["epoch"], last["ended"]) == ("send-receive", "wait", 1, None)
    said = [one.what for one in merge(tmp_path) if one.subject.startswith("communicator")]
    assert "rank 0 in send-receive 1 (wait)" in said[0]


def _into_a_file(rank: int, path: str) -> tuple[str, list[str]]:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ep_plugin").addHandler(handler)
    comms = [open_with_deadline(2, 30) for _ in range(2)]
    for comm in comms:
        comm.abort("no more")
    with pytest.raises(PeerAborted) as caught:
        round_trip(comms[0])
    return str(caught.value), records


def test_a_folder_that_cannot_be_written_is_said_once_and_hides_no_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    for text, records in values(run_ranks(2, _into_a_file, str(path), env={"EP_PLUGIN_DUMP": str(path)})):
        assert "aborted: no more" in text
        assert len(records) == 1 and records[0].startswith(f"EP_PLUGIN_DUMP: {path}: nothing was written: ")


def _never_answers(rank: int) -> tuple[str, list[str], float]:
    """The folder is on a server that is gone, so no write to it returns."""
    calls._write = lambda *_: threading.Event().wait()
    calls._WRITE_S = 0.5
    began = time.monotonic()
    text, records = _into_a_file(rank, "")
    return text, records, time.monotonic() - began


@pytest.mark.deadline
def test_a_folder_that_never_answers_delays_the_error_a_little(tmp_path: Path) -> None:
    for text, records, took in values(
        run_ranks(2, _never_answers, env={"EP_PLUGIN_DUMP": str(tmp_path)}, timeout_s=30)
    ):
        assert "aborted: no more" in text and took < 20
        assert records == [f"EP_PLUGIN_DUMP: {tmp_path}: nothing was written: no answer in 0.5 s"]


def test_a_failure_during_a_write_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_PLUGIN_DUMP", str(tmp_path))
    monkeypatch.setattr(calls, "_failures", [])
    inner = calls.Calls((0,), 0, True, "inner")

    def boards() -> dict[int, Any]:
        calls.failed(inner, EpPluginError("of a handler"), dict)
        return {}

    calls.failed(calls.Calls((0,), 0, True, "outer"), EpPluginError("first"), boards)
    content = json.loads((tmp_path / "rank0.json").read_text())
    assert sorted(one["name"] for one in content["communicators"] if one["failures"]) == ["inner", "outer"]


class _Diverged(Exception):
    """An error of a trainer, with a step of its own."""

    step = object()


def test_an_error_with_a_step_of_its_own_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_PLUGIN_DUMP", str(tmp_path))
    monkeypatch.setattr(calls, "_failures", [])
    calls.failed(calls.Calls((0,), 0, True, "communicator"), _Diverged("loss"), dict)
    content = json.loads((tmp_path / "rank0.json").read_text())
    (failure,) = next(one["failures"] for one in content["communicators"] if one["failures"])
    assert (failure["error"], failure["text"], failure["step"]) == ("_Diverged", "loss", "")


def test_links_in_a_shared_folder_lead_no_file_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user knows the names of the files, and has put links in their places."""
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.write_text("of the user")
    for name in ("rank0.json", "rank0.json.unfinished"):
        (shared / name).symlink_to(elsewhere)
    monkeypatch.setenv("EP_PLUGIN_DUMP", str(shared))
    monkeypatch.setattr(calls, "_failures", [])
    calls.failed(calls.Calls((0,), 0, True, "communicator"), EpPluginError("first"), dict)
    assert elsewhere.read_text() == "of the user"
    assert not (shared / "rank0.json").is_symlink()
    assert json.loads((shared / "rank0.json").read_text())["rank"] == 0
    assert {path.name for path in shared.iterdir()} == {"rank0.json", "rank0.json.unfinished"}


def test_a_file_that_cannot_be_finished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").mkdir()  # which no file can replace
    with pytest.raises(OSError):
        calls._write(tmp_path, 0, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]


def _count(rank: int) -> tuple[int, list[str]]:
    comm = open_with_deadline(2, 30)
    for _ in range(_C.num_kept_calls // 2 + 1):
        round_trip(comm)
    dist.barrier()
    comm.abort("over")
    kept = _C.kept_calls()
    return len(kept), sorted({kind for _, kind, *_ in kept})


def test_the_history_is_bounded() -> None:
    assert values(run_ranks(2, _count)) == [(_C.num_kept_calls, ["combine", "dispatch"])] * 2


# -- merging files ---------------------------------------------------------------------------------------------------


def dump(
    rank: int, kinds: list[str], *, size: int = 2, ident: str = "a", failure: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The file of a rank that has called operations of these kinds, and is in the last."""
    listed = [
        {
            "communicator": 0, "kind": kind, "part": "", "number": number, "epoch": kinds[:number].count(kind),
            "nbytes": 0, "began": float(number), "ended": None if number == len(kinds) else number + 0.5,
        }
        for number, kind in enumerate(kinds, start=1)
    ]  # fmt: skip
    failure = failure or {"rank": (rank + 1) % size, "error": "PeerTimeout", "text": "late"}
    failure = {"time": 100.0 + rank, "step": "notify", "boards": {}, **failure}
    one = {"name": "communicator 0.1", "ident": ident, "in_order": True, "failures": [failure]}
    one["ranks"] = list(range(size))
    written = 200.0 - ord(ident[0])
    return {
        "format": calls.FORMAT, "rank": rank, "world_size": size, "written": written, "communicators": [one],
        "calls": listed,
    }  # fmt: skip


def merged(folder: Path, *dumps: Any) -> list[Finding]:
    for rank, content in enumerate(dumps):
        (folder / f"rank{rank}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return merge(folder)


def test_ranks_that_call_different_operations_are_named(tmp_path: Path) -> None:
    findings = merged(tmp_path, dump(0, ["dispatch", "combine"]), dump(1, ["dispatch", "dispatch"]))
    said = of(findings, "communicator 0.1", FAILURE)
    assert said == "ranks differ in operation 2: rank 0 combine 1; rank 1 dispatch 2"


def test_ranks_in_the_same_operation_are_said_to_be_there(tmp_path: Path) -> None:
    findings = merged(tmp_path, dump(0, ["dispatch"]), dump(1, ["dispatch"]))
    assert of(findings, "communicator 0.1", WARNING) == "all ranks had come to the same operation"


def test_who_waited_for_the_rank_at_fault_is_not_behind(tmp_path: Path) -> None:
    """Ranks 0 and 2 waited for rank 1, which left no file. Rank 2 lacked its rows of an operation before."""
    blames = {"rank": 1, "error": "PeerTimeout", "text": "late"}
    ahead, apart = (dump(rank, ["dispatch"] * many, size=3, failure=blames) for rank, many in ((0, 2), (2, 1)))
    (tmp_path / "rank2.json").write_text(json.dumps(apart))
    findings = merged(tmp_path, ahead)
    assert of(findings, "communicator 0.1", OK) == "rank 0 in dispatch 2; rank 2 in dispatch 1"
    assert [one.subject for one in findings if one.level == FAILURE] == ["rank 1"]


def test_files_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    """Ranks 2 and 3 of the present job left none."""
    old = [dump(rank, ["combine"], size=4, ident="old") for rank in (2, 3)]
    findings = merged(tmp_path, *(dump(rank, ["dispatch"], size=4) for rank in (0, 1)), *old)
    said = [one.what for one in findings if one.level == WARNING and one.subject == "files"]
    assert said == [f"the file of rank {rank} is of an earlier job, and left out" for rank in (2, 3)]
    assert of(findings, "communicator 0.1", OK) == "ranks 0, 1 in dispatch 1"
    assert "left no file" in of(findings, "rank 2", FAILURE)
    assert of(findings, "ranks", WARNING) == "rank 3 left no file, and no other file mentions it"


def test_files_of_groups_that_share_no_rank_are_of_one_job(tmp_path: Path) -> None:
    other = dump(1, ["combine"], ident="b")
    other["communicators"][0] |= {"name": "communicator 1.1", "ranks": [1]}
    other["communicators"][0]["failures"][0]["rank"] = 0
    findings = merged(tmp_path, dump(0, ["dispatch"]), other)
    assert not [one for one in findings if one.subject == "files"]
    assert of(findings, "communicator 1.1", OK) == "rank 1 in combine 1"


WHOLE = json.dumps(dump(1, ["dispatch"]))
BAD = {
    "cut": WHOLE[: len(WHOLE) // 2],
    "empty": "",
    "no object": "[1, 2]",
    "null": "null",
    "another format": WHOLE.replace('"format": 1', '"format": 7'),
    "no calls": WHOLE.replace('"calls"', '"called"'),
    "a rank that is none": WHOLE.replace('"rank": 1, "world_size"', '"rank": "one", "world_size"'),
    "a rank outside of the group": WHOLE.replace('"rank": 0, "error"', '"rank": 17, "error"'),
    "a negative rank": WHOLE.replace('"rank": 0, "error"', '"rank": -1, "error"'),
    "a time that is none": WHOLE.replace('"time": 101.0', '"time": 1e300'),
    "a world without end": WHOLE.replace('"world_size": 2', '"world_size": 1e400'),
    "a world too large": WHOLE.replace('"world_size": 2', '"world_size": 1000000000000'),
    "not text": "\udcff",
    "nested": "[" * 100_000,
}


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 << 30)  # without a block on the disk


def a_file_that_needs_much_memory(path: Path) -> None:
    path.write_text("[" + "{}," * (21 << 20) + "0]")


@pytest.mark.parametrize("make", [a_pipe, a_device, a_folder, a_huge_file, a_file_that_needs_much_memory])
def test_what_is_no_file_of_a_rank_is_named_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "rank1.json")
    (tmp_path / "rank0.json").write_text(json.dumps(dump(0, ["dispatch"])))
    done = doctor(tmp_path)
    assert "rank1.json cannot be used: " in said(done) and "rank 1 left no file" in said(done)
    assert "rank 0 in dispatch 1" in said(done) and done.stderr == ""


def doctor(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`ep-doctor --merge` in a process of its own, with little memory and little time."""
    limit = 1 << 30
    return subprocess.run(
        [sys.executable, "-m", "ep_plugin.doctor", "--merge", str(folder), *options],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip


def said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stdout.split())


def test_many_ranks_without_a_file_are_one_line(tmp_path: Path) -> None:
    """A job of a million ranks, of which one has left a file that mentions two others."""
    seen = {"1": {"last": "in dispatch of communicator 0.1"}, "3": {"last": ""}}
    content = dump(0, ["dispatch"], size=4, failure={"rank": 1, "error": "PeerTimeout", "text": "late", "boards": seen})
    began = time.monotonic()
    findings = merged(tmp_path, content | {"world_size": 2**20})
    missing = {one.subject: one.what for one in findings if "left no file" in one.what}
    assert missing == {
        "rank 1": "left no file; rank 0 saw it last in dispatch of communicator 0.1; rank 0 waited for it in vain",
        "rank 3": "left no file; rank 0 saw it last in no operation",
        "ranks": "ranks 2, 4 to 1048575 left no file, and no other file mentions them",
    }
    assert doctor(tmp_path).returncode == 1 and time.monotonic() - began < 30


TEXTS = {
    "half of a pair": "caf\udce9",
    "a title for the terminal": "\x1b]0;title\x07\x1b[2J",
    "one byte for two": "\x9b31m",
    "letters from right to left": "abc\u202edef",
}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_only_what_can_be_printed_reaches_the_terminal(tmp_path: Path, text: str, encoding: str) -> None:
    failure = {"rank": 1, "error": f"E{text}", "text": f"naïve {text}", "boards": {"1": {"last": text}}}
    content = dump(0, ["dispatch"], failure=failure)
    content["communicators"][0]["name"] = f"communicator {text}"
    content["calls"][0]["kind"] = text
    (tmp_path / "rank0.json").write_text(json.dumps(content))
    done = doctor(tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (1, "")
    assert all(letter.isprintable() or letter == "\n" for letter in done.stdout)
    assert ascii(text)[1:-1] in said(done)
    assert json.loads(doctor(tmp_path, "--json", PYTHONIOENCODING=encoding).stdout)["status"] == 1


def test_only_what_can_be_printed_of_a_name_reaches_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "rank1.json\x1b[2J\udcff").write_text("")
    done = doctor(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "rank1.json\\x1b[2J\\udcff cannot be used" in said(done)


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_file_is_named_and_the_rest_is_used(tmp_path: Path, content: str) -> None:
    assert content != WHOLE
    (tmp_path / "rank1.json").write_bytes(content.encode(errors="surrogateescape"))
    (tmp_path / "rank0.json").write_text(json.dumps(dump(0, ["dispatch"])))
    findings = merge(tmp_path)
    assert of(findings, "files", WARNING).startswith("rank1.json cannot be used: ")
    assert of(findings, "communicator 0.1", OK) == "rank 0 in dispatch 1"
    assert "left no file" in of(findings, "rank 1", FAILURE)


def test_the_command_prints_sentences_and_json_without_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps(dump(0, ["dispatch"])))
    assert main(["--merge", str(tmp_path)]) == 1
    assert "rank 1            left no file" in capsys.readouterr().out
    code = (
        "import sys; from ep_plugin.doctor.__main__ import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "--json", "--merge", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == 1
    with pytest.raises(SystemExit, match="2"):
        main(["--merge", str(tmp_path / "nothing")])


def test_an_empty_folder_says_how_files_come(tmp_path: Path) -> None:
    [finding] = merge(tmp_path)
    assert finding.level == FAILURE and "EP_PLUGIN_DUMP" in finding.do
