"""ep-doctor finds planted faults and says what to do. Faults are planted in what the system says.

The file is long because the same functions plant faults in one process and in a rank of several.
"""

from __future__ import annotations

import builtins
import dataclasses
import errno
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin import _C, env
from ep_plugin.doctor import machine, ranks, rates, software
from ep_plugin.doctor.__main__ import main
from ep_plugin.doctor.findings import FAILURE, LEVELS, OK, WARNING, Finding, collect, render, status
from ep_plugin.transport import shm
from ep_plugin.transport.topology import NodeMap, RankReport
from tests.ranks import run_ranks, values

ROOT = Path(__file__).parents[2]
BOOT_ID = "/proc/sys/kernel/random/boot_id"
Plant = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of ours or of a launcher, and for checks in this process no GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in list(os.environ):
        if name.startswith("EP_PLUGIN") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    env._parsed.cache_clear()


def problems(findings: list[Finding]) -> list[Finding]:
    """The warnings and failures, each of which must say what to do."""
    for finding in findings:
        assert finding.level in LEVELS and finding.what and bool(finding.do) == (finding.level != OK), finding
    return [finding for finding in findings if finding.level != OK]


def doctor(*options: str, **environment: str) -> tuple[int, list[Finding], str]:
    """Exit status, findings, and stderr of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "ep_plugin.doctor", "--json", *options],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    shown = json.loads(done.stdout) if done.stdout else {"status": done.returncode, "findings": []}
    assert shown["status"] == done.returncode, done.stderr
    return done.returncode, [Finding(**each) for each in shown["findings"]], done.stderr


# -- what the system says ----------------------------------------------------------------------------------------------


def variable(name: str, value: str) -> Plant:
    return lambda monkeypatch, _: monkeypatch.setenv(name, value)


def unreadable(*paths: str) -> Plant:
    """Files that cannot be opened, and folders that cannot be listed."""

    def plant(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
        for module, name in ((builtins, "open"), (os, "listdir")):
            monkeypatch.setattr(module, name, refusing(getattr(module, name), paths))

    return plant


def refusing(function: Callable[..., Any], paths: tuple[str, ...]) -> Callable[..., Any]:
    def call(path: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(path, str) and path.startswith(paths):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return function(path, *rest, **more)

    return call


def contents(monkeypatch: pytest.MonkeyPatch, path: str, text: str, folder: Path) -> None:
    """Makes `path` read as `text`."""
    stand_in = folder / path.replace("/", "_")
    stand_in.write_text(text)
    opened = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda name, *rest, **more: opened(stand_in if name == path else name, *rest, **more)
    )


def gpus(
    monkeypatch: pytest.MonkeyPatch, count: int = 2, capability: tuple[int, int] = (9, 0), driver: int = 13000
) -> None:
    """PyTorch for CUDA 13.0 on a machine with GPUs."""
    found = types.SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "newest_cuda", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: found)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, other: True)


def cuda_build(monkeypatch: pytest.MonkeyPatch, *archs: int) -> None:
    monkeypatch.setattr(_C, "cuda", object(), raising=False)
    monkeypatch.setattr(_C, "cuda_archs", list(archs), raising=False)
    monkeypatch.setattr(_C, "cuda_version", 13000, raising=False)


def no_torch(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def old_torch(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cu128"))


def no_extension(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setitem(sys.modules, "ep_plugin._C", None)


def cpu_build_on_gpus(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch)
    monkeypatch.delattr(_C, "cuda", raising=False)


def build_for_newer_gpus(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch, capability=(7, 5))
    cuda_build(monkeypatch, 80, 90)


def build_for_older_gpus(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch, capability=(10, 0))
    cuda_build(monkeypatch, 80, 90)


def not_installed(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setenv("EP_PLUGIN", "deep_ep")
    monkeypatch.setattr("ep_plugin.integrations.hooks.enable", lambda names: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints())


def versions(**installed: str) -> Plant:
    """Distributions of these versions, `_` for `-`, and no others."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name.replace("-", "_")]

    return lambda monkeypatch, _: monkeypatch.setattr(importlib.metadata, "version", version)


def driver_with_torch_for_cpus(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    contents(monkeypatch, "/proc/driver/nvidia/version", text, folder)


def old_driver(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch, driver=12040)


def no_driver(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch, driver=0)


def hidden_gpus(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def blocked_peer(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch, count=3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, other: {gpu, other} != {0, 2})


def little_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name, text in (("memory.max", 400 << 20), ("memory.current", 100 << 20), ("memory.stat", "inactive_file 0")):
        (folder / name).write_text(f"{text}\n")
    (folder / "self").write_text("0::/\n")
    monkeypatch.setattr(shm, "_CGROUP_ROOT", str(folder))
    monkeypatch.setattr(shm, "_CGROUPS_OF_PROCESS", str(folder / "self"))


def no_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    little_memory(monkeypatch, folder)
    (folder / "memory.current").write_text(f"{399 << 20}\n")


def no_memfd(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)


def small_shm(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=16384, f_frsize=4096))


def no_shm(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(os, "statvfs", refusing(os.statvfs, ("/dev/shm",)))


def long_directory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    long = folder / ("d" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))


FAULTS: dict[str, tuple[Callable[[], Iterator[Finding]], Plant, str, str, str]] = {
    "unknown variable": (
        software.check_variables, variable("EP_PLUGIN_TRANSPROT", "shm"),
        WARNING, "EP_PLUGIN_TRANSPROT is set, but ep_plugin has no such variable", "did you mean EP_PLUGIN_TRANSPORT?"),
    "variable unlike any": (
        software.check_variables, variable("EP_PLUGIN_XYZ", "1"),
        WARNING, "EP_PLUGIN_XYZ is set", "unset it; known are"),
    "wrong value": (
        software.check_variables, variable("EP_PLUGIN_TRANSPORT", "rdma"),
        FAILURE, "EP_PLUGIN_TRANSPORT: expected one of auto, shm, nvlink, got 'rdma'", "correct the variable"),
    "launcher": (
        software.check_variables, variable("LOCAL_WORLD_SIZE", "-1"), FAILURE, "LOCAL_WORLD_SIZE: expected", "correct"),
    "test gate": (
        software.check_variables, variable("EP_PLUGIN_TEST_GATE", "notify"), FAILURE, "halts every rank", "unset"),
    "no torch": (software.check_torch, no_torch, FAILURE, "PyTorch cannot be imported", "pip install 'torch>=2.11'"),
    "old torch": (
        software.check_torch, old_torch, FAILURE, "PyTorch is 2.9.1+cu128; ep_plugin needs 2.11", "torch>=2.11"),
    "no extension": (
        software.check_build, no_extension, FAILURE, "ep_plugin._C, cannot be loaded in Python 3.", "pip install ."),
    "build for CPUs": (
        software.check_build, cpu_build_on_gpus,
        FAILURE, "kernels for CPUs only, but PyTorch sees 2 GPUs", "EP_PLUGIN_BUILD_CUDA=1"),
    "GPU too old": (
        software.check_build, build_for_newer_gpus, FAILURE, "GPU 0 is sm_75, for which the build has no kernels: none",
        'EP_PLUGIN_CUDA_ARCHS="75"'),
    "GPU too new": (
        software.check_build, build_for_older_gpus, WARNING, "GPU 1 is sm_100", 'EP_PLUGIN_CUDA_ARCHS="100"'),
    "not installed": (
        software.check_integrations, not_installed, WARNING, "EP_PLUGIN=deep_ep has no effect", "pip install ."),
    "old transformers": (
        software.check_frameworks, versions(transformers="4.57.1"),
        WARNING, "expected transformers 5.23 or newer, got 4.57.1", "install such a version"),
    "new megatron": (
        software.check_frameworks, versions(megatron_core="0.20.0"),
        WARNING, "expected megatron.core 0.16.1 or newer and below 0.20, got 0.20.0", "install such a version"),
    "PyTorch for CPUs": (
        machine.check_driver, driver_with_torch_for_cpus,
        WARNING, "NVIDIA's driver 580.95.05 is loaded, but PyTorch", "install PyTorch for CUDA"),
    "old driver": (
        machine.check_driver, old_driver,
        FAILURE, "is for CUDA 12.4, older than PyTorch's CUDA 13.0", "update the driver"),
    "no driver": (machine.check_driver, no_driver, WARNING, "driver does not answer", "--gpus all"),
    "hidden GPUs": (machine.check_driver, hidden_gpus, WARNING, "PyTorch finds no GPU", "CUDA_VISIBLE_DEVICES"),
    "blocked peer": (
        machine.check_gpus, blocked_peer, FAILURE, "GPU 0 cannot reach the memory of GPU 2", "nvidia-smi topo -p2p r"),
    "little memory": (
        machine.check_memory, little_memory,
        WARNING, "0.3 GiB left by the container's limit: less than 1.0 GiB", "raise"),
    "no memory": (
        machine.check_shared_memory, no_memory,
        FAILURE, "64 MiB of shared memory cannot be had: expected at most", "raise"),
    "no memfd": (
        machine.check_shared_memory, no_memfd, WARNING, "unnamed shared memory is refused ([Errno 1]", "memfd_create"),
    "small /dev/shm": (
        machine.check_shared_memory, small_shm, WARNING, "/dev/shm has 0.1 GiB free", "--shm-size=8g"),
    "no /dev/shm": (machine.check_shared_memory, no_shm, WARNING, "/dev/shm cannot be used", "mount a tmpfs"),
    "/proc": (
        machine.check_proc, unreadable("/proc/self/fd"),
        WARNING, "/proc/self/fd cannot be read (Permission", "mount"),
    "no boot id": (
        machine.check_proc, unreadable(BOOT_ID), WARNING, "hosts are told apart by /etc/machine-id", "mount"),
    "unknown host": (
        machine.check_proc, unreadable(BOOT_ID, "/etc/machine-id"),
        FAILURE, "which has neither a boot id nor a machine id", "EP_PLUGIN_RANKS_PER_NODE"),
    "TMPDIR": (
        machine.check_socket_directory, variable("TMPDIR", "/proc/no/such"),
        WARNING, "no socket can be made in /proc/no/such", "set TMPDIR to a short path"),
    "long TMPDIR": (
        machine.check_socket_directory, long_directory, WARNING, "AF_UNIX path too long", "set TMPDIR to a short path"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_finds_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check, plant, level, says, do = FAULTS[fault]
    with monkeypatch.context() as planted:
        planted.setattr(torch.version, "cuda", torch.version.cuda)
        clean = problems(collect([check]))
        plant(planted, tmp_path)
        env._parsed.cache_clear()
        found = problems(collect([check]))
    matching = [finding for finding in found if says in finding.what and finding not in clean]
    assert matching, found
    assert {finding.level for finding in matching} == {level}
    assert all(do in finding.do for finding in matching), matching


def test_gpus_that_reach_each_other_have_their_row_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, count=3)
    cuda_build(monkeypatch, 80, 90)
    found = [*software.check_build(), *machine.check_driver(), *machine.check_gpus()]
    assert not problems(found)
    said = [finding.what for finding in found]
    assert "kernels for CPUs and for sm_80, sm_90, by CUDA 13.0" in said
    assert "GPU 1: NVIDIA H200, 140 GiB, sm_90, reaches GPUs 0, 2" in said


def test_versions_of_a_build_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    (found,) = software.check_torch()
    assert {f"torch {torch.__version__}", "cuda 13.0", "nccl 2.28.9"} <= set(found.what.split(", "))


def test_variables_are_listed_only_when_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect([software.check_variables]) == []
    monkeypatch.setenv("EP_PLUGIN_CHILDREN", "0")
    monkeypatch.setenv("RANK", "3")
    assert [finding.what for finding in collect([software.check_variables])] == ["children is False", "rank is 3"]


def test_a_check_that_breaks_is_a_failure_and_the_others_run() -> None:
    def check_that_breaks() -> Iterator[Finding]:
        raise KeyError("unforeseen")
        yield

    found = collect([check_that_breaks, software.check_variables])
    assert problems(found)[0].what == "this check itself failed: KeyError: 'unforeseen'"
    assert status(found) == 1


def test_the_table_has_every_word_and_counts() -> None:
    found = [
        Finding(OK, "a", "fine"),
        Finding(WARNING, "b", "odd " * 60, "mend " * 40),
        Finding(FAILURE, "c", "no", "stop"),
    ]
    shown = render(found)
    assert max(map(len, shown.splitlines())) <= 120
    assert (shown.count("odd"), shown.count("mend"), shown.count("to do: ")) == (60, 40, 2)
    assert shown.endswith("1 failure, 1 warning")
    assert (status(found), status(found[:2])) == (1, 0)


def test_a_long_subject_does_not_multiply_the_table() -> None:
    """A file of a failed rank may name a communicator as it likes."""
    found = [Finding(OK, "name" * 10_000, "fine"), Finding(WARNING, "b", "odd " * 1000, "mend " * 1000)]
    assert len(render(found)) < 150_000


# -- processes of their own --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_alone_it_names_versions_build_and_integrations() -> None:
    _, found, _ = doctor(EP_PLUGIN="deep_ep,fsdp2")
    problems(found)
    said = {finding.subject: finding.what for finding in found if finding.level == OK}
    assert torch.__version__ in said["torch"]
    assert "torchrun" in said["ranks"]
    on = [finding.what for finding in found if finding.subject == "integrations"]
    assert any(what.startswith("deep_ep is ready") for what in on) and any(
        what.startswith("fsdp2 is ready") for what in on
    )
    assert "megatron is off: not in EP_PLUGIN" in on


@pytest.mark.parametrize(
    ("environment", "level", "says"),
    [
        ({"EP_PLUGIN": "megatorn"}, FAILURE, "EP_PLUGIN: expected names among megatron, fsdp2, transformers"),
        ({"EP_PLUGIN": "fsdp2", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, WARNING, "EP_PLUGIN=fsdp2 has no effect"),
    ],
)
def test_a_switch_that_cannot_work(environment: dict[str, str], level: str, says: str) -> None:
    exit_status, found, _ = doctor(**environment)
    (finding,) = [finding for finding in problems(found) if says in finding.what]
    assert finding.level == level
    assert exit_status == 1 or level == WARNING


@pytest.mark.slow
def test_a_framework_that_fails_when_it_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '4.1'\n")
    exit_status, found, _ = doctor(EP_PLUGIN="transformers", PYTHONPATH=str(tmp_path))
    (finding,) = [finding for finding in problems(found) if finding.subject == "integrations"]
    assert exit_status == 1
    assert "expected transformers 5.23 or newer, got 4.1" in finding.what


@pytest.mark.slow
def test_a_framework_that_is_left_to_itself_stops_no_job(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '4.1'\n")  # it has no module that we replace, either
    variables = {"EP_PLUGIN": "transformers", "EP_PLUGIN_FALLBACK": "stock", "PYTHONPATH": str(tmp_path)}
    _, found, _ = doctor(**variables)
    (finding,) = [finding for finding in problems(found) if finding.subject == "integrations"]
    assert (finding.level, finding.do.partition(",")[0]) == (WARNING, "install such a version")
    assert finding.what.startswith("transformers is left to the framework (EP_PLUGIN_FALLBACK): transformers: expected")


@pytest.mark.parametrize(("fallback", "level"), [("", FAILURE), ("stock", WARNING)])
def test_an_old_framework_that_is_asked_for(fallback: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(transformers="4.57.1")(monkeypatch, ROOT)
    monkeypatch.setenv("EP_PLUGIN", "transformers")
    monkeypatch.setenv("EP_PLUGIN_FALLBACK", fallback)
    (finding,) = problems(collect([software.check_frameworks]))
    assert finding.level == level and "got 4.57.1" in finding.what


@pytest.mark.parametrize("rank", [None, "1"])
def test_a_torch_that_cannot_be_imported(rank: str | None, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    started = {} if rank is None else {"RANK": rank, "WORLD_SIZE": "2"}
    exit_status, found, printed = doctor(PYTHONPATH=str(tmp_path), **started)
    says = "PyTorch cannot be imported: ImportError: libcudart.so.13: cannot open shared object file"
    if rank is None:
        assert exit_status == 1
        assert [finding.what for finding in problems(found) if finding.subject == "torch"] == [says]
    else:  # rank 0 prints, and names this rank
        assert exit_status == 0 and f"ep-doctor: torch: {says}; to do: " in printed


@pytest.mark.slow
def test_a_limit_on_the_size_of_files() -> None:
    size = 32 << 20
    done = subprocess.run(
        [sys.executable, "-m", "ep_plugin.doctor"], cwd=ROOT, capture_output=True, text=True, timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )  # fmt: skip
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "64 MiB of shared memory cannot be had: [Errno 27] File too large" in said
    assert "`ulimit -f`" in said


@pytest.mark.deadline
def test_a_rank_that_does_not_come_is_named() -> None:
    port = str(21000 + os.getpid() % 9000)  # connections of others get higher ones
    began = time.monotonic()
    exit_status, found, _ = doctor("--timeout", "2", RANK="0", WORLD_SIZE="3", MASTER_PORT=port)
    (finding,) = [finding for finding in problems(found) if finding.subject == "ranks"]
    assert finding.what == "ranks 1, 2 did not come within 2 s"
    assert exit_status == 1 and time.monotonic() - began < 60


@pytest.mark.slow
def test_a_network_device_that_is_not_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ep_plugin.doctor", "--json"],
        cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": "no_such"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1
    (finding,) = [each for each in json.loads(done.stdout)["findings"] if each["subject"] == "ranks"]
    assert finding["what"].startswith("all ranks came, but gloo cannot connect them: ")
    assert "GLOO_SOCKET_IFNAME" in finding["do"]


@pytest.mark.deadline
def test_a_store_that_nobody_serves_is_named() -> None:
    exit_status, _, printed = doctor("--timeout", "1", RANK="1", WORLD_SIZE="2", MASTER_PORT="1")
    assert "ep-doctor: ranks: rank 1 cannot reach the store at 127.0.0.1:1" in printed
    assert exit_status == 0


@pytest.mark.parametrize("port", ["99999999", "0", "tcp"])
@pytest.mark.slow
def test_a_port_that_is_none_is_named(port: str) -> None:
    exit_status, found, _ = doctor(RANK="0", WORLD_SIZE="2", MASTER_PORT=port)
    (finding,) = [finding for finding in problems(found) if finding.subject == "ranks"]
    assert finding.what == f"MASTER_PORT: expected an integer from 1 to 65535, got '{port}'"
    assert finding.do == "correct the variable or unset it"
    assert exit_status == 1


@pytest.mark.parametrize("option", [["--timeout", "0"], ["--timeout", "soon"], ["--no-such"]])
def test_a_wrong_option_ends_with_status_2(option: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(option)
    assert ended.value.code == 2


@pytest.mark.slow
def test_under_torchrun_rank_0_prints_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ep_plugin.doctor", "--json"],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    shown = json.loads(done.stdout)
    said = {each["subject"]: each["what"] for each in shown["findings"]}
    assert said["nodes"].startswith("node 0 is ranks 0, 1 on ")
    assert said["same on ranks"] == "versions, build and EP_PLUGIN of ranks 0, 1"
    assert "GB/s from the next one; we measured" in said["copy rate"]
    assert "top 8 of 256 experts" in said["dispatch"]


# -- across ranks ------------------------------------------------------------------------------------------------------


def _examine(rank: int, plant: str, folder: Path) -> list[Finding]:
    """The findings of a rank, with a fault on the last one."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if rank == torch.distributed.get_world_size() - 1:
        PLANTED[plant](monkeypatch, folder)
    return ranks.examine([Finding(OK, "local", f"of rank {rank}")], timeout_s=10)


def other_boot(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    contents(monkeypatch, BOOT_ID, "of another machine\n", folder)


def other_device(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    gpus(monkeypatch)
    cuda_build(monkeypatch, 90)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    found = types.SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: found)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


def not_mapped(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    """As if this rank were on another machine of the same identity, or another user's."""
    monkeypatch.setattr(os, "readlink", refusing(os.readlink, ("/proc/",)))
    monkeypatch.setattr(os, "open", refusing(os.open, ("/dev/shm/ep_plugin-",)))


def dies(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    os._exit(3)


PLANTED: dict[str, Plant] = {
    "nothing": lambda monkeypatch, _: None,
    "mixed versions": old_torch,
    "mixed frameworks": versions(transformers="5.23.0"),
    "mixed switches": variable("EP_PLUGIN", "fsdp2"),
    "mixed fallbacks": variable("EP_PLUGIN_FALLBACK", "stock"),
    "mixed devices": other_device,
    "unequal nodes": variable("EP_PLUGIN_HOST", "elsewhere"),
    "mixed nodes": variable("EP_PLUGIN_RANKS_PER_NODE", "1"),
    "mixed rails": variable("EP_PLUGIN_RAIL", "c10d"),
    "one name": other_boot,
    "no common memory": not_mapped,
    "dead rank": dies,
}


@pytest.mark.parametrize(
    ("plant", "size", "level", "says"),
    [
        ("mixed versions", 2, FAILURE, f"ranks differ in torch: {torch.__version__} on rank 0, 2.9.1+cu128 on rank 1"),
        ("mixed frameworks", 2, FAILURE, "ranks differ in transformers: "),
        ("mixed switches", 2, FAILURE, "ranks differ in EP_PLUGIN: none on rank 0, fsdp2 on rank 1"),
        ("mixed fallbacks", 2, FAILURE, "ranks differ in EP_PLUGIN_FALLBACK: none on rank 0, stock on rank 1"),
        ("mixed devices", 2, FAILURE, "ranks differ in device type: cpu on rank 0, cuda on rank 1"),
        ("unequal nodes", 3, FAILURE, "expected the same on every node, got node 0 ("),
        ("mixed nodes", 2, FAILURE, "ranks disagree on EP_PLUGIN_RANKS_PER_NODE: None on rank 0, 1 on rank 1"),
        ("mixed rails", 2, FAILURE, "ranks disagree on EP_PLUGIN_RAIL: auto on rank 0, c10d on rank 1"),
        ("one name", 2, WARNING, "2 hosts claim the name "),
        ("no common memory", 2, FAILURE, "ranks cannot share memory: "),
    ],
)
def test_finds_a_fault_of_one_rank(plant: str, size: int, level: str, says: str, tmp_path: Path) -> None:
    everyone = values(run_ranks(size, _examine, plant, tmp_path, timeout_s=60))
    assert all(found == everyone[0] for found in everyone)
    matching = [finding for finding in problems(everyone[0]) if says in finding.what]
    assert matching, everyone[0]
    assert {finding.level for finding in matching} == {level}


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_without_a_fault_have_a_rate_and_a_prediction(nodes: int, tmp_path: Path) -> None:
    outcomes = run_ranks(4, _examine, "nothing", tmp_path, timeout_s=60, env={"EP_TEST_NODES": str(nodes)})
    found = values(outcomes)[0]
    assert not problems(found)
    said = [finding.what for finding in found]
    assert "of rank 0" in said and "of rank 1" not in said
    assert sum(finding.subject == "nodes" for finding in found) == nodes
    assert ("45 GB/s assumed between nodes" in said[-1]) == (nodes == 2)
    assert "the ranks of each node map and read each other's memory" in said


def test_gpus_that_copy_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    node, device = NodeMap(((0, 1),)), torch.device("cuda", 0)
    slow, predicted = rates.describe(node, 25.0, device)
    assert "25.0 GB/s from the next one; we measured 369.6 between 4 H200" in problems([slow])[0].what
    assert "nvidia-smi nvlink" in slow.do
    assert not problems([*rates.describe(node, 300.0, device)])
    # Of 4096 tokens, those with one of their 8 experts among the 128 of the other rank: all but 1 in 273.
    expected_ms = 4096 * (1 - comb(128, 8) / comb(256, 8)) * 7168 * 2 / 25e9 * 1e3
    assert float(predicted.what.split()[2]) == pytest.approx(expected_ms, rel=0.02)
    monkeypatch.setitem(sys.modules, "ep_plugin.bench.plan", None)  # as where typer is missing
    assert "pip install '.[bench]' in the repository's root" in problems([*rates.describe(node, 25.0, device)])[0].do


@pytest.mark.deadline
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    first, last = run_ranks(2, _examine, "dead rank", tmp_path, timeout_s=60)
    assert last.exitcode == 3
    found = problems(first.value)
    assert any("for rank 1" in finding.what and "ep-doctor: what ranks see" in finding.what for finding in found), found


def test_a_problem_of_some_ranks_names_them() -> None:
    odd, bad = Finding(WARNING, "memory", "little", "raise it"), Finding(FAILURE, "torch", "old", "install")
    found = ranks.merge([[bad], [bad, odd], [bad, odd], [bad, odd, odd]])
    assert [finding.what for finding in found] == ["old", "ranks 1 to 3: little"]


def test_gpus_that_cannot_reach_each_other_across_ranks() -> None:
    report = RankReport(rank=0, host="a/1", device="cuda:0", device_id="GPU-0")
    other = dataclasses.replace(report, rank=1, device="cuda:1", device_id="GPU-1", unreachable=("GPU-0",))
    found, node_map = ranks.map_nodes([report, other])
    assert node_map is None
    assert "rank 1 on cuda:1 (GPU-1) cannot reach the memory of rank 0 on cuda:0 (GPU-0)" in problems(found)[0].what


def test_more_ranks_on_a_node_than_a_group_takes() -> None:
    found, _ = ranks.map_nodes([RankReport(rank=rank, host="a/1") for rank in range(_C.max_ranks + 1)])
    assert f"a group takes at most {_C.max_ranks} of a node" in problems(found)[0].what
