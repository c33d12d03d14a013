"""Runs a command as the ranks of several nodes, on one machine.

    python -m ep_plugin.testing.nodes --nodes 2 --ranks 2 --rate 1gbit -- python train.py --steps 10

Each of the nodes x ranks processes gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
torchrun sets them. EP_PLUGIN_HOST separates the nodes for ep_plugin: ranks of different nodes map no memory of each
other, as on real hosts. The nodes have these networks:

- CPUs: a network namespace per node (namespaces.py). ``--rate`` bounds its link each way. The nodes reach each other
  and nothing else. If the machine does not allow namespaces, the ranks share the loopback device, stderr says so, and
  ``--rate`` is refused.
- GPUs: the ranks share the loopback device. A node sees its own GPUs only, and NCCL treats the nodes as hosts that only
  sockets join. ``--rate`` is refused. With fewer GPUs than ranks, ranks share GPUs: each rank sees one GPU, has
  LOCAL_RANK 0 of 1, and is a host of its own for NCCL, which refuses two ranks of one host on one GPU.

The ranks end with the launcher, also when it is killed. The first rank that fails decides the exit status (128 + the
signal that killed it). If several ranks fail within 20 ms, the lowest of them decides. The other ranks have ``--grace``
seconds to end by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import glob
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from ep_plugin.testing.namespaces import INTERFACE, Network, NoNamespaces, create_network

_PROGRAM = "python -m ep_plugin.testing.nodes"
_POLL_S = 0.02
_TERMINATE_S = 5.0
_PORT = 29500  # used in a namespace of our own, where every port is free
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_NCCL_OVER_SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
_SHARED_GPU = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes to emulate.

    gpus: the CUDA devices, as CUDA_VISIBLE_DEVICES names them; None: the ranks run on CPUs.
    network: the namespaces of the nodes; None: the ranks share the loopback device.
    rate: the ``--rate`` of each node's link.
    launched_by: the launcher's command line, without the ranks' command.
    """

    nodes: int
    ranks: int
    gpus: list[str] | None = None
    network: Network | None = None
    rate: str | None = None
    launched_by: str = ""

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    @property
    def shares_gpus(self) -> bool:
        return self.gpus is not None and len(self.gpus) < self.size

    def described(self) -> str:
        network = "network namespaces" if self.network else "the loopback device"
        links = f", links of {self.rate}" if self.rate else ""
        shared = f", which share {len(self.gpus or ())} GPU(s)" if self.shares_gpus else ""
        return f"{self.nodes} nodes of {self.ranks} ranks on {network}{links}{shared}"


def run(cluster: Cluster, command: list[str], grace_s: float) -> int:
    """Runs ``command`` on every rank. Returns the exit status of the first rank that failed, or 0 if none did.

    No rank is left when it returns or raises.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.nullcontext(_PORT) if cluster.network else held_port() as port:
        try:
            for rank in range(cluster.size):
                variables = {**os.environ, **variables_of(rank, cluster, port)}
                start = functools.partial(_before_exec, os.getpid(), cluster.network, rank // cluster.ranks)
                ranks.append(subprocess.Popen(command, env=variables, preexec_fn=start, start_new_session=True))
            return _wait(ranks, grace_s)
        finally:
            _end(ranks)


def variables_of(rank: int, cluster: Cluster, port: int) -> dict[str, str]:
    """Returns the variables that ``rank`` gets in addition to the launcher's own environment."""
    node, local_rank = divmod(rank, cluster.ranks)
    interface = INTERFACE if cluster.network else "lo"
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.ranks),
        "MASTER_ADDR": cluster.network.address(0) if cluster.network else "127.0.0.1",
        "MASTER_PORT": str(port),
        "EP_PLUGIN_HOST": f"node{node}",
        "EP_PLUGIN_EMULATION": cluster.described(),
        "EP_PLUGIN_LAUNCHED_BY": cluster.launched_by,
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }
    if cluster.gpus is not None and cluster.shares_gpus:
        gpu = cluster.gpus[rank * len(cluster.gpus) // cluster.size]
        variables |= {**_NCCL_OVER_SOCKETS, **_SHARED_GPU, "NCCL_HOSTID": f"rank{rank}", "CUDA_VISIBLE_DEVICES": gpu}
    elif cluster.gpus is not None:
        own = cluster.gpus[node * cluster.ranks : (node + 1) * cluster.ranks]
        variables |= {**_NCCL_OVER_SOCKETS, "NCCL_HOSTID": f"node{node}", "CUDA_VISIBLE_DEVICES": ",".join(own)}
    return variables


def parse_rate(text: str) -> int:
    """Returns the bits per second of a text such as "100mbit", "1gbit" or "2.5gbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate: expected a number and kbit, mbit or gbit, such as 1gbit, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _wait(ranks: list[subprocess.Popen[bytes]], grace_s: float) -> int:
    status, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if status == 0:
            status = _first_failure(ranks)
            deadline = time.monotonic() + grace_s if status else deadline
        time.sleep(_POLL_S)
    return status or _first_failure(ranks)


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> int:
    for number, rank in enumerate(ranks):
        code = rank.poll()
        if code:
            said = f"exited with status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            print(f"nodes: rank {number} {said}", file=sys.stderr, flush=True)
            return code if code > 0 else 128 - code
    return 0


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends every rank and its children, first by SIGTERM."""
    for signum, patience_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _TERMINATE_S)):
        deadline = time.monotonic() + patience_s
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # the whole process group has ended
                os.killpg(rank.pid, signum)
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _before_exec(launcher: int, network: Network | None, node: int) -> None:
    """Runs in the child: enters its node's network, and makes the child die with the launcher."""
    if network is not None:
        network.enter(node)
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # the launcher died before the line above


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Returns a context with a free TCP port that no other process is given while the context lasts.

    A server that sets SO_REUSEADDR, as PyTorch's stores do, can listen on the port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))  # without listen(): nobody can listen beside a listener
        yield int(holder.getsockname()[1])


def _visible_gpus() -> list[str]:
    """Returns the CUDA devices, as CUDA_VISIBLE_DEVICES names them. Asks torch in a child, since torch starts
    threads."""
    if not glob.glob("/dev/nvidia[0-9]*"):
        return []
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    code = "import torch; print(torch.cuda.device_count())"
    count = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    return listed[:count] if listed else [str(index) for index in range(count)]


def _choose(options: argparse.Namespace, rate: int | None, launched_by: str) -> Cluster:
    """Returns the cluster of the options. Raises ValueError if this machine cannot emulate it."""
    sizes = {"nodes": options.nodes, "ranks": options.ranks, "launched_by": launched_by}
    gpus = _visible_gpus() if options.device in ("auto", "cuda") else []
    if gpus or options.device == "cuda":
        if not gpus:
            raise ValueError("device: expected at least one GPU for cuda, found none; --device cpu needs none")
        if rate:
            raise ValueError("rate: expected none with GPUs, whose ranks share the loopback device")
        cluster = Cluster(**sizes, gpus=gpus)
        if cluster.shares_gpus:
            print(f"nodes: {cluster.described()}; each sees one as its LOCAL_RANK 0", file=sys.stderr)
        return cluster
    if options.network == "loopback":
        problem = "--network loopback"
    else:
        try:
            return Cluster(**sizes, network=create_network(options.nodes, rate), rate=options.rate)
        except NoNamespaces as error:
            problem = str(error)
    if rate:
        raise ValueError(f"rate: expected network namespaces, whose links can be bounded, got none: {problem}")
    if options.network == "namespaces":
        raise ValueError(f"network: expected to make namespaces, got: {problem}")
    print(f"nodes: the ranks share the loopback device, only the node map is emulated ({problem})", file=sys.stderr)
    return Cluster(**sizes)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, int | None]:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Run a command as the ranks of several emulated nodes.")
    parser.add_argument("--nodes", type=int, default=2, help="nodes to emulate (2)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each node (2)")
    parser.add_argument("--rate", help="of each node's link, each way, such as 1gbit (none)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are")
    parser.add_argument(
        "--network", choices=("auto", "namespaces", "loopback"), default="auto", help="of ranks on CPUs (auto)"
    )
    parser.add_argument("--grace", type=float, default=10.0, help="seconds left to the others when a rank fails (10)")
    parser.add_argument("command", nargs="+", help="what each rank runs, after --")
    options = parser.parse_args(arguments)
    for name in ("nodes", "ranks"):
        if not 1 <= getattr(options, name) <= 64:
            parser.error(f"--{name}: expected 1 to 64, got {getattr(options, name)}")
    if not 0 <= options.grace < float("inf"):
        parser.error(f"--grace: expected 0 or more seconds, got {options.grace:g}")
    try:
        return options, parse_rate(options.rate) if options.rate else None
    except ValueError as error:
        parser.error(str(error))


def _words(arguments: list[str], command: list[str]) -> str:
    """Returns the launcher's command line, without the ranks' command."""
    own = arguments[: len(arguments) - len(command)]
    return shlex.join([*_PROGRAM.split(), *own[: -1 if own[-1:] == ["--"] else None]])


def _stop(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options, rate = _parse(arguments)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    try:
        return run(_choose(options, rate, _words(arguments, options.command)), options.command, options.grace)
    except ValueError as error:
        print(f"nodes: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(f"nodes: command not found: {error.filename}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
