"""What else must hold on GPUs: scales, capacities, several operations under way, company on the device."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
import unittest.mock
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.moe.reference import ReferenceOutput, reference_dispatch, reference_quantize
from tests.gpu.checks import (
    CASES,
    ONE_KERNEL,
    TOKEN_MAJOR,
    Case,
    CombineOracle,
    assert_close,
    assert_received,
    check_round,
    communicator,
    device_of,
    expert_rows,
    make_inputs,
)
from tests.gpu.early import changes_streams, grows_unevenly, receives_early
from tests.gpu.gradients import gradients
from tests.moe.moe_cases import roundings_of


def same_bits(rank: int, size: int) -> None:
    """Two runs, and runs with other SM counts, give identical bits."""
    case = CASES["real_widths"]
    given = make_inputs(case, size, 3)
    results = []
    for sms in ({}, {}, {"dispatch_send_sms": 4, "dispatch_recv_sms": 7, "combine_send_sms": 5}, ONE_KERNEL):
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


QUANTIZED = {
    "bf16": Case(hidden=7168, tokens=300, topk=8),
    "bf16_token_major": Case(hidden=7168, tokens=300, topk=8, layout=TOKEN_MAJOR),
    "fp16": Case(hidden=2048, dtype=torch.float16),
    "fp32": Case(hidden=4112, dtype=torch.float32, alignment=8),
    "short_last_block": Case(hidden=272),
    "narrow": Case(hidden=16, tokens=90),
    "longer_than_a_stage": Case(hidden=60_016, tokens=40, topk=2, ragged=9),
    "empty_ranks": Case(hidden=512, tokens=20, ragged=11),
}


def _to_quantise(x: torch.Tensor, seed: int) -> torch.Tensor:
    """`x` with blocks of very different magnitudes, zeros of either sign, whole blocks of them, and odd values."""
    generator = torch.Generator().manual_seed(seed)
    tokens, hidden = x.shape
    powers = torch.randint(-12, 12, (tokens, -(-hidden // 128)), generator=generator)
    factors = 2.0 ** powers.float() * (torch.rand(powers.shape, generator=generator) > 0.1)
    x = (x.float() * factors.repeat_interleave(128, dim=1)[:, :hidden]).to(x.dtype)
    odd = [torch.nan, -torch.nan, torch.inf, -torch.inf, torch.finfo(x.dtype).max, torch.finfo(x.dtype).tiny, 1e-45]
    for token, value in zip(range(0, tokens, 2), odd, strict=False):
        x[token, int(torch.randint(hidden, (1,), generator=generator))] = value
    x[1:2] *= torch.finfo(x.dtype).tiny
    return x


def quantised_in_one_kernel(rank: int, size: int) -> None:
    quantised(rank, size, **ONE_KERNEL)


def quantised(rank: int, size: int, names: Collection[str] = tuple(QUANTIZED), **sms: int) -> None:
    """Rows and scales made by the send are the oracle's bit for bit, by all kernels, and over a known routing."""
    for plain, (seed, (name, case)) in itertools.product(("0", "1"), enumerate(QUANTIZED.items())):
        if name not in names:
            continue
        given = make_inputs(case, size, seed)
        x = [_to_quantise(rows, seed + r) for r, rows in enumerate(given.x)]
        rows, scales = zip(*(reference_quantize(tokens) for tokens in x), strict=True)
        kwargs = {
            "num_experts": case.experts_per_rank * size,
            "layout": case.layout,
            "expert_alignment": case.alignment,
        }
        expected = reference_dispatch([r.view(torch.uint8) for r in rows], given.ids, given.weights, **kwargs)[rank]
        beside = reference_dispatch(list(scales), given.ids, given.weights, **kwargs)[rank]
        with (
            unittest.mock.patch.dict(os.environ, EP_PLUGIN_PLAIN_KERNELS=plain),
            communicator(case, rank, size, timeout_s=60, **sms) as comm,
        ):
            device = comm.engine.device
            mine, ids, weights = (part[rank].to(device) for part in (x, given.ids, given.weights))
            handle = None
            for _ in range(3):
                out, made = comm.dispatch(mine, ids, weights, previous_handle=handle, quantize="e4m3")
                handle = handle or made
                assert out.scales is not None and out.tokens.dtype is torch.float8_e4m3fn
                assert torch.equal(out.scales.cpu(), beside.tokens), f"scales of {name}, plain={plain}"
                assert_received(out._replace(tokens=out.tokens.view(torch.uint8)), expected)


def capacity_in_one_kernel(rank: int, size: int) -> None:
    capacity(rank, size, **ONE_KERNEL)


def capacity(rank: int, size: int, **sms: int) -> None:
    """Enough room: the oracle's rows, then zeros; too little: rows are dropped and counted."""
    case = Case(dtype=torch.float32, tokens=50)
    given = make_inputs(case, size, 5)
    expected = given.expected[rank]
    rows = len(expected.tokens)
    with communicator(case, rank, size, timeout_s=60, max_tokens_per_rank=64, **sms) as comm:
        device = comm.engine.device
        x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
        out, handle = comm.dispatch(x, ids, weights, capacity=rows + 40)
        assert torch.equal(out.tokens[:rows].cpu(), expected.tokens) and not out.tokens[rows:].any()
        assert out.row_expert_ids is not None and (out.row_expert_ids[rows:] == -1).all()
        assert out.overflow is not None and out.required is not None
        assert out.overflow.item() == 0 and out.required.item() == rows
        y = torch.full_like(out.tokens, torch.nan)  # beyond the rows nothing is read
        y[:rows] = expert_rows(case, given, rank, 6).to(device)
        z = comm.combine(y, handle, weights=out.weights)
        CombineOracle(case, given, rank, 6, roundings_of(comm)).check("combine with room", z, weighted=True)

        cut = replace(given, expected=[first_rows(e, max(1, len(e.tokens) // 2)) for e in given.expected])
        small = max(1, rows // 2)
        out, handle = comm.dispatch(x, ids, weights, capacity=small)
        assert out.overflow is not None and out.required is not None
        assert torch.equal(out.tokens.cpu(), cut.expected[rank].tokens)
        assert out.overflow.item() == int(rows > small) and out.required.item() == rows
        assert int(out.expert_offsets.max()) <= small
        z = comm.combine(expert_rows(case, cut, rank, 7).to(device), handle, weights=out.weights)
        oracle = CombineOracle(case, cut, rank, 7, roundings_of(comm))
        oracle.check("combine of what there was room for", z, weighted=True)


def first_rows(expected: ReferenceOutput, capacity: int) -> ReferenceOutput:
    """The rows, and the pairs that they hold, for which there is room."""
    kept = expected.pair_row < capacity
    return replace(
        expected,
        tokens=torch.nn.functional.pad(expected.tokens[:capacity], (0, 0, 0, max(0, capacity - len(expected.tokens)))),
        pair_token=expected.pair_token[kept],
        pair_k=expected.pair_k[kept],
        pair_row=expected.pair_row[kept],
    )


def outstanding(rank: int, size: int) -> None:
    """Several handles, two communicators, async operations waited for late or never, beside a busy device."""
    case = Case(hidden=256, tokens=300)
    inputs = [make_inputs(case, size, seed) for seed in range(4)]
    with communicator(case, rank, size, timeout_s=60) as first, communicator(case, rank, size, timeout_s=60) as second:
        device = first.engine.device
        busy = torch.randn(4096, 4096, device=device)
        for _ in range(100 if device.type == "cuda" else 0):
            busy = torch.nn.functional.normalize(busy @ busy)
        parts = [[part[rank].to(device) for part in (g.x, g.ids, g.weights)] for g in inputs]
        works = [(first if i % 2 else second).dispatch_async(*parts[i]) for i in range(4)]
        results = [work.wait() for work in works]
        for (out, _), given in zip(results, inputs, strict=True):
            assert_received(out, given.expected[rank])
        for i in (2, 0, 3, 1):
            out, handle = results[i]
            comm = first if i % 2 else second
            y = expert_rows(case, inputs[i], rank, i).to(device)
            z = comm.combine_async(y, handle, weights=out.weights).wait()
            CombineOracle(case, inputs[i], rank, i, roundings_of(comm)).check(f"combine {i}", z, weighted=True)
        first.dispatch_async(*parts[0])  # nobody waits: the next operation completes it
        out, _ = first.dispatch(*parts[1])
        assert_received(out, inputs[1].expected[rank])


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


def beside_an_allocating_thread(rank: int, size: int) -> None:
    """Another thread allocates, fills and frees memory on the stream that the operations are called on, all the time.

    Its blocks are as large as an output: memory that it frees while the host waits for totals may become the output,
    with its work on it still under way; and the other way round.
    """
    case = Case(hidden=2048, tokens=300)
    inputs = [make_inputs(case, size, seed) for seed in range(3)]
    oracles = [CombineOracle(case, given, rank, seed) for seed, given in enumerate(inputs)]
    stop = threading.Event()
    with (
        communicator(case, rank, size, timeout_s=60) as comm,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        device = comm.engine.device
        parts = [[part[rank].to(device) for part in (given.x, given.ids, given.weights)] for given in inputs]
        ys = [expert_rows(case, given, rank, seed).to(device) for seed, given in enumerate(inputs)]
        other = pool.submit(_fill_and_free, stop, [torch.empty_like(y, device="meta") for y in ys], device)
        try:
            for turn in range(30):
                which = turn % len(inputs)
                out, handle = comm.dispatch(*parts[which])
                z = comm.combine(ys[which], handle, weights=out.weights)
                assert_received(out, inputs[which].expected[rank])
                oracles[which].check(f"combine {turn}", z, weighted=True)
                del out, z  # their memory is the other thread's next
        finally:
            stop.set()
        assert other.result() > 0


def _fill_and_free(stop: threading.Event, like: list[torch.Tensor], device: torch.device) -> int:
    """Until `stop`: how many blocks it filled. What it has written must still be there when its stream gets to it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    busy = torch.ones(1024, 1024, device=device)
    lost = torch.zeros((), dtype=torch.bool, device=device)
    filled = 0
    while not stop.is_set():
        for tensor in like:
            torch.mm(busy, busy)  # what follows waits a little, so that it is freed before it is written
            block = torch.full_like(tensor, filled % 100, device=device)
            lost |= (block != filled % 100).any()
            del block
            filled += 1
        assert not lost.item()  # and the stream's queue stays short
    return filled


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
        assert x.grad is not None
        share = (given.weights[rank].double() * (given.ids[rank] >= 0)).sum(1, keepdim=True)
        exact, gradient = given.x[rank].double() * share, given.x[rank].double() * 2 * share * share
        roundings = roundings_of(comm)
        assert_close("z", z.detach(), exact, exact.abs(), case.dtype, roundings)
        assert_close("x.grad", x.grad, gradient, gradient.abs(), case.dtype, roundings)

    os.environ["EP_PLUGIN_CHECK_IDS"] = "1"
    with communicator(case, rank, size, timeout_s=60) as comm:
        del os.environ["EP_PLUGIN_CHECK_IDS"]
        bad = ids.clone()
        bad[:1, 0] = comm.config.num_experts
        if len(bad):
            with pytest.raises(ValueError, match="topk_ids: expected"):
                comm.dispatch(x, bad, weights)
        comm.dispatch(x, ids, weights)


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
        assert out.row_expert_ids is not None
        factor = 2.0 ** torch.arange(experts, device=device)  # each expert's; exact in any type
        mine = factor[rank * comm.num_local_experts :][out.row_expert_ids.long()]
        z = comm.combine(out.tokens.mul_(mine.to(x.dtype).unsqueeze(1)), handle, weights=out.weights)
        exact = x[:, 0].double() * factor.double()[ids].sum(1) / 2
        assert (z.min(dim=1).values == z.max(dim=1).values).all()
        assert_close("z", z[:, 0], exact.cpu(), exact.cpu(), z.dtype)


_CHECKS = (
    gradients,
    same_bits,
    scales_travel,
    quantised,
    quantised_in_one_kernel,
    capacity,
    capacity_in_one_kernel,
    outstanding,
    receives_early,
    grows_unevenly,
    changes_streams,
    misaligned,
    beside_an_allocating_thread,
    beside_a_full_device,
)
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
