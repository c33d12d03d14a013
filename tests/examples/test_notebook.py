"""examples/walkthrough.ipynb: each cell, run in order, prints what the notebook shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts_on_ranks import run_code

NOTEBOOK = Path(__file__).parents[2] / "examples/walkthrough.ipynb"
END = "-- end of a cell --"


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    shown = ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in cells]
    status, printed = run_code(f"\nprint({END!r}, flush=True)\n".join([*sources, ""]), tmp_path)
    assert status == 0, printed
    assert printed.split(f"{END}\n")[:-1] == shown and sum(map(bool, shown)) == len(shown) - 1
