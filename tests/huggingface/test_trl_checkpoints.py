"""Runs of TRL's SFTTrainer that are killed continue as if they had never ended.

`make test-huggingface` runs it, in an environment that has TRL.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.huggingface.test_trl_peft import checkpoint as checkpoint  # a fixture
from tests.integrations.test_checkpoints import train


@pytest.mark.parametrize(("kill", "begin"), [("1:5", 4), ("0:6:save", 4)])
def test_a_killed_run_continues_as_if_it_had_never_ended(
    checkpoint: Path, tmp_path: Path, kill: str, begin: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    expected = train(whole, checkpoint, trl=True)
    assert train(killed, checkpoint, kill, trl=True) is None
    found = train(killed, checkpoint, trl=True)
    assert expected is not None and found is not None and len(set(expected["losses"])) > 1
    assert found["begin"].endswith(f"checkpoint-{begin}")
    assert (found["losses"], found["drawn"]) == (expected["losses"], expected["drawn"])
