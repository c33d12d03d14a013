"""Runs small_case.py under compute-sanitizer, and notes in the receipt what passed: `scripts/gpu.sh sanitize`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu import receipt

SMALL_CASE = Path(__file__).with_name("small_case.py")
TOOLS = ("memcheck", "racecheck")
SHAPES = ((1, 1), (2, 1), (4, 2))  # ranks and nodes
# PyTorch's symmetric memory finds out by a failing call whether the machine has fabric handles: failing calls are not
# reported. NCCL's kernels, in which racecheck finds hazards, are left out.
OPTIONS = ("--report-api-errors", "no", "--error-exitcode", "9")
OPTIONS += ("--kernel-name-exclude", "kernel_substring=ncclDevKernel")


def watch(tool: str, size: int, nodes: int) -> None:
    """Runs each rank under a sanitizer of its own: the tool does not follow the processes that a test starts.

    Raises CalledProcessError when a rank fails or the tool finds something, after all ranks have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["compute-sanitizer", "--tool", tool, *OPTIONS, sys.executable, str(SMALL_CASE)]
        shared = [str(size), f"{folder}/store", str(nodes)]
        ranks = [subprocess.Popen([*command, str(rank), *shared]) for rank in range(size)]
        for status, rank in [(rank.wait(), rank) for rank in ranks]:
            if status != 0:
                raise subprocess.CalledProcessError(status, rank.args)


def main() -> None:
    for tool in TOOLS:
        for size, nodes in SHAPES:
            what = f"compute-sanitizer --tool {tool} of {SMALL_CASE.name}, {size} rank(s) on {nodes} node(s)"
            print(f"== {what}", flush=True)
            began = time.monotonic()
            watch(tool, size, nodes)
            receipt.record(time.monotonic() - began, {"passed": size, "skipped": 0, "failed": 0}, what)


if __name__ == "__main__":
    main()
