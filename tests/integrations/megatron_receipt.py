"""A plugin of pytest for `make test-megatron`: when no test has failed, it writes the version of Megatron-core into
megatron_receipt.json, with the numbers of tests, the day and the commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import pytest

from ep_plugin.bench.provenance import commit

RECEIPT = Path(__file__).with_name("megatron_receipt.json")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus != pytest.ExitCode.OK:
        return
    versions = json.loads(RECEIPT.read_text()) if RECEIPT.exists() else {}
    versions[importlib.metadata.version("megatron-core")] = {
        "passed": len(terminalreporter.stats["passed"]),
        "skipped": len(terminalreporter.stats.get("skipped", [])),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }
    RECEIPT.write_text(json.dumps(dict(sorted(versions.items())), indent=2) + "\n")
