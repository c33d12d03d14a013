"""transformers' models that decode in low latency on GPUs; ranks share a GPU where there are fewer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.checks import device_of
from tests.integrations import inference_cases as cases
from tests.ranks import run_ranks, values


def on_gpus(rank: int, size: int, folder: Path, captured: bool) -> dict[str, tuple[list, list]]:
    device = device_of(rank)
    os.environ["LOCAL_RANK"] = str(device.index)  # by which transformers chooses the device
    return cases.both(rank, size, folder, _kinds(captured), captured)


def _kinds(captured: bool) -> tuple[str, ...]:
    """A cache of sliding windows counts on the host, so a graph cannot have its steps."""
    return tuple(kind for kind in cases.KINDS if not captured or kind != "gpt_oss")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_tokens_are_those_of_one_rank_alone(tmp_path: Path, captured: bool) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    cases.save_checkpoints(tmp_path)
    for results in values(run_ranks(2, on_gpus, 2, tmp_path, captured, timeout_s=280)):
        assert len(results) == 2 * len(_kinds(captured))
        for name, (tokens, expected) in results.items():
            assert tokens == expected, name
