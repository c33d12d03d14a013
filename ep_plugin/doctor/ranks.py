"""Checks across the ranks of a job: that all ranks come, that versions agree, and that ranks can share memory."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from ep_plugin import env
from ep_plugin.doctor import machine, rates, software
from ep_plugin.doctor.findings import FAILURE, OK, WARNING, Finding, ranks_said
from ep_plugin.errors import EpPluginError
from ep_plugin.transport import topology

_MAY_DIFFER = ("driver", "python")  # a warning; what else differs would stop or spoil a job


def facts(device: Any) -> dict[str, str]:
    """Returns what must be the same on all ranks, as text. "none" stands for what this rank does not have."""
    from ep_plugin.bench.provenance import hash_sources, versions

    _C = software.extension()
    found = dict.fromkeys(software.FRAMEWORKS, "none") | software.framework_versions()
    found |= {name: version or "none" for name, version in versions().items()}
    found["source of ep_plugin"] = hash_sources()[:12]
    found["build"] = "none" if _C is None else f"for {getattr(_C, 'cuda_archs', 'CPUs only')}"
    found["EP_PLUGIN"] = ",".join(env.integrations()) or "none"
    found["EP_PLUGIN_FALLBACK"] = "none"
    with contextlib.suppress(ValueError):  # software.check_variables says it
        found["EP_PLUGIN_FALLBACK"] = env.settings().fallback or "none"
    found["driver"] = machine.driver_version() or "none"
    found["device type"] = device.type
    return found


def choose_device() -> Any:
    """Returns the GPU of this rank if PyTorch and the build serve GPUs, else the CPU."""
    import torch

    if not (torch.cuda.is_available() and hasattr(software.extension(), "cuda")):
        return torch.device("cpu")
    device = torch.device("cuda", (env.launcher().local_rank or 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connect(timeout_s: float) -> Finding | None:
    """Makes the default group of the launcher's ranks, over gloo.

    Returns:
        None, or why there is no group: it names the ranks that have not come, or the variable that is wrong.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if dist.is_initialized():
        return None
    started = env.launcher()
    try:
        address, port = env.master()
    except ValueError as error:
        return Finding(FAILURE, "ranks", str(error), "correct the variable or unset it")
    assert started.rank is not None and started.world_size is not None
    timeout = datetime.timedelta(seconds=timeout_s)
    serves = started.rank == 0 and not env.has_agent_store()
    try:
        tcp = TCPStore(address, port, started.world_size, serves, timeout, wait_for_workers=False)
    except RuntimeError as error:
        what = f"rank {started.rank} cannot reach the store at {address}:{port}: {_first_line(error)}"
        return Finding(FAILURE, "ranks", what, "check MASTER_ADDR, MASTER_PORT and the firewall between the hosts")
    store = PrefixStore("ep-doctor", tcp)
    keys = [f"host/{rank}" for rank in range(started.world_size)]
    store.set(keys[started.rank], json.dumps([socket.gethostname(), topology.host_identity()]))
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        what = f"{ranks_said(missing)} did not come within {timeout_s:g} s"
        return Finding(FAILURE, "ranks", what, "see what they printed; start as many ranks as WORLD_SIZE says")
    try:
        dist.init_process_group("gloo", None, timeout, started.world_size, started.rank, store)
    except RuntimeError as error:
        named_alike = [finding.what for finding in same_names([json.loads(store.get(key)) for key in keys])]
        what = "; ".join([f"all ranks came, but gloo cannot connect them: {_first_line(error)}", *named_alike])
        do = "set GLOO_SOCKET_IFNAME to the network device between the hosts, and give each host a name of its own"
        return Finding(FAILURE, "ranks", what, do)
    return None


def leave() -> None:
    """Ends the group. Rank 0 may serve the store, so it leaves after the other ranks."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):  # a rank that has died
        dist.barrier()
    dist.destroy_process_group()


def examine(local: list[Finding], timeout_s: float) -> list[Finding]:
    """Returns the findings of all ranks and across ranks, the same list on every rank. Collective over all ranks."""
    from ep_plugin.transport.exchange import Exchange

    device, exchange = choose_device(), Exchange(None, timeout_s)
    host, report = [socket.gethostname(), topology.host_identity()], None
    if not any(finding.level == FAILURE and finding.subject == "variables" for finding in local):
        report = dataclasses.asdict(topology.report_of(exchange.rank, device))
    seen = {"findings": local, "facts": facts(device), "host": host, "report": report}
    try:
        everyone = exchange.all_gather("ep-doctor: what ranks see", seen)
        found = merge([[Finding(*each) for each in rank["findings"]] for rank in everyone])
        found += compare([rank["facts"] for rank in everyone])
        found += same_names([rank["host"] for rank in everyone])
        if not all(rank["report"] for rank in everyone):
            return found
        reports = [topology.RankReport(**rank["report"]) for rank in everyone]
        places, node_map = map_nodes(reports)
        found += places
        if node_map is None or len({report.device.partition(":")[0] for report in reports}) > 1:
            return found
        mine, gbps = share_memory(node_map, exchange, device)
        shared = exchange.all_gather("ep-doctor: shared memory", [mine, gbps])
    except EpPluginError as error:
        return [*local, Finding(FAILURE, "ranks", str(error), "see what the ranks that it names have printed")]
    problems = merge([[Finding(*each) for each in findings] for findings, _ in shared])
    measured = [rate for _, rate in shared if rate]
    if measured and not problems:
        found.append(Finding(OK, "peer memory", "the ranks of each node map and read each other's memory"))
        found += rates.describe(node_map, min(measured), device)
    return found + problems


def merge(of_ranks: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Returns what is fine on rank 0, and each problem once, with the ranks that have it unless all ranks have it."""
    found = [finding for finding in of_ranks[0] if finding.level == OK] if of_ranks else []
    problems: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(of_ranks):
        for finding in dict.fromkeys(findings):
            if finding.level != OK:
                problems.setdefault(finding, []).append(rank)
    for finding, ranks in problems.items():
        everywhere = len(ranks) == len(of_ranks)
        found.append(finding if everywhere else finding._replace(what=f"{ranks_said(ranks)}: {finding.what}"))
    return found


def compare(of_ranks: Sequence[dict[str, str]]) -> Iterator[Finding]:
    """Names the facts that differ between ranks."""
    differs = False
    for name in of_ranks[0]:
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(of_ranks):
            holders.setdefault(theirs[name], []).append(rank)
        if len(holders) > 1:
            differs = True
            values = ", ".join(f"{value} on {ranks_said(ranks)}" for value, ranks in holders.items())
            level = WARNING if name in _MAY_DIFFER else FAILURE
            yield Finding(level, "same on ranks", f"ranks differ in {name}: {values}", "make it the same on every host")
    if not differs:
        yield Finding(OK, "same on ranks", f"versions, build and EP_PLUGIN of {ranks_said(range(len(of_ranks)))}")


def same_names(hosts: Sequence[Sequence[str]]) -> Iterator[Finding]:
    """Names hosts that are different machines but share a host name. `hosts` has (name, identity) of each rank."""
    machines: dict[str, dict[str, list[int]]] = {}
    for rank, (name, identity) in enumerate(hosts):
        machines.setdefault(name, {}).setdefault(identity, []).append(rank)
    for name, identities in machines.items():
        if len(identities) > 1:
            where = " and ".join(ranks_said(ranks) for ranks in identities.values())
            what = f"{len(identities)} hosts claim the name {name!r}: those of {where}; gloo finds hosts by their names"
            yield Finding(WARNING, "host", what, "give each host a name of its own (hostnamectl set-hostname)")


def map_nodes(reports: Sequence[topology.RankReport]) -> tuple[list[Finding], topology.NodeMap | None]:
    """Returns the node map of a communicator over all ranks, or None and why ep_plugin would refuse such a group."""
    try:
        topology.check_hosts(reports)
        node_map = topology.build_node_map(reports)
        topology.check_peer_access(reports, node_map, range(len(reports)))
    except ValueError as error:  # DisagreementError too
        return [Finding(FAILURE, "nodes", str(error), "set the variable alike on every rank")], None
    except EpPluginError as error:
        do = "start as many ranks on every node, on GPUs that reach each other; a group inside the job may still fit"
        return [Finding(FAILURE, "nodes", str(error), do)], None
    found = [
        Finding(OK, "nodes", f"node {node} is {ranks_said(ranks)} on {reports[ranks[0]].host}")
        for node, ranks in enumerate(node_map.nodes)
    ]
    most = software.extension().max_ranks if software.extension() else node_map.ranks_per_node
    if node_map.ranks_per_node > most:
        what = f"{node_map.ranks_per_node} ranks are on one node; a group takes at most {most} of a node"
        do = "use smaller groups, or split nodes by EP_PLUGIN_RANKS_PER_NODE"
        return [*found, Finding(FAILURE, "nodes", what, do)], None
    return found, node_map


def share_memory(node_map: topology.NodeMap, exchange: Any, device: Any) -> tuple[list[Finding], float]:
    """Maps and times the memory of this node's ranks. Returns problems, and GB/s (0: not measured). Collective."""
    from ep_plugin.transport.exchange import Exchange

    node = node_map.node_ranks(node_map.node_of(exchange.rank))
    if software.extension() is None or len(node) < 2:
        return [], 0.0
    with contextlib.closing(Exchange(None, exchange.timeout_s, ranks=node)) as within:
        try:
            return [], rates.copy_rate(within, device)
        except (EpPluginError, RuntimeError, OSError, ValueError) as error:
            do = "ranks of one node must run on one machine, as one user, in one container or pod, and see the same "
            do += "/proc; if two machines have one identity, set EP_PLUGIN_HOST to another name on each"
            return [Finding(FAILURE, "peer memory", f"ranks cannot share memory: {error}", do)], 0.0


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
