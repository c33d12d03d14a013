"""Writes the receipt when GPU tests have run and none failed: the whole suite, or a part that is to be noted."""

from __future__ import annotations

import time
from typing import Any

import pytest

_began = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "note in the receipt that these GPU tests passed, which are a part of the suite"
    parser.addoption("--also-passed", action="store_true", help=help)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    part = _part_of(config)
    if exitstatus != pytest.ExitCode.OK or hasattr(config, "workerinput"):  # what one of several workers ran is a part
        return
    if part and not getattr(config.option, "also_passed", False):  # pytest knows it where this folder is named
        return  # a part of the suite is no evidence for the whole
    passed, skipped = _gpu_reports(terminalreporter, "passed"), _gpu_reports(terminalreporter, "skipped")
    if not passed:
        return
    from tests.gpu.receipt import record

    record(time.monotonic() - _began, {"passed": len(passed), "skipped": len(skipped), "failed": 0}, part)


def _part_of(config: pytest.Config) -> str:
    """The files and options that chose the tests; empty for the whole suite."""
    chosen = [f"-k '{config.option.keyword}'"] if config.option.keyword else []
    chosen += [f"-m '{config.option.markexpr}'"] if config.option.markexpr not in ("", "gpu") else []
    return "" if config.args == ["tests/gpu"] and not chosen else " ".join([*config.args, *chosen])


def _gpu_reports(terminalreporter: Any, outcome: str) -> list[Any]:
    """Reports of GPU tests, and of whole files that were skipped: a report of collection has no keywords."""
    reports = terminalreporter.stats.get(outcome, [])
    return [report for report in reports if "gpu" in getattr(report, "keywords", {"gpu": 1})]
