"""Suites of ep-bench that only GPUs have, small."""

from __future__ import annotations

import pytest

from ep_plugin.bench import suite_collectives, suite_overlap
from ep_plugin.bench.collective_peers import PEERS
from ep_plugin.bench.suite_collectives import GATHER, SCATTER, CollectiveSuite
from ep_plugin.bench.suite_overlap import ALONE, MIB, OverlapSuite


@pytest.mark.gpu(2)
@pytest.mark.parametrize("what", [GATHER, SCATTER])
def test_every_peer_of_a_collective_is_right_and_timed_or_left_out_by_name(what: str) -> None:
    suite = CollectiveSuite(what=what, backend="cuda", ranks=2, nodes=1, sizes=(MIB, 32 * MIB), iterations=3)
    found = suite_collectives.run(suite)
    impls = {row["impl"] for row in found["rows"]}
    assert {"ep_plugin", "nccl"} <= impls
    for impl in PEERS[what, "cuda"].keys() - impls:
        assert any(sentence.startswith(f"{impl} is left out") for sentence in found["left_out"])
    assert not any("invalid argument" in sentence for sentence in found["left_out"])  # of the default stream
    assert all(row["sms"] is not None for row in found["rows"] if row["impl"].startswith("ep_plugin"))


@pytest.mark.gpu(2)
def test_a_gather_beside_products_is_right_and_timed() -> None:
    suite = OverlapSuite(ranks=2, sizes=(64 * MIB,), iterations=3)
    found = suite_overlap.run(suite)
    rows = {row["impl"]: row for row in found["rows"]}
    assert {"matmul", "ep_plugin", "ep_plugin, foreign output", "nccl"} <= rows.keys()
    assert rows["matmul"]["case"] == ALONE and rows["ep_plugin"]["sms"] == 0
    (excess,) = found["excess_us"].values()
    assert excess.keys() == rows.keys() - {"matmul"}
    # A way to gather is timed or left out by name.
    for impl in {"nccl zero-cta", "low-contention"} - rows.keys():
        assert any(sentence.startswith(f"{impl} is left out") for sentence in found["left_out"])
