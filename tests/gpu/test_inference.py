"""transformers' models that decode in low latency on GPUs; ranks share a GPU where there are fewer."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import sys
import unittest.mock
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu import over_nodes
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


EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_qwen3_moe.py"


def example(rank: int, size: int) -> tuple[str, int]:
    """What the example prints on this rank, and how often it replays its CUDA graph."""
    over_nodes.place(rank, size, nodes=1)
    if (device := device_of(rank)).type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)
    store = dist.PrefixStore("example", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()  # the example makes its own, which tests.ranks destroys
    start = functools.partial(dist.init_process_group, store=store, rank=rank, world_size=size)
    replay = torch.cuda.CUDAGraph.replay
    with (
        unittest.mock.patch.object(dist, "init_process_group", start),
        unittest.mock.patch.object(dist, "destroy_process_group"),
        unittest.mock.patch.object(torch.cuda.CUDAGraph, "replay", autospec=True, side_effect=replay) as replays,
        unittest.mock.patch.object(sys, "argv", [str(EXAMPLE)]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue(), replays.call_count


@pytest.mark.gpu(1)
def test_the_example_decodes_in_a_graph() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    for printed, replays in values(run_ranks(2, example, 2, timeout_s=200)):
        new = re.search(r"sequences of (\d+) new tokens", printed)
        assert new is not None and "one rank alone gives the same tokens" in printed, printed
        assert replays == int(new[1]) - 2  # a prompt's token, and one before the capture
