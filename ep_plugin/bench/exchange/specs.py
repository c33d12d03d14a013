"""The cases of the suite `moe`: names, operations, sizes, SMs, and whether peers take part."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

from ep_plugin.bench.exchange.workload import SHORT_NAMES, Workload
from ep_plugin.config import DispatchLayout

DISPATCH, CACHED, COMBINE, ROUNDTRIP = "dispatch", "cached", "combine", "roundtrip"
FLAT, TOKEN_MAJOR = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR
SKEW = 2.0  # of the skewed case
SMALL_TOKENS = (512, 128)  # T of the round trips whose latency counts

Sms = dict[str, Any]  # SMs, by fields of MoECommunicatorConfig; fields that are missing have their defaults
SENDS_ON_12: Sms = {"dispatch_send_sms": 12, "dispatch_recv_sms": 48, "combine_send_sms": 12, "combine_recv_sms": 36}


def in_all(sms: int) -> Sms:
    """So many SMs for all kernels that move rows: one kernel for each operation."""
    return {"dispatch_send_sms": sms, "dispatch_recv_sms": 0, "combine_send_sms": sms, "combine_recv_sms": 0}


# The cases of each type. Cases with SMs of their own are for GPUs.
_OF_EACH_TYPE: list[tuple[str, str, DispatchLayout, Sms]] = [
    ("dispatch_flat_{}", DISPATCH, FLAT, {}),
    ("dispatch_cached_{}", CACHED, FLAT, {}),
    ("combine_flat_{}", COMBINE, FLAT, {}),
    ("roundtrip_flat_{}", ROUNDTRIP, FLAT, {}),
    ("dispatch_flat_{}_12sm", DISPATCH, FLAT, SENDS_ON_12),
    ("dispatch_flat_{}_12total", DISPATCH, FLAT, in_all(12)),
    ("combine_flat_{}_12sm", COMBINE, FLAT, SENDS_ON_12),
    ("combine_flat_{}_12total", COMBINE, FLAT, in_all(12)),
    ("dispatch_token_major_{}", DISPATCH, TOKEN_MAJOR, {}),
    ("dispatch_token_major_{}_12sm", DISPATCH, TOKEN_MAJOR, in_all(12)),
]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One case. peers: they do it too. capacity: ep_plugin's output has a fixed size, so its host does not wait.

    quantize: rows leave as FP8 with scales, quantised on the way. graph: a CUDA graph is replayed.
    """

    name: str
    what: str
    dtype: str
    workload: Workload
    layout: DispatchLayout = FLAT
    sms: Sms = field(default_factory=dict)
    peers: bool = True
    capacity: bool = False
    quantize: bool = False
    graph: bool = False

    @property
    def crossings(self) -> int:
        """The number of times that rows cross the links."""
        return 2 if self.what == ROUNDTRIP else 1


def specs_of(
    workload: Workload, dtypes: tuple[str, ...], layouts: tuple[DispatchLayout, ...], on_gpus: bool
) -> list[Spec]:
    """All cases for these types and layouts. Cases that share inputs are next to each other."""
    summable = [dtype for dtype in dtypes if dtype != "float8"]
    found = [
        Spec(name=name.format(SHORT_NAMES[dtype]), what=what, dtype=dtype, layout=layout, workload=workload, sms=sms,
             peers=not sms)
        for dtype in dtypes
        for name, what, layout, sms in _OF_EACH_TYPE
        if layout in layouts and (on_gpus or not sms) and (dtype in summable or what in (DISPATCH, CACHED))
    ]  # fmt: skip
    if FLAT not in layouts:
        return found
    if {"bfloat16", "float8"} <= set(dtypes):
        name = "dispatch_flat_bf16_to_fp8"
        found.append(Spec(name=name, what=DISPATCH, dtype="bfloat16", workload=workload, quantize=True))
    for dtype in summable[:1]:
        with contextlib.suppress(ValueError):  # too few ranks or experts for it
            name = f"dispatch_flat_{SHORT_NAMES[dtype]}_skew{SKEW:g}"
            found.append(Spec(name=name, what=DISPATCH, dtype=dtype, workload=replace(workload, skew=SKEW)))
        for tokens in SMALL_TOKENS:
            sizes = replace(workload, tokens=tokens)
            small = Spec(name=f"roundtrip_t{tokens}", what=ROUNDTRIP, dtype=dtype, workload=sizes, capacity=True)
            found.append(small)
            if on_gpus:
                found.append(replace(small, name=f"{small.name}_graph", graph=True, peers=False))
            found.append(replace(small, name=f"{small.name}_host_wait", capacity=False))
    return found


AXES = {"tokens": "t", "hidden": "h", "topk": "k", "experts": "e", "skew": "skew", "sms": "sms"}
"""The sizes that `--sweep` changes, and their prefixes in the names of cases."""


def sweep_specs(workload: Workload, dtype: str, sweep: list[str]) -> list[Spec]:
    """Dispatch and combine of the workload, the headline, and of the workload with one size changed at a time.

    sweep: "AXIS=V1,V2,...", of AXES. ValueError for another text, and for sizes that cannot be.
    """
    changes: dict[str, tuple[Workload, Sms]] = {"headline": (workload, {})}
    for text in sweep:
        axis, _, values = text.partition("=")
        if axis not in AXES or not values:
            raise ValueError(f"sweep: expected AXIS=V1,V2,... with an axis of {', '.join(AXES)}, got {text!r}")
        for value in values.split(","):
            try:
                size = float(value) if axis == "skew" else int(value)
            except ValueError as error:
                raise ValueError(f"sweep: expected numbers for {axis}, got {value!r}") from error
            sizes: dict[str, Any] = {axis: size}
            changed = (workload, in_all(int(size))) if axis == "sms" else (replace(workload, **sizes), {})
            changes[f"{AXES[axis]}{value}"] = changed
    return [
        Spec(name=f"{what}_flat_{SHORT_NAMES[dtype]}_{change}", what=what, dtype=dtype, workload=sizes, sms=sms,
             peers=False)
        for change, (sizes, sms) in changes.items()
        for what in (DISPATCH, COMBINE)
    ]  # fmt: skip
