"""What is built and installed: the wheel, an editable install, a build for CPU only, a cheap import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
ROOT = Path(__file__).parents[2]
BUILT_FROM = [
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
    "ep_plugin",
    "integrations",
]
CPU_ONLY = "ep_plugin: building for CPU only"
HEAVY = ("torch", "transformers", "numpy", "triton", "rich", "typer", "matplotlib", "ep_plugin._C")
# Loaded by every Python below PYTHONPATH: as if nvcc were installed nowhere.
HIDE_NVCC = """
import shutil
which = shutil.which
shutil.which = lambda name, *rest, **more: None if name.endswith("nvcc") else which(name, *rest, **more)
"""


def run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `cwd` without the caller's EP_PLUGIN_* and PYTHONPATH; all it prints is in stdout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EP_PLUGIN", "PYTHONPATH"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert (done.returncode != 0) == fails, f"exit status {done.returncode}:\n{done.stdout}"
    return done


def in_site(site: Path, code: str, cwd: Path) -> str:
    """What `code` prints in a Python whose only site-packages is `site`."""
    start = f"import site; site.addsitedir({str(site)!r})\n"
    return run(sys.executable, "-I", "-S", "-c", start + code, cwd=cwd).stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from, with the objects of `make build`, which builds here may take over."""
    copy = tmp_path_factory.mktemp("tree")
    unwanted = shutil.ignore_patterns("*.so", "*.o", "__pycache__")
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=unwanted)
        else:
            shutil.copy(source, copy / name)
    objects = ROOT / "build" / "objects"
    if objects.exists():
        shutil.copytree(objects, copy / "build" / "objects")
    return copy


@pytest.fixture(scope="module")
def without_nvcc(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("without_nvcc")
    (folder / "sitecustomize.py").write_text(HIDE_NVCC)
    return str(folder)


@pytest.fixture(scope="module")
def wheel(tree: Path, without_nvcc: str) -> tuple[Path, str]:
    """The wheel that pip builds where nvcc is hidden, and what the build printed."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--verbose", "--wheel-dir", "wheels")
    done = run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=tree, PYTHONPATH=without_nvcc)
    (path,) = (tree / "wheels").glob("ep_plugin-*.whl")
    return path, done.stdout


@pytest.fixture(scope="module")
def wheel_names(wheel: tuple[Path, str]) -> set[str]:
    with zipfile.ZipFile(wheel[0]) as archive:
        return set(archive.namelist())


def expected_modules() -> set[str]:
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ep_plugin").rglob("*.py")}
    integrations = {f"ep_plugin/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "integrations").rglob("*.py")}
    return package | integrations


@pytest.mark.slow
def test_build_without_nvcc_says_once_that_it_is_for_cpu_only(wheel: tuple[Path, str]) -> None:
    said = [line.strip() for line in wheel[1].splitlines() if CPU_ONLY in line]
    assert len(said) == 1, wheel[1]
    assert "nvcc" in said[0]


@pytest.mark.slow
def test_wheel_holds_every_module_and_one_extension(wheel_names: set[str]) -> None:
    modules = {name for name in wheel_names if name.endswith(".py")}
    assert modules == expected_modules()
    assert "ep_plugin/integrations/__init__.py" in modules
    extensions = [name for name in wheel_names if name.endswith(".so")]
    assert len(extensions) == 1
    assert extensions[0].startswith("ep_plugin/_C.")


@pytest.mark.slow
def test_wheel_holds_types_and_no_sources(wheel_names: set[str]) -> None:
    stubs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ep_plugin").rglob("*.pyi")}
    outside = {name for name in wheel_names if ".dist-info/" not in name}
    others = {name for name in outside if not name.endswith((".py", ".so"))}
    assert others == stubs | {"ep_plugin/py.typed"}
    assert all(name.startswith("ep_plugin/") for name in outside)


@pytest.mark.slow
def test_wheel_metadata(wheel: tuple[Path, str]) -> None:
    with zipfile.ZipFile(wheel[0]) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if "-info/" in name}
    metadata = Parser().parsestr(texts["METADATA"])
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License"] == "Apache-2.0"
    unconditional = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert unconditional == ["torch>=2.11"]
    assert any("megatron-core<0.20,>=0.16.1" in need for need in metadata.get_all("Requires-Dist", []))
    assert "ep-bench = ep_plugin.bench.__main__:main" in texts["entry_points.txt"]
    assert "ep-doctor = ep_plugin.doctor.__main__:main" in texts["entry_points.txt"]
    assert "[torch.backends]\nep_plugin = ep_plugin.integrations.autoload:start" in texts["entry_points.txt"]
    assert "Apache License" in texts["LICENSE"]


@pytest.mark.slow
def test_sdist_holds_what_its_pages_point_to(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    unwanted = shutil.ignore_patterns(".*", "*.egg-info", "*.so", "__pycache__", "build", "dist", "runs")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    run(sys.executable, "setup.py", "-q", "sdist", cwd=tree)
    (path,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}  # folders too
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    words = {word.rstrip("./") for word in re.findall(r"[\w.-]+/[\w./-]*", pages)}
    made_later = (".", "runs/", "build/", "dist/")  # folders that git ignores: there or not, they are not shipped
    pointed = {word for word in words if (ROOT / word).exists() and not f"{word}/".startswith(made_later)}
    assert {"docs/fsdp2.md", "tests/ranks.py", "scripts/gpu.sh", "benchmarks/results", "requirements"} <= pointed
    assert (pointed | {"Makefile"}) - names == set()


@pytest.mark.slow
def test_installed_wheel_imports(wheel: tuple[Path, str], tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel[0]) as archive:
        archive.extractall(site)
    code = "import ep_plugin.integrations as i, ep_plugin._C as c; print(i.__file__); print(c.__file__)"
    integrations, extension = in_site(site, code, cwd=tmp_path).splitlines()
    assert integrations == str(site / "ep_plugin/integrations/__init__.py")
    assert Path(extension).parent == site / "ep_plugin"


@pytest.mark.slow
@pytest.mark.usefixtures("wheel")
def test_make_wheel_makes_one_that_any_linux_loads(tree: Path, tmp_path: Path) -> None:
    """Without nvcc, and without the download of what builds it: the script, its flags for the linker and auditwheel."""
    pytest.importorskip("auditwheel")
    # The wheel's objects are taken over: only the link is repeated.
    (tree / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "wheels.sh", tree / "scripts")
    (tree / ".venv").symlink_to(sys.prefix)
    local = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}  # 0: no isolation
    run("scripts/wheels.sh", cwd=tree, EP_PLUGIN_BUILD_CUDA="0", WHEEL_PYTHONS=sys.executable, **local)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    (path,) = (tree / "dist").glob("*.whl")
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"ep_plugin-[\d.]+-{version}-{version}-manylinux_\d+_\d+_x86_64\.whl", path.name), path.name
    site = tmp_path / "site"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    assert {each.name for each in site.iterdir()} == {"ep_plugin", f"{sdist.name.removesuffix('.tar.gz')}.dist-info"}
    (extension,) = site.glob("ep_plugin/_C.*.so")
    needed = re.findall(r"NEEDED +(\S+)", run("objdump", "-p", extension, cwd=tmp_path).stdout)
    foreign = ("libstdc++", "libtorch", "libc10", "libcuda", "libpython")
    assert needed and not [name for name in needed if name.startswith(foreign)]
    assert in_site(site, "import ep_plugin._C as c; print(c.max_ranks)", cwd=tmp_path).isdecimal()


@pytest.mark.slow
@pytest.mark.usefixtures("wheel")
def test_editable_install_imports_from_the_tree(tree: Path, without_nvcc: str, tmp_path: Path) -> None:
    # The wheel's objects are taken over: only the link is repeated.
    build = "import setuptools.build_meta as b, sys; print(b.build_editable(sys.argv[1]))"
    run(sys.executable, "-c", build, tmp_path, cwd=tree, PYTHONPATH=without_nvcc)
    (editable,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(site)
    code = "import ep_plugin.integrations as i, ep_plugin._C as c; print(i.__file__); print(c.__file__)"
    integrations, extension = in_site(site, code, cwd=tmp_path).splitlines()
    assert integrations == str(tree / "integrations/__init__.py")
    assert Path(extension).parent == tree / "ep_plugin"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EP_PLUGIN_BUILD_CUDA", "1", "expected nvcc under CUDA_HOME, CUDACXX or PATH, found none"),
        ("EP_PLUGIN_BUILD_CUDA", "yes", "expected 0, 1 or auto, got 'yes'"),
    ],
)
def test_build_refuses(tree: Path, without_nvcc: str, variable: str, value: str, message: str) -> None:
    environment = {variable: value, "PYTHONPATH": without_nvcc}
    done = run(sys.executable, "setup.py", "-q", "build_ext", cwd=tree, fails=True, **environment)
    assert message in done.stdout


def test_import_is_cheap(tmp_path: Path) -> None:
    code = f"import sys, ep_plugin; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).stdout.strip()
    assert loaded == "[]"
    code = "import ep_plugin; print(ep_plugin.integrations.status())"  # which loads them
    assert "transformers" in run(sys.executable, "-c", code, cwd=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_kernels_compile_for_gpus_without_bulk_copies(tmp_path: Path) -> None:
    """The default build is for those too, CI's only for those with them."""
    assert NVCC is not None
    flags = ("-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_80", "-Xptxas", "-O0", f"-I{ROOT}/ep_plugin/csrc")
    run(NVCC, *flags, "-c", ROOT / "ep_plugin/csrc/cuda/moe/dispatch_recv.cu", "-o", tmp_path / "recv.o", cwd=tmp_path)
    assert (tmp_path / "recv.o").stat().st_size > 0
