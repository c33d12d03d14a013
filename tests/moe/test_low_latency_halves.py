"""The two halves of low-latency operations: in either order, late, many of them, and beside other communicators."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os

import pytest
import torch

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter, MoECommunicator, SendReceive
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from tests.collectives.collective_cases import reduced, shard
from tests.moe.low_latency_cases import check_rows, check_sums, expert_results, low_latency, round_trip
from tests.moe.moe_cases import Case, communicator, make_inputs, named, on_ranks, same_bits
from tests.moe.moe_cases import check_dispatch as check_flat
from tests.ranks import simt_asked

CASE = Case(tokens=(20, 5, 60), num_experts=6, topk=5, dtype=torch.bfloat16, hidden=40)


def _either_order(rank: int, size: int) -> None:
    with low_latency(CASE) as comm:
        for number in range(6):
            pair = [make_inputs(dataclasses.replace(CASE, seed=2 * number + i)) for i in (0, 1)]
            order = (1, 0) if (number + rank) % 2 else (0, 1)  # ranks differ in it
            works = [comm.dispatch_async(one.x[rank], one.ids[rank]) for one in pair]
            assert not works[0].done
            outs = {i: works[i].wait() for i in order}
            assert works[0].done and works[0].wait() is outs[0]
            for i in (0, 1):
                check_rows(comm, outs[i][0], pair[i])
            y = [expert_results(one, outs[0][0].tokens.shape[1]) for one in pair]
            sums = [comm.combine_async(y[i][rank], outs[i][1], pair[i].weights[rank]) for i in (0, 1)]
            found = {i: sums[i].wait() for i in reversed(order)}
            for i in (0, 1):
                check_sums(pair[i], rank, y[i], found[i])


def test_halves_in_either_order() -> None:
    on_ranks(3, _either_order)


def _late(rank: int, size: int) -> None:
    """A dispatch is received after others have come and gone, a combine after dispatches."""
    inputs = [make_inputs(dataclasses.replace(CASE, seed=seed)) for seed in range(4)]
    with low_latency(CASE) as comm:
        early = comm.dispatch_async(inputs[0].x[rank], inputs[0].ids[rank])
        round_trip(comm, inputs[1])  # a whole dispatch and a whole combine
        check_rows(comm, early.wait()[0], inputs[0])
        out, handle = early.wait()
        y = expert_results(inputs[0], out.tokens.shape[1])
        late = comm.combine_async(y[rank], handle, inputs[0].weights[rank])
        for one in inputs[2:]:
            check_rows(comm, comm.dispatch(one.x[rank], one.ids[rank])[0], one)
        check_sums(inputs[0], rank, y, late.wait())


def test_late_receives() -> None:
    on_ranks(3, _late)


def _third(rank: int, size: int) -> None:
    inputs = make_inputs(CASE)
    given = inputs.x[rank], inputs.ids[rank]
    with low_latency(CASE) as comm:
        first, second = comm.dispatch_async(*given), comm.dispatch_async(*given)
        for _ in range(2):
            with pytest.raises(ValueError, match="last but one dispatch to be received .* got .* 2 un-received"):
                comm.dispatch(*given)
        second.wait()
        with pytest.raises(ValueError, match="last but one dispatch to be received .* got .* 1 un-received"):
            comm.dispatch_async(*given)
        first.wait()
        out, handle = comm.dispatch(*given)
        y = expert_results(inputs, out.tokens.shape[1])
        works = [comm.combine_async(y[rank], handle, inputs.weights[rank]) for _ in range(2)]
        with pytest.raises(ValueError, match="last but one combine to be received"):
            comm.combine_async(y[rank], handle, inputs.weights[rank])
        for work in works:
            check_sums(inputs, rank, y, work.wait())


def test_a_third_operation_is_refused() -> None:
    on_ranks(3, _third)


def _dropped(rank: int, size: int) -> None:
    """Rank 0 drops works that it has not waited for. Later operations of the kind receive them."""
    inputs = make_inputs(CASE)
    given = inputs.x[rank], inputs.ids[rank]
    with low_latency(CASE) as comm:
        for _ in range(5):
            works = [comm.dispatch_async(*given) for _ in range(2)]
            if rank > 0:
                check_rows(comm, works[0].wait()[0], inputs)
                works[1].wait()
            works.clear()
            out, handle = comm.dispatch(*given)
            check_rows(comm, out, inputs)
            y = expert_results(inputs, out.tokens.shape[1])
            comm.combine_async(y[rank], handle, inputs.weights[rank])
            for _ in range(2):
                check_sums(inputs, rank, y, comm.combine(y[rank], handle, inputs.weights[rank]))


def test_operations_that_nobody_waits_for_do_not_block_later_ones() -> None:
    on_ranks(3, _dropped)


def _many(rank: int, size: int, count: int) -> None:
    """Every row of every operation is compared, by values that tell the operation, the source and the token."""
    generator = torch.Generator().manual_seed(1)
    E, K, H, most = 2 * size, 4, 8, 110
    case = Case(tokens=(most,) * size, num_experts=E, topk=K, hidden=H)
    with low_latency(case) as comm:
        for number in range(count):
            tokens = torch.randint(0, most + 1, (size,), generator=generator).tolist()
            ids = [torch.rand((T, E), generator=generator).topk(K, dim=1).indices for T in tokens]
            x = [(torch.arange(T) + 100.0 * r + 1000 * (number % 997) + 1).repeat(H, 1).T for r, T in enumerate(tokens)]
            out, handle = comm.dispatch(x[rank].contiguous(), ids[rank])
            everywhere, token_of = torch.cat(ids), torch.cat(x)[:, 0]
            for local in range(2):
                chosen = token_of[(everywhere == 2 * rank + local).any(dim=1)]
                assert int(out.num_tokens_per_expert[local]) == len(chosen), number
                assert torch.equal(out.tokens[local, : len(chosen)], chosen.repeat(H, 1).T), number
            sums = comm.combine(out.tokens, handle, weights=torch.full((tokens[rank], K), 1 / K))
            assert torch.equal(sums, x[rank]), number


@pytest.mark.slow
def test_thousands_of_operations() -> None:
    on_ranks(3, _many, 1500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("EP_TEST_LONG" not in os.environ, reason="takes minutes: EP_TEST_LONG=1 runs it")
def test_a_hundred_thousand_operations() -> None:
    on_ranks(2, _many, 50_000, timeout_s=1750)


def _epochs_of_32_bits(rank: int, size: int) -> None:
    """Words carry the lower half of the epoch; operations cross its wrap."""
    with low_latency(CASE) as comm:
        small, large = dataclasses.replace(CASE, tokens=(2, 1, 3)), CASE
        round_trip(comm, make_inputs(small))
        comm.engine.exchange.barrier("test")  # peers have signalled that they have read
        begin = 2**32 - 5
        for offset, value in ((_C.ll_epoch_offset, begin), (_C.ll_unsignalled_offset, 0)):
            comm.engine.ll_state[offset : offset + 16].view(torch.int64).fill_(value)
        _age_block(comm, begin)
        comm.engine.exchange.barrier("test")
        for number in range(10):
            with named(number):
                round_trip(comm, make_inputs(dataclasses.replace((small, large)[number % 3 == 2], seed=number)))


def _age_block(comm: MoECommunicator, epoch: int) -> None:
    """Makes this rank's block as it is after `epoch` operations of each kind: everything consumed, every word old."""
    block, flags = comm.engine.memory._open[0], 4 * comm.size
    consumed = (ctypes.c_uint64 * flags).from_address(block.ptrs[comm.rank])
    consumed[:] = [epoch] * flags
    words = -(-8 * flags // 128) * 128 + 128 + flags * 128 * 8  # behind consumed words, waiting words and flags
    ctypes.memset(block.ptrs[comm.rank] + words, 0x7F, block.nbytes - words)


def test_epochs_wrap_in_words() -> None:
    on_ranks(3, _epochs_of_32_bits)


FEW_PAIRS = _C.ll_few_pairs  # whose rows travel as words


def words_of_pairs(comm: MoECommunicator) -> torch.Tensor:
    """int32 ``[2, FEW_PAIRS, words of a row, 4]``: this rank's words of rows, which end with their epochs."""
    engine, block = comm.engine, comm.engine.memory._open[0]
    per_row = -(-engine.shape.slot_bytes // 12)
    behind = 4 * comm.size * engine.shape.max_tokens * engine.shape.slot_bytes  # slots, to the block's end
    nbytes = 2 * FEW_PAIRS * per_row * 16
    begin = block.ptrs[comm.rank] + engine.memory_bytes - behind - nbytes
    words = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(begin), dtype=torch.int32)
    return words.view(2, FEW_PAIRS, per_row, 4)


def _words_stay_young(rank: int, size: int, every_word: bool) -> None:
    """One token is combined again and again, and each combine refreshes one more word of pairs that it does not have.

    every_word: as kernels of GPUs have it; on CPUs the last word of a row says that the row is there.
    """
    case = Case(tokens=(1,) * size, num_experts=2 * size, topk=1, dtype=torch.float32, hidden=4, drop=0.0)
    with low_latency(case) as comm:
        inputs, old = make_inputs(case), 0x7F7F7F7F
        round_trip(comm, inputs)
        comm.engine.exchange.barrier("test")  # peers have signalled that they have read
        words = words_of_pairs(comm)
        ages = words[..., 3] if every_word else words[:, :, -1, 3]
        ages.fill_(old)
        comm.engine.exchange.barrier("test")
        for _ in range(2 * FEW_PAIRS):
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            sums = comm.combine(out.tokens.nan_to_num(), handle)
        assert torch.equal(sums, inputs.x[rank])
        comm.engine.exchange.barrier("test")
        assert int((ages != old).sum()) >= 2 * FEW_PAIRS, f"{int((ages == old).sum())} of {ages.numel()} are old"


def test_no_word_of_a_pair_grows_old() -> None:
    on_ranks(2, _words_stay_young, simt_asked(os.environ))


def _beside(rank: int, size: int) -> None:
    """Two low-latency communicators and one of the other mode take turns."""
    inputs = make_inputs(CASE)
    with low_latency(CASE) as one, low_latency(CASE) as two, communicator(CASE) as flat:
        work = one.dispatch_async(inputs.x[rank], inputs.ids[rank])
        round_trip(two, inputs)
        plain, handle = flat.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        check_flat(plain, inputs.expected(flat.config.resolved_layout)[rank])
        out, handle_of_one = work.wait()
        check_rows(one, out, inputs)
        y = expert_results(inputs, out.tokens.shape[1])
        with pytest.raises(ValueError, match="handle: expected one of communicator"):
            one.combine(y[rank], handle)
        with pytest.raises(ValueError, match="handle: expected one of communicator"):
            flat.combine(plain.tokens, handle_of_one)
        check_sums(inputs, rank, y, one.combine(y[rank], handle_of_one, inputs.weights[rank]))


def test_other_communicators_beside() -> None:
    on_ranks(3, _beside)


COUNTS = (5, 4097, 300_001)  # elements of a shard or of a message


def _collectives_beside(rank: int, size: int) -> None:
    """A gather, a sum and messages begin between the halves of a dispatch and of a combine, and end late."""
    after, before = (rank + 1) % size, (rank - 1) % size
    with (
        low_latency(CASE) as comm,
        HierarchicalAllGather() as gather,
        HierarchicalReduceScatter() as scatter,
        SendReceive(device=comm.engine.device) as p2p,
    ):
        for seed, count in enumerate(COUNTS):
            given = make_inputs(dataclasses.replace(CASE, seed=seed))
            wholes = [shard(seed, source, size * count, torch.bfloat16).view(size, count) for source in range(size)]
            mine = wholes[rank].to(comm.engine.device)
            gathered, total, *messages = (torch.zeros_like(one) for one in (mine, mine[0], mine[0], mine[0]))
            dispatch = comm.dispatch_async(given.x[rank], given.ids[rank])
            works = [gather(gathered, mine[0], async_op=True), p2p.exchange(mine[1], messages[0], after, before, 0)]
            out, handle = dispatch.wait()
            y = expert_results(given, out.tokens.shape[1])
            combine = comm.combine_async(y[rank], handle, given.weights[rank])
            works += [scatter(total, mine, async_op=True), p2p.exchange(mine[2], messages[1], before, after, 1)]
            sums = combine.wait()
            for work in reversed(works):
                work.wait()
            check_rows(comm, out, given)
            check_sums(given, rank, y, sums)
            same_bits("gather", gathered.cpu(), torch.stack([whole[0] for whole in wholes]))
            same_bits("sum", total.cpu(), reduced(wholes, rank, size, 1.0))
            for message, source, row in zip(messages, (before, after), (1, 2), strict=True):
                same_bits("message", message.cpu(), wholes[source][row])


def test_collectives_and_messages_beside() -> None:
    on_ranks(3, _collectives_beside)


def _counters(rank: int, size: int) -> None:
    inputs = make_inputs(CASE)
    with low_latency(CASE) as comm:
        cumulative = torch.full((comm.num_local_experts,), 5, dtype=torch.int32)
        cost, back_cost = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        given = inputs.x[rank], inputs.ids[rank], None, None, None, None, [], comm.number
        for _ in range(2):
            started = comm.in_flight.start(
                LowLatencyDispatch(comm.engine, *given, cumulative=cumulative, wait_cost=cost)
            )
            results = comm.in_flight.collect(started.number)
        assert torch.equal(cumulative, 5 + 2 * results[4])
        y = expert_results(inputs, results[0].shape[1])
        out = torch.full((CASE.tokens[rank], CASE.hidden), torch.nan, dtype=CASE.dtype)
        given = y[rank], inputs.weights[rank], None, None, False, list(results[8:]), comm.number
        sums = comm.in_flight.run(LowLatencyCombine(comm.engine, *given, out=out, wait_cost=back_cost))[0]
        assert sums is out
        check_sums(inputs, rank, y, out)
        assert (cost >= 0).all() and (back_cost >= 0).all() and int(cost[rank]) == 0


def test_counters_and_out() -> None:
    on_ranks(3, _counters)


def _logfmt(rank: int, size: int) -> None:
    case = Case(tokens=(90, 4, 17), num_experts=6, topk=3, dtype=torch.bfloat16, hidden=256, seed=3)
    inputs = make_inputs(case)
    with low_latency(case) as comm:
        _, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = expert_results(inputs, size * comm.config.max_tokens_per_rank)
        for factor in (0.05, 3.0):  # all values are below 1, so groups are coded; some are not
            scaled = [rows * factor for rows in y]
            given = scaled[rank], inputs.weights[rank], None, None, False, list(handle[:-1]), comm.number
            coded = comm.in_flight.run(LowLatencyCombine(comm.engine, *given, logfmt=True))[0]
            plain = comm.combine(scaled[rank], handle, weights=inputs.weights[rank])
            if case.tokens[rank] * case.topk <= _C.ll_few_pairs:
                assert torch.equal(coded, plain)
            a, b = coded.double() + 1, plain.double() + 1
            assert 1 - float(2 * (a * b).sum() / (a * a + b * b).sum()) < 1e-5, factor
            torch.testing.assert_close(coded, plain, rtol=0.05, atol=0.02 * float(plain.abs().max()))


def test_logfmt() -> None:
    on_ranks(3, _logfmt)


def slots_of_combine(comm: MoECommunicator) -> torch.Tensor:
    """uint8 ``[2, R, T_max, bytes]``: this rank's slots of partial rows, by parity and holder."""
    engine, block = comm.engine, comm.engine.memory._open[0]
    shape = 2, comm.size, engine.shape.max_tokens, engine.shape.slot_bytes
    nbytes = math.prod(shape)
    begin = block.ptrs[comm.rank] + engine.memory_bytes - nbytes  # the last part of the block
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(begin), dtype=torch.uint8).view(shape)


def _bytes_of_logfmt(rank: int, size: int) -> None:
    """Of every 128 sums below 1, a combine with logfmt stores 160 bytes of codes and 8 of scale; of others, 8 more than
    their 256. Bytes count as stored if they do not depend on what was in the slots."""
    case = Case(tokens=(90, 4, 17), num_experts=6, topk=3, dtype=torch.bfloat16, hidden=512, seed=3)
    inputs = make_inputs(case)
    named_there = [(inputs.ids[rank] // 2 == holder).any(1) for holder in range(size)]
    with low_latency(case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        slots = slots_of_combine(comm)
        for coded, stored in ((False, 4 * 256), (True, 3 * (160 + 8) + 256 + 8)):
            y = torch.rand(out.tokens.shape, generator=torch.Generator().manual_seed(rank)).bfloat16() * 0.2 + 0.1
            y[:, :, -128:] += 1  # the last group cannot be coded
            given = y, None, None, None, False, list(handle[:-1]), comm.number
            found = []
            for poison in (0x00, 0xFF):
                comm.engine.exchange.barrier("test")  # peers have received what was before
                slots.fill_(poison)
                comm.engine.exchange.barrier("test")
                for _ in range(2):  # of both parities
                    comm.in_flight.run(LowLatencyCombine(comm.engine, *given, logfmt=coded))
                found.append(slots.clone())
            nbytes = (found[0] == found[1]).sum(3)
            assert nbytes.shape == (2, size, comm.engine.shape.max_tokens)
            expected = torch.zeros_like(nbytes)
            if case.tokens[rank] * case.topk > _C.ll_few_pairs:
                expected[:, :, : case.tokens[rank]] = stored * torch.stack(named_there)
            assert torch.equal(nbytes, expected), (coded, nbytes.unique().tolist())


def test_bytes_of_logfmt() -> None:
    on_ranks(3, _bytes_of_logfmt)
