"""Suites of ep-bench that only GPUs have, small."""

from __future__ import annotations

import pytest

from ep_plugin.bench.suites.collectives import MIB, AllGatherSuite, CollectiveSuite, ReduceScatterSuite
from ep_plugin.bench.suites.host import HostSuite
from ep_plugin.bench.suites.moe import LowLatencySuite, MoeSuite
from ep_plugin.bench.suites.overlap import ALONE, OverlapSuite
from ep_plugin.bench.suites.stand_in import StandInSuite
from ep_plugin.bench.suites.wire import WireSuite

LOW_LATENCY = ("dispatch_bf16", "dispatch_fp8", "combine_bf16")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", [AllGatherSuite, ReduceScatterSuite])
def test_both_implementations_of_a_collective_are_right_and_timed(kind: type[CollectiveSuite]) -> None:
    found = kind(backend="cuda", ranks=2, size=[MIB, 32 * MIB], iterations=3).run()
    assert {"ep_plugin", "nccl"} <= {row["impl"] for row in found["rows"]}
    assert all(row["sms"] is not None for row in found["rows"] if row["impl"].startswith("ep_plugin"))


@pytest.mark.gpu(2)
def test_communication_beside_products_is_right_and_timed() -> None:
    sizes = {"tokens": 256, "hidden": 1024, "topk": 4, "experts": 16}
    found = OverlapSuite(backend="cuda", ranks=2, size=[64 * MIB], iterations=3, **sizes).run()
    rows = {(row["case"], row["impl"]): row for row in found["rows"]}
    assert (ALONE, "matmul") in rows and rows["products_beside_64MiB", "ep_plugin"]["sms"] == 0
    gathers = {"ep_plugin", "ep_plugin, foreign output", "nccl"}
    assert {impl for case, impl in rows if case == "products_beside_64MiB"} == gathers
    for case in ("products_beside_dispatch", "products_beside_combine"):
        assert {impl for name, impl in rows if name == case} == {"ep_plugin", "nccl_all_to_all"}
        assert rows[case, "ep_plugin"]["sms"]


@pytest.mark.gpu(1)
def test_ranks_that_share_a_gpu_are_right_and_timed() -> None:
    found = StandInSuite(backend="cuda", share=[2, 4], tokens=[1, 20], iterations=3).run()
    rows = {(row["case"], row["impl"]): row for row in found["rows"]}
    for name in (f"{what}_t{tokens}_x{share}" for what in LOW_LATENCY for tokens in (1, 20) for share in (2, 4)):
        assert rows[name, "ep_plugin"]["sms"] and (name, "predicted") in rows


@pytest.mark.gpu(1)
def test_calls_of_the_host_are_timed() -> None:
    found = HostSuite(backend="cuda", ranks=1, iterations=2, calls=3).run()
    assert {("all_gather", "nccl"), ("combine", "ep_plugin")} <= {(row["case"], row["impl"]) for row in found["rows"]}


@pytest.mark.gpu(2)
def test_low_latency_is_right_and_timed_beside_nccl() -> None:
    found = LowLatencySuite(backend="cuda", ranks=2, tokens=[1, 20], iterations=3, peer=["all_to_all"]).run()
    rows = {(row["case"], row["impl"]) for row in found["rows"]}
    for name in (f"{what}_t{tokens}" for what in LOW_LATENCY for tokens in (1, 20)):
        assert {(name, "ep_plugin"), (name, "nccl_all_to_all")} <= rows


@pytest.mark.gpu(1)
def test_one_rank_has_no_floor_because_no_rows_cross() -> None:
    sizes = {"tokens": 64, "hidden": 1024, "topk": 4, "experts": 16}
    found = MoeSuite(backend="cuda", ranks=1, iterations=2, case=["roundtrip*"], peer=["all_to_all"], **sizes).run()
    assert {row["impl"] for row in found["rows"]} == {"ep_plugin", "nccl_all_to_all"}


@pytest.mark.gpu(2)
def test_every_copy_over_the_links_is_right_and_timed() -> None:
    found = WireSuite(backend="cuda", ranks=2, iterations=2).run()
    assert {"store_sm16", "tma_store_c14336_sm16", "ce_push"} <= {row["case"] for row in found["rows"]}
