"""CPU kernels under the sanitizer of undefined behaviour, for what tensors can do and no result shows."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "ep_plugin/csrc"
COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
@pytest.mark.slow
def test_empty_shards_are_neither_copied_nor_filled(tmp_path: Path) -> None:
    sources = [*(CSRC / "cpu/collectives").glob("*.cpp"), *(CSRC / "cpu/core").glob("*.cpp")]
    program = tmp_path / "empty_shards"
    flags = ["-std=c++17", "-O1", "-pthread", "-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{CSRC}"]
    main = Path(__file__).with_name("empty_shards.cpp")
    subprocess.run([COMPILER, *flags, str(main), *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
