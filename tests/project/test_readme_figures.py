"""README's tables say what the files under benchmarks/results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOE = {
    "dispatch, router output to rows grouped by expert": "dispatch_flat_bf16",
    "the same over a known routing": "dispatch_cached_bf16",
    "combine, weights applied": "combine_flat_bf16",
    "dispatch, one row per token": "dispatch_token_major_bf16",
    "dispatch, FP8 rows and scales": "dispatch_flat_fp8",
}
SIZES = [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
COLLECTIVES = {
    "all-gather, 4 × H200": "h200x4/allgather",
    "reduce-scatter, 4 × H200, on 24 SMs": "h200x4/reduce_scatter",
    "reduce-scatter, 2 × H200, on 64 SMs, the default now": "h200x2/reduce_scatter",
}
TRAINING = {
    "Qwen3-30B-A3B's widths, 4 layers, transformers": ("h200x2/train_qwen3_30b_a3b_4_layers", "all_to_all"),
    "DeepSeek-V3's widths, 4 layers, Megatron-core": ("h200x4/train_deepseek_v3_megatron", "alltoall"),
    "DeepSeek-V3's widths, 2 layers, transformers": ("h200x2/train_deepseek_v3_hf_2_layers", "all_to_all"),
    "Qwen3-4B's widths, 36 layers, FSDP2 alone; 62,864 without any communication": ("h200x4/fsdp2", "stock"),
}


def _cells(label: str) -> list[str]:
    """Of README's row of that name, without the name."""
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {label} |")]
    assert len(rows) == 1, f"expected one row {label!r}, got {len(rows)}"
    return [cell.strip() for cell in rows[0].strip("|").split("|")][1:]


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _median(result: dict[str, Any], case: str, impl: str) -> float:
    (found,) = (row["median_us"] for row in result["rows"] if (row["case"], row["impl"]) == (case, impl))
    return found


@pytest.mark.parametrize("label", MOE)
def test_dispatch_and_combine(label: str) -> None:
    expected = []
    for gpus in (4, 2):
        result = _result(f"h200x{gpus}/moe_ht")
        ours, theirs, floor = (_median(result, MOE[label], impl) for impl in ("ep_plugin", "nccl_all_to_all", "floor"))
        expected += [f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.1f} ×", *([f"{floor:.0f}"] if gpus == 4 else [])]
    assert _cells(label) == expected


@pytest.mark.parametrize("label", COLLECTIVES)
def test_collectives(label: str) -> None:
    result = _result(COLLECTIVES[label])
    pairs = [(_median(result, str(size), "ep_plugin"), _median(result, str(size), "nccl")) for size in SIZES]
    assert _cells(label) == [f"{ours:.0f} ({theirs:.0f})" for ours, theirs in pairs]


@pytest.mark.parametrize("label", TRAINING)
def test_training(label: str) -> None:
    name, reference = TRAINING[label]
    speeds = _result(name)["tokens_per_s"]
    ours = next(iter(speeds)) if reference != "stock" else "ep_plugin"
    hardware = f"{name[5]} × H200"
    expected = [
        hardware,
        f"{speeds[reference]:,.0f}",
        f"{speeds[ours]:,.0f}",
        f"{speeds[ours] / speeds[reference]:.2f} ×",
    ]
    assert _cells(label) == expected
    if "without any communication" in label:
        assert f"{speeds['no communication']:,.0f} without" in label
