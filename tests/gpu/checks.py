"""What the GPU tests run on every rank: operations on fresh random inputs, judged by the oracles.

Ranks may share a GPU: rank r uses device r modulo the number of devices.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ep_plugin import DispatchLayout, MoECommunicator, MoECommunicatorConfig
from ep_plugin.moe.reference import ReferenceOutput, reference_combine, reference_dispatch

FLAT, TOKEN_MAJOR = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Case:
    """One routing problem. Rank r has max(0, tokens - ragged * r) tokens; `dropped` is the share of ids set to -1."""

    tokens: int = 200
    hidden: int = 512
    topk: int = 4
    experts_per_rank: int = 8
    dtype: torch.dtype = torch.bfloat16
    layout: DispatchLayout = FLAT
    alignment: int = 1
    ragged: int = 13
    dropped: float = 0.1
    only_rank: int | None = None
    ids: torch.dtype = torch.int64


CASES = {
    "plain": Case(),
    "token_major": Case(layout=TOKEN_MAJOR),
    "fp32": Case(dtype=torch.float32, hidden=260),
    "fp16_int32_ids": Case(dtype=torch.float16, ids=torch.int32, topk=1),
    "aligned": Case(alignment=16, experts_per_rank=3, topk=3),
    "one_expert_each": Case(experts_per_rank=1, topk=1, hidden=64),
    "sixteen_byte_rows": Case(hidden=8, tokens=77),
    "wide_rows": Case(hidden=20_488, tokens=70, topk=2),
    "many_experts_per_token": Case(topk=100, experts_per_rank=128, tokens=65, hidden=128),
    "empty_ranks": Case(tokens=20, ragged=11),
    "all_dropped": Case(dropped=1.0, tokens=33),
    "one_rank_receives_all": Case(only_rank=0, topk=2),
    "real_widths": Case(tokens=600, hidden=7168, topk=8, experts_per_rank=32),
    "real_widths_token_major": Case(tokens=600, hidden=7168, topk=8, experts_per_rank=32, layout=TOKEN_MAJOR),
}


def device_of(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def config_of(case: Case, size: int, **settings: Any) -> MoECommunicatorConfig:
    return MoECommunicatorConfig(
        num_experts=case.experts_per_rank * size,
        hidden_size=case.hidden,
        topk=min(case.topk, case.experts_per_rank * size),
        layout=case.layout,
        expert_alignment=case.alignment,
        **settings,
    )


@contextlib.contextmanager
def communicator(case: Case, rank: int, size: int, **settings: Any) -> Iterator[MoECommunicator]:
    with MoECommunicator(None, config_of(case, size, **settings), device_of(rank)) as comm:
        yield comm


@dataclass(frozen=True)
class Inputs:
    """All ranks' inputs, on the CPU, equal on every rank."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    expected: list[ReferenceOutput]

    @property
    def tokens(self) -> list[int]:
        return [len(x) for x in self.x]


def make_inputs(case: Case, size: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    experts = case.experts_per_rank * size
    topk = min(case.topk, experts)
    x, ids, weights = [], [], []
    for rank in range(size):
        tokens = max(0, case.tokens - case.ragged * rank)
        x.append(torch.randn(tokens, case.hidden, generator=generator).to(case.dtype))
        first = 0 if case.only_rank is None else case.only_rank * case.experts_per_rank
        choices = experts if case.only_rank is None else case.experts_per_rank
        chosen = torch.rand(tokens, choices, generator=generator).topk(topk, dim=1).indices + first
        chosen[torch.rand(tokens, topk, generator=generator) < case.dropped] = -1
        ids.append(chosen.to(case.ids))
        weights.append(torch.rand(tokens, topk, generator=generator))
    expected = reference_dispatch(
        x, ids, weights, num_experts=experts, layout=case.layout, expert_alignment=case.alignment
    )
    return Inputs(x, ids, weights, expected)


def assert_received(out: Any, expected: ReferenceOutput) -> None:
    """Bit for bit what the oracle says."""
    assert torch.equal(out.tokens.cpu(), expected.tokens), "tokens"
    if out.weights is not None:
        assert torch.equal(out.weights.cpu(), expected.weights), "weights"
    for name in ("topk_ids", "row_expert_ids"):
        ours, theirs = getattr(out, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours.cpu(), theirs), name
    assert torch.equal(out.num_tokens_per_expert.cpu(), expected.num_tokens_per_expert), "num_tokens_per_expert"
    assert torch.equal(out.expert_offsets.cpu(), expected.expert_offsets), "expert_offsets"
    if out.num_tokens_per_expert_cpu is not None:
        assert torch.equal(out.num_tokens_per_expert_cpu.int(), expected.num_tokens_per_expert), "counts on the host"


def assert_close(ours: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(ours).all(), "not finite"
    error = (ours.double().cpu() - oracle).norm() / oracle.norm().clamp(min=1e-30)
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e} above {TOLERANCE[dtype]}"


def check_round(comm: MoECommunicator, case: Case, seed: int) -> None:
    """Dispatch, combine with and without weights, and a dispatch over the same routing."""
    rank, size, device = comm.rank, comm.size, comm.engine.device
    given = make_inputs(case, size, seed)
    x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
    out, handle = comm.dispatch(x, ids, weights)
    assert_received(out, given.expected[rank])

    # The rows of expert e (or slot i) become rows that only this rank could have made.
    ys = [expected.tokens * (1 + r / 4) for r, expected in enumerate(given.expected)]
    y = ys[rank].to(device)
    bias = torch.full_like(x, 0.5)
    z = comm.combine(y, handle, weights=out.weights, bias=bias)
    oracle = reference_combine(ys, given.expected, given.tokens, [e.weights for e in given.expected])
    assert_close(z, oracle[rank] + 0.5, case.dtype)
    plain = comm.combine(y, handle)
    assert_close(plain, reference_combine(ys, given.expected, given.tokens)[rank], case.dtype)

    other = [tokens.flip(1).contiguous() for tokens in given.x]
    expected = reference_dispatch(
        other,
        given.ids,
        given.weights,
        num_experts=comm.config.num_experts,
        layout=case.layout,
        expert_alignment=case.alignment,
    )
    cached, _ = comm.dispatch(other[rank].to(device), ids, weights, previous_handle=handle)
    assert_received(cached, expected[rank])


def grid(rank: int, size: int) -> list[str]:
    """Every case, on fresh inputs, twice where ranks are few. Returns the names of the cases that ran."""
    done = []
    for index, (name, case) in enumerate(CASES.items()):
        if case.topk > case.experts_per_rank * size:
            continue
        with communicator(case, rank, size, timeout_s=60) as comm:
            for seed in (2 * index, 2 * index + 1)[: 2 if size <= 4 else 1]:
                try:
                    check_round(comm, case, seed)
                except Exception as error:
                    error.add_note(f"case {name}, seed {seed}, rank {rank} of {size}")
                    raise
        done.append(name)
    return done


def gradients(rank: int, size: int) -> None:
    """Gradients of x, the weights and the experts' scale, against autograd through the oracle's arithmetic."""
    for layout, dtype in itertools.product((FLAT, TOKEN_MAJOR), (torch.float32, torch.bfloat16)):
        case = Case(dtype=dtype, hidden=64, tokens=90, layout=layout)
        given = make_inputs(case, size, 7)
        with communicator(case, rank, size, timeout_s=60) as comm:
            device = comm.engine.device
            x = given.x[rank].to(device).requires_grad_()
            weights = given.weights[rank].to(device).requires_grad_()
            out, handle = comm.dispatch(x, given.ids[rank].to(device), weights)
            z = comm.combine(torch.tanh(out.tokens), handle, weights=out.weights)
            target = torch.linspace(-1, 1, case.hidden, device=device)
            (z * target).sum().backward()  # by way of gradients that are neither contiguous nor of the rows' dtype

            x_ref = given.x[rank].double().requires_grad_()
            w_ref = given.weights[rank].double().requires_grad_()
            kept = (given.ids[rank] >= 0).double()
            z_ref = torch.tanh(x_ref) * (w_ref * kept).sum(1, keepdim=True)
            (z_ref * target.cpu().double()).sum().backward()
            assert x.grad is not None and weights.grad is not None
            assert x_ref.grad is not None and w_ref.grad is not None
            assert_close(z, z_ref.detach(), dtype)
            assert_close(x.grad, x_ref.grad, dtype)
            assert_close(weights.grad, w_ref.grad, dtype)


def same_bits(rank: int, size: int) -> None:
    """Two runs, and runs with other SM counts, give identical bits."""
    case = CASES["real_widths"]
    given = make_inputs(case, size, 3)
    results = []
    for sms in ({}, {}, {"dispatch_sms": 4, "expand_sms": 7, "combine_sms": 5}):
        with communicator(case, rank, size, timeout_s=60, **sms) as comm:
            device = comm.engine.device
            out, handle = comm.dispatch(*(part[rank].to(device) for part in (given.x, given.ids, given.weights)))
            z = comm.combine(out.tokens.sin(), handle, weights=out.weights)
            results.append((out.tokens.cpu(), z.cpu()))
    for tokens, z in results[1:]:
        assert torch.equal(tokens, results[0][0]) and torch.equal(z, results[0][1])


def scales_travel(rank: int, size: int) -> None:
    """FP8 rows and their scales come back as they were."""
    case = Case(hidden=1024, dtype=torch.float32)
    given = make_inputs(case, size, 11)
    fp8 = [x.to(torch.float8_e4m3fn) for x in given.x]
    generator = torch.Generator().manual_seed(12)
    scales = [torch.rand(len(x), case.hidden // 128, generator=generator) for x in given.x]
    kwargs = {"num_experts": case.experts_per_rank * size}
    rows = reference_dispatch([x.view(torch.uint8) for x in fp8], given.ids, given.weights, **kwargs)
    beside = reference_dispatch(scales, given.ids, given.weights, **kwargs)
    with communicator(case, rank, size, timeout_s=60) as comm:
        device = comm.engine.device
        x, ids, beside_x = fp8[rank].to(device), given.ids[rank].to(device), scales[rank].to(device)
        out, _ = comm.dispatch(x, ids, scales=beside_x)
        assert out.weights is None and out.scales is not None
        assert torch.equal(out.tokens.view(torch.uint8).cpu(), rows[rank].tokens)
        assert torch.equal(out.scales.cpu(), beside[rank].tokens)


def capacity(rank: int, size: int) -> None:
    """Enough room: the oracle's rows, then zeros; too little: rows are dropped and counted."""
    case = Case(dtype=torch.float32, tokens=50)
    given = make_inputs(case, size, 5)
    expected = given.expected[rank]
    rows = len(expected.tokens)
    with communicator(case, rank, size, timeout_s=60, max_tokens_per_rank=64) as comm:
        device = comm.engine.device
        x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
        out, handle = comm.dispatch(x, ids, weights, capacity=rows + 40)
        assert torch.equal(out.tokens[:rows].cpu(), expected.tokens) and not out.tokens[rows:].any()
        assert out.row_expert_ids is not None and (out.row_expert_ids[rows:] == -1).all()
        assert out.overflow is not None and out.required is not None
        assert out.overflow.item() == 0 and out.required.item() == rows
        comm.combine(out.tokens, handle, weights=out.weights)
        small = max(1, rows // 2)
        out, handle = comm.dispatch(x, ids, weights, capacity=small)
        assert out.overflow is not None and out.required is not None
        assert torch.equal(out.tokens.cpu(), expected.tokens[:small])
        assert out.overflow.item() == int(rows > small) and out.required.item() == rows
        assert int(out.expert_offsets.max()) <= small
        assert torch.isfinite(comm.combine(out.tokens, handle, weights=out.weights)).all()


def outstanding(rank: int, size: int) -> None:
    """Several handles, two communicators, async operations waited for late or never, beside a busy device."""
    case = Case(hidden=256, tokens=300)
    inputs = [make_inputs(case, size, seed) for seed in range(4)]
    with communicator(case, rank, size, timeout_s=60) as first, communicator(case, rank, size, timeout_s=60) as second:
        device = first.engine.device
        busy = torch.randn(4096, 4096, device=device)
        for _ in range(100):
            busy = torch.nn.functional.normalize(busy @ busy)
        parts = [[part[rank].to(device) for part in (g.x, g.ids, g.weights)] for g in inputs]
        works = [(first if i % 2 else second).dispatch_async(*parts[i]) for i in range(4)]
        results = [work.wait() for work in works]
        for (out, _), given in zip(results, inputs, strict=True):
            assert_received(out, given.expected[rank])
        for i in (2, 0, 3, 1):
            out, handle = results[i]
            comm = first if i % 2 else second
            z = comm.combine_async(out.tokens, handle, weights=out.weights).wait()
            rows = [e.tokens for e in inputs[i].expected]
            oracle = reference_combine(
                rows, inputs[i].expected, inputs[i].tokens, [e.weights for e in inputs[i].expected]
            )
            assert_close(z, oracle[rank], case.dtype)
        first.dispatch_async(*parts[0])  # nobody waits: the next operation completes it
        out, _ = first.dispatch(*parts[1])
        assert_received(out, inputs[1].expected[rank])


def graph(rank: int, size: int) -> None:
    """One capture of dispatch and combine, replayed with new routing, interleaved with eager calls."""
    case = Case(hidden=256, tokens=64, ragged=0, dtype=torch.float32)
    with communicator(case, rank, size, timeout_s=60, max_tokens_per_rank=64) as comm:
        device = comm.engine.device
        given = make_inputs(case, size, 0)
        x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
        room = 64 * size * case.topk

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            out, handle = comm.dispatch(x, ids, weights, capacity=room)
            return out.tokens, comm.combine(out.tokens * 2, handle, weights=out.weights)

        step()
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            tokens, z = step()
        for seed in range(1, 20):
            given = make_inputs(case, size, seed)
            for to, source in ((x, given.x), (ids, given.ids), (weights, given.weights)):
                to.copy_(source[rank])
            recorded.replay()
            expected = given.expected[rank]
            assert torch.equal(tokens[: len(expected.tokens)].cpu(), expected.tokens)
            rows = [2 * e.tokens for e in given.expected]
            oracle = reference_combine(rows, given.expected, given.tokens, [e.weights for e in given.expected])
            assert_close(z, oracle[rank], torch.float32)
            if seed % 5 == 0:
                check_round(comm, case, 100 + seed)
            if seed == 12:  # wider rows grow the pools; what was captured goes on in those it was captured with
                comm.dispatch(x, ids, weights, scales=torch.ones(len(x), 64, device=device), capacity=room)


def beside_nccl(rank: int, size: int) -> None:
    """NCCL all-reduces between the operations of two communicators, on a stream of their own."""
    import torch.distributed as dist

    case = Case(hidden=1024, tokens=500)
    device = device_of(rank)
    nccl = dist.new_group(list(range(size)), backend="nccl")
    with communicator(case, rank, size, timeout_s=60) as first, communicator(case, rank, size, timeout_s=60) as second:
        for seed in range(5):
            numbers = torch.full((1 << 22,), float(rank + seed), device=device)
            work = dist.all_reduce(numbers, group=nccl, async_op=True)
            check_round(first, case, seed)
            check_round(second, case, seed + 5)
            work.wait()
            assert (numbers == sum(r + seed for r in range(size))).all()
    torch.cuda.synchronize()


def beside_a_full_device(rank: int, size: int) -> None:
    """A kernel that holds every SM for 50 ms, while our operations are enqueued and run after it or around it."""
    import cupy

    source = """extern "C" __global__ void hold(long long ns) {
      long long began, now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
      do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - began < ns);
    }"""
    case = Case(hidden=1024, tokens=300)
    with communicator(case, rank, size, timeout_s=60) as comm:
        hold = cupy.RawKernel(source, "hold")
        hold.max_dynamic_shared_size_bytes = shared = 200 * 1024
        sms = torch.cuda.get_device_properties(comm.engine.device).multi_processor_count
        check_round(comm, case, 0)
        side = torch.cuda.Stream()
        for seed in range(1, 4):
            with cupy.cuda.ExternalStream(side.cuda_stream):
                hold((sms,), (1024,), (50_000_000,), shared_mem=shared)
            check_round(comm, case, seed)
        torch.cuda.synchronize()


def misaligned(rank: int, size: int) -> None:
    """Rows that do not begin at 16 bytes are copied, also as gradients; bad ids are found before a launch if asked."""
    case = Case(dtype=torch.float32, hidden=64, tokens=40)
    given = make_inputs(case, size, 9)
    with communicator(case, rank, size, timeout_s=60) as comm:
        device = comm.engine.device
        ids, weights = given.ids[rank].to(device), given.weights[rank].to(device)
        flat = torch.zeros(1 + given.x[rank].numel(), device=device)
        flat[1:] = given.x[rank].flatten().to(device)
        x = flat[1:].view(-1, case.hidden).requires_grad_()
        out, handle = comm.dispatch(x, ids, weights)
        assert_received(out, given.expected[rank])
        z = comm.combine(out.tokens, handle, weights=out.weights)
        torch.cat([torch.ones(1, device=device), z.flatten()]).square().sum().backward()
        assert x.grad is not None and torch.isfinite(x.grad).all()

        os.environ["EP_PLUGIN_CHECK_IDS"] = "1"
        bad = ids.clone()
        bad[:1, 0] = comm.config.num_experts
        if len(bad):
            with pytest.raises(ValueError, match="topk_ids: expected"):
                comm.dispatch(x, bad, weights)
        comm.dispatch(x, ids, weights)
        del os.environ["EP_PLUGIN_CHECK_IDS"]


def large(rank: int, size: int) -> None:
    """More than 2**31 bytes of rows in one dispatch, in the pool and in the output."""
    hidden, tokens, experts = 8192, 70_000, 2 * size
    config = MoECommunicatorConfig(num_experts=experts, hidden_size=hidden, topk=2, timeout_s=60)
    with MoECommunicator(None, config, device_of(rank)) as comm:
        device = comm.engine.device
        numbers = torch.arange(tokens, device=device)
        x = (numbers % 251).unsqueeze(1).expand(tokens, hidden).to(torch.bfloat16) + rank
        first = (numbers + rank) % experts
        ids = torch.stack([first, (first + 1) % experts], dim=1)
        out, handle = comm.dispatch(x.contiguous(), ids, torch.full((tokens, 2), 0.5, device=device))
        assert out.tokens.numel() * 2 > 2**31
        assert (out.tokens.min(dim=1).values == out.tokens.max(dim=1).values).all()
        z = comm.combine(out.tokens, handle, weights=out.weights)
        assert torch.equal(z, x)


_CHECKS = (gradients, same_bits, scales_travel, capacity, outstanding, graph, misaligned, beside_a_full_device)
FEATURES = {check.__name__: check for check in _CHECKS}


def features(rank: int, size: int) -> list[str]:
    """All of FEATURES in one group of processes. Returns the names of those that ran."""
    done = []
    for name, check in FEATURES.items():
        try:
            check(rank, size)
        except Exception as error:
            error.add_note(f"feature {name}, rank {rank} of {size}")
            raise
        done.append(name)
    return done
