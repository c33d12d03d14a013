"""The suite `moe_sweep`: dispatch and combine over one size at a time, against the headline.

H, K and E at as many bytes on the wire as the headline has: T follows. T, the skew of the routing and, on GPUs, the SMs
by themselves, the other sizes as they are. `t512` is the headline with T = 512, `skew2` with twice the mean for rank 0,
`sms12` with 12 SMs for all kernels that move rows, which are one kernel for each operation, as in the suite `moe`'s
cases `12total`.
"""

from __future__ import annotations

import fnmatch
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ep_plugin.bench import provenance
from ep_plugin.bench.cases import Peers, cases_of
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.results import SMS_ARE, Row, result
from ep_plugin.bench.specs import COMBINE, DEFAULT_SMS, DISPATCH, FLAT, Sms, Spec, in_all, select
from ep_plugin.bench.suite_moe import time_cases
from ep_plugin.bench.wire import best_sm_store_rate
from ep_plugin.bench.workload import SHORT_NAMES, Workload, crossing_per_token
from ep_plugin.moe.high_throughput.sms import usable_sms

SUITE = "moe_sweep"
HEADLINE = "headline"
SUMMABLE = tuple(name for name in SHORT_NAMES if name != "float8")
# Sizes of the workload, by how cases call them, and what each may be.
EQUAL_BYTES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "h": ("hidden", (2048, 2880, 4096, 5120, 7168, 8192)),
    "k": ("topk", (1, 2, 4, 6, 8, 10, 16)),
    "e": ("experts", (8, 64, 128, 256, 384, 512)),
}
BY_THEMSELVES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "t": ("tokens", (128, 512, 1024, 2048, 4096, 8192)),
    "skew": ("skew", (1.25, 1.5, 2, 3, 4)),
}
MOST_TOKENS = 2  # times the headline's
SMS = (4, 8, 12, 16, 24, 48, 96)


@dataclass(frozen=True, kw_only=True)
class SweepSuite:
    """workload: the headline. cases: patterns of names; empty: all. sms: in place of the cases' own."""

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
        reason = self._no_sms()
        if reason is None:
            every += self._over_sms()
        for pattern in self.cases:
            if reason and _matching(self._over_sms(), pattern) and not _matching(every, pattern):
                raise ValueError(f"case: expected none over SMs, since {reason}, got {pattern!r}")
        return every[:2] + [spec for spec in select(every, self.cases) if spec not in every[:2]]

    def left_out(self) -> list[str]:
        """Why no case that was asked for is over SMs; nothing where some are."""
        reason = self._no_sms()
        asked = not self.cases or any(_matching(self._over_sms(), pattern) for pattern in self.cases)
        return [f"over SMs: left out, since {reason}"] if reason and asked else []

    def workloads(self) -> dict[str, Workload]:
        """The headline's sizes, and those with one changed, by the change's name; what cannot be is left out."""
        found = {HEADLINE: self.workload}
        for letters, (size, values) in (EQUAL_BYTES | BY_THEMSELVES).items():
            for value in values:
                too_large = size == "tokens" and value > MOST_TOKENS * self.workload.tokens
                if too_large or value == getattr(self.workload, size):
                    continue
                try:
                    changed = replace(self.workload, **{size: value})
                except ValueError:
                    continue
                found[f"{letters}{value:g}"] = self._at_equal_bytes(changed) if letters in EQUAL_BYTES else changed
        return found

    def _at_equal_bytes(self, changed: Workload) -> Workload:
        """With as many tokens as make the headline's bytes."""
        target = self.workload.tokens * crossing_per_token(self.workload) * self.workload.hidden
        return replace(changed, tokens=max(1, round(target / crossing_per_token(changed) / changed.hidden)))

    def _no_sms(self) -> str | None:
        if self.backend == "cpu":
            return "kernels on CPUs run on no SMs"
        return f"all cases run on {self.sms}" if str(self.sms) else None

    def _over_sms(self) -> list[Spec]:
        return [spec for sms in SMS for spec in self._pair(f"sms{sms}", self.workload, in_all(sms))]

    def _pair(self, change: str, sizes: Workload, sms: Sms = DEFAULT_SMS) -> list[Spec]:
        short = SHORT_NAMES[self.dtype]
        return [
            Spec(
                name=f"{what}_flat_{short}_{change}",
                what=what,
                dtype=self.dtype,
                layout=FLAT,
                workload=sizes,
                sms=sms,
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
    specs, left_out = _that_fit(suite, device)
    cases = cases_of(specs, device, Peers(), suite.sms)
    found = time_cases(device, cases, len(specs), suite.iterations, None if rate is None else rate.gb_s)
    about = {"sms_are": SMS_ARE, "headline": asdict(suite.workload), "left_out": left_out}
    return {**found, **about, "efficiency": relative_efficiency(found["rows"])}


def _that_fit(suite: SweepSuite, device: torch.device) -> tuple[list[Spec], list[str]]:
    """The cases that this device has SMs for, and a sentence for each of the others."""
    specs, usable = suite.specs(), usable_sms(device)
    fitting = [spec for spec in specs if (spec.sms.dispatch or 0) <= usable]
    reason = f"left out, since kernels may hold at most {usable} of this device's SMs"
    return fitting, suite.left_out() + [f"{spec.name}: {reason}" for spec in specs if spec not in fitting]


def _matching(specs: list[Spec], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(spec.name, pattern) for spec in specs)


def relative_efficiency(rows: list[Row]) -> dict[str, float]:
    """By case: bytes over time, which is floor over time but for a factor, relative to the headline's."""
    speed = {row["case"]: row["bytes_wire"] / row["median_us"] for row in rows if row["impl"] == "ep_plugin"}
    return {case: round(found / speed[_headline_of(case)], 3) for case, found in speed.items()}


def _headline_of(case: str) -> str:
    return f"{case.rpartition('_')[0]}_{HEADLINE}"
