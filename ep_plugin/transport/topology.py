"""Which ranks of a group live on which node: a pure function of what each rank reports, and a discovery of the reports.

Node numbers follow the first appearance of a node in rank order, local ranks the order of ranks within their node, so
a group may be interleaved across nodes. Every node holds the same number of ranks. A rail is the ranks that have the
same local rank on every node.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ep_plugin import env
from ep_plugin.errors import DisagreementError, NotSupported

if TYPE_CHECKING:
    import torch

    from ep_plugin.transport.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank says about where it runs.

    rank: its place in the group. host: a name that only processes of one running machine share, and of one part of it
    where the user says how many consecutive ranks of the whole job a node has.
    local_rank, local_world_size: what the launcher said, None where it said nothing or the user says more.
    device: the device as this process numbers it, "cpu" or "cuda:1". device_id: the GPU's identity on its host, empty
    for a CPU. unreachable: identities of the GPUs that this rank's GPU is known not to reach as a peer.
    ranks_per_node: what the user says, None for nothing.
    """

    rank: int
    host: str
    local_rank: int | None = None
    local_world_size: int | None = None
    device: str = "cpu"
    device_id: str = ""
    unreachable: tuple[str, ...] = ()
    ranks_per_node: int | None = None


@dataclass(frozen=True)
class NodeMap:
    """The nodes of a group: ``nodes[node]`` holds the group's ranks on that node, by local rank."""

    nodes: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def ranks_per_node(self) -> int:
        return len(self.nodes[0])

    @property
    def size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def spans_nodes(self) -> bool:
        return self.num_nodes > 1

    def node_of(self, rank: int) -> int:
        return self._places[rank][0]

    def local_rank_of(self, rank: int) -> int:
        return self._places[rank][1]

    def node_ranks(self, node: int) -> tuple[int, ...]:
        return self.nodes[node]

    def rail(self, local_rank: int) -> tuple[int, ...]:
        """The ranks with this local rank, one of each node, by node."""
        return tuple(ranks[local_rank] for ranks in self.nodes)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (node, local_rank) for node, ranks in enumerate(self.nodes) for local_rank, rank in enumerate(ranks)
        }


def build_node_map(reports: Sequence[RankReport]) -> NodeMap:
    """The node map of a group from the reports of all its ranks, in rank order.

    Ranks of one host form a node, unless the launcher says that it started several whole nodes on that host. Raises
    NotSupported, naming the nodes, when they hold different numbers of ranks, and DisagreementError when ranks do not
    say the same of their number.
    """
    if [report.rank for report in reports] != list(range(len(reports))) or not reports:
        raise ValueError(f"reports: expected one of each rank, in order, got {[report.rank for report in reports]}")
    _check_override(reports)
    nodes = _nodes_by_launch(reports)
    if len({len(ranks) for ranks in nodes}) > 1:
        listing = ", ".join(
            f"node {node} ({reports[ranks[0]].host}) has {len(ranks)}" for node, ranks in enumerate(nodes)
        )
        raise NotSupported(
            f"nodes with different numbers of ranks are not supported: expected the same on every node, got {listing}"
        )
    return NodeMap(tuple(tuple(ranks) for ranks in nodes))


def check_peer_access(
    reports: Sequence[RankReport], node_map: NodeMap, group_ranks: Sequence[int] | None = None
) -> None:
    """Raises NotSupported, naming the pair, when two GPUs of one node cannot read and write each other's memory.

    ``group_ranks``: the ranks within the group to name, by index in ``reports``; None where these are the same.
    """
    names = range(len(reports)) if group_ranks is None else group_ranks
    for ranks in node_map.nodes:
        for rank in ranks:
            blocked = set(reports[rank].unreachable)
            for peer in ranks:
                if reports[peer].device_id in blocked and reports[peer].device_id != reports[rank].device_id:
                    raise NotSupported(
                        f"GPUs without peer access are not supported: rank {names[rank]} on {reports[rank].device} "
                        f"({reports[rank].device_id}) cannot reach the memory of rank {names[peer]} on "
                        f"{reports[peer].device} ({reports[peer].device_id})"
                    )


def discover(exchange: Exchange, device: torch.device) -> tuple[NodeMap, list[RankReport]]:
    """Asks every rank of the exchange where it runs. Collective. Raises what build_node_map raises, on every rank."""
    mine = dataclasses.asdict(report_of(exchange.rank, device))
    reports = [_from_json(value) for value in exchange.all_gather("report topology", mine)]
    return build_node_map(reports), reports


def report_of(rank: int, device: torch.device) -> RankReport:
    """This process's own report, for the group's rank ``rank`` that works on ``device``."""
    from torch.distributed import get_rank

    settings, launcher = env.settings(), env.launcher()
    host, per_node = host_identity(settings.host), settings.ranks_per_node
    if per_node is not None:  # by the rank in the job, so that all of its groups see the same nodes
        host, launcher = f"{host}, node {get_rank() // per_node} of {per_node} ranks", env.Launcher()
    device_id, unreachable = _gpu_identity(device) if device.type == "cuda" else ("", ())
    return RankReport(
        rank=rank,
        host=host,
        local_rank=launcher.local_rank,
        local_world_size=launcher.local_world_size,
        device=str(device),
        device_id=device_id,
        unreachable=unreachable,
        ranks_per_node=per_node,
    )


def host_identity(alias: str | None = None) -> str:
    """A name that two processes share only on one running machine: the host's name and an id of its boot or disk.

    Machines cloned from one image share names, and containers on one machine share its boot: it takes both. ``alias``
    sets apart processes of one machine that stand for several hosts.
    """
    own = machine_identity()
    return own if alias is None else f"{alias}@{own}"


def machine_identity() -> str:
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            with open(path) as file:
                return f"{socket.gethostname()}/{file.read().strip()}"
        except OSError:
            continue
    return socket.gethostname()


def _check_override(reports: Sequence[RankReport]) -> None:
    override = reports[0].ranks_per_node
    for report in reports:
        if report.ranks_per_node != override:
            raise DisagreementError(
                f"ranks disagree on EP_PLUGIN_RANKS_PER_NODE: {override} on rank 0, {report.ranks_per_node} on rank "
                f"{report.rank}"
            )


def _nodes_by_launch(reports: Sequence[RankReport]) -> list[list[int]]:
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    nodes = [ranks for on_host in hosts.values() for ranks in _split_host(on_host)]
    return sorted(nodes, key=lambda ranks: ranks[0])


def _split_host(reports: list[RankReport]) -> list[list[int]]:
    """The nodes on one host: one, or as many as a launcher started there with all their ranks, two or more of each.

    That happens when nodes are emulated on one machine, and when machines cloned while running report one identity.
    The n-th rank with a given local rank belongs to the n-th node.
    """
    size = reports[0].local_world_size
    whole = [report.rank for report in reports]
    if size is None or size < 2 or len(reports) <= size or any(r.local_world_size != size for r in reports):
        return [whole]
    times = Counter(report.local_rank for report in reports)
    num_nodes = len(reports) // size
    if times != Counter({local_rank: num_nodes for local_rank in range(size)}):
        return [whole]
    nodes: list[list[int]] = [[] for _ in range(num_nodes)]
    seen: Counter[int | None] = Counter()
    for report in reports:
        nodes[seen[report.local_rank]].append(report.rank)
        seen[report.local_rank] += 1
    return nodes


def _gpu_identity(device: torch.device) -> tuple[str, tuple[str, ...]]:
    """The GPU's identity, and those of the GPUs seen by this process that it cannot reach."""
    import torch

    count = torch.cuda.device_count()
    index = device.index if device.index is not None else torch.cuda.current_device()
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    unreachable = [ids[i] for i in range(count) if i != index and not torch.cuda.can_device_access_peer(index, i)]
    return ids[index], tuple(unreachable)


def _from_json(value: dict[str, Any]) -> RankReport:
    return RankReport(**{**value, "unreachable": tuple(value["unreachable"])})
