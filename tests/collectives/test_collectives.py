"""All-gather bit for bit and reduce-scatter against its oracle: sizes, dtypes, world sizes, emulated nodes, forms."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.transport.rails import CHUNK_BYTES
from tests.collectives.collective_cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    FP64,
    SIZES,
    gathered_by_gloo,
    poisoned,
    reduced,
    same_bits,
    shard,
)
from tests.faults.fault_cases import nothing_left_behind
from tests.ranks import run_ranks, values

# Ranks, and ranks of an emulated node (None: all of them).
WORLDS = [(1, None), (2, None), (3, None), (4, None), (5, None), (6, None), (7, None), (8, None)]
WORLDS += [(3, 1), (4, 2), (6, 3)]
LARGE = CHUNK_BYTES["cpu"] + 4097  # bytes of a shard: more than one rail chunk, and not a whole number of them


def _env(per_node: int | None) -> dict[str, str]:
    return {} if per_node is None else {"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}


def _gathers(rank: int, size: int) -> int:
    cases = [(count, dtype) for count in SIZES[:: 1 if size <= 6 else 3] for dtype in (torch.uint8, BF16)]
    cases += [(129, dtype) for dtype in DTYPES] + [(LARGE, torch.uint8)]
    with HierarchicalAllGather() as gather:
        for seed, (count, dtype) in enumerate(cases):
            mine = shard(seed, rank, count, dtype)
            expected = gathered_by_gloo(mine)
            foreign = poisoned(size * count, dtype)
            assert gather(foreign, mine) is None
            assert same_bits(foreign, expected), f"foreign output, {count} of {dtype}"
            ours = gather.allocate((size * count,), dtype=dtype, device=torch.device("cpu"))
            ours.copy_(poisoned(size * count, dtype))
            gather(ours, mine)
            assert same_bits(ours, expected), f"allocated output, {count} of {dtype}"
            ours.copy_(poisoned(size * count, dtype))
            part = ours.narrow(0, rank * count, count)
            part.copy_(mine)
            gather(output_tensor=ours, input_tensor=part, group=gather.group, async_op=False)
            assert same_bits(ours, expected), f"in place, {count} of {dtype}"
            listed = [poisoned(count, dtype) for _ in range(size)]
            gather.all_gather(listed, mine)
            assert same_bits(torch.cat(listed), expected), f"list, {count} of {dtype}"
        return gather.rail_bytes_sent


@pytest.mark.parametrize(("size", "per_node"), WORLDS)
def test_all_gather_is_bit_exact(size: int, per_node: int | None) -> None:
    values(run_ranks(size, _gathers, size, timeout_s=200, env=_env(per_node)))


def _sums(rank: int, size: int, per_node: int) -> None:
    premul = dist._make_nccl_premul_sum(0.375)
    operations = [(dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1.0 / size), (premul, 0.375)]
    dtypes = (BF16, FP16, FP32, FP64) if size <= 6 else (BF16, FP32)
    cases = [(count, dtype) for count in (1, 5, 4097, 70_001) for dtype in dtypes]
    cases += [(CHUNK_BYTES["cpu"] // 2 + 13, BF16)]
    with HierarchicalReduceScatter() as scatter:
        for seed, (count, dtype) in enumerate(cases):
            whole = [shard(seed, source, size * count, dtype).view(size, count) for source in range(size)]
            for op, scale in operations:
                expected = reduced(whole, rank, per_node, scale)
                what = f"{op}, {count} of {dtype}"
                out = poisoned(count, dtype)
                assert scatter(out, whole[rank].flatten(), op=op) is None
                assert same_bits(out, expected), f"foreign input, {what}"
                ours = scatter.allocate(size * count, dtype=dtype, device="cpu")
                ours.copy_(whole[rank].flatten())
                out = poisoned(count, dtype)
                scatter(output_tensor=out, input_tensor=ours, group=scatter.group, op=op)
                assert same_bits(out, expected), f"allocated input, {what}"
                scatter(ours.narrow(0, rank * count, count), ours, op=op)
                assert same_bits(ours.narrow(0, rank * count, count), expected), f"in place, {what}"
                out = poisoned(count, dtype)
                scatter.reduce_scatter(out, list(whole[rank].unbind()), op=op)
                assert same_bits(out, expected), f"list, {what}"


@pytest.mark.parametrize(("size", "per_node"), WORLDS)
def test_reduce_scatter_is_its_oracle_to_the_bit(size: int, per_node: int | None) -> None:
    values(run_ranks(size, _sums, size, per_node or size, timeout_s=200, env=_env(per_node)))


def _rail_bytes(rank: int, size: int, count: int) -> tuple[int, int]:
    with HierarchicalAllGather() as gather, HierarchicalReduceScatter() as scatter:
        gather(torch.empty(size * count, dtype=BF16), torch.zeros(count, dtype=BF16))
        scatter(torch.empty(count, dtype=BF16), torch.zeros(size * count, dtype=BF16))
        return gather.rail_bytes_sent, scatter.rail_bytes_sent


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (6, 3), (3, 1), (2, None)])
def test_rails_carry_each_shard_once_per_other_node(size: int, per_node: int | None) -> None:
    count = CHUNK_BYTES["cpu"] // 2 + 5
    expected = (size // (per_node or size) - 1) * count * BF16.itemsize
    sent = values(run_ranks(size, _rail_bytes, size, count, env=_env(per_node)))
    assert sent == [(expected, expected)] * size


def _gathers_together(rank: int) -> int:
    """As over NCCL: the rail's backend gathers shards, in more chunks than are under way at a time."""
    count, device = 7 * 1000 + 13, torch.device("cpu")
    with HierarchicalAllGather() as gather:
        engine = gather.engine_on(device)
        engine.rails._rail.gathers = True
        engine.rails.chunk_bytes = 1000
        mine = shard(0, rank, count, torch.uint8)
        for out in (poisoned(6 * count, torch.uint8), gather.allocate(6 * count, torch.uint8, device)):
            gather(out, mine)
            assert same_bits(out, gathered_by_gloo(mine))
        return gather.rail_bytes_sent


def test_a_rail_that_gathers_together_carries_each_shard_once_per_other_node() -> None:
    assert values(run_ranks(6, _gathers_together, env=_env(2))) == [2 * 2 * 7013] * 6


def _parts_of_nodes(rank: int) -> list[int]:
    """As hybrid sharding has them: groups inside the nodes, and groups across them."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    sent = []
    for group in groups:
        members = dist.get_process_group_ranks(group)
        if rank in members:
            with HierarchicalAllGather(group) as gather:
                out = torch.empty(20)
                gather(out, torch.full((10,), float(rank)))
                assert out.tolist() == [float(member) for member in members for _ in range(10)]
                sent.append(gather.rail_bytes_sent)
    return sent


def test_groups_across_nodes_are_seen_as_such() -> None:
    assert values(run_ranks(4, _parts_of_nodes, env=_env(2))) == [[0, 40]] * 4


def _works(rank: int, size: int) -> None:
    with HierarchicalAllGather() as gather, HierarchicalReduceScatter() as scatter:
        out, total = torch.empty(size * 7), torch.empty(7)
        for work, output in (
            (gather(out, torch.full((7,), float(rank)), async_op=True), out),
            (gather.all_gather(list(out.chunk(size)), torch.full((7,), float(rank)), async_op=True), out),
            (scatter(total, torch.ones(size * 7), async_op=True), total),
        ):
            assert isinstance(work, dist.Work)
            assert work.wait() is True and work.is_completed() and work.is_success()
            assert work.get_future().wait()[0].data_ptr() == output.data_ptr()
        assert out.tolist() == [float(source) for source in range(size) for _ in range(7)]
        assert total.tolist() == [float(size)] * 7


def test_async_op_returns_a_work_of_torch() -> None:
    values(run_ranks(3, _works, 3))


def _lists_of_any_memory(rank: int, size: int) -> None:
    """Any of a list may be made by `allocate`, each lies in a block of its own, and ranks may differ in which are."""
    with HierarchicalAllGather() as gather, HierarchicalReduceScatter() as scatter:
        for count in (5, 300_001):
            for mapped in ({0}, {rank}, {(rank + 1) % size}, set(range(size)), {1, 2}, set()):
                making = [gather.allocate if source in mapped else torch.empty for source in range(size)]
                outs = [make(count, dtype=FP32, device="cpu").fill_(-1) for make in making]
                gather.all_gather(outs, torch.full((count,), float(rank)))
                assert [out.unique().tolist() for out in outs] == [[float(source)] for source in range(size)]
                making = [scatter.allocate if source in mapped else torch.empty for source in range(size)]
                ins = [make(count, dtype=FP32, device="cpu").fill_(10 * rank + to) for to, make in enumerate(making)]
                total = torch.empty(count)
                scatter.reduce_scatter(total, ins)
                assert total.unique().tolist() == [float(sum(10 * source + rank for source in range(size)))]


def test_lists_of_tensors_from_anywhere() -> None:
    values(run_ranks(3, _lists_of_any_memory, 3))


def _parts_of_a_block(rank: int, size: int) -> None:
    sizes = (1, 257, 100_003, 3 << 20)
    parts = [(sum(sizes[:i]) * size, nbytes) for i, nbytes in enumerate(sizes)]
    with HierarchicalAllGather(num_buffers=1) as gather:
        for step in range(12):
            block = gather.allocate(sum(sizes) * size, torch.uint8)
            if step % 4 == 3:
                block = block.clone()  # peers have not mapped it
            block.fill_(0xFF)
            shards = [[block[begin:].narrow(0, at * nbytes, nbytes) for begin, nbytes in parts] for at in range(size)]
            for own in shards[rank]:
                own.fill_(step * size + rank)
            gather.gather_parts(block, parts)
            for own in shards[rank]:
                own.fill_(0xEE)  # is for nobody
            for source in {*range(size)} - {rank}:
                assert all(part.eq(step * size + source).all() for part in shards[source]), (step, source)
            del block, shards, own


@pytest.mark.parametrize("size", [1, 3])
def test_parts_of_a_block_are_gathered_together(size: int) -> None:
    """Ranks change their shards as soon as the call returns."""
    values(run_ranks(size, _parts_of_a_block, size))


def _one_element(rank: int) -> None:
    """Tensors of one element and of none are contiguous whatever their strides are."""
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter()
    spaced = torch.full((4,), float(rank + 1))
    out = torch.zeros(2)
    gather(out, spaced[::4])
    assert out.tolist() == [1.0, 2.0]
    total = torch.zeros(4)
    scatter(total[::4], torch.ones(2))
    assert total.tolist() == [2.0, 0.0, 0.0, 0.0]
    gather(torch.empty(0), spaced[4::4])
    scatter(torch.empty(0), torch.empty(0))
    scatter(total[:1], torch.full((2,), 1.5))  # what moved nothing counts as an operation too
    assert total.tolist() == [3.0, 0.0, 0.0, 0.0]
    gather(out, spaced[1::4])
    assert out.tolist() == [1.0, 2.0]
    gather.all_gather([total[:1], total[3::4]], spaced[:1].clone().squeeze().requires_grad_().reshape(1))
    assert total.tolist() == [1.0, 0.0, 0.0, 2.0]
    gather.close()
    scatter.close()


def test_strides_of_one_element_mean_nothing() -> None:
    values(run_ranks(2, _one_element))


def _uneven_lifetimes(rank: int, size: int) -> int:
    """Ranks drop their outputs at different times: none is ever written while a rank still holds it."""
    held: list[tuple[torch.Tensor, int]] = []
    with HierarchicalAllGather() as gather:
        for call in range(200):
            out = gather.allocate(size * 1000, torch.int32)
            gather(out, torch.full((1000,), call * size + rank, dtype=torch.int32))
            held.append((out, call))
            while len(held) > (call * 7 + rank * 3) % 5:
                kept, made = held.pop(0)
                assert kept.view(size, 1000).eq(made * size + torch.arange(size)[:, None]).all(), f"call {made}"
        held.clear()
        return len(gather.engine_on(torch.device("cpu")).blocks)


def test_an_output_is_reused_only_when_no_rank_holds_it() -> None:
    counts = values(run_ranks(3, _uneven_lifetimes, 3))
    assert len(set(counts)) == 1 and counts[0] <= 8


def _many_held(rank: int) -> list[bool]:
    """More than there are blocks, all but one of which rank 1 drops; then all are dropped, and as many made again."""
    with HierarchicalAllGather() as gather:
        mapped: list[bool] = []
        held: list[tuple[int, torch.Tensor]] = []
        for call in range(2 * _C.max_blocks):
            if call == _C.max_blocks + 9:
                held.clear()
            out = gather.allocate(200, torch.int32)
            gather(out, torch.full((100,), 2 * call + rank, dtype=torch.int32))
            mapped.append(gather.maps(out))
            if rank == 0 or call != 3:
                held.append((call, out))
            if call in (_C.max_blocks + 8, 2 * _C.max_blocks - 1):
                for made, kept in held:
                    assert kept.tolist() == [2 * made] * 100 + [2 * made + 1] * 100
        del out, kept
        held.clear()
        return mapped


def test_more_outputs_than_blocks_are_ordinary_memory_on_all_ranks() -> None:
    first, second = values(run_ranks(2, _many_held))
    most = _C.max_blocks
    assert first == second == [True] * most + [False] * 9 + [True] * (most - 9)


def _outlives(rank: int) -> None:
    gather = HierarchicalAllGather()
    out = gather.allocate(20, torch.int64)
    view = out[5:]
    gather(out, torch.full((10,), rank))
    gather.close()
    gather.close()
    with pytest.raises(ValueError, match="expected an open communicator, got a closed one"):
        gather(out, torch.full((10,), rank))
    del out
    assert view.tolist() == [0] * 5 + [1] * 10
    del view
    nothing_left_behind()


def test_an_output_outlives_its_communicator() -> None:
    values(run_ranks(2, _outlives))


def _changing_sizes(rank: int, size: int) -> int:
    with HierarchicalAllGather() as gather:
        for turn in range(3):
            for count in range(1, 120):
                out = gather.allocate(size * count * 5000, torch.uint8)
                gather(out, torch.full((count * 5000,), count % 251, dtype=torch.uint8))
                assert out[0] == out[-1] == count % 251, f"turn {turn}, {count}"
                del out
        blocks = gather.engine_on(torch.device("cpu")).blocks
        return len(blocks)


def test_outputs_of_many_sizes_need_few_blocks() -> None:
    assert max(values(run_ranks(2, _changing_sizes, 2))) <= 32
