"""Dispatches that fill one output, as those of several nodes do, by kernels alone.

The emulation of the CUDA kernels and tests/gpu run the same cases. Shapes: T tokens, K experts per token.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, DispatchLayout, MoECommunicator
from ep_plugin.dtypes import DTYPE_CODES
from ep_plugin.errors import PeerAborted, PeerTimeout
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL, DISPATCH_POOL
from ep_plugin.runtime.streams import current_stream
from tests.faults.fault_cases import finish, here, open_communicator
from tests.moe.moe_cases import LAYOUTS, named, on_ranks, same_bits
from tests.moe.test_node_kernels import SMS, _poisoned, _random

EXPERTS, TOPK, HIDDEN, ALIGNMENT = 3, 3, 16, 4  # EXPERTS: of a rank
TOKENS = ((70, 5, 0), (1, 40, 33), (0, 0, 9))  # by part and rank
ORDER = (2, 0, 1)  # of the parts in the output


class _Part:
    """One of the dispatches that fill an output. Every rank makes the inputs of all ranks."""

    def __init__(self, comm: MoECommunicator, number: int) -> None:
        engine, size = comm.engine, comm.size
        torch.manual_seed(10 + number)
        counts = TOKENS[number][:size]
        self.x = [_random(count, HIDDEN) for count in counts]
        self.weights = [_random(count, TOPK) for count in counts]
        scores = [torch.rand(count, EXPERTS * size).topk(TOPK).indices for count in counts]
        self.ids = [torch.where(torch.rand(ids.shape) < 0.2, -1, ids).to(torch.int32).to(here()) for ids in scores]
        T = self.T = counts[comm.rank]
        self.plan = torch.empty(engine.plan_words(T, TOPK), dtype=torch.int32, device=here())
        self.topk_ids = self.plan.new_empty(T, TOPK)
        self.struct = engine.routing_struct(self.topk_ids, self.plan, None)
        self._words = {"row_bytes": HIDDEN * 4, "scale_bytes": 0, "weight_bytes": 4, "topk": TOPK, "num_tokens": T}
        self._words["dtype"] = DTYPE_CODES[torch.float32]
        self._common = {"stream": current_stream(here()), "num_sms": SMS}

    def header(self, op: int) -> Any:
        return _C.Header(op=op, layout=self.struct.layout, **self._words)

    def notify(self, comm: MoECommunicator) -> None:
        engine, ids = comm.engine, self.ids[comm.rank]
        blocks = self.plan.new_empty(_C.block_count_words(self.T, comm.size, EXPERTS * comm.size))
        given = {"comm": engine.comm, "routing": self.struct, "block_counts": blocks.data_ptr()}
        given["stream"] = self._common["stream"]
        engine.kernels.plan(_C.PlanArgs(ids=ids.data_ptr(), id_bytes=4, **given))
        engine.kernels.notify(_C.NotifyArgs(header=self.header(_C.Op.DISPATCH), **given))
        self._kept = blocks

    def rewrite(self, comm: MoECommunicator, words: dict[str, list[int]]) -> None:
        layout = _C.meta_layout(comm.size, EXPERTS * comm.size, 1)
        for name, values in words.items():
            begin = getattr(layout, name)
            self.plan[begin : begin + len(values)] = torch.tensor(values, dtype=torch.int32, device=here())

    def dispatch(self, comm: MoECommunicator, out: dict[str, torch.Tensor], one_kernel: bool = False) -> None:
        engine, x, weights = comm.engine, self.x[comm.rank], self.weights[comm.rank]
        slots = int(self.plan[_C.meta_layout(comm.size, EXPERTS * comm.size, 1).recv_offset + comm.size])
        self.recv_rows = self.plan.new_empty(slots, TOPK)
        self.struct.recv_rows, self.struct.slots = _C.address(self.recv_rows), slots
        common = {"comm": engine.comm, "routing": self.struct, "header": self.header(_C.Op.CACHED_DISPATCH)}
        common |= self._common
        stride = HIDDEN * 4
        send = _C.DispatchSendArgs(x=_C.address(x), x_stride=stride, weights=_C.address(weights), **common)
        outputs = {name: tensor.data_ptr() for name, tensor in out.items()}
        capacity = out["tokens"].shape[0]
        recv = _C.DispatchRecvArgs(fresh=1, capacity=capacity, **outputs, **common)
        if one_kernel:
            engine.kernels.dispatch(send, recv)
            return
        engine.kernels.dispatch_send(send)
        engine.kernels.dispatch_recv(recv)

    def combine(
        self, comm: MoECommunicator, y: torch.Tensor, weights: torch.Tensor, one_kernel: bool
    ) -> tuple[torch.Tensor, ...]:
        engine = comm.engine
        common = {"comm": engine.comm, "routing": self.struct, "header": self.header(_C.Op.COMBINE), **self._common}
        common |= {"hidden": HIDDEN, "element": _C.Element.FLOAT32}
        extra, sums, extra_out = weights * 8, self.x[comm.rank].clone(), self.weights[comm.rank].clone()
        send = _C.CombineSendArgs(
            y=y.data_ptr(), rows=y.shape[0], weights=weights.data_ptr(), extra=extra.data_ptr(), **common
        )
        recv = _C.CombineRecvArgs(out=_C.address(sums), extra=_C.address(extra_out), **common)
        if one_kernel:
            engine.kernels.combine(send, recv)
        else:
            engine.kernels.combine_send(send)
            engine.kernels.combine_recv(recv)
        return sums, extra_out


def _expected_rows(parts: list[_Part], rank: int, flat: bool) -> list[tuple[int, int, int, int]]:
    """The rows of the output: (part, source, token, k), k = -1 in TOKEN_MAJOR; part -1 for padding."""
    sources = [(part, source) for part in ORDER for source in range(len(parts[0].x))]
    rows: list[tuple[int, int, int, int]] = []
    if not flat:
        for part, source in sources:
            here_ids = parts[part].ids[source] // EXPERTS == rank
            rows += [(part, source, token, -1) for token in here_ids.any(dim=1).nonzero().flatten().tolist()]
        return rows
    for expert in range(rank * EXPERTS, (rank + 1) * EXPERTS):
        for part, source in sources:
            pairs = (parts[part].ids[source] == expert).nonzero().tolist()
            rows += [(part, source, token, k) for token, k in pairs]
        rows += [(-1, 0, 0, 0)] * (-len(rows) % ALIGNMENT)
    return rows


def _bases(parts: list[_Part], rank: int, size: int) -> dict[int, dict[str, list[int]]]:
    """Each part's words that place its rows in the output, by part."""
    expert_offset, expert_rows = [0], []
    flat_base = {part: [[0] * EXPERTS for _ in range(size)] for part in ORDER}
    for local in range(EXPERTS):
        row = expert_offset[-1]
        for part, source in itertools.product(ORDER, range(size)):
            flat_base[part][source][local] = row
            row += int((parts[part].ids[source] == rank * EXPERTS + local).sum())
        expert_rows.append(row - expert_offset[-1])
        expert_offset.append(-(-row // ALIGNMENT) * ALIGNMENT)
    row, token_base = 0, {}
    for part in ORDER:
        token_base[part] = []
        for source in range(size):
            token_base[part].append(row)
            row += int((parts[part].ids[source] // EXPERTS == rank).any(dim=1).sum())
    same = {"expert_offset": expert_offset, "expert_rows": expert_rows}
    return {
        part: {"flat_base": list(itertools.chain(*flat_base[part])), "token_base": [*token_base[part], row], **same}
        for part in ORDER
    }


def fills_one_output(rank: int, size: int, layout: DispatchLayout, one_kernel: bool = False) -> None:
    """Three dispatches write into one output in another order, with and without room for all; combine returns rows."""
    flat = layout is DispatchLayout.FLAT
    comm = open_communicator(
        size,
        num_experts=EXPERTS * size,
        hidden_size=HIDDEN,
        topk=TOPK,
        layout=layout,
        expert_alignment=ALIGNMENT if flat else 1,
    )
    engine = comm.engine
    engine.reserve(DISPATCH_POOL, size * 70 * _C.slot_bytes(HIDDEN * 4, 0, 4, TOPK))
    engine.reserve(COMBINE_POOL, size * 70 * _C.partial_bytes(HIDDEN * 4, 4, TOPK))
    parts = [_Part(comm, number) for number in range(len(TOKENS))]
    for part in parts:
        part.notify(comm)
    bases = _bases(parts, rank, size)
    for number, part in enumerate(parts):
        part.rewrite(comm, bases[number])
    rows = _expected_rows(parts, rank, flat)
    for capacity in (max(len(rows) - 7, 0), len(rows) + 5, len(rows)):  # of the last one the recv_rows are kept
        beside = (capacity,) if flat else (capacity, TOPK)
        ids = _poisoned(*beside, dtype=torch.int32)
        out = {
            "tokens": _poisoned(capacity, HIDDEN, dtype=torch.float32),
            "weights": _poisoned(*beside, dtype=torch.float32),
            "row_expert_ids" if flat else "topk_ids": ids,
            "expert_count": _poisoned(EXPERTS, dtype=torch.int32),
            "expert_offset": _poisoned(EXPERTS + 1, dtype=torch.int32),
            "overflow": _poisoned(2, dtype=torch.int32),
        }
        for part in parts:
            part.dispatch(comm, out, one_kernel)
        finish(comm)
        assert out["overflow"].tolist() == [int(capacity < len(rows)), len(rows)]
        for row, (number, source, token, k) in enumerate(rows[:capacity]):
            with named(f"row {row} of {capacity}: part {number}, source {source}, token {token}, k {k}"):
                _check_row(parts[number] if number >= 0 else None, source, token, k, out, ids, row, rank)
        assert (ids[len(rows) :] == -1).all() and (out["tokens"][len(rows) :] == 0).all()
        if flat and capacity >= len(rows):
            assert out["expert_count"].tolist() == bases[0]["expert_rows"]
            assert out["expert_offset"].tolist() == bases[0]["expert_offset"]
    factors = (ids + 1 if flat else torch.full((capacity,), rank + 1, device=here())).to(torch.float32)
    y = out["tokens"] * factors.unsqueeze(1)
    for part in parts:
        sums, extra = part.combine(comm, y, out["weights"], one_kernel)
        mine, weights = part.ids[rank], part.weights[rank].masked_fill(part.ids[rank] < 0, 0)
        factor = (weights * (mine % EXPERTS + 1 if flat else mine // EXPERTS + 1)).sum(dim=1, keepdim=True)
        torch.testing.assert_close(sums, part.x[rank] * factor)
        same_bits("extra values", extra, weights * 8)
    finish(comm)
    comm.close()


def _check_row(
    part: _Part | None, source: int, token: int, k: int, out: dict[str, Any], ids: torch.Tensor, row: int, rank: int
) -> None:
    if part is None:
        assert int(ids[row]) == -1 and not out["tokens"][row].any() and out["weights"][row] == 0
        return
    same_bits("row", out["tokens"][row], part.x[source][token])
    theirs, weights = part.ids[source][token], part.weights[source][token]
    if k >= 0:
        assert ids[row] == theirs[k] - rank * EXPERTS and out["weights"][row] == weights[k]
        return
    is_here = theirs // EXPERTS == rank
    same_bits("ids", ids[row], torch.where(is_here, theirs - rank * EXPERTS, -1).to(torch.int32))
    same_bits("weights", out["weights"][row], torch.where(is_here, weights, 0))


def refuses_bases_outside(rank: int, size: int, layout: DispatchLayout) -> None:
    """Rewritten bases are checked as those of a handle are, though the dispatch is the first of its routing."""
    flat = layout is DispatchLayout.FLAT
    for name in ("expert_offset", "expert_rows") if flat else ("token_base",):
        for value in (-(2**31), 2**30, 2**31 - 1):
            comm = open_communicator(
                size, num_experts=EXPERTS * size, hidden_size=HIDDEN, topk=TOPK, layout=layout, timeout_s=5
            )
            comm.engine.reserve(DISPATCH_POOL, size * 70 * _C.slot_bytes(HIDDEN * 4, 0, 4, TOPK))
            part = _Part(comm, 1)
            part.notify(comm)
            if rank == 0:
                part.rewrite(comm, {name: [value] * (EXPERTS if flat else size)})
            out = {"tokens": _poisoned(200, HIDDEN, dtype=torch.float32)}
            beside = (200,) if flat else (200, TOPK)
            out |= {"weights": _poisoned(*beside, dtype=torch.float32)}
            out |= {"row_expert_ids" if flat else "topk_ids": _poisoned(*beside, dtype=torch.int32)}
            out |= {"expert_count": _poisoned(EXPERTS, dtype=torch.int32)}
            out |= {"expert_offset": _poisoned(EXPERTS + 1, dtype=torch.int32)}
            part.dispatch(comm, out)
            if rank != 0:
                try:
                    finish(comm)
                except (PeerTimeout, PeerAborted) as error:  # the fault stopped the send of rank 0, which still ran
                    assert comm.engine.device.type == "cuda" and error.rank == 0
            dist.barrier()  # the error of rank 0 would end the call of rank 1
            if rank == 0:
                with named(f"{name} = {value}"), pytest.raises(ValueError, match="handle: .* at step dispatch_recv"):
                    finish(comm)
                assert (out["tokens"].view(torch.uint8) == 0xFF).all()
            comm.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_dispatches_fill_one_output(size: int, layout: DispatchLayout) -> None:
    on_ranks(size, fills_one_output, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewritten_bases_are_checked(layout: DispatchLayout) -> None:
    on_ranks(2, refuses_bases_outside, layout)
