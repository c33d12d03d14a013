"""`ep-bench low-latency-stand-in`: its rows and its comparison, with ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin import _C
from ep_plugin.bench.suite import measured
from ep_plugin.bench.suites.stand_in import StandInSuite
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from tests.ranks import run_ranks, values

SIZES = {"iterations": 1, "hidden": 128, "topk": 2, "experts": 6, "dtype": "float32"}
SUITE = StandInSuite(backend="cpu", share=[3], tokens=[3, 20], rate=50.0, **SIZES)

WRONG = {"dispatch": "tokens: expected the oracle's values", "combine": "relative errors"}


def measure(rank: int, _: int = 1) -> dict[str, Any]:
    return measured(torch.device("cpu"), SUITE)


def check_rows(found: dict[str, Any]) -> None:
    rows = {(row["case"], row["impl"]): row for row in found["rows"]}
    cases = [f"dispatch{half}_{kind}" for half in ("", "_send", "_receive") for kind in ("fp32", "fp8")]
    cases += [f"combine{half}_fp32" for half in ("", "_send", "_receive")]
    expected = {(f"launch_{kind}_t{tokens}_x3", "ep_plugin") for tokens in (3, 20) for kind in ("fp32", "fp8")}
    for name in (f"{case}_t{tokens}_x3" for tokens in (3, 20) for case in cases):
        expected |= {(name, "ep_plugin"), (name, "predicted")}
        if "_receive" not in name:
            expected.add((name, "floor"))
    assert set(rows) == expected
    case, launch = "dispatch_fp32_t20_x3", rows["launch_fp32_t20_x3", "ep_plugin"]
    floor_us = rows[case, "ep_plugin"]["bytes_wire"] / 50.0 / 1e3
    assert rows[case, "floor"]["median_us"] == pytest.approx(max(0.1, floor_us), abs=0.06)
    total = rows[case, "ep_plugin"]["median_us"] + rows[case, "floor"]["median_us"] - launch["median_us"]
    assert rows[case, "predicted"]["median_us"] == pytest.approx(max(0.1, total), abs=0.06)


def test_every_case_has_its_rows() -> None:
    found = values(run_ranks(1, measure))[0]
    check_rows(found)
    assert found["notes"][1].startswith("a communicator for T = 3 takes ")


def _wrong(rank: int, kind: type[Any], halves: bool) -> list[str]:
    """What is said of ranks whose operations, whole or in halves, leave half of each result's first row behind."""

    def wrongly(run: Any) -> Any:
        def run_wrongly(self: Any, *given: Any) -> Any:
            made = run(self, *given)
            if self.name == kind.name and isinstance(made, tuple):  # no started operation
                row = made[0].flatten(end_dim=-2)[0]
                row[: len(row) // 2] = 0
            return made

        return run_wrongly

    if halves:
        _C.StartedOperation.collect = wrongly(_C.StartedOperation.collect)  # type: ignore[method-assign]
    else:
        kind.run = wrongly(kind.run)
    return measure(rank)["wrong"]


@pytest.mark.parametrize("halves", [["_send", "_receive"], [""]], ids=["halves", "whole"])
@pytest.mark.parametrize(("kind", "what"), [(LowLatencyDispatch, "dispatch"), (LowLatencyCombine, "combine")])
def test_wrong_results_are_not_timed(kind: type[Any], what: str, halves: list[str]) -> None:
    (found,) = values(run_ranks(1, _wrong, kind, len(halves) == 2))
    assert "rows" not in found
    for half in halves:
        start = f"rank 0: {what}{half}_fp32_t3_x3 by ep_plugin: "
        assert any(text.startswith(start) and WRONG[what] in text for text in found)
    if halves[1:]:  # the whole operation is right
        assert not any(f" {what}_fp32_t3_x3 by " in text for text in found)


@pytest.mark.parametrize(
    ("given", "expected"), [({"ranks": 2}, "ranks"), ({"rate": 0.0}, "rate"), ({"share": [4]}, "experts")]
)
def test_bad_options(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}: expected"):
        StandInSuite(**{"backend": "cpu", "share": [3], **SIZES, **given})
