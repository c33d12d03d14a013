"""The cases of the suite `moe`: names, operations, sizes, SMs, and whether peers take part."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, replace
from typing import Any

from ep_plugin.bench.exchange.workload import SHORT_NAMES, Workload, crossing_per_token
from ep_plugin.config import LEAST_SMS, SMS_FIELDS, DispatchLayout

DISPATCH, CACHED, COMBINE, ROUNDTRIP = "dispatch", "cached", "combine", "roundtrip"
FLAT, TOKEN_MAJOR = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR
SKEW = 2.0  # of the skewed case
SMALL_TOKENS = (512, 128)  # T of the round trips whose latency counts


Sms = dict[str, Any]  # SMs, by fields of MoECommunicatorConfig; fields that are missing have their defaults


def in_all(sms: int) -> Sms:
    """So many SMs for all kernels that move rows: one kernel for each operation."""
    return {"dispatch_send_sms": sms, "dispatch_recv_sms": 0, "combine_send_sms": sms, "combine_recv_sms": 0}


# The SMs of cases with a bounded number, by the case's last word and layout.
SPLITS: dict[tuple[str, DispatchLayout], Sms] = {
    ("12sm", FLAT): {
        "dispatch_send_sms": 12,
        "dispatch_recv_sms": 48,
        "combine_send_sms": 12,
        "combine_recv_sms": 36,
    },
    ("12sm", TOKEN_MAJOR): {"dispatch_send_sms": 12, "dispatch_recv_sms": 0},
    ("12total", FLAT): in_all(12),
}


def parse_sms(text: str) -> Sms:
    """The SMs in "dispatch_send=16,dispatch_recv=48". ValueError for any other text."""
    found: Sms = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        name = f"{name}_sms"
        if name not in SMS_FIELDS or not value.isdigit() or int(value) < LEAST_SMS.get(name, 1):
            known = ", ".join(f"{each.removesuffix('_sms')}=N" for each in SMS_FIELDS)
            raise ValueError(f"sms: expected {known} or some of them, got {text!r}")
        found[name] = int(value)
    return found


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One case. peers: they do it too. capacity: ep_plugin's output has a fixed size, so its host does not wait.

    quantize: rows leave as FP8 with scales, quantised on the way. graph: a CUDA graph is replayed.
    """

    name: str
    what: str
    dtype: str
    layout: DispatchLayout
    workload: Workload
    sms: Sms = field(default_factory=dict)
    peers: bool = True
    capacity: bool = False
    quantize: bool = False
    graph: bool = False


def specs_of(
    workload: Workload, dtypes: tuple[str, ...], layouts: tuple[DispatchLayout, ...], on_gpus: bool
) -> list[Spec]:
    """All cases for these types and layouts. Cases that share inputs are next to each other."""
    found: list[Spec] = []
    for dtype in dtypes:
        for layout in layouts:
            found += _plain(workload, dtype, layout)
            found += _bounded(workload, dtype, layout) if on_gpus else []
    if FLAT in layouts and {"bfloat16", "float8"} <= set(dtypes):
        found.append(_quantised(workload))
    summable = [dtype for dtype in dtypes if _summable(dtype)]
    if FLAT in layouts and summable:
        found += _skewed(workload, summable[0])
        for tokens in SMALL_TOKENS:
            found += _small(replace(workload, tokens=tokens), summable[0], on_gpus)
    return found


def select(specs: list[Spec], patterns: list[str]) -> list[Spec]:
    """The cases whose names match any shell pattern; all without patterns. ValueError when a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(spec.name, pattern) for spec in specs):
            raise ValueError(f"case: expected a pattern for {', '.join(spec.name for spec in specs)}, got {pattern!r}")
    return [
        spec for spec in specs if not patterns or any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns)
    ]


def _summable(dtype: str) -> bool:
    return dtype != "float8"


def _plain(workload: Workload, dtype: str, layout: DispatchLayout) -> list[Spec]:
    short = SHORT_NAMES[dtype]

    def spec(name: str, what: str) -> Spec:
        return Spec(name=f"{name}_{short}", what=what, dtype=dtype, layout=layout, workload=workload)

    if layout is TOKEN_MAJOR:
        return [spec("dispatch_token_major", DISPATCH)]
    found = [spec("dispatch_flat", DISPATCH), spec("dispatch_cached", CACHED)]
    if _summable(dtype):
        found += [spec("combine_flat", COMBINE), spec("roundtrip_flat", ROUNDTRIP)]
    return found


def _bounded(workload: Workload, dtype: str, layout: DispatchLayout) -> list[Spec]:
    """Cases with few SMs; FP8 only where others have published figures."""
    words = {(FLAT, DISPATCH): "12sm 12total", (FLAT, COMBINE): "12sm 12total", (TOKEN_MAJOR, DISPATCH): "12sm"}
    if not _summable(dtype):
        words = {(FLAT, DISPATCH): "12sm"}
    return [
        Spec(
            name=f"{what}_{layout.value}_{SHORT_NAMES[dtype]}_{word}",
            what=what,
            dtype=dtype,
            layout=layout,
            workload=workload,
            sms=SPLITS[word, layout],
            peers=False,
        )
        for (place, what), listed in words.items()
        if place is layout
        for word in listed.split()
    ]


def _quantised(workload: Workload) -> Spec:
    name = f"dispatch_flat_{SHORT_NAMES['bfloat16']}_to_{SHORT_NAMES['float8']}"
    return Spec(name=name, what=DISPATCH, dtype="bfloat16", layout=FLAT, workload=workload, quantize=True)


def _skewed(workload: Workload, dtype: str) -> list[Spec]:
    name = f"dispatch_flat_{SHORT_NAMES[dtype]}_skew{SKEW:g}"
    try:
        skewed = replace(workload, skew=SKEW)
    except ValueError:  # too few ranks or experts for it
        return []
    return [Spec(name=name, what=DISPATCH, dtype=dtype, layout=FLAT, workload=skewed)]


def _small(workload: Workload, dtype: str, on_gpus: bool) -> list[Spec]:
    """Round trips of few tokens: with a fixed size of the output, the same as a graph, and with the host's wait."""
    base = Spec(name=f"roundtrip_t{workload.tokens}", what=ROUNDTRIP, dtype=dtype, layout=FLAT, workload=workload)
    found = [replace(base, capacity=True)]
    if on_gpus:
        found.append(replace(base, name=f"{base.name}_graph", capacity=True, graph=True, peers=False))
    return [*found, replace(base, name=f"{base.name}_host_wait")]


AXES = {"tokens": "t", "hidden": "h", "topk": "k", "experts": "e", "skew": "skew", "sms": "sms"}
"""What `--sweep` changes, and how the names of cases call it."""
_AT_EQUAL_BYTES = ("hidden", "topk", "experts")


def sweep_specs(workload: Workload, dtype: str, sweep: list[str]) -> list[Spec]:
    """Dispatch and combine of the workload, the headline, and of the workload with one size changed at a time.

    sweep: "AXIS=V1,V2,...", of AXES. For other H, K or E, T follows, so that as many bytes cross; the other axes change
    by themselves. ValueError for another text, and for sizes that cannot be.
    """
    found = _pair("headline", dtype, workload)
    for text in sweep:
        axis, _, values = text.partition("=")
        if axis not in AXES or not values:
            raise ValueError(f"sweep: expected AXIS=V1,V2,... with an axis of {', '.join(AXES)}, got {text!r}")
        for value in values.split(","):
            found += _changed(axis, value, dtype, workload)
    return found


def _changed(axis: str, value: str, dtype: str, workload: Workload) -> list[Spec]:
    try:
        size = float(value) if axis == "skew" else int(value)
    except ValueError as error:
        raise ValueError(f"sweep: expected numbers for {axis}, got {value!r}") from error
    change = f"{AXES[axis]}{size:g}"
    if axis == "sms":
        return _pair(change, dtype, workload, in_all(int(size)))
    changes: dict[str, Any] = {axis: size}
    changed = replace(workload, **changes)
    if axis in _AT_EQUAL_BYTES:
        target = workload.tokens * crossing_per_token(workload) * workload.hidden
        changed = replace(changed, tokens=max(1, round(target / crossing_per_token(changed) / changed.hidden)))
    return _pair(change, dtype, changed)


def _pair(change: str, dtype: str, workload: Workload, sms: Sms | None = None) -> list[Spec]:
    shared = {"dtype": dtype, "layout": FLAT, "workload": workload, "sms": sms or {}, "peers": False}
    return [
        Spec(name=f"{what}_flat_{SHORT_NAMES[dtype]}_{change}", what=what, **shared)  # type: ignore[arg-type]
        for what in (DISPATCH, COMBINE)
    ]
