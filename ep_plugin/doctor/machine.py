"""Checks the driver, the GPUs, memory, shared memory, /proc and the directory for sockets."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from collections.abc import Iterator

from ep_plugin import env
from ep_plugin.doctor.findings import FAILURE, OK, WARNING, Finding
from ep_plugin.doctor.software import imported_torch
from ep_plugin.transport import shm, topology

_GIB = 2**30
_LITTLE = _GIB  # of memory, and of /dev/shm: the pools of one large layer on a node
_BLOCK = 64 * 2**20
_SHM = "/dev/shm"


def driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel driver; None if it is not loaded or cannot be read."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read())
    except OSError:
        return None
    return found[1] if found else "of unknown version"


def newest_cuda() -> int:
    """Returns the newest CUDA that the driver serves: 13000 is 13.0, and 0 means that no driver answers."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def check_driver() -> Iterator[Finding]:
    torch, driver = imported_torch(), driver_version()
    if torch is None:
        return
    built = torch.version.cuda
    if built is None:
        if driver:
            what = f"NVIDIA's driver {driver} is loaded, but PyTorch {torch.__version__} is a build for CPUs only"
            do = "to use the GPUs, install PyTorch for CUDA, and then ep_plugin again"
            yield Finding(WARNING, "driver", what, do)
        return
    serves = newest_cuda()
    if not serves:
        what = f"PyTorch was built for CUDA {built}, but NVIDIA's driver does not answer"
        yield Finding(WARNING, "driver", what, "load the driver, or start the container with --gpus all; CPUs work")
        return
    newest = f"{serves // 1000}.{serves % 1000 // 10}"
    if serves // 1000 < int(built.split(".")[0]):
        what = f"the driver{f' {driver}' if driver else ''} is for CUDA {newest}, older than PyTorch's CUDA {built}"
        do = f"update the driver, or install a PyTorch for CUDA {serves // 1000}, and then ep_plugin again"
        yield Finding(FAILURE, "driver", what, do)
        return
    yield Finding(OK, "driver", f"{driver or 'loaded'}, for CUDA up to {newest}")
    if not torch.cuda.is_available():
        do = "see whether nvidia-smi lists GPUs, and whether CUDA_VISIBLE_DEVICES hides them; CPUs work"
        yield Finding(WARNING, "driver", "the driver is loaded, but PyTorch finds no GPU", do)


def check_gpus() -> Iterator[Finding]:
    """Lists each GPU and the other GPUs that it reaches."""
    torch = imported_torch()
    if torch is None or not torch.cuda.is_available():
        return
    gpus = range(torch.cuda.device_count())
    for gpu in gpus:
        others = [other for other in gpus if other != gpu]
        blocked = [other for other in others if not torch.cuda.can_device_access_peer(gpu, other)]
        reached = ", ".join(str(other) for other in others if other not in blocked)
        properties = torch.cuda.get_device_properties(gpu)
        size = f"{properties.total_memory / _GIB:.0f} GiB, sm_{properties.major}{properties.minor}"
        what = f"GPU {gpu}: {properties.name}, {size}, reaches GPUs {reached or 'none'}"
        yield Finding(OK, "GPUs", what if others else what.rpartition(",")[0])
        if blocked:
            names = f"GPU{'s'[: len(blocked) != 1]} {', '.join(map(str, blocked))}"
            what = f"GPU {gpu} cannot reach the memory of {names} as a peer; a group with both is refused"
            do = (
                "see `nvidia-smi topo -p2p r`; put only GPUs that reach each other on one node (CUDA_VISIBLE_DEVICES), "
            )
            do += "or set EP_PLUGIN_RANKS_PER_NODE so that they are on two nodes; virtual machines must allow P2P"
            yield Finding(FAILURE, "GPUs", what, do)


def check_memory() -> Iterator[Finding]:
    machine, container = shm.available_bytes()
    if machine == sys.maxsize:
        return  # check_proc says why
    limited = container < machine
    limit = f"{_gib(container)} left by the container's limit" if limited else "no smaller limit by a container"
    what = f"{_gib(machine)} available on the machine, {limit}"
    if min(machine, container) < _LITTLE:
        do = "raise the container's memory limit (docker run --memory, the limits of a pod), or end other processes"
        yield Finding(WARNING, "memory", f"{what}: less than {_gib(_LITTLE)}", do)
    else:
        yield Finding(OK, "memory", what)


def check_shared_memory() -> Iterator[Finding]:
    size = f"{_BLOCK >> 20} MiB of shared memory"
    try:
        refusal = shm.try_block(_BLOCK)
    except (MemoryError, OSError) as error:
        do = "raise the container's --shm-size and memory limit, and `ulimit -f`"
        yield Finding(FAILURE, "shared memory", f"{size} cannot be had: {error}", do)
        refusal = None
    else:
        if refusal is None:
            yield Finding(OK, "shared memory", f"unnamed shared memory works: a block of {_BLOCK >> 20} MiB was made")
        else:
            what = f"unnamed shared memory is refused ({refusal}), so ranks on CPUs use names in {_SHM}"
            do = "allow memfd_create in the container's seccomp profile, or give /dev/shm enough space"
            yield Finding(WARNING, "shared memory", what, do)
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        what = f"{_SHM} cannot be used: {error}; NCCL, gloo and workers of data loaders need it"
        yield Finding(WARNING, "shared memory", what, f"mount a tmpfs at {_SHM}")
        return
    free = found.f_bavail * found.f_frsize
    what = f"{_SHM} has {_gib(free)} free"
    if free < _LITTLE:
        what += ": NCCL, workers of data loaders, and ep_plugin without unnamed memory need more"
        yield Finding(WARNING, "shared memory", what, "start the container with --shm-size=8g or --ipc=host")
    else:
        yield Finding(OK, "shared memory", what)


_PROC = {
    "/proc/self/fd": "ranks on CPUs cannot map each other's unnamed memory, and use names in /dev/shm",
    "/proc/meminfo": "memory cannot be checked before it is allocated, and a full machine kills processes",
    "/proc/sys/kernel/random/boot_id": "hosts are told apart by /etc/machine-id, which copies of a machine share",
}


def check_proc() -> Iterator[Finding]:
    unreadable = 0
    for path, consequence in _PROC.items():
        try:
            if path.endswith("fd"):
                os.listdir(path)
            else:
                with open(path) as file:
                    file.read()
        except OSError as error:
            unreadable += 1
            do = "mount /proc in the container, without hidepid and masked paths"
            yield Finding(WARNING, "/proc", f"{path} cannot be read ({error.strerror}): {consequence}", do)
    if not unreadable:
        yield Finding(OK, "/proc", "can be read")
    host = topology.host_identity()
    try:
        topology.check_hosts([topology.RankReport(rank=0, host=host)])
    except ValueError as error:
        yield Finding(FAILURE, "host", str(error), "set EP_PLUGIN_RANKS_PER_NODE on every rank")
    else:
        yield Finding(OK, "host", f"its name is {host}; ranks with the same name form a node")


def check_socket_directory() -> Iterator[Finding]:
    directory = env.socket_directory()
    path = f"{directory}/symm_mem-{os.getpid()}-doctor"
    torch = imported_torch()
    gpus = torch is not None and torch.cuda.is_available()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.bind(path)
        os.unlink(path)
    except OSError as error:
        what = (
            f"no socket can be made in {directory} ($TMPDIR, or /tmp): {error}; ranks on GPUs share memory through one"
        )
        do = "set TMPDIR to a short path on a local disk that you can write to, the same on all ranks of a node"
        yield Finding(FAILURE if gpus else WARNING, "TMPDIR", what, do)
    else:
        yield Finding(OK, "TMPDIR", f"{directory} takes sockets")


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"


CHECKS = (check_driver, check_gpus, check_memory, check_shared_memory, check_proc, check_socket_directory)
