"""Describes the code, the hardware and the versions that produced a result."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

import ep_plugin
from ep_plugin import env

ROOT = Path(__file__).resolve().parents[2]
BENCHED = ("ep_plugin", "integrations")
SOURCES = {".py", ".pyi", ".h", ".cuh", ".cpp", ".cu"}


def hash_sources(folders: Iterable[str] = BENCHED, root: Path = ROOT) -> str:
    """Returns the SHA-256, in hex, of the names and bytes of all source files below `folders` of `root`, without links.

    A missing folder counts as empty: an installed package has its integrations inside `ep_plugin`.
    """
    digest = hashlib.sha256()
    files = {path for folder in folders for path in (root / folder).rglob("*") if path.suffix in SOURCES}
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files if not path.is_symlink()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def commit(root: Path = ROOT) -> str | None:
    """Returns the commit of the checkout at `root`, with "-dirty" if the code differs from it.

    Outside a git checkout it is EP_PLUGIN_COMMIT, or None where that is not set.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if (root / ".git").exists():  # an installed package may lie inside somebody else's checkout
            return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", *BENCHED) else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    return env.settings().commit


def versions() -> dict[str, str | None]:
    """Returns the versions of PyTorch, ep_plugin, NCCL, CUDA and Python; None for what this build does not have."""
    has_nccl = torch.version.cuda and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "ep_plugin": ep_plugin.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def hardware(backend: str, ranks: int) -> str:
    """Returns the hardware of the ranks for readers, such as "4 x NVIDIA H200" or "2 cores of AMD EPYC"."""
    if backend == "cuda":
        return f"{ranks} x {torch.cuda.get_device_name(0)}"
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{cores()} cores of {found[1] if found else platform.machine()}"


def hardware_folder(backend: str, ranks: int) -> str:
    """Returns the folder in `benchmarks/results` for this hardware: "cpu2" for 2 cores, "h200x4" for 4 GPUs."""
    if backend == "cpu":
        return f"cpu{cores()}"
    name = torch.cuda.get_device_name(0).removeprefix("NVIDIA ").split(" ")[0]
    return f"{re.sub('[^a-z0-9]+', '', name.lower())}x{ranks}"
