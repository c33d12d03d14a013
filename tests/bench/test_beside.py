"""ep-bench beside: what is judged before a product is timed beside it. There is no GPU here: nothing shares SMs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin.bench import suite_beside
from ep_plugin.bench.peers import Received
from ep_plugin.bench.product import Product
from ep_plugin.bench.suite_beside import ALONE, HELD, BesideSuite, Bounded, Neighbour
from ep_plugin.bench.timing import Timing
from ep_plugin.bench.workload import Batch, Workload
from tests.ranks import run_ranks, values

RANKS = 2
WORKLOAD = Workload(ranks=RANKS, tokens=40, hidden=128, topk=2, experts=6)
CPU = torch.device("cpu")
CASES = [
    "matmul_beside_dispatch_token_major_12sm",
    *(f"matmul_beside_{name}{sms}" for sms in (12, 24, 48) for name in ("dispatch_flat_expand", "combine_flat_push")),
]


class SwappedRows(Bounded):
    """Two rows of a dispatch change places."""

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        received = super().dispatch(batch, previous)
        received.tokens[[0, 1]] = received.tokens[[1, 0]]
        return received


class LastTokenMissing(Bounded):
    """The last token of a combine is never written."""

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        out = super().combine(y, state)
        z = torch.empty_like(out)
        z[:-1] = out[:-1]
        return z


class Unstaged:
    """A stage without streams: a product and its neighbour run one after the other."""

    spoilt_beside = ""

    def __init__(self, device: torch.device) -> None:
        self.product = Product(device, torch.float32, 64)

    def hold(self, sms: int) -> None:
        pass

    def wrong(self, neighbour: Neighbour, count: int) -> str | None:
        self.product.forget()
        if neighbour.case != self.spoilt_beside:
            self.product()
        for _ in range(count):
            neighbour.enqueue()
        return "; ".join(self.product.wrong()) or None

    def repetitions(self, neighbour: Neighbour, product_us: float) -> int:
        return 2

    def time(self, neighbour: Neighbour, count: int, iterations: int) -> Timing:
        return Timing(median_us=float(count), p10_us=1.0, p90_us=2.0)


def measure(_: int, bounded: type[Bounded], spoilt: str = "") -> dict[str, Any]:
    suite_beside.Bounded, suite_beside.Stage = bounded, Unstaged  # type: ignore[misc, assignment]
    Unstaged.spoilt_beside = spoilt
    return suite_beside.measure(CPU, BesideSuite(workload=WORKLOAD, iterations=1))


def test_every_neighbour_is_judged_and_timed() -> None:
    for found in values(run_ranks(RANKS, measure, Bounded)):
        assert found["wrong"] == [] and found["base_case"] == ALONE
        held = [f"matmul_beside_hold_{sms}sm" for sms in HELD]
        assert [row["case"] for row in found["rows"]] == [ALONE, *held, *CASES]
        assert [row["median_us"] for row in found["rows"]] == [1.0] * (1 + len(held)) + [2.0] * len(CASES)


@pytest.mark.parametrize(
    ("bounded", "spoilt", "case", "what"),
    [
        (SwappedRows, "", CASES[0], "tokens: expected the oracle's values, got others in 2 of"),
        (LastTokenMissing, "", CASES[2], "relative errors"),
        (Bounded, ALONE, ALONE, "matmul: expected a relative error of at most 1e-2, got nan"),
        (Bounded, "matmul_beside_hold_24sm", "matmul_beside_hold_24sm", "got nan"),
        (Bounded, CASES[3], CASES[3], "got nan"),
    ],
    ids=["a dispatch", "a combine", "the product alone", "a product beside held SMs", "a product beside a dispatch"],
)
def test_nothing_is_timed_where_something_is_wrong(bounded: type[Bounded], spoilt: str, case: str, what: str) -> None:
    for found in values(run_ranks(RANKS, measure, bounded, spoilt)):
        assert found["rows"] == [] and len(found["wrong"]) == RANKS
        for rank, sentence in enumerate(found["wrong"]):
            assert sentence.startswith(f"rank {rank}: {case}: ") and what in sentence
