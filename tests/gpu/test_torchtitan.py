"""torchtitan's routed experts on GPUs, through its all-to-all and through ours."""

from __future__ import annotations

import pytest
import torch

from ep_plugin.bench import suite_torchtitan
from ep_plugin.bench.layers import EXPERTS, LIMIT, OURS, STOCK
from ep_plugin.bench.workload import Workload

pytest.importorskip("torchtitan", reason="needs torchtitan")


@pytest.mark.gpu(2)
def test_outputs_and_gradients_of_both_dispatchers() -> None:
    ranks = min(4, torch.cuda.device_count())
    sizes = Workload(ranks=ranks, tokens=130, hidden=256, topk=6, experts=8 * ranks)
    suite = suite_torchtitan.TorchtitanSuite(backend="cuda", workload=sizes, ffn=128, iterations=1)
    found = suite_torchtitan.run(suite)
    assert 0 < found["max_rel_diff"] <= LIMIT
    assert [row["impl"] for row in found["rows"]] == [STOCK, OURS, EXPERTS]
