"""The receipt of the GPU tests: what passed, where, and over which code.

`python tests/gpu/receipt.py --check` says whether the committed receipt is older than the code. Only runs write it:

- The whole suite adds an entry to `runs`, one per number of devices and setting (conftest.py in this folder).
- A part of the suite, run with `--also-passed`, and sanitize.py add entries to `also_passed`.
- `--merge FILE...` adds what runs on copies of this tree have written elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECEIPT = Path(__file__).with_name("receipt.json")
SETTINGS = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "EP_PLUGIN_PLAIN_KERNELS", "EP_TEST_LONG")
# What the name of a test file says of the framework it needs, and the framework's distribution.
FRAMEWORKS = {
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
    "deep_ep_scripts": "DeepEP",
}
# What no GPU test runs.
LEFT_OUT = ("ep_plugin/bench/", "ep_plugin/testing/", "ep_plugin/csrc/cpu/")
VERSION = re.compile(r"version\w*\s*=\s*['\"](\d[\w.]*)")
COMMENTS = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def code_hash(root: Path = ROOT) -> str:
    """SHA-256, in hex, over what GPUs run: csrc and the control path, without comments, docstrings and layout."""
    digest = hashlib.sha256()
    files = (path for folder in ("ep_plugin", "integrations") for path in (root / folder).rglob("*"))
    names = {path.relative_to(root).as_posix(): path for path in files}
    for name, path in sorted(names.items()):
        if path.suffix not in READ or name.startswith(LEFT_OUT):
            continue
        code = READ[path.suffix](path.read_text())
        digest.update(f"{name}\0{len(code)}\0{code}".encode())
    return digest.hexdigest()


def _python(text: str) -> str:
    """The text without comments and docstrings, and with one blank for any white space, in any version of Python."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno, node.end_lineno or node.lineno  # a docstring, also an attribute's
            lines[first - 1 : last] = [""] * (last - first + 1)
    return " ".join(" ".join(lines).split())


def _cpp(text: str) -> str:
    """The text without comments, and with one blank for any white space."""
    kept = COMMENTS.sub(lambda found: found[0] if found[0][0] in "\"'" else " ", text)
    return " ".join(kept.split())


READ: dict[str, Callable[[str], str]] = {".py": _python} | dict.fromkeys((".h", ".cuh", ".cu", ".cpp"), _cpp)


def read_or_begin() -> dict[str, Any]:
    """The receipt of this code; an empty one when there is none, or only of other code."""
    now = code_hash()
    receipt = json.loads(RECEIPT.read_text()) if RECEIPT.exists() else {}
    return receipt if receipt.get("code_hash") == now else {"code_hash": now, "runs": {}, "also_passed": {}}


def write(receipt: dict[str, Any]) -> None:
    RECEIPT.write_text(json.dumps(receipt, indent=2) + "\n")


def record(seconds: float, counts: dict[str, int], part: str = "") -> None:
    """Adds a run in which nothing failed, under the number of devices and the settings it ran with.

    Args:
        seconds: how long the run took.
        counts: how many tests passed, were skipped and failed.
        part: what ran, where that was not the whole suite. If it names a framework, the entry's name has the version:
            runs with several versions stand side by side.
    """
    import torch

    from ep_plugin.bench.provenance import commit

    receipt = read_or_begin()
    devices, frameworks = torch.cuda.device_count(), framework_versions()
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name in SETTINGS]
    name = " ".join([f"{devices} GPU(s)", *settings])
    if part:
        named = [f"{key} {frameworks[key]}" for word, key in FRAMEWORKS.items() if word in part and key in frameworks]
        name += ": " + ", ".join([part, *named])
    receipt["also_passed" if part else "runs"][name] = {
        "hardware": f"{devices} x {torch.cuda.get_device_name(0)}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **frameworks,
        },
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "counts": counts,
        "seconds": round(seconds, 1),
    }
    write(receipt)


def framework_versions() -> dict[str, str]:
    """Versions of the frameworks that are installed, and of the checkout of DeepEP at EP_TEST_DEEPEP."""
    found = {}
    for distribution in FRAMEWORKS.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[distribution] = importlib.metadata.version(distribution)
    if checkout := os.environ.get("EP_TEST_DEEPEP"):
        said = VERSION.search(Path(checkout, "setup.py").read_text())
        found["DeepEP"] = said[1] if said else "of unknown version"
    return found


def merge(files: list[Path]) -> None:
    """Adds the runs of other receipts of this code; a later file's run replaces an earlier one of the same setting.
    ValueError, before anything is written, names the file that does not fit."""
    merged = read_or_begin()
    for file, receipt in [(file, json.loads(file.read_text())) for file in files]:
        if receipt.get("code_hash") != merged["code_hash"]:
            raise ValueError(f"{file}: expected code_hash {merged['code_hash']}, got {receipt.get('code_hash')}")
        for kind in ("runs", "also_passed"):
            merged[kind] = dict(sorted((merged[kind] | receipt[kind]).items()))
    write(merged)


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
    parser.add_argument("--check", action="store_true", help="say whether the receipt is of this code")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="add the runs of other receipts")
    arguments = parser.parse_args()
    if arguments.merge:
        try:
            merge(arguments.merge)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    problem = check()
    print(problem or f"{RECEIPT.relative_to(ROOT)} is of this code")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
