"""Nodes of 20 and of 72 ranks, more than a warp has lanes: every kernel against plain torch.

The ranks are threads of one process (tests/many_ranks.py), but for one test of 20 processes. Sizes are small.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin import _C, MoECommunicatorConfig
from ep_plugin.bench.suites.stand_in import StandIn, Together
from ep_plugin.moe.layout import DispatchResult
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from tests import many_ranks
from tests.many_ranks import LONG, SIZES, ManyRanks
from tests.moe import moe_cases
from tests.ranks import run_ranks, values

HIDDEN, TOPK, LOCAL = 64, 4, 2
ROW_BYTES = 4 * HIDDEN
FLAT, TOKEN_MAJOR = int(_C.Layout.FLAT), int(_C.Layout.TOKEN_MAJOR)
DISPATCH, COMBINE = int(_C.Pool.DISPATCH), int(_C.Pool.COMBINE)
FLOAT32 = int(_C.Element.FLOAT32)


def _in_a_process(function: Any, *args: Any) -> None:
    values(run_ranks(1, function, *args, timeout_s=240, env={"EP_TEST_KERNELS": "simt"}))


# -- the batches of all ranks, and what plain torch says of them ---------------------------------------------------


class Batch:
    """x ``[T, H]`` of small integers and ids ``[T, K]`` of one rank. Every 24th rank has `most`
    tokens, the others at most 3."""

    def __init__(self, rank: int, ranks: int, most: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        tokens = most if rank % 24 == 23 else rank % 4
        self.x = torch.randint(-8, 8, (tokens, HIDDEN), generator=generator).float()
        scores = torch.rand(tokens, ranks * LOCAL, generator=generator)
        self.ids = scores.topk(TOPK).indices.to(torch.int32)
        self.ids[torch.rand(tokens, TOPK, generator=generator) < 0.1] = -1
        self.weights = torch.randint(1, 5, (tokens, TOPK), generator=generator).float()


def batches_of(ranks: int, most: int, seed: int = 0) -> list[Batch]:
    return [Batch(rank, ranks, most, seed) for rank in range(ranks)]


def rows_of_expert(batches: list[Batch], expert: int) -> list[tuple[int, int]]:
    """(source, token) of the expert's rows, in their order."""
    return [
        (source, token)
        for source, batch in enumerate(batches)
        for token in (batch.ids == expert).any(dim=1).nonzero().flatten().tolist()
    ]


def rows_of_rank(batches: list[Batch], rank: int) -> list[tuple[int, int]]:
    return [
        (source, token)
        for source, batch in enumerate(batches)
        for token in (batch.ids.div(LOCAL, rounding_mode="floor") == rank).any(dim=1).nonzero().flatten().tolist()
    ]


def gathered(batches: list[Batch], rows: list[tuple[int, int]]) -> torch.Tensor:
    return torch.stack([batches[source].x[token] for source, token in rows]) if rows else torch.empty(0, HIDDEN)


# -- high throughput -----------------------------------------------------------------------------------------------


class Exchange:
    """One rank's dispatch and combine."""

    def __init__(self, node: ManyRanks, kernels: Any, rank: int, batches: list[Batch], layout: int, most: int) -> None:
        self.node, self.kernels, self.rank, self.batches = node, kernels, rank, batches
        self.comm, self.batch, self.layout = node.comms[rank], batches[rank], layout
        T, R, E = len(self.batch.x), node.size, node.size * LOCAL
        self.meta = torch.zeros(_C.meta_layout(R, E, 1).words + T * (R + TOPK), dtype=torch.int32)
        send_pos = self.meta.data_ptr() + 4 * _C.meta_layout(R, E, 1).words
        self.ids = torch.zeros(max(T, 1), TOPK, dtype=torch.int32)
        slots = R * most
        self.recv_rows = torch.full((slots, TOPK), -1, dtype=torch.int32)
        self.routing = _C.Routing(
            num_tokens=T,
            topk=TOPK,
            layout=layout,
            alignment=1,
            topk_ids=self.ids.data_ptr(),
            send_pos=send_pos,
            pair_pos=send_pos + 4 * T * R,
            meta=self.meta.data_ptr(),
            recv_rows=self.recv_rows.data_ptr(),
            slots=slots,
        )
        self.capacity = slots * TOPK if layout == FLAT else slots
        self.tokens = torch.full((self.capacity, HIDDEN), float("nan"))
        self.row_ids = torch.zeros(self.capacity, dtype=torch.int32)
        self.token_ids = torch.zeros(self.capacity, TOPK, dtype=torch.int32)
        self.counts, self.offsets = torch.zeros(LOCAL, dtype=torch.int32), torch.zeros(LOCAL + 1, dtype=torch.int32)

    def _header(self, op: Any, weight_bytes: int) -> Any:
        return _C.Header(
            op=op,
            row_bytes=ROW_BYTES,
            weight_bytes=weight_bytes,
            topk=TOPK,
            layout=self.layout,
            num_tokens=len(self.batch.x),
        )

    def dispatch(self, one_kernel: bool) -> None:
        header, kernels = self._header(_C.Op.DISPATCH, 0), self.kernels
        common = {"comm": self.comm, "routing": self.routing}
        blocks = torch.zeros(_C.block_count_words(len(self.batch.x), self.node.size, self.comm.num_experts) + 4)
        counts = {"block_counts": blocks.data_ptr() + -blocks.data_ptr() % 16}
        kernels.plan(_C.PlanArgs(ids=self.batch.ids.data_ptr(), id_bytes=4, **counts, **common))
        kernels.notify(_C.NotifyArgs(header=header, ticket=1, **counts, **common))
        send = _C.DispatchSendArgs(header=header, x=self.batch.x.data_ptr(), x_stride=ROW_BYTES, num_sms=2, **common)
        recv = _C.DispatchRecvArgs(
            header=header,
            tokens=self.tokens.data_ptr(),
            row_expert_ids=self.row_ids.data_ptr() if self.layout == FLAT else 0,
            topk_ids=0 if self.layout == FLAT else self.token_ids.data_ptr(),
            expert_count=self.counts.data_ptr(),
            expert_offset=self.offsets.data_ptr(),
            capacity=self.capacity,
            num_sms=2,
            fresh=1,
            **common,
        )
        if one_kernel:
            return kernels.dispatch(send, recv)
        kernels.dispatch_send(send)
        kernels.dispatch_recv(recv)

    def check(self) -> None:
        if self.layout == FLAT:
            rows = [row for e in range(LOCAL) for row in rows_of_expert(self.batches, self.rank * LOCAL + e)]
        else:
            rows = rows_of_rank(self.batches, self.rank)
        expected = gathered(self.batches, rows)
        assert torch.equal(self.tokens[: len(rows)], expected), f"rank {self.rank}"
        assert not self.tokens[len(rows) :].any()

    def expert_rows(self) -> torch.Tensor:
        """The rows after the experts: each is its row times 1 + the expert or, in TOKEN_MAJOR, 1 + the rank."""
        if self.layout == TOKEN_MAJOR:
            return self.tokens * (1 + self.rank)
        return self.tokens * (1 + self.row_ids.clamp(min=0) + self.rank * LOCAL).unsqueeze(1)

    def combine(self, one_kernel: bool) -> None:
        y, T = self.expert_rows(), len(self.batch.x)
        flat = self.layout == FLAT
        extra = (1 + self.row_ids.clamp(min=0) + self.rank * LOCAL).float() if flat else None
        header = self._header(_C.Op.COMBINE, 4 if flat else 0)
        common = {"comm": self.comm, "routing": self.routing, "header": header, "hidden": HIDDEN, "element": FLOAT32}
        self.out, self.extra_out = torch.full((T, HIDDEN), float("nan")), torch.full((T, TOPK), float("nan"))
        send = _C.CombineSendArgs(
            y=y.data_ptr(), rows=len(y), extra=0 if extra is None else extra.data_ptr(), num_sms=2, **common
        )
        recv = _C.CombineRecvArgs(
            out=self.out.data_ptr(), extra=self.extra_out.data_ptr() if flat else 0, num_sms=2, **common
        )
        if one_kernel:
            return self.kernels.combine(send, recv)
        self.kernels.combine_send(send)
        self.kernels.combine_recv(recv)

    def check_sums(self) -> None:
        ids = self.batch.ids.long()
        if self.layout == FLAT:
            factors = torch.where(ids >= 0, ids + 1, 0)
            assert torch.equal(self.extra_out, factors.float()), f"rank {self.rank}"
        else:
            goes = torch.zeros(len(ids), self.node.size + 1)
            goes.scatter_(1, torch.where(ids >= 0, ids // LOCAL, self.node.size), 1.0)
            factors = goes[:, :-1] * torch.arange(1, self.node.size + 1)
        assert torch.equal(self.out, self.batch.x * factors.sum(dim=1, keepdim=True)), f"rank {self.rank}"


def _high_throughput(rank: int, ranks: int, layout: int, one_kernel: bool, simt: bool = True, most: int = 5) -> None:
    kernels, batches = many_ranks.kernels(simt), batches_of(ranks, most)
    experts = ranks * LOCAL
    with ManyRanks(ranks, _C.control_bytes(ranks, experts, 1), experts) as node:
        node.set_pool(DISPATCH, ranks * most * _C.slot_bytes(ROW_BYTES, 0, 0, TOPK))
        node.set_pool(COMBINE, most * TOPK * _C.partial_bytes(ROW_BYTES, 4, TOPK))
        for _ in range(2):  # epochs and consumed words
            each = [Exchange(node, kernels, rank, batches, layout, most) for rank in range(ranks)]
            node.at_once(lambda rank, each=each: each[rank].dispatch(one_kernel))
            for one in each:
                one.check()
            node.at_once(lambda rank, each=each: each[rank].combine(one_kernel))
            for one in each:
                one.check_sums()


@pytest.mark.parametrize("layout", [FLAT, TOKEN_MAJOR])
@pytest.mark.parametrize("ranks", SIZES)
def test_dispatch_and_combine(ranks: int, layout: int) -> None:
    _in_a_process(_high_throughput, ranks, layout, False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SIZES)
def test_one_kernel(ranks: int) -> None:
    _in_a_process(_high_throughput, ranks, FLAT, True)


@pytest.mark.parametrize("layout", [FLAT, TOKEN_MAJOR])
@pytest.mark.parametrize("ranks", SIZES)
def test_kernels_of_cpus(ranks: int, layout: int) -> None:
    _in_a_process(_high_throughput, ranks, layout, False, False)


def _communicators(rank: int, size: int) -> None:
    case = moe_cases.Case(tokens=moe_cases.ragged(size, 9), num_experts=2 * size, topk=3)
    inputs = moe_cases.make_inputs(case)
    for layout in moe_cases.LAYOUTS:
        with moe_cases.communicator(case, layout) as comm, moe_cases.poisoned():
            moe_cases.round_trip(comm, inputs, inputs.expected(layout))


@pytest.mark.slow
def test_twenty_processes() -> None:
    values(run_ranks(20, _communicators, 20, timeout_s=600))


# -- low latency ---------------------------------------------------------------------------------------------------


def _dispatch_of(batches: list[Batch], quantize: str | None) -> Any:
    def make(share: Any) -> LowLatencyDispatch:
        batch = batches[share.rank]
        return LowLatencyDispatch(share, batch.x, batch.ids.clone(), None, None, None, quantize, [], 0)

    return make


def _check_blocks(batches: list[Batch], results: list[Any], without: tuple[int, ...] = ()) -> None:
    """Compares the rows of all experts. without: ranks that are masked."""
    for rank, of_rank in enumerate(results):
        if rank in without:
            continue
        *made, _, plan = of_rank
        tokens, counts = DispatchResult(*made).tokens, DispatchResult(*made).expert_counts
        R, rows_of = len(batches), tokens.shape[1]
        sources = plan[: 2 * LOCAL * R].view(torch.int64).view(LOCAL, R)
        for local in range(LOCAL):
            rows = [row for row in rows_of_expert(batches, rank * LOCAL + local) if row[0] not in without]
            assert counts[local] == len(rows) <= rows_of
            assert torch.equal(tokens[local, : len(rows)], gathered(batches, rows)), f"rank {rank}"
            for source in range(R):
                number = sum(row[0] == source for row in rows)
                assert sources[local, source] & 0xFFFFFFFF == number, f"rank {rank}, source {source}"


def _low_latency(rank: int, ranks: int, most: int, simt: bool = True) -> None:
    """Few pairs if `most` is small, else partial rows."""
    with many_ranks.served(simt, 1 if ranks == 72 else 2):
        config = MoECommunicatorConfig(
            num_experts=ranks * LOCAL,
            hidden_size=HIDDEN,
            topk=TOPK,
            mode="ll",
            max_tokens_per_rank=most,
            max_row_bytes=ROW_BYTES,
        )
        node = StandIn(ranks, config, torch.device("cpu"))
        for seed, apart in enumerate((False, True) if ranks < 72 else (False,)):
            batches = batches_of(ranks, most, seed)
            dispatch = Together(node, _dispatch_of(batches, None), apart)
            results = dispatch.results()
            _check_blocks(batches, results)

            def combine_of(share: Any, batches: Any = batches, results: Any = results) -> LowLatencyCombine:
                tokens, *_, ids, plan = results[share.rank]
                factors = 1 + share.rank * LOCAL + torch.arange(LOCAL)
                y = tokens * factors.view(LOCAL, 1, 1)
                return LowLatencyCombine(share, y, batches[share.rank].weights, None, None, False, [ids, plan], 0)

            for batch, (out, _) in zip(batches, Together(node, combine_of, apart).results(), strict=True):
                factors = torch.where(batch.ids >= 0, batch.ids + 1, 0) * batch.weights
                assert torch.equal(out, batch.x * factors.sum(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("ranks", "most"),
    [
        *((20, 3), (20, 70)),
        *(pytest.param(ranks, most, marks=pytest.mark.slow) for ranks, most in ((33, 70), (72, 3))),
        pytest.param(72, 70, marks=LONG),
    ],
)
def test_low_latency(ranks: int, most: int) -> None:
    _in_a_process(_low_latency, ranks, most)


@pytest.mark.parametrize("ranks", SIZES)
def test_low_latency_kernels_of_cpus(ranks: int) -> None:
    _in_a_process(_low_latency, ranks, 70, False)


def _masks(rank: int, ranks: int, masked: int, simt: bool = True) -> None:
    """One rank masks another one, which takes no part. The headers of that rank tell all others."""
    with many_ranks.served(simt, 1 if ranks == 72 else 2):
        config = MoECommunicatorConfig(
            num_experts=ranks * LOCAL,
            hidden_size=HIDDEN,
            topk=TOPK,
            mode="ll",
            max_tokens_per_rank=5,
            max_row_bytes=ROW_BYTES,
            shrink=True,
        )
        node = StandIn(ranks, config, torch.device("cpu"))
        batches = batches_of(ranks, 5)
        calls = [_dispatch_of(batches, None)(share) for share in node.ranks]
        results: list[Any] = [None] * ranks
        begin = _C.ll_mask_offset
        masks = [share.ll_state[begin : begin + 4 * ranks].view(torch.int32) for share in node.ranks]
        masks[3][masked] = 1
        for call in calls:
            call.check()
            call.remember()

        def run(rank: int) -> None:
            if rank != masked:
                results[rank] = calls[rank].run("")

        node.at_once(run)
        node.check()
        _check_blocks(batches, results, without=(masked,))
        for index, mask in enumerate(masks):
            assert index == masked or mask.nonzero().flatten().tolist() == [masked], f"rank {index}"


@pytest.mark.slow
@pytest.mark.parametrize("masked", [pytest.param(1, marks=LONG), 40, pytest.param(71, marks=LONG)])
def test_masks_travel(masked: int) -> None:
    _in_a_process(_masks, 72, masked)
