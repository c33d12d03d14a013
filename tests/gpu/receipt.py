"""The receipt of the GPU tests: what passed, where, and over which code.

`python tests/gpu/receipt.py --check` says whether the committed receipt is older than the code. The receipt itself is
written by the test run (see conftest.py in this folder), one entry per number of devices.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECEIPT = Path(__file__).with_name("receipt.json")
FOLDERS = ("ep_plugin", "integrations", "tests/gpu")


def code_hash() -> str:
    """Hash over the sources that the GPU tests judge, and the tests themselves."""
    sys.path.insert(0, str(ROOT))
    from ep_plugin.bench.provenance import hash_sources

    return hash_sources(FOLDERS)


def record(counts: dict[str, int], seconds: float) -> None:
    """Adds this run's counts under the number of devices present; entries over other code are dropped."""
    import torch

    now = code_hash()
    receipt = json.loads(RECEIPT.read_text()) if RECEIPT.exists() else {}
    runs = receipt.get("runs", {}) if receipt.get("code_hash") == now else {}
    devices = torch.cuda.device_count()
    entry: dict[str, Any] = {
        "hardware": f"{devices} x {torch.cuda.get_device_name(0)}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "counts": counts,
        "seconds": round(seconds, 1),
    }
    runs[str(devices)] = entry
    RECEIPT.write_text(json.dumps({"code_hash": now, "runs": runs}, indent=2) + "\n")


def check() -> str | None:
    """What is wrong with the committed receipt, or None when it is of this code."""
    if not RECEIPT.exists():
        return f"no {RECEIPT.relative_to(ROOT)}: the GPU tests have not been run on this code"
    receipt = json.loads(RECEIPT.read_text())
    if receipt["code_hash"] != code_hash():
        return f"{RECEIPT.relative_to(ROOT)} is older than the code: run `make gpu` on a machine with GPUs"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", required=True)
    parser.parse_args()
    problem = check()
    print(problem or f"{RECEIPT.relative_to(ROOT)} is of this code")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
