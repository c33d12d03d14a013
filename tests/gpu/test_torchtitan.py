"""torchtitan's routed experts on GPUs, through its all-to-all and through ours."""

from __future__ import annotations

import pytest
import torch

from ep_plugin.bench.suites.layers import EXPERTS, LIMIT, OURS, STOCK, LayersSuite

pytest.importorskip("torchtitan", reason="needs torchtitan")


@pytest.mark.gpu(2)
def test_outputs_and_gradients_of_both_dispatchers() -> None:
    ranks = min(4, torch.cuda.device_count())
    sizes = {"ranks": ranks, "tokens": 130, "hidden": 256, "topk": 6, "experts": 8 * ranks}
    found = LayersSuite(backend="cuda", framework="torchtitan", ffn=128, iterations=1, **sizes).run()
    assert 0 < found["max_rel_diff"] <= LIMIT
    assert [row["impl"] for row in found["rows"]] == [STOCK, OURS, EXPERTS]
