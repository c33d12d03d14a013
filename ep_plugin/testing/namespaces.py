"""Network namespaces that stand for nodes: each has one interface, ``eth0``, on a bridge that stands for the switch.

    node 0: eth0 10.77.0.1 --- port0 ]
    node 1: eth0 10.77.0.2 --- port1 ] bridge, in a namespace of its own

A namespace has no name and no file. File descriptors of this process and the processes in it keep it alive. When the
last of them is gone the kernel removes it with its interfaces, also after a kill. Without root the namespaces live in a
user namespace, in which this user counts as root.
"""

from __future__ import annotations

import ctypes
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
    """This machine or this user cannot have network namespaces; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The namespaces of the nodes, which this process keeps open."""

    user: int | None
    switch: int
    nodes: tuple[int, ...]

    def enter(self, node: int) -> None:
        """Moves the calling process, a child between fork and exec, into the node's network."""
        _enter(self.user, self.nodes[node])

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"


def create_network(nodes: int, rate_bits: int | None) -> Network:
    """Makes and joins the namespaces of ``nodes`` nodes. Call it in a process with one thread.

    ``rate_bits``: the most bits per second of each node's link, each way; None: no limit. Raises NoNamespaces.
    """
    for program in ("ip", *(("tc",) if rate_bits else ())):
        if shutil.which(program) is None:
            raise NoNamespaces(f"{program!r} is not installed (package iproute2)")
    user, switch = _new_namespaces(None, with_user=os.geteuid() != 0)
    network = Network(user=user, switch=switch, nodes=tuple(_new_namespaces(user)[1] for _ in range(nodes)))
    _run(user, switch, "ip link add switch type bridge")
    _run(user, switch, "ip link set switch up")
    for node, net in enumerate(network.nodes):
        port = f"port{node}"
        _run(user, switch, f"ip link add {port} type veth peer name {INTERFACE} netns /proc/self/fd/{net}", net)
        _run(user, switch, f"ip link set {port} master switch up")
        _run(user, net, f"ip address add {network.address(node)}/24 dev {INTERFACE}")
        _run(user, net, f"ip link set {INTERFACE} up")
        _run(user, net, "ip link set lo up")
        if rate_bits:
            _limit(user, net, INTERFACE, rate_bits)
            _limit(user, switch, port, rate_bits)
    return network


def _limit(user: int | None, net: int, interface: str, rate_bits: int) -> None:
    burst = max(int(rate_bits / 8 * _BURST_S), _LEAST_BURST)
    shape = f"tbf rate {rate_bits}bit burst {burst}b latency {_LONGEST_QUEUE}"
    _run(user, net, f"tc qdisc add dev {interface} root {shape}")


def _run(user: int | None, net: int, command: str, *inherited: int) -> None:
    done = subprocess.run(
        command.split(),
        preexec_fn=lambda: _enter(user, net),
        pass_fds=inherited,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        raise NoNamespaces(f"`{command}` failed: {done.stderr.strip()}")


def _new_namespaces(user: int | None, *, with_user: bool = False) -> tuple[int | None, int]:
    """Descriptors of the user namespace that owns a new network namespace (None: this process's own) and of that."""
    made, make = os.pipe()
    end, keep = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(made)
        os.close(keep)
        _in_child(lambda: _unshare(user, with_user=with_user), make)
        os.read(end, 1)  # ends when the parent closes its end, or dies
        os._exit(0)
    os.close(make)
    os.close(end)
    try:
        with open(made, encoding="utf-8") as pipe:
            problem = pipe.readline()
        if problem != "\n":
            raise NoNamespaces(problem.strip() or "the process that made them died")
        owner = os.open(f"/proc/{child}/ns/user", os.O_RDONLY) if with_user else user
        return owner, os.open(f"/proc/{child}/ns/net", os.O_RDONLY)
    finally:
        os.close(keep)
        os.waitpid(child, 0)


def _in_child(work: Callable[[], None], report: int) -> None:
    """Does the work and writes a line: empty, or what went wrong."""
    problem = ""
    try:
        work()
    except OSError as error:
        problem = f"no permission for network namespaces: {error}"
    os.write(report, f"{problem}\n".encode())
    os.close(report)


def _unshare(user: int | None, *, with_user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if user is not None:
        _call("setns", user, _NEW_USER)
    _call("unshare", _NEW_NET | (_NEW_USER if with_user else 0))
    if with_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _enter(user: int | None, net: int) -> None:
    if user is not None:
        _call("setns", user, _NEW_USER)
    _call("setns", net, _NEW_NET)


def _call(name: str, *args: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
