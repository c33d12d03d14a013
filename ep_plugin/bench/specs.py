"""Which cases the suite `moe` has: their names, what each does, with which SMs, and who does it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace

from ep_plugin.bench.workload import SHORT_NAMES, Workload
from ep_plugin.config import LEAST_SMS, DispatchLayout

DISPATCH, CACHED, COMBINE, ROUNDTRIP = "dispatch", "cached", "combine", "roundtrip"
FLAT, TOKEN_MAJOR = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR
SKEW = 2.0  # of the skewed case
FEW_LOCAL_EXPERTS = 16  # per rank, all that PyTorch's own exchange for MoE serves
SMALL_TOKENS = (512, 128)  # T of the round trips whose latency counts


@dataclass(frozen=True, kw_only=True)
class Sms:
    """SMs of ep_plugin's kernels; None: its defaults."""

    dispatch: int | None = None
    expand: int | None = None
    combine: int | None = None
    add: int | None = None

    def over(self, defaults: Sms) -> Sms:
        """These, and `defaults` where these name none."""
        return Sms(**{name: value if value is not None else getattr(defaults, name) for name, value in self.items()})

    def items(self) -> Iterator[tuple[str, int | None]]:
        return iter(asdict(self).items())

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.items() if value is not None)


DEFAULT_SMS = Sms()


def in_all(sms: int) -> Sms:
    """So many for all kernels that move rows: one kernel for each operation."""
    return Sms(dispatch=sms, expand=0, combine=sms, add=0)


# How the SMs of a case with a bounded number are split, by the case's last word and layout.
SPLITS: dict[tuple[str, DispatchLayout], Sms] = {
    ("12sm", FLAT): Sms(dispatch=12, expand=48, combine=12, add=36),
    ("12sm", TOKEN_MAJOR): Sms(dispatch=12, expand=0),
    ("12total", FLAT): in_all(12),
}


def parse_sms(text: str) -> Sms:
    """ "dispatch=16,expand=48" as Sms; ValueError when it is something else."""
    known = [field.name for field in fields(Sms)]
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in known or not value.isdigit() or int(value) < LEAST_SMS.get(f"{name}_sms", 1):
            raise ValueError(f"sms: expected {', '.join(f'{each}=N' for each in known)} or some of them, got {text!r}")
        found[name] = int(value)
    return Sms(**found)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One case. peers: others do it too. capacity: ep_plugin's host waits for nothing. quantize: rows leave as FP8
    with scales, made on the way. graph: it is replayed."""

    name: str
    what: str
    dtype: str
    layout: DispatchLayout
    workload: Workload
    sms: Sms = DEFAULT_SMS
    peers: bool = True
    capacity: bool = False
    quantize: bool = False
    graph: bool = False


def specs_of(
    workload: Workload, dtypes: tuple[str, ...], layouts: tuple[DispatchLayout, ...], on_gpus: bool
) -> list[Spec]:
    """All cases for these types and layouts, those that share inputs next to each other."""
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
        found += _few_experts(workload, summable[0]) if on_gpus else []
        for tokens in SMALL_TOKENS:
            found += _small(replace(workload, tokens=tokens), summable[0], on_gpus)
    return found


def select(specs: list[Spec], patterns: tuple[str, ...]) -> list[Spec]:
    """Those whose names match any pattern of a shell; all without patterns. ValueError when a pattern matches none."""
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
    """With few SMs; FP8 only where somebody has published a figure."""
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


def _few_experts(workload: Workload, dtype: str) -> list[Spec]:
    """As many as all peers serve, where there are more."""
    few = FEW_LOCAL_EXPERTS * workload.ranks
    if workload.skew != 1 or not workload.topk <= few < workload.experts:
        return []
    name = f"dispatch_flat_{SHORT_NAMES[dtype]}_e{few}"
    return [Spec(name=name, what=DISPATCH, dtype=dtype, layout=FLAT, workload=replace(workload, experts=few))]


def _small(workload: Workload, dtype: str, on_gpus: bool) -> list[Spec]:
    """Round trips of few tokens: with a bound on the rows, the same from a graph, and with the host's wait for them."""
    base = Spec(name=f"roundtrip_t{workload.tokens}", what=ROUNDTRIP, dtype=dtype, layout=FLAT, workload=workload)
    found = [replace(base, capacity=True)]
    if on_gpus:
        found.append(replace(base, name=f"{base.name}_graph", capacity=True, graph=True, peers=False))
    return [*found, replace(base, name=f"{base.name}_host_wait")]
