"""Suites of ep-bench that only GPUs have, small."""

from __future__ import annotations

import pytest

from ep_plugin.bench import suite_overlap
from ep_plugin.bench.suite_overlap import ALONE, MIB, OverlapSuite


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
