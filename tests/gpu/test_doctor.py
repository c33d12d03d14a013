"""ep-doctor on GPUs: alone, and on two ranks that share a GPU or have one each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def said_by(*launcher: str) -> dict[str, list[str]]:
    """The sentences of each subject. Nothing may be a failure."""
    command = [sys.executable, *launcher, "-m", "ep_plugin.doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, list[str]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        said.setdefault(finding["subject"], []).append(finding["what"])
    return said


@pytest.mark.gpu(1)
def test_alone_it_names_the_gpu_the_driver_the_build_and_versions() -> None:
    said = said_by()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = said["torch"][0].split(", ")
    assert {f"torch {torch.__version__}", f"cuda {torch.version.cuda}", f"nccl {nccl}"} <= set(versions)
    assert any(what.startswith("GPU 0: NVIDIA") for what in said["GPUs"])
    assert "for CUDA up to" in said["driver"][0]
    assert "kernels for CPUs and for sm_" in said["build"][0]


@pytest.mark.gpu(1)
def test_two_ranks_share_memory_of_gpus_and_time_it() -> None:
    said = said_by(*TORCHRUN)
    assert said["peer memory"] == ["the ranks of each node map and read each other's memory"]
    assert "we measured 369.6 between 4 H200" in said["copy rate"][0]
    assert "top 8 of 256 experts" in said["dispatch"][0]
