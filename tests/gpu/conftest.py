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
    passed = [report for report in terminalreporter.stats.get("passed", []) if "gpu" in report.keywords]
    failed = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", [])
    if not passed or failed:
        return
    from tests.gpu.receipt import record

    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "gpu" in report.keywords]
    record({"passed": len(passed), "skipped": len(skipped), "failed": 0}, time.monotonic() - _began)
