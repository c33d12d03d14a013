"""ep-bench load: what it prints and draws of the files of a run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from click.testing import Result
from typer.testing import CliRunner

from ep_plugin import LoadStats
from ep_plugin.bench import cli
from ep_plugin.bench.load import load
from ep_plugin.moe.recording import _HEAD, _to_json

NAME = "communicator 0.1"


def stats(rank: int, tokens: list[list[int]], layers: dict[str, list[list[int]]] | None = None) -> LoadStats:
    return LoadStats(
        rank=rank,
        num_experts=4,
        dispatches=3,
        cached_dispatches=1,
        combines=4,
        tokens=torch.tensor(tokens),
        layers={name: torch.tensor(of_layer) for name, of_layer in (layers or {}).items()},
        dropped_ids=1000,
        dropped_rows=5,
        link_bytes_sent=2_500_000,
        link_bytes_received=0,
        rail_bytes_sent=0,
        rail_bytes_received=0,
        waited_ns=torch.tensor([0, 1_500_000_000 if rank == 0 else 0]),
    )


def write(path: Path, record: LoadStats, name: str = NAME) -> str:
    path.write_text(json.dumps({**_HEAD, "communicators": {name: _to_json(record)}}))
    return str(path)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["load", *words])


def test_table_and_heat_map(tmp_path: Path) -> None:
    # Given in any order. Rank 1 receives 30 of 40 tokens, 18 of them for expert 2.
    files = [write(tmp_path / "b", stats(1, [[9, 6], [9, 6]])), write(tmp_path / "a", stats(0, [[5, 0], [5, 0]]))]
    result = run(*files, "--plot", str(tmp_path / "load.png"))
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines() if "|" in line]
    assert cells[2] == ["0", "10", "0.50 ×", "2.00", "1,005", "2.5", "0.0", "rank 1: 1.500 s"]
    assert cells[3] == ["1", "30", "1.50 ×", "1.20", "1,005", "2.5", "0.0", ""]
    assert "The busiest of 4 experts is 2, with 18 tokens: 1.80 × the mean." in result.output
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_for_each_layer(tmp_path: Path) -> None:
    layers = {"first": [[4, 0], [5, 0]], "second": [[1, 0], [0, 0]]}
    files = [write(tmp_path / "a", stats(0, [[5, 0], [5, 0]], layers))]
    files.append(write(tmp_path / "b", stats(1, [[9, 6], [9, 6]], {"first": [[9, 6], [9, 3]]})))
    result = run(*files, "--plot", str(tmp_path / "load.png"))
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines() if "|" in line]
    assert cells[-3:] == [
        ["first", "36", "2", "18", "2.00 ×"],
        ["second", "1", "0", "1", "4.00 ×"],
        ["no layer", "3", "3", "3", "4.00 ×"],
    ]
    (found,) = load([Path(file) for file in files])
    assert {name: tokens.tolist() for name, tokens in found.layers().items()} == {
        "first": [9, 0, 18, 9],
        "second": [1, 0, 0, 0],
        "no layer": [0, 0, 0, 3],
    }
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_experts_of_a_rank_without_a_file_are_unknown(tmp_path: Path) -> None:
    (found,) = load([Path(write(tmp_path / "b", stats(1, [[9, 6], [9, 6]])))])
    assert found.tokens()[:, 2:].tolist() == [[9, 6], [9, 6]] and found.tokens()[:, :2].isnan().all()
    assert "The busiest of 2 experts is 2" in run(str(tmp_path / "b")).output


def test_refusals(tmp_path: Path) -> None:
    one = write(tmp_path / "one", stats(0, [[5, 0], [5, 0]]))
    again = write(tmp_path / "again", stats(0, [[5, 0], [5, 0]]))
    other = write(tmp_path / "other", stats(1, [[1, 2, 3]] * 2))
    (tmp_path / "empty").write_text(json.dumps({**_HEAD, "communicators": {}}))
    for files, message in (
        ((one, again), "expected one file for each rank, got a second one for rank 0"),
        ((one, other), "expected files of one run"),
        ((str(tmp_path / "empty"),), "expected at least one communicator in them, got none"),
        ((__file__,), "expected a file that ep_plugin.write_stats wrote, got no JSON"),
    ):
        refused = run(*files)
        assert refused.exit_code == 2
        words = " ".join(refused.output.replace("│", " ").split())
        assert message in words, words
