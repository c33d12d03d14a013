"""A tracker that `report_to` names has what LoadCallback logs. `make test-huggingface` runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.test_load_callback import train

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard; `make test-huggingface` has it"
)


def test_tensorboard_has_the_load_of_each_log(tmp_path: Path) -> None:
    train(tmp_path, "tensorboard")
    loads = [log for log in json.loads((tmp_path / "found.json").read_text())["logged"] if "moe/expert_skew" in log]
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    seen = accumulator.EventAccumulator(str(events))
    seen.Reload()
    assert len(loads) == 2
    for name in loads[0]:
        if name.startswith("moe/"):
            scalars = [one.value for one in seen.Scalars(f"train/{name}")]
            assert scalars == pytest.approx([log[name] for log in loads]), name
