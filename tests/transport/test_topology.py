"""Node maps of made-up clusters, and the discovery on this machine."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from ep_plugin import env
from ep_plugin.errors import DisagreementError, NotSupported
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.topology import NodeMap, RankReport, build_node_map, check_peer_access, discover, host_identity
from tests.transport.memory_ranks import run


def cluster(hosts: list[str], **fields) -> list[RankReport]:
    """One report per entry of ``hosts``, with ``fields`` on all of them."""
    return [RankReport(rank=rank, host=host, **fields) for rank, host in enumerate(hosts)]


def check_consistent(node_map: NodeMap, reports: list[RankReport]) -> None:
    """What holds for every node map: each rank is in one place, and the places agree with every view of the map."""
    size = len(reports)
    assert node_map.num_nodes * node_map.ranks_per_node == size
    assert sorted(rank for node in range(node_map.num_nodes) for rank in node_map.node_ranks(node)) == list(range(size))
    for rank in range(size):
        node, local_rank = node_map.node_of(rank), node_map.local_rank_of(rank)
        assert node_map.node_ranks(node)[local_rank] == rank
        assert node_map.rail(local_rank)[node] == rank
    for node in range(node_map.num_nodes):
        ranks = node_map.node_ranks(node)
        assert list(ranks) == sorted(ranks)
        assert len({reports[rank].host for rank in ranks}) == 1
    assert [node_map.node_ranks(node)[0] for node in range(node_map.num_nodes)] == sorted(node_map.rail(0))


@pytest.mark.parametrize(
    "num_nodes, per_node", [(1, 1), (1, 8), (2, 4), (3, 5), (8, 1), (128, 8), (1024, 1), (1, 1024)]
)
def test_contiguous_clusters(num_nodes, per_node):
    reports = cluster([f"host{node}" for node in range(num_nodes) for _ in range(per_node)])
    node_map = build_node_map(reports)
    check_consistent(node_map, reports)
    assert (node_map.num_nodes, node_map.ranks_per_node) == (num_nodes, per_node)
    last = num_nodes * per_node - 1
    assert (node_map.node_of(last), node_map.local_rank_of(last)) == (num_nodes - 1, per_node - 1)
    assert node_map.rail(per_node - 1) == tuple(range(per_node - 1, last + 1, per_node))


def test_interleaved_ranks_are_numbered_by_first_appearance():
    reports = cluster(["b", "a", "b", "a", "a", "b"])
    node_map = build_node_map(reports)
    check_consistent(node_map, reports)
    assert node_map.nodes == ((0, 2, 5), (1, 3, 4))
    assert node_map.rail(1) == (2, 3)


@pytest.mark.parametrize("seed", range(5))
def test_any_permutation_of_an_even_cluster(seed):
    hosts = [f"host{node}" for node in range(32) for _ in range(8)]
    random.Random(seed).shuffle(hosts)
    reports = cluster(hosts)
    node_map = build_node_map(reports)
    check_consistent(node_map, reports)
    assert (node_map.num_nodes, node_map.ranks_per_node) == (32, 8)


def test_uneven_nodes_are_refused_by_name_and_count():
    reports = cluster(["a"] * 8 + ["b"] * 8 + ["c"] * 7)
    with pytest.raises(NotSupported, match=r"node 0 \(a\) has 8, node 1 \(b\) has 8, node 2 \(c\) has 7"):
        build_node_map(reports)


def test_override_must_be_the_same_everywhere():
    reports = [
        RankReport(rank=0, host="a", ranks_per_node=1),
        RankReport(rank=1, host="a", ranks_per_node=2),
    ]
    with pytest.raises(DisagreementError, match="EP_PLUGIN_RANKS_PER_NODE: 1 on rank 0, 2 on rank 1"):
        build_node_map(reports)


def launched(local_ranks: list[int], local_world_size: int) -> list[RankReport]:
    return [
        RankReport(rank=rank, host="a", local_rank=local_rank, local_world_size=local_world_size)
        for rank, local_rank in enumerate(local_ranks)
    ]


@pytest.mark.parametrize(
    "local_ranks, local_world_size, nodes",
    [
        ([0, 1, 2, 3], 4, ((0, 1, 2, 3),)),
        ([0, 1, 0, 1], 2, ((0, 1), (2, 3))),
        ([0, 0, 1, 1], 2, ((0, 2), (1, 3))),
        ([0, 2], 4, ((0, 1),)),
        ([0, 0, 0, 0], 1, ((0, 1, 2, 3),)),
        ([0, 1, 0], 2, ((0, 1, 2),)),
    ],
    ids=["one launch", "two launches", "two, interleaved", "part of a launch", "inherited by all", "part of two"],
)
def test_launches_on_one_host(local_ranks, local_world_size, nodes):
    assert build_node_map(launched(local_ranks, local_world_size)).nodes == nodes


def test_reports_must_cover_the_group_in_order():
    with pytest.raises(ValueError, match=r"reports: expected one of each rank, in order, got \[1, 0\]"):
        build_node_map(cluster(["a", "a"])[::-1])
    with pytest.raises(ValueError, match=r"got \[\]"):
        build_node_map([])


def gpus(blocked: dict[int, tuple[str, ...]], ids: list[str], hosts: list[str]) -> list[RankReport]:
    return [
        RankReport(rank=r, host=hosts[r], device=f"cuda:{r}", device_id=ids[r], unreachable=blocked.get(r, ()))
        for r in range(len(ids))
    ]


def test_missing_peer_access_names_the_pair():
    reports = gpus({2: ("GPU-0",)}, ["GPU-0", "GPU-1", "GPU-2"], ["a"] * 3)
    with pytest.raises(NotSupported, match=r"rank 2 on cuda:2 \(GPU-2\) cannot reach .* rank 0 on cuda:0 \(GPU-0\)"):
        check_peer_access(reports, build_node_map(reports), range(3))


def test_peer_access_is_asked_for_within_a_node_and_between_different_gpus_only():
    across = gpus({0: ("GPU-1",)}, ["GPU-0", "GPU-1"], ["a", "b"])
    check_peer_access(across, build_node_map(across), range(2))
    outsider = gpus({0: ("GPU-7",)}, ["GPU-0", "GPU-1"], ["a", "a"])
    check_peer_access(outsider, build_node_map(outsider), range(2))
    shared = gpus({0: ("GPU-0",)}, ["GPU-0", "GPU-0"], ["a", "a"])
    check_peer_access(shared, build_node_map(shared), range(2))


def test_host_identity_is_stable_and_not_only_a_name():
    name, boot = host_identity().split("/", 1)
    assert name and len(boot) >= 32
    assert host_identity() == host_identity()


def _discover(rank: int, size: int) -> None:
    exchange = Exchange(timeout_s=30.0)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "EP_PLUGIN_RANKS_PER_NODE"):
        env.os.environ.pop(name, None)
    node_map, reports = discover(exchange, torch.device("cpu"))
    assert node_map.nodes == (tuple(range(size)),)
    assert [report.rank for report in reports] == list(range(size))
    assert {(report.host, report.device, report.unreachable) for report in reports} == {(host_identity(), "cpu", ())}

    env.os.environ["EP_PLUGIN_RANKS_PER_NODE"] = "2"
    node_map, _ = discover(exchange, torch.device("cpu"))
    assert node_map.nodes == ((0, 1), (2, 3))

    # The same nodes in every group, whichever ranks it has, and whatever the launcher says.
    env.os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    for members, nodes in ([0, 2], ((0,), (1,))), ([2, 3], ((0, 1),)), ([3, 0, 2, 1], ((0, 2), (1, 3))):
        group = dist.new_group(members, sort_ranks=False)
        if rank in members:
            assert discover(Exchange(group), torch.device("cpu"))[0].nodes == nodes
    uneven = dist.new_group([0, 1, 2])
    if rank < 3:
        with pytest.raises(
            NotSupported, match="node 0 .* node 0 of 2 ranks.* has 2, node 1 .* node 1 of 2 ranks.* has 1"
        ):
            discover(Exchange(uneven), torch.device("cpu"))

    env.os.environ["EP_PLUGIN_RANKS_PER_NODE"] = "1" if rank else "2"
    with pytest.raises(DisagreementError, match="EP_PLUGIN_RANKS_PER_NODE: 2 on rank 0, 1 on rank 1"):
        discover(exchange, torch.device("cpu"))

    env.os.environ.update(EP_PLUGIN_RANKS_PER_NODE="4", EP_PLUGIN_HOST=f"half{rank // 2}")
    node_map, _ = discover(exchange, torch.device("cpu"))
    assert node_map.nodes == ((0, 1), (2, 3)), "it splits hosts, and joins none"
    del env.os.environ["EP_PLUGIN_HOST"]

    del env.os.environ["EP_PLUGIN_RANKS_PER_NODE"]
    env.os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    node_map, _ = discover(exchange, torch.device("cpu"))
    assert node_map.nodes == ((0, 1), (2, 3))


def test_discovery_on_this_machine():
    run(4, _discover)
