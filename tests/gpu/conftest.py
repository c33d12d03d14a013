"""Writes the receipt when all GPU tests have run and none failed."""

from __future__ import annotations

import time
from typing import Any

import pytest

_began = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if config.args != ["tests/gpu"] or config.option.keyword or hasattr(config, "workerinput"):
        return  # a part of the suite is no evidence for the whole, nor is what one of several workers ran
    passed = _gpu_reports(terminalreporter, "passed")
    failed = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", [])
    if not passed or failed:
        return
    from tests.gpu.receipt import record

    skipped = _gpu_reports(terminalreporter, "skipped")
    record({"passed": len(passed), "skipped": len(skipped), "failed": 0}, time.monotonic() - _began)


def _gpu_reports(terminalreporter: Any, outcome: str) -> list[Any]:
    """Reports of GPU tests, and of whole files that were skipped: a report of collection has no keywords."""
    reports = terminalreporter.stats.get(outcome, [])
    return [report for report in reports if "gpu" in getattr(report, "keywords", {"gpu": 1})]
