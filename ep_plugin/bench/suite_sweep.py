"""The suite `moe_sweep`: dispatch and combine over H, K and E, at as many bytes on the wire as the headline has."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ep_plugin.bench import provenance
from ep_plugin.bench.cases import Peers, cases_of
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.results import SMS_ARE, Row, result
from ep_plugin.bench.specs import COMBINE, DEFAULT_SMS, DISPATCH, FLAT, Sms, Spec, select
from ep_plugin.bench.suite_moe import time_cases
from ep_plugin.bench.wire import best_sm_store_rate
from ep_plugin.bench.workload import SHORT_NAMES, Workload, crossing_per_token

SUITE = "moe_sweep"
HEADLINE = "headline"
SUMMABLE = tuple(name for name in SHORT_NAMES if name != "float8")
VALUES = {
    "hidden": (2048, 2880, 4096, 5120, 7168, 8192),
    "topk": (1, 2, 4, 6, 8, 10, 16),
    "experts": (8, 64, 128, 256, 384, 512),
}
_LETTERS = {"hidden": "h", "topk": "k", "experts": "e"}


@dataclass(frozen=True, kw_only=True)
class SweepSuite:
    """One size is changed at a time; T follows, so that as many bytes cross as with `workload`, the headline."""

    backend: str
    workload: Workload
    dtype: str
    iterations: int
    cases: tuple[str, ...] = ()
    sms: Sms = DEFAULT_SMS

    def __post_init__(self) -> None:
        if self.dtype not in SUMMABLE:
            raise ValueError(f"dtype: expected one of {', '.join(SUMMABLE)}, which can be summed, got {self.dtype!r}")
        if self.workload.ranks < 2:
            raise ValueError(f"ranks: expected at least 2, whose rows cross between them, got {self.workload.ranks}")
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")
        self.specs()

    def specs(self) -> list[Spec]:
        """The cases, the headline's always and first. ValueError when a pattern matches none."""
        every = [spec for change, sizes in self.workloads().items() for spec in self._pair(change, sizes)]
        chosen = select(every, self.cases)
        return every[:2] + [spec for spec in chosen if spec not in every[:2]]

    def workloads(self) -> dict[str, Workload]:
        """The headline's sizes, and those with one changed, by the change's name; what cannot be is left out."""
        headline = self.workload
        target = headline.tokens * crossing_per_token(headline) * headline.hidden
        found = {HEADLINE: headline}
        for name, values in VALUES.items():
            for value in values:
                if value == getattr(headline, name):
                    continue
                try:
                    changed = replace(headline, **{name: value})
                except ValueError:
                    continue
                tokens = max(1, round(target / crossing_per_token(changed) / changed.hidden))
                found[f"{_LETTERS[name]}{value}"] = replace(changed, tokens=tokens)
        return found

    def _pair(self, change: str, sizes: Workload) -> list[Spec]:
        short = SHORT_NAMES[self.dtype]
        return [
            Spec(
                name=f"{what}_flat_{short}_{change}",
                what=what,
                dtype=self.dtype,
                layout=FLAT,
                workload=sizes,
                peers=False,
            )
            for what in (DISPATCH, COMBINE)
        ]

    def command(self) -> str:
        sizes = {name: value for name, value in asdict(self.workload).items() if name not in ("seed", "skew")}
        words = [f"--backend {self.backend}", *(f"--{name} {value}" for name, value in sizes.items())]
        words += [f"--case '{pattern}'" for pattern in self.cases] + ([f"--sms {self.sms}"] if str(self.sms) else [])
        return " ".join(["ep-bench sweep", *words, f"--dtype {self.dtype} --iterations {self.iterations}"])


def run(suite: SweepSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.workload.ranks, suite.backend, measure, suite)
    return result(SUITE, suite.backend, suite.workload.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: SweepSuite) -> dict[str, Any]:
    """One rank's part, the same on every rank. Collective."""
    rate = best_sm_store_rate(device) if device.type == "cuda" else None
    if rate is not None and rate.wrong:
        return {"rows": [], "wrong": rate.wrong}
    specs, gb_s = suite.specs(), None if rate is None else rate.gb_s
    found = time_cases(device, cases_of(specs, device, Peers(), suite.sms), len(specs), suite.iterations, gb_s)
    return {**found, "sms_are": SMS_ARE, "efficiency": relative_efficiency(found["rows"])}


def relative_efficiency(rows: list[Row]) -> dict[str, float]:
    """By case: bytes over time, which is floor over time but for a factor, relative to the headline's."""
    speed = {row["case"]: row["bytes_wire"] / row["median_us"] for row in rows if row["impl"] == "ep_plugin"}
    return {case: round(found / speed[_headline_of(case)], 3) for case, found in speed.items()}


def _headline_of(case: str) -> str:
    return f"{case.rpartition('_')[0]}_{HEADLINE}"
