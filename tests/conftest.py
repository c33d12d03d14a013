"""Markers and time limits that all tests share."""

from __future__ import annotations

import os

import pytest

# Workers share the cores with ranks, and threads of OpenMP that wait for each other spin. As torchrun sets it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks a name server for the names of local addresses. An answer that is lost then delays a test by 1 s, not by 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Whole training runs and the like; everything else keeps pyproject's default.
SLOW_TIMEOUT_S = 900

MARKERS = (
    "gpu(n=1): needs n CUDA devices; skipped where there are fewer",
    "deadline: waits until a deadline has passed, or for a rank that must be slower than one; not in `make check`",
    f"slow: takes long, so it is not in `make check`; its time limit is {SLOW_TIMEOUT_S} s unless the test sets one",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((gpus_needed(mark) for mark in item.iter_markers("gpu")), default=0)
    if needed == 0:
        return
    import torch

    # Counts devices without creating a CUDA context in this process.
    found = torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} CUDA device(s), found {found}")


def gpus_needed(mark: pytest.Mark) -> int:
    """Devices that one `gpu` marker asks for: `gpu`, `gpu(2)` or `gpu(n=2)`."""
    return int(mark.kwargs.get("n", mark.args[0] if mark.args else 1))
