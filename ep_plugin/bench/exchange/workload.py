"""Sizes of an exchange, the cases of the suite `moe`, and inputs that every rank can make for all ranks.

Shapes: R ranks, T tokens per rank, H hidden size, K experts per token, E experts in all, E_l = E / R.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
import typer

from ep_plugin import _C
from ep_plugin.bench.suite import BY_BACKEND, Suite, check_least
from ep_plugin.config import DispatchLayout, MoECommunicatorConfig, in_one_kernel

SCALE_BLOCK = 128  # elements of an FP8 row per scale
seeds = itertools.count()  # seeds for the data of comparisons, the same on all ranks
HOT_RANK = 0  # skewed routing sends more rows to this rank
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SUMMABLE = tuple(DTYPES)
DTYPES["float8"] = torch.float8_e4m3fn
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
# The sizes of README's table, and sizes that two cores can exchange.
CPU_SIZES: dict[str, Any] = {"ranks": 4, "tokens": 1024, "hidden": 2048, "topk": 4, "experts": 32}
CUDA_SIZES: dict[str, Any] = {"ranks": None, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256}
DISPATCH, CACHED, COMBINE, ROUNDTRIP = "dispatch", "cached", "combine", "roundtrip"
FLAT, TOKEN_MAJOR, EXPERT_MAJOR = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR, DispatchLayout.EXPERT_MAJOR
SEND, RECEIVE = "send", "receive"  # halves of an operation
SKEW = 2.0  # the skew of the skewed case
SMALL_TOKENS = (512, 128)  # T of the small round trips, in which latency counts

Sms = dict[str, Any]  # SM counts by field of MoECommunicatorConfig; missing fields have their defaults
SENDS_ON_12: Sms = {"dispatch_send_sms": 12, "dispatch_recv_sms": 48, "combine_send_sms": 12, "combine_recv_sms": 36}


# The cases of each type. Cases with SMs of their own are for GPUs.
_OF_EACH_TYPE: list[tuple[str, str, DispatchLayout, Sms]] = [
    ("dispatch_flat_{}", DISPATCH, FLAT, {}),
    ("dispatch_cached_{}", CACHED, FLAT, {}),
    ("combine_flat_{}", COMBINE, FLAT, {}),
    ("roundtrip_flat_{}", ROUNDTRIP, FLAT, {}),
    ("dispatch_flat_{}_12sm", DISPATCH, FLAT, SENDS_ON_12),
    ("dispatch_flat_{}_12total", DISPATCH, FLAT, in_one_kernel(12)),
    ("combine_flat_{}_12sm", COMBINE, FLAT, SENDS_ON_12),
    ("combine_flat_{}_12total", COMBINE, FLAT, in_one_kernel(12)),
    ("dispatch_token_major_{}", DISPATCH, TOKEN_MAJOR, {}),
    ("dispatch_cached_token_major_{}", CACHED, TOKEN_MAJOR, {}),
    ("combine_token_major_{}", COMBINE, TOKEN_MAJOR, {}),
    ("dispatch_token_major_{}_12sm", DISPATCH, TOKEN_MAJOR, in_one_kernel(12)),
]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one exchange. No token is dropped, and every rank has the same T.

    skew: rows for the experts of HOT_RANK, from every source, as a multiple of the mean over ranks. 1: routing is
    uniformly random.
    """

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    skew: float = 1.0

    def __post_init__(self) -> None:
        check_least(dict.fromkeys(("ranks", "tokens", "hidden", "topk", "experts", "skew"), 1), self)
        if self.experts % self.ranks:
            raise ValueError(f"experts: expected a multiple of the {self.ranks} ranks, got {self.experts}")
        if self.topk > self.experts:
            raise ValueError(f"topk: expected at most the {self.experts} experts, got {self.topk}")
        most = min(self.topk, self.local_experts) * self.ranks / self.topk
        if self.skew > max(1, most):
            raise ValueError(f"skew: expected at most {most:g} with these ranks and experts, got {self.skew:g}")

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks


@dataclass(frozen=True, kw_only=True)
class ExchangeSuite(Suite):
    """A suite with a workload."""

    defaults: ClassVar = {"cpu": CPU_SIZES, "cuda": CUDA_SIZES}

    tokens: Annotated[int, typer.Option(help="Tokens per rank, T. Default on cuda: 4096.")] = BY_BACKEND
    hidden: Annotated[int, typer.Option(help="Elements of a row, H. Default on cuda: 7168.")] = BY_BACKEND
    topk: Annotated[int, typer.Option(help="Experts per token, K. Default on cuda: 8.")] = BY_BACKEND
    experts: Annotated[int, typer.Option(help="Experts in all, E. Default on cuda: 256.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        self.workloads()  # raises for impossible sizes

    def workload_of(self, ranks: int, tokens: int) -> Workload:
        """Returns a workload of these numbers of ranks and tokens, with uniformly random routing."""
        return Workload(ranks=ranks, tokens=tokens, hidden=self.hidden, topk=self.topk, experts=self.experts)

    def workloads(self) -> list[Workload]:
        """Returns all sizes that are measured."""
        return [self.workload]

    @property
    def workload(self) -> Workload:
        return self.workload_of(self.ranks, self.tokens)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One case.

    peers: the peers run the case, too. capacity: ep_plugin's output has a fixed size, so the host does not wait.
    layout: EXPERT_MAJOR selects mode="ll". quantize: rows are quantised on the way, and leave as FP8 with scales.
    graph: a CUDA graph is replayed. half: SEND or RECEIVE, one half of an operation in mode="ll".
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
    half: str = ""

    @property
    def config(self) -> MoECommunicatorConfig:
        """Returns the configuration of ep_plugin's communicator."""
        sizes, options = self.workload, self.sms
        if self.layout is EXPERT_MAJOR:
            options = {"mode": "ll", "max_row_bytes": sizes.hidden * DTYPES[self.dtype].itemsize}
        return MoECommunicatorConfig(
            num_experts=sizes.experts,
            hidden_size=sizes.hidden,
            topk=sizes.topk,
            max_tokens_per_rank=sizes.tokens,
            layout=self.layout,
            **options,
        )

    @property
    def dedup(self) -> bool:
        """Whether ep_plugin sends one row per (token, rank). A low-latency combine of few pairs sends one per pair."""
        many = self.workload.tokens * self.workload.topk > _C.ll_few_pairs
        return many or self.what != COMBINE or self.layout is not EXPERT_MAJOR

    @property
    def crossings(self) -> int:
        """The number of times that rows cross the links."""
        return 2 if self.what == ROUNDTRIP else 1


def specs_of(
    workload: Workload, dtypes: tuple[str, ...], layouts: tuple[DispatchLayout, ...], on_gpus: bool
) -> list[Spec]:
    """Returns all cases for these types and layouts. Cases that share inputs are next to each other."""
    summable = [dtype for dtype in dtypes if dtype in SUMMABLE]
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
        with contextlib.suppress(ValueError):  # the case needs more ranks or experts
            name = f"dispatch_flat_{SHORT_NAMES[dtype]}_skew{SKEW:g}"
            found.append(Spec(name=name, what=DISPATCH, dtype=dtype, workload=replace(workload, skew=SKEW)))
        for tokens in SMALL_TOKENS:
            sizes = replace(workload, tokens=tokens)
            small = Spec(name=f"roundtrip_t{tokens}", what=ROUNDTRIP, dtype=dtype, workload=sizes, capacity=True)
            graph = [replace(small, name=f"{small.name}_graph", graph=True, peers=False)] if on_gpus else []
            found += [small, *graph, replace(small, name=f"{small.name}_host_wait", capacity=False)]
    return found


AXES = {"tokens": "t", "hidden": "h", "topk": "k", "experts": "e", "skew": "skew", "sms": "sms"}
"""The sizes that `--sweep` changes, and their prefixes in the names of cases."""


def sweep_specs(workload: Workload, dtype: str, sweep: list[str]) -> list[Spec]:
    """Returns dispatch and combine of the workload (the headline), and of the workload with one size changed at a time.

    sweep: texts "AXIS=V1,V2,...", with an axis of AXES. Raises ValueError for other texts and for impossible sizes.
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
            changed = (workload, in_one_kernel(int(size))) if axis == "sms" else (replace(workload, **sizes), {})
            changes[f"{AXES[axis]}{value}"] = changed
    return [
        Spec(name=f"{what}_flat_{SHORT_NAMES[dtype]}_{change}", what=what, dtype=dtype, workload=sizes, sms=sms,
             peers=False)
        for change, (sizes, sms) in changes.items()
        for what in (DISPATCH, COMBINE)
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's tokens. x: `[T, H]`, ids: int64 `[T, K]`, weights: float32 `[T, K]`, scales: `[T, S]` with FP8.

    Weights are 0.1 to 1.1 and not normalised. So a result with other weights, or without weights, is clearly wrong.
    quantize: x arrives as FP8 with scales.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    quantize: bool = False

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a row and its scales, as they travel."""
        H, scaled = self.x.shape[1], self.quantize or self.scales is not None
        scales = -(-H // SCALE_BLOCK) * torch.float32.itemsize if scaled else 0
        return H * (1 if self.quantize else self.x.element_size()) + scales

    def clone(self) -> Batch:
        """Returns a copy with rows, ids and weights in memory of its own."""
        return replace(self, x=self.x.clone(), ids=self.ids.clone(), weights=self.weights.clone())

    def copy_(self, other: Batch) -> None:
        """Copies the rows, ids and weights of `other` into this batch."""
        self.x.copy_(other.x)
        self.ids.copy_(other.ids)
        self.weights.copy_(other.weights)


def batches(workload: Workload, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """Makes the tokens of each rank. Every rank makes the same ones."""
    random = torch.Generator(device).manual_seed(0)
    made = []
    for _ in range(workload.ranks):
        x = torch.randn(workload.tokens, workload.hidden, generator=random, device=device).to(dtype)
        scores = torch.rand(workload.tokens, workload.experts, generator=random, device=device)
        ids = _chosen(workload, scores, random)
        weights = torch.rand(ids.shape, generator=random, device=device) + 0.1
        scales = None
        if dtype is DTYPES["float8"]:
            blocks = -(-workload.hidden // SCALE_BLOCK)
            scales = torch.rand(workload.tokens, blocks, generator=random, device=device)
        made.append(Batch(x=x, ids=ids, weights=weights, scales=scales))
    return made


def _chosen(workload: Workload, scores: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Returns the experts with the highest scores of each token, `[T, K]`. The skew determines how many of them are on
    the hot rank."""
    if workload.skew == 1:
        return scores.topk(workload.topk, dim=1).indices
    # Each token has an equal share of the hot rows. The remainder goes to some tokens, one row each.
    T = workload.tokens
    total = round(workload.skew * T * workload.topk / workload.ranks)
    extra = torch.randperm(T, generator=random, device=scores.device) < total % T
    share = total // T + extra.long()
    first, end = HOT_RANK * workload.local_experts, (HOT_RANK + 1) * workload.local_experts
    position = scores[:, first:end].argsort(1, descending=True).argsort(1)
    # Scores are below 1. So hot experts come before all others, or after them.
    scores[:, first:end] = torch.where(position < share.unsqueeze(1), 2.0, -1.0)
    return scores.topk(workload.topk, dim=1).indices


def other_rows(everyone: list[Batch], turn: int, reroute: bool) -> list[Batch]:
    """Returns the batches with each rank's rows, weights and scales in an order that differs from turn to turn. Every
    rank makes the same batches.

    reroute: routes are also reordered, in an order of their own. Every expert receives as many rows as before.
    """
    found, device = [], everyone[0].x.device
    random = torch.Generator(device).manual_seed(turn)
    for batch in everyone:
        rows, routes = (torch.randperm(len(batch.x), generator=random, device=device) for _ in range(2))
        other = replace(batch, x=batch.x.view(torch.int64)[rows].view(batch.x.dtype), weights=batch.weights[rows])
        if reroute:
            other = replace(other, ids=batch.ids[routes])
        found.append(other if batch.scales is None else replace(other, scales=batch.scales[rows]))
    return found


def random_like(seed: int, like: torch.Tensor) -> torch.Tensor:
    """Returns random bytes, or random numbers of another dtype, in the shape of `like`. Every rank can make them, so it
    can compare what another rank sends."""
    random: dict[str, Any] = {"generator": torch.Generator(like.device).manual_seed(seed), "device": like.device}
    if like.dtype is torch.uint8:
        return torch.randint(0, 256, like.shape, dtype=torch.uint8, **random)
    return torch.randn(like.shape, dtype=torch.float32, **random).to(like.dtype)


def expert_factors(workload: Workload, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a factor from 0.5 to 1.5 for the rows of each expert, `[E]`. All experts have different factors."""
    # The fractional parts of multiples of the golden ratio lie far apart.
    return (0.5 + (torch.arange(workload.experts, dtype=torch.float64, device=device) * 0.6180339887) % 1).to(dtype)


def rows_by_rank(workload: Workload, ids: list[torch.Tensor], dedup: bool, nodes: int | None = None) -> torch.Tensor:
    """Counts the rows from each rank to each rank, int64 `[R, R]` on the host; with `nodes`, to each node, `[R, N]`.

    ids: `[T, K]` of each rank. dedup: a token crosses once per destination, however many of its experts are there.
    """
    places = workload.ranks if nodes is None else nodes
    owners = torch.stack([chosen // (workload.experts // places) for chosen in ids])  # [R, T, K]
    pairs = torch.stack([(owners == place).sum(2) for place in range(places)], 1)  # [R, places, T]
    return (pairs.clamp(max=1) if dedup else pairs).sum(2).cpu()


def rows_over_rails(workload: Workload, ids: list[torch.Tensor], nodes: int) -> torch.Tensor:
    """Counts the tokens of each rank that need each other node, int64 `[R, N]` on the host. A node has R / N
    consecutive ranks."""
    node = torch.arange(workload.ranks) // (workload.ranks // nodes)
    return rows_by_rank(workload, ids, True, nodes).masked_fill(node[:, None] == torch.arange(nodes), 0)


def rows_on_the_wire(
    workload: Workload, ids: list[torch.Tensor], dedup: bool, nodes: int = 1, two_levels: bool = False
) -> int:
    """Counts the rows that cross to or from the busiest rank, in its busier direction. With several nodes, it counts
    rows between nodes; with one, rows between ranks.

    dedup: see `rows_by_rank`. two_levels: a token crosses once per node, to the rank of the same rail.
    """
    if two_levels and nodes > 1:
        sent = rows_over_rails(workload, ids, nodes)
        landed = sent.view(nodes, -1, nodes).sum(0)  # by local rank and node
        return int(max(sent.sum(1).max(), landed.max()))
    place = torch.arange(workload.ranks) // (workload.ranks // nodes if nodes > 1 else 1)
    sent = rows_by_rank(workload, ids, dedup).masked_fill(place[:, None] == place, 0)
    return int(torch.maximum(sent.sum(0), sent.sum(1)).max())
