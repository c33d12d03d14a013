"""Build of ep_plugin: its packages, and the extension `ep_plugin._C` from ep_plugin/csrc.

The CPU kernels are always compiled; the CUDA kernels when nvcc is found. Neither needs torch.
Read here, at build time only:

EP_PLUGIN_BUILD_CUDA   auto (default): CUDA kernels when nvcc is found; 1: expect nvcc; 0: CPU only
EP_PLUGIN_CUDA_ARCHS   compute capabilities, "80;90+PTX" by default (+PTX: portable code as well)
CUDA_HOME, CUDACXX     where nvcc is looked for first
CXX, CXXFLAGS          the C++ compiler (nvcc's host compiler too) and further flags for it
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, OptionError

CSRC = Path("ep_plugin/csrc")
OBJECTS = Path("build/objects")
DEFAULT_ARCHS = "80;90+PTX"
WITH_CUDA = "-DEP_WITH_CUDA=1"
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-lineinfo"]
NVCC_FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
# The CUDA runtime is linked in, libcuda never: the module imports on machines without a driver. The runtime's
# symbols stay hidden, or calls could bind to another libcudart that the process has already loaded.
CUDA_LINK_FLAGS = ["-lcudart_static", "-ldl", "-lrt", "-lpthread", "-Wl,--exclude-libs,libcudart_static.a"]


def find_nvcc() -> str | None:
    """Path of nvcc: CUDA_HOME, CUDACXX, PATH, the usual folder, then as pip installs it."""
    cuda_home = os.environ.get("CUDA_HOME")
    wheels = Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*/bin/nvcc")
    candidates = [
        f"{cuda_home}/bin/nvcc" if cuda_home else None,
        os.environ.get("CUDACXX"),
        "nvcc",
        "/usr/local/cuda/bin/nvcc",
        *sorted(map(str, wheels), reverse=True),
    ]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def choose_nvcc() -> str | None:
    """nvcc when the CUDA kernels are to be built, else None, saying so once."""
    wanted = os.environ.get("EP_PLUGIN_BUILD_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise OptionError(f"EP_PLUGIN_BUILD_CUDA: expected 0, 1 or auto, got {wanted!r}")
    nvcc = None if wanted == "0" else find_nvcc()
    if nvcc is None and wanted == "1":
        raise OptionError("EP_PLUGIN_BUILD_CUDA=1: expected nvcc under CUDA_HOME, CUDACXX or PATH, found none")
    if nvcc is None:
        reason = "EP_PLUGIN_BUILD_CUDA=0" if wanted == "0" else "found no nvcc; CUDA_HOME can name its folder"
        print(f"ep_plugin: building for CPU only ({reason})", file=sys.stderr, flush=True)
    return nvcc


def arch_flags(archs: str) -> list[str]:
    """nvcc's -gencode flags for a list such as "80;90+PTX"; "8.0" and "90a" are understood too."""
    flags = []
    for arch in filter(None, (entry.strip() for entry in archs.split(";"))):
        match = re.fullmatch(r"(\d+)\.?(\d[af]?)(\+PTX)?", arch)
        if match is None:
            raise OptionError(f'EP_PLUGIN_CUDA_ARCHS: expected entries such as "90" or "90+PTX", got {arch!r}')
        number = match[1] + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    if not flags:
        raise OptionError(f'EP_PLUGIN_CUDA_ARCHS: expected a list such as "{DEFAULT_ARCHS}", got {archs!r}')
    return flags


def cudart_folders(nvcc: str) -> list[str]:
    """Folders with libcudart_static.a, asked of nvcc itself, which may be a wrapper that lies elsewhere."""
    run = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    told = run.stdout + run.stderr
    folders = re.findall(r'"-L([^"]+)"', told)
    folders += [f"{top}/lib" for top in re.findall(r"^#\$ TOP=(.+)$", told, re.MULTILINE)]
    found = [folder for folder in folders if Path(folder, "libcudart_static.a").exists()]
    if not found:
        raise OptionError(f"{nvcc}: expected libcudart_static.a in one of {folders}, found none")
    return found


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The command lines that turn one source into one object. `nvcc` is empty in a build for CPU only.

    A C++ source that does not ask for CUDA is compiled alike with and without it, and builds of both kinds share it.
    """

    cxx: tuple[str, ...]
    nvcc: tuple[str, ...] = ()

    def compiler(self, source: Path) -> tuple[str, ...]:
        if source.suffix == ".cu":
            return (*self.nvcc, WITH_CUDA)
        needs = self.nvcc and "EP_WITH_CUDA" in source.read_text()
        return (*self.cxx, WITH_CUDA) if needs else self.cxx

    def command(self, source: Path) -> list[str]:
        # Not part of the key: in an isolated build these folders have another name every time.
        folders = [
            pybind11.get_include(),
            *{sysconfig.get_path("include"), sysconfig.get_path("platinclude")},
        ]
        system = [] if source.suffix == ".cu" else [f"-isystem{folder}" for folder in folders]
        return [*self.compiler(source), f"-I{CSRC}", *system, "-c", str(source)]

    def key(self, source: Path) -> str:
        """A name for how `source` is compiled, so that an object of another configuration is never taken for ours."""
        parts: tuple[object, ...] = (self.compiler(source),)
        if source.suffix == ".cu":  # nvcc reads further flags from there
            parts += (os.environ.get("NVCC_PREPEND_FLAGS", ""), os.environ.get("NVCC_APPEND_FLAGS", ""))
        if source.parent.name in (
            "bindings",
            "control",
        ):  # nothing else includes Python's headers: builds for several share it
            parts += (pybind11.__version__, sysconfig.get_config_var("EXT_SUFFIX"))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def make_toolchain(nvcc: str | None) -> Toolchain:
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    cxx = (*compiler, *CXX_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")))
    if nvcc is None:
        return Toolchain(cxx=cxx)
    archs = arch_flags(os.environ.get("EP_PLUGIN_CUDA_ARCHS", DEFAULT_ARCHS))
    host = ["-ccbin", compiler[0]] if os.environ.get("CXX") else []
    return Toolchain(cxx=cxx, nvcc=(nvcc, *NVCC_FLAGS, *archs, *host))


def sources(with_cuda: bool) -> list[Path]:
    return [
        *sorted(CSRC.glob("bindings/*.cpp")),
        *sorted(CSRC.glob("control/*.cpp")),
        *sorted(CSRC.glob("cpu/*/*.cpp")),
        *(sorted(CSRC.glob("cuda/*/*.cu")) if with_cuda else ()),
    ]


def compile_object(command: list[str], target: Path) -> None:
    """Run one compiler; the object appears under its name only when it is whole."""
    partial = target.with_suffix(".partial.o")
    run = subprocess.run([*command, "-o", str(partial)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.stdout:
        print(run.stdout, file=sys.stderr, end="", flush=True)
    if run.returncode != 0:
        raise CompileError(f"exit status {run.returncode}: {shlex.join(command)}")
    partial.replace(target)


def compile_stale(toolchain: Toolchain) -> list[str]:
    """Compile, in parallel, what is older than its source or any header; the objects of all sources."""
    headers = [path.stat().st_mtime for path in CSRC.rglob("*.*h")]
    objects, stale = [], []
    for source in sources(with_cuda=bool(toolchain.nvcc)):
        target = OBJECTS / toolchain.key(source) / f"{source.relative_to(CSRC).as_posix().replace('/', '.')}.o"
        objects.append(str(target))
        if not target.exists() or target.stat().st_mtime <= max(source.stat().st_mtime, *headers):
            stale.append((toolchain.command(source), target))
            target.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: compile_object(*job), stale))
    return objects


class BuildExtension(build_ext):
    """Compiles C++ and CUDA by our own command lines; setuptools links and installs the result."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = choose_nvcc()
        ext.extra_objects = compile_stale(make_toolchain(nvcc))
        if nvcc is not None:
            ext.library_dirs = cudart_folders(nvcc)
            ext.extra_link_args = CUDA_LINK_FLAGS
        ext.sources = []
        # Linked afresh each time: the last link may have been of another configuration.
        self.force = self.compiler.force = True
        super().build_extension(ext)


INTEGRATIONS = [
    "ep_plugin.integrations",
    *(f"ep_plugin.integrations.{name}" for name in find_packages("integrations")),
]

setup(
    license="Apache-2.0",
    packages=[*find_packages(include=["ep_plugin", "ep_plugin.*"]), *INTEGRATIONS],
    package_dir={"ep_plugin.integrations": "integrations"},
    ext_modules=[Extension("ep_plugin._C", [str(path) for path in sources(with_cuda=True)], language="c++")],
    cmdclass={"build_ext": BuildExtension},
    zip_safe=False,
)
