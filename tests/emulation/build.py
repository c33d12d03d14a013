"""Builds the module `_simt`: ep_plugin's CUDA kernels, compiled for CPUs by the C++ compiler."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "ep_plugin" / "csrc"
BUILD = ROOT / "build" / "emulation"
# Kernels of the benchmark, and files that only a GPU can run.
LEFT_OUT = {"wire.cu", "host.cu", "stream_words.cu"}
# Files of csrc that a file here replaces, and where they are.
IN_PLACE = {"ptx.cuh": "cuda/core", "stream_words.h": "cuda/collectives"}
SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".py"}
# Fortified, longjmp refuses to go to another fiber's stack.
FLAGS = "-std=c++17 -O1 -U_FORTIFY_SOURCE -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas"
FLAGS += " -DEP_WITH_CUDA=1 -x c++"


def build() -> Path:
    """The folder of the module, which is compiled anew only if a source has changed. Safe to call from any process."""
    BUILD.mkdir(parents=True, exist_ok=True)
    made = BUILD / _digest()
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for other in BUILD.iterdir():
                if other.is_dir():  # of other sources, or of a process that was killed
                    shutil.rmtree(other)
            _compile(BUILD / "parts")
            os.rename(BUILD / "parts" / "module", made)
            shutil.rmtree(BUILD / "parts")
    return made


def _digest() -> str:
    """Covers every source and the pybind11 version: ep_plugin._C, built with it, has the argument structs."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    digest = hashlib.sha256(f"{FLAGS} {_compiler()} {suffix} {pybind11.__version__}".encode())
    for folder in (HERE, CSRC):
        for path in sorted(folder.rglob("*")):
            if path.suffix in SUFFIXES:
                digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(parts: Path) -> None:
    tree = parts / "csrc"
    shutil.copytree(CSRC, tree)
    for name, folder in IN_PLACE.items():
        shutil.copy(HERE / name, tree / folder / name)
    sources = [path for path in sorted(tree.glob("cuda/*/*.cu")) if path.name not in LEFT_OUT]
    sources += sorted(HERE.glob("*.cpp"))
    headers = [HERE, HERE / "include", tree, pybind11.get_include(), sysconfig.get_path("include")]
    command = [*_compiler(), *FLAGS.split(), *(f"-I{path}" for path in headers)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda source: _object(command, source, parts), sources))
    module = parts / "module" / f"_simt{sysconfig.get_config_var('EXT_SUFFIX')}"
    module.parent.mkdir()
    _run([*_compiler(), "-shared", *map(str, objects), "-latomic", "-lpthread", "-o", str(module)])


def _object(command: list[str], source: Path, parts: Path) -> Path:
    made = parts / f"{source.name}.o"
    _run([*command, "-c", str(source), "-o", str(made)])
    return made


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(build())
