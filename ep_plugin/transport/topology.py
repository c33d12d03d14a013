"""Which ranks of a group live on which node: a pure function of what each rank reports, and how ranks report it.

Nodes are numbered by their first rank. Local ranks follow the order of ranks within a node, so a group may be
interleaved across nodes. Every node holds the same number of ranks. A rail is the ranks that have the same local rank,
one on each node.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ep_plugin import env
from ep_plugin.errors import DisagreementError, NotSupported

if TYPE_CHECKING:
    import torch

    from ep_plugin.transport.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Where one rank runs.

    Attributes:
        rank: its index in the exchange.
        host: a name that only processes of one running machine share. With ``ranks_per_node`` it names a part of one.
        local_rank, local_world_size: the launcher's; None where it gives none, or ``ranks_per_node`` overrides it.
        device: as this process numbers it, "cpu" or "cuda:1".
        device_id: the GPU's identity on its host; empty for a CPU.
        unreachable: identities of the GPUs that this rank's GPU cannot reach as a peer.
        ranks_per_node: EP_PLUGIN_RANKS_PER_NODE, None where it is not set.
        rail: EP_PLUGIN_RAIL.
    """

    rank: int
    host: str
    local_rank: int | None = None
    local_world_size: int | None = None
    device: str = "cpu"
    device_id: str = ""
    unreachable: tuple[str, ...] = ()
    ranks_per_node: int | None = None
    rail: str = "auto"


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

    def node_of(self, rank: int) -> int:
        return self._places[rank][0]

    def local_rank_of(self, rank: int) -> int:
        return self._places[rank][1]

    def node_ranks(self, node: int) -> tuple[int, ...]:
        return self.nodes[node]

    def rail(self, local_rank: int) -> tuple[int, ...]:
        """The ranks with this local rank, by node."""
        return tuple(ranks[local_rank] for ranks in self.nodes)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (node, local_rank) for node, ranks in enumerate(self.nodes) for local_rank, rank in enumerate(ranks)
        }


def build_node_map(reports: Sequence[RankReport]) -> NodeMap:
    """The node map of a group.

    Ranks of one host form a node, unless the launcher started several whole nodes on that host.

    Args:
        reports: one of each rank, in rank order.

    Raises:
        ValueError: the reports are not those.
        DisagreementError: ranks have different values of EP_PLUGIN_RANKS_PER_NODE or EP_PLUGIN_RAIL.
        NotSupported: nodes hold different numbers of ranks.
    """
    if [report.rank for report in reports] != list(range(len(reports))) or not reports:
        raise ValueError(f"reports: expected one of each rank, in order, got {[report.rank for report in reports]}")
    first = reports[0]
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        for name in ("ranks_per_node", "rail"):
            mine, theirs = getattr(first, name), getattr(report, name)
            if mine != theirs:
                raise DisagreementError(
                    f"ranks disagree on EP_PLUGIN_{name.upper()}: {mine} on rank 0, {theirs} on rank {report.rank}"
                )
        hosts.setdefault(report.host, []).append(report)
    nodes = sorted(ranks for on_host in hosts.values() for ranks in _split_host(on_host))
    if len({len(ranks) for ranks in nodes}) > 1:
        listing = ", ".join(
            f"node {node} ({reports[ranks[0]].host}) has {len(ranks)}" for node, ranks in enumerate(nodes)
        )
        raise NotSupported(
            f"nodes with different numbers of ranks are not supported: expected the same on every node, got {listing}"
        )
    return NodeMap(tuple(tuple(ranks) for ranks in nodes))


def check_peer_access(reports: Sequence[RankReport], node_map: NodeMap, group_ranks: Sequence[int]) -> None:
    """Raises NotSupported, naming the pair, when two GPUs of one node cannot read and write each other's memory.

    ``group_ranks``: the rank within the group of each report, for the message.
    """
    for ranks in node_map.nodes:
        for mine in (reports[rank] for rank in ranks):
            for peer in (reports[rank] for rank in ranks):
                if peer.device_id in mine.unreachable and peer.device_id != mine.device_id:
                    raise NotSupported(
                        f"GPUs without peer access are not supported: rank {group_ranks[mine.rank]} on {mine.device} "
                        f"({mine.device_id}) cannot reach the memory of rank {group_ranks[peer.rank]} on {peer.device} "
                        f"({peer.device_id})"
                    )


def check_hosts(reports: Sequence[RankReport]) -> None:
    """Raises ValueError for a rank that does not know its host. It could be counted on one host or on several."""
    for report in reports:
        if report.ranks_per_node is None and "/" not in report.host.strip("/"):
            raise ValueError(
                f"group: expected ranks that know their host, got rank {report.rank} on {report.host!r}, which has "
                "neither a boot id nor a machine id; set EP_PLUGIN_RANKS_PER_NODE on every rank"
            )


def discover(exchange: Exchange, device: torch.device) -> tuple[NodeMap, list[RankReport]]:
    """The node map of the exchange's ranks, and their reports. Collective. Every rank raises as build_node_map does."""
    values = exchange.all_gather("report topology", dataclasses.asdict(report_of(exchange.rank, device)))
    reports = [RankReport(**{**value, "unreachable": tuple(value["unreachable"])}) for value in values]
    return build_node_map(reports), reports


def report_of(rank: int, device: torch.device) -> RankReport:
    """The report of this process, which is rank ``rank`` of an exchange and works on ``device``."""
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
        rail=settings.rail,
    )


def host_identity(alias: str | None = None) -> str:
    """A name that two processes share only on one running machine.

    It is the host's name and the id of its boot or disk. Both are needed: machines cloned from one image share names,
    and containers on one machine share its boot. ``alias`` makes one machine count as several.
    """
    own = socket.gethostname()
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            with open(path) as file:
                own = f"{own}/{file.read().strip()}"
                break
        except OSError:
            continue
    return own if alias is None else f"{alias}@{own}"


def _split_host(reports: list[RankReport]) -> list[list[int]]:
    """The nodes on one host: one, or as many as a launcher started there with all their ranks, two or more of each.

    Several are there when nodes are emulated on one machine, and when machines cloned while running report one
    identity. The n-th rank with a given local rank belongs to the n-th node.
    """
    size, ranks = reports[0].local_world_size, [report.rank for report in reports]
    if size is None or size < 2 or len(reports) <= size or any(r.local_world_size != size for r in reports):
        return [ranks]
    by_local_rank: dict[int | None, list[int]] = {}
    for report in reports:
        by_local_rank.setdefault(report.local_rank, []).append(report.rank)
    num_nodes = len(reports) // size
    if set(by_local_rank) != set(range(size)) or any(len(same) != num_nodes for same in by_local_rank.values()):
        return [ranks]
    return [sorted(node) for node in zip(*by_local_rank.values(), strict=True)]


def _gpu_identity(device: torch.device) -> tuple[str, tuple[str, ...]]:
    """The identity of the GPU, and those of the GPUs of this process that it cannot reach."""
    import torch

    count = torch.cuda.device_count()
    index = device.index if device.index is not None else torch.cuda.current_device()
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    unreachable = [ids[i] for i in range(count) if i != index and not torch.cuda.can_device_access_peer(index, i)]
    return ids[index], tuple(unreachable)
