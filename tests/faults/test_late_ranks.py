"""`ep-doctor --merge` names the rank for which others waited, from the files of `ep_plugin.write_stats`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ep_plugin
from ep_plugin.doctor.dumps import merge
from ep_plugin.doctor.findings import OK, WARNING
from tests.faults.fault_cases import open_communicator, round_trip
from tests.faults.test_dumps import dump, merged
from tests.ranks import run_ranks, values


def write_load(folder: Path, rank: int, waited_ms: list[int], name: str = "communicator 0.1") -> None:
    fields = {"rank": rank, "waited_ns": [ms * 10**6 for ms in waited_ms]}
    content = {"format": "ep_plugin load", "version": 1, "communicators": {name: fields}}
    (folder / f"load-{rank}.json").write_text(json.dumps(content))


def test_the_late_rank_is_the_one_that_waited_least_for_others(tmp_path: Path) -> None:
    """Rank 3 is late. Rank 1 of its rail and rank 2 of its node wait for it, and rank 0 waits for rank 1."""
    for rank, waited in enumerate(([0, 600, 1, 0], [0, 0, 0, 600], [2, 0, 0, 590], [0, 0, 3, 0])):
        write_load(tmp_path, rank, waited)
    (said,) = merge(tmp_path)
    assert (said.level, said.subject) == (OK, "communicator 0.1")
    assert said.what == "others waited 1.190 s for its rank 3, which waited 0.003 s itself"
    beside = merged(tmp_path, dump(0, ["dispatch"]), dump(1, ["dispatch"]))
    assert said in beside and len(beside) > 1


def load(**fields: Any) -> dict[str, Any]:
    fields = {"rank": 0, "waited_ns": [0, 0]} | fields
    return {"format": "ep_plugin load", "version": 1, "communicators": {"communicator 0.1": fields}}


BAD = {
    "{": "JSONDecodeError",
    json.dumps([1]): "TypeError",
    json.dumps(load() | {"format": "another"}): "expected {'format': 'ep_plugin load', 'version': 1}",
    json.dumps(load() | {"version": 2}): "got {'format': 'ep_plugin load', 'version': 2}",
    json.dumps(load(rank="x")): "ValueError",
    json.dumps(load(rank=2)): "expected a rank below the number of waits, got rank 2 and 2 waits",
    json.dumps(load(waited_ns=[])): "got rank 0 and 0 waits",
    json.dumps(load(waited_ns=[0, -1])): "got -1 to 0",
    json.dumps(load(waited_ns=[0, 10**400])): "expected waits of 0 to",
    json.dumps(load(waited_ns=[0, float("inf")])): "OverflowError",
    json.dumps(load(waited_ns=None)): "TypeError",
}


@pytest.mark.parametrize(("content", "said"), BAD.items(), ids=range(len(BAD)))
def test_a_file_that_cannot_be_used_is_named_and_the_rest_is_used(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "load-0.json").write_text(content)
    write_load(tmp_path, 1, [7, 0])
    warning, found = merge(tmp_path)
    assert warning.level == WARNING
    assert warning.what.startswith("load-0.json cannot be used: ") and said in warning.what, warning
    assert found.what == "others waited 0.007 s for its rank 0, which waited 0.000 s itself"


def test_files_of_another_job_are_named(tmp_path: Path) -> None:
    write_load(tmp_path, 0, [0, 0])
    write_load(tmp_path, 1, [7, 0, 0])
    (tmp_path / "load-2.json").write_text((tmp_path / "load-0.json").read_text())
    *warnings, found = merge(tmp_path)
    assert [one.level for one in warnings] == [WARNING] * 2
    assert "load-1.json has rank 1 of 3 of communicator 0.1, and does not fit the files before it" in warnings[0].what
    assert "load-2.json has rank 0 of 2 of communicator 0.1" in warnings[1].what
    assert found.what == "no rank was late"


def _writes_load(rank: int, folder: str) -> None:
    ep_plugin.record_stats()
    with open_communicator(2) as comm:
        round_trip(comm)
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        round_trip(comm)
        ep_plugin.write_stats(f"{folder}/load-{rank}.json")


def test_a_late_rank_is_named_from_what_ranks_write(tmp_path: Path) -> None:
    values(run_ranks(2, _writes_load, str(tmp_path)))
    (said,) = merge(tmp_path)
    assert re.match(r"others waited 0\.[3-9]\d\d s for its rank 1, which waited 0\.0", said.what), said
