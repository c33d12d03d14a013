"""Network namespaces that stand for nodes. Each has one interface, ``eth0``, on a bridge that stands for the switch.

    node 0: eth0 10.77.0.1 --- port0 ]
    node 1: eth0 10.77.0.2 --- port1 ] bridge, in the namespace of the calling process

A namespace has no name and no file. File descriptors of this process and the processes in it keep it alive. When the
last of them is gone the kernel removes it with its interfaces, also after a kill. Without root the namespaces live in a
user namespace, in which this user counts as root.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

INTERFACE = "eth0"

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
# One millisecond at the link's rate, and at least the largest segment that a virtual interface sends whole.
_BURST_S, _LEAST_BURST = 1e-3, 128 * 1024
_LONGEST_QUEUE = "50ms"


class NoNamespaces(Exception):
    """This machine or this user cannot have network namespaces. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The namespaces of the nodes, which this process keeps open."""

    nodes: tuple[int, ...]

    def enter(self, node: int) -> None:
        """Moves the calling process, a child between fork and exec, into the node's network."""
        _call("setns", self.nodes[node], _NEW_NET)

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"


def create_network(nodes: int, rate_bits: int | None) -> Network:
    """Makes and joins the namespaces of ``nodes`` nodes. This process must have one thread. It moves into the switch's
    namespace.

    ``rate_bits``: the most bits per second of each node's link, each way; None: no limit. Raises NoNamespaces.
    """
    for program in ("ip", *(("tc",) if rate_bits else ())):
        if shutil.which(program) is None:
            raise NoNamespaces(f"{program!r} is not installed (package iproute2)")
    for kind in ("bridge", "veth"):  # children try them, since a process cannot return from its own namespace
        _run(f"ip link add tried type {kind}", _leave_network)
    _leave_network()
    network = Network(nodes=tuple(_next_network() for _ in range(nodes)))
    _run("ip link add switch type bridge")
    _run("ip link set switch up")
    for node, net in enumerate(network.nodes):
        port, enter = f"port{node}", functools.partial(network.enter, node)
        _run(f"ip link add {port} type veth peer name {INTERFACE} netns /proc/self/fd/{net}", inherited=(net,))
        _run(f"ip link set {port} master switch up")
        _run(f"ip address add {network.address(node)}/24 dev {INTERFACE}", enter)
        _run(f"ip link set {INTERFACE} up", enter)
        _run("ip link set lo up", enter)
        if rate_bits:
            _run(_limit(INTERFACE, rate_bits), enter)
            _run(_limit(port, rate_bits))
    return network


def _limit(interface: str, rate_bits: int) -> str:
    burst = max(int(rate_bits / 8 * _BURST_S), _LEAST_BURST)
    return f"tc qdisc add dev {interface} root tbf rate {rate_bits}bit burst {burst}b latency {_LONGEST_QUEUE}"


def _run(command: str, start: Callable[[], object] | None = None, inherited: tuple[int, ...] = ()) -> None:
    """Runs `command` in a child. start: the child calls it before the command. inherited: descriptors that the command
    needs."""
    try:
        subprocess.run(
            command.split(),
            preexec_fn=start,
            pass_fds=inherited,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"`{command}` failed: {error.stderr.strip()}") from error
    except subprocess.SubprocessError as error:
        raise NoNamespaces(f"no permission for network namespaces: `{command}`: {error}") from error


def _leave_network() -> None:
    """Moves this process into a network of its own; without root also into a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NET | (_NEW_USER if uid else 0))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")) if uid else ():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _next_network() -> int:
    """Moves this process into a new network. Returns a descriptor of the network that it leaves."""
    left = os.open("/proc/self/ns/net", os.O_RDONLY)
    _call("unshare", _NEW_NET)
    return left


def _call(name: str, *args: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
