"""The test scripts of DeepEP itself, 1.2.1 or 2.x, on ranks that may share a GPU. EP_TEST_DEEPEP is a checkout."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gpu import deep_ep_scripts
from tests.ranks import run_ranks, values

CHECKOUT = os.environ.get("EP_TEST_DEEPEP", "")
OPTION = re.compile(r"""add_argument\(\s*['"](--[\w-]+)""")


class Run(NamedTuple):
    """A run of a script, with options for sizes that take seconds where ranks share a GPU."""

    script: str
    size: int
    options: str
    timed: bool = True


PRESSURE = "--num-experts 4 --num-topk 4 --num-tokens 32 --hidden 2048 --pressure-test"
RUNS = {
    "low latency, 2 ranks": Run("test_low_latency.py", 2, "--num-experts 16"),
    "low latency, 4 ranks": Run("test_low_latency.py", 4, "--num-experts 16"),
    "one node, 2 ranks": Run("test_intranode.py", 2, "--num-experts 32 --num-tokens 512"),
    "one node, 4 ranks": Run("test_intranode.py", 4, "--num-experts 32 --num-tokens 128 --hidden 2048"),
    "logfmt, 2 ranks": Run("test_low_latency.py", 2, "--num-experts 8 --num-tokens 64 --hidden 2048 --use-logfmt"),
    "logfmt, 4 ranks": Run("test_low_latency.py", 4, "--num-experts 8 --num-tokens 32 --hidden 2048 --use-logfmt"),
    "shrink, 8 ranks": Run(
        "test_low_latency.py", 8, "--num-experts 16 --num-topk 4 --num-tokens 32 --hidden 2048 --shrink-test"
    ),
    "pressure, 2 ranks": Run("test_low_latency.py", 2, PRESSURE, timed=False),
    "pressure, 4 ranks": Run("test_low_latency.py", 4, PRESSURE, timed=False),
}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", RUNS)
def test_script_passes(name: str) -> None:
    if not CHECKOUT:
        pytest.skip("needs EP_TEST_DEEPEP, a checkout of DeepEP")
    script, size, options, timed = RUNS[name]
    tests = Path(CHECKOUT).resolve() / "tests"
    found = next((path for path in (tests / "legacy" / script, tests / script) if path.exists()), None)
    assert found is not None, f"expected EP_TEST_DEEPEP to have tests/{script} or tests/legacy/{script}, got {CHECKOUT}"
    if missing := {option for option in options.split() if option.startswith("--")} - set(
        OPTION.findall(found.read_text())
    ):
        pytest.skip(f"needs a version of DeepEP whose {script} has {', '.join(sorted(missing))}")
    values(run_ranks(size, deep_ep_scripts.run, size, found, options.split(), timed, timeout_s=250))
