"""DeepEP 2's own tests of ElasticBuffer on CPU ranks, with its own reference. EP_TEST_DEEPEP is a checkout of it.

Devices and sizes are changed, and nothing else; tests/gpu/deep_ep_scripts.py says how. What these scripts need of
ElasticBuffer is tested without a checkout in test_deep_ep_elastic.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gpu import deep_ep_scripts
from tests.ranks import run_ranks, values

CHECKOUT = os.environ.get("EP_TEST_DEEPEP", "")


class Run(NamedTuple):
    """A run of a script."""

    script: str
    options: str
    ranks: int = 2
    nodes: int = 1


EP = "--num-experts 8 --num-topk 4 --num-tokens 24 --hidden 256 --skip-perf-test"
SETTINGS = {
    "defaults": "",
    "no host wait": "--do-cpu-sync 0",
    "one reduction": "--allow-multiple-reduction 0",
    "one reduction, no host wait": "--allow-multiple-reduction 0 --do-cpu-sync 0",
    "no hybrid mode": "--allow-hybrid-mode 0",
    "overlap": "--prefer-overlap-with-compute 1",
    "deterministic": "--deterministic",
    "deterministic, no host wait": "--deterministic --do-cpu-sync 0",
    "masked": "--masked-ratio 0.3",
    "masked, one reduction": "--masked-ratio 0.3 --allow-multiple-reduction 0",
    "unbalanced": "--unbalanced-ratio 2",
    "precisely unbalanced": "--unbalanced-ratio 1.5 --precise-unbalanced-ratio",
    "pressure": "--do-pressure-test --test-first-only",
    "pressure, one buffer": "--do-pressure-test --reuse-elastic-buffer --test-first-only",
    "times": "--test-first-only --ignore-local-traffic",
    "without checks": "--test-first-only --skip-check",
    "resources": "--test-first-only --num-sms 4 --num-qps 3 --num-allocated-qps 5 --sl-idx 1 --seed 7",
}
RUNS = {f"test_ep, {name}": Run("test_ep.py", f"{EP} {options}") for name, options in SETTINGS.items()}
RUNS["test_ep, times"] = Run("test_ep.py", f"{EP} {SETTINGS['times']}".replace("--skip-perf-test ", ""))
RUNS["test_ep, 4 ranks"] = Run("test_ep.py", f"{EP} --num-experts 16 --num-topk 6 --masked-ratio 0.1", ranks=4)
RUNS |= {
    f"test_ep, 2 nodes, {name}": Run("test_ep.py", f"{EP} {SETTINGS[name]}", ranks=4, nodes=2)
    for name in ("defaults", "no host wait", "one reduction", "masked")
}
RUNS |= {
    "test_agrs, 2 ranks": Run("test_agrs.py", ""),
    "test_agrs, 3 ranks": Run("test_agrs.py", "--num-max-inflight-agrs 2", ranks=3),
    "test_barrier": Run("test_barrier.py", ""),
    "test_pp, 2 ranks": Run("test_pp.py", "--num-tokens 64 --hidden 128"),
    "test_pp, 4 ranks": Run("test_pp.py", "--num-tokens 64 --hidden 128 --num-max-inflight-tensors 1", ranks=4),
}
SIZES = {
    "test_agrs.py": {
        "(32, 64, 2048)": "(2, 8, 64)",
        "int(256e6 // 4)": "4",
        "2 ** 26": "2 ** 12",
        "range(20, 27)": "range(8, 13)",
    },
    "test_pp.py": {"(131072, 32768)": "(4, 4)"},
    "test_barrier.py": {"num_tests=1000": "num_tests=50"},
}


@pytest.mark.parametrize("name", RUNS)
def test_script_passes(name: str) -> None:
    if not CHECKOUT:
        pytest.skip("needs EP_TEST_DEEPEP, a checkout of DeepEP 2")
    one = RUNS[name]
    script = Path(CHECKOUT).resolve() / "tests" / "elastic" / one.script
    assert script.exists(), f"expected EP_TEST_DEEPEP to have tests/elastic/{one.script}, got {CHECKOUT}"
    given = script, one.options.split(), False, SIZES.get(one.script), one.nodes
    values(run_ranks(one.ranks, _run_on_cpu, one.ranks, *given, timeout_s=250))


UTILS = """
def init_dist(local_rank, num_local_ranks):
    raise AssertionError("expected the caller's init_dist")
"""
SCRIPT = """
import argparse
import deep_ep
import torch
from utils import init_dist

def main(local_rank, num_local_ranks, args):
    rank, num_ranks, group = init_dist(local_rank, num_local_ranks)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 128, num_ranks, 2 * num_ranks)
    buffer = deep_ep.Buffer(group, num_rdma_bytes=nbytes, low_latency_mode=True, enable_shrink=True)
    assert int(1e9) == 1
    ids = torch.full((4, 1), 2 * rank, device='cuda')
    x = torch.full((4, 128), rank + 1.0, device='cuda')
    _, counts, _, event, _ = buffer.low_latency_dispatch(x, ids, 16, 2 * num_ranks, use_fp8=False)
    assert counts.tolist() == [4, 0], counts

parser = argparse.ArgumentParser()
parser.add_argument("--num-processes", type=int)
args = parser.parse_args()
torch.multiprocessing.spawn(main, args=(args.num_processes, args), nprocs=args.num_processes)
"""


def test_a_script_in_the_manner_of_deep_ep_runs_unchanged(tmp_path: Path) -> None:
    """Without a checkout this finds names of ours that the runner replaces and that are gone."""
    (tmp_path / "utils.py").write_text(UTILS)
    (tmp_path / "test_small.py").write_text(SCRIPT)
    values(run_ranks(2, _run_on_cpu, 2, tmp_path / "test_small.py", [], timeout_s=100))


def _run_on_cpu(rank: int, *given: Any) -> None:
    os.environ["EP_TEST_DEVICE"] = "cpu"  # also on a machine with GPUs
    deep_ep_scripts.run(rank, *given)
