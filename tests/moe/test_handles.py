"""Handles: several at once, reused for other rows, rebuilt from parts, of several communicators, and after close."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ep_plugin import CommunicatorClosed, MoECommunicator, MoECommunicatorConfig
from ep_plugin.moe.high_throughput import engine
from tests.faults.fault_cases import nothing_left_behind
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    TOKEN_MAJOR,
    Case,
    Inputs,
    check_combine,
    check_dispatch,
    communicator,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    round_trip,
    same_bits,
)


def _several(size: int) -> list[Inputs]:
    """Three calls of different sizes and routings."""
    cases = [
        Case(tokens=ragged(size, most, seed), num_experts=3 * size, hidden=hidden, routing=routing, seed=seed)
        for seed, (most, hidden, routing) in enumerate(
            ((12, 24, "random"), (200, 40, "random"), (30, 8, "last rank only"))
        )
    ]
    return [make_inputs(case) for case in cases]


def _outstanding(rank: int, size: int) -> None:
    """D1 D2 D3 C2 C1 C3 C1 D2' C2: a combine depends on its handle alone."""
    for layout in LAYOUTS:
        every = _several(size)
        expected = [inputs.expected(layout) for inputs in every]
        with communicator(every[0].case, layout, hidden_size=40) as comm, poisoned():
            outs, handles = [], []
            for inputs in every:
                out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
                outs.append(out)
                handles.append(handle)
            for i in (1, 0, 2, 0):
                with named((layout, i)):
                    check_combine(comm, handles[i], every[i], expected[i], weighted=i != 2)
            again, _ = comm.dispatch(
                every[1].x[rank], every[1].ids[rank], every[1].weights[rank], previous_handle=handles[1]
            )
            check_dispatch(again, expected[1][rank])
            check_combine(comm, handles[1], every[1], expected[1], weighted=True)
            for out, received in zip(outs, expected, strict=True):  # nothing above has changed the results
                check_dispatch(out, received[rank])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_several_handles_are_outstanding(size: int) -> None:
    on_ranks(size, _outstanding)


def _reused(rank: int, size: int) -> None:
    for layout, alignment in ((FLAT, 4), (TOKEN_MAJOR, 1)):
        case = Case(tokens=ragged(size, 50, 3), num_experts=2 * size, hidden=64, seed=3)
        first = make_inputs(case)
        with communicator(case, layout, expert_alignment=alignment) as comm, poisoned():
            out, handle = comm.dispatch(first.x[rank], first.ids[rank], first.weights[rank])
            for dtype, hidden in ((torch.float32, 64), (torch.bfloat16, 8), (torch.float64, 64), (torch.int64, 2)):
                fresh = make_inputs(replace(case, dtype=torch.float64, hidden=hidden, seed=hidden))
                x = [(100 * rows).to(dtype) for rows in fresh.x]
                weights = [w.to(torch.float64 if dtype is torch.float64 else torch.float32) for w in fresh.weights]
                other = replace(first, x=x, weights=weights)
                with named((layout, dtype)):
                    again, same = comm.dispatch(x[rank], first.ids[rank], weights[rank], previous_handle=handle)
                    check_dispatch(again, other.expected(layout, alignment)[rank])
                    for now, before in zip(same[:-1], handle[:-1], strict=True):
                        assert now is before
                    plain, _ = comm.dispatch(x[rank], first.ids[rank], previous_handle=same)
                    assert plain.weights is None
                    same_bits("rows alone", plain.tokens, again.tokens)
            check_combine(comm, handle, first, first.expected(layout, alignment), weighted=True)
            check_dispatch(out, first.expected(layout, alignment)[rank])


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_routing_is_reused_for_other_rows_and_weights(size: int) -> None:
    on_ranks(size, _reused)


def _taken_apart(rank: int, size: int) -> None:
    for layout in LAYOUTS:
        inputs = make_inputs(Case(tokens=ragged(size, 20, 9), num_experts=2 * size, seed=9))
        with communicator(inputs.case, layout) as comm:
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
            leaves, spec = pytree.tree_flatten((out, handle))
            tensors = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            copied_out, copied = pytree.tree_unflatten(tensors, spec)
            assert type(copied) is type(handle) and copied.comm == handle.comm == comm.number
            for tensor in handle[:-1]:
                tensor.fill_(2**30)  # the copy owns its routing
            check_dispatch(copied_out, inputs.expected(layout)[rank])
            check_combine(comm, copied, inputs, inputs.expected(layout), weighted=True)


@pytest.mark.parametrize("size", [2])
def test_handle_is_a_pytree_that_owns_its_routing(size: int) -> None:
    on_ranks(size, _taken_apart)


def _interleaved(rank: int, size: int) -> None:
    """Two communicators of one group and one of a subgroup, with interleaved operations."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    everyone = _several(size)[:2]
    for inputs in everyone:
        assert inputs.case.size == size
    config = MoECommunicatorConfig(num_experts=4, hidden_size=24, topk=2)
    pair_inputs = make_inputs(Case(tokens=(13, 5), num_experts=4, seed=rank // 2))
    with (
        communicator(everyone[0].case, FLAT) as flat,
        communicator(everyone[1].case, TOKEN_MAJOR, max_tokens_per_rank=256) as token_major,
        MoECommunicator(pairs[rank // 2], config) as pair,
    ):
        assert (flat.rank, token_major.rank, pair.rank, pair.size) == (rank, rank, rank % 2, 2)
        for _ in range(3):
            first, second = everyone
            out1, handle1 = flat.dispatch(first.x[rank], first.ids[rank], first.weights[rank])
            out2, handle2 = token_major.dispatch(second.x[rank], second.ids[rank], second.weights[rank])
            round_trip(pair, pair_inputs, pair_inputs.expected(FLAT))
            check_combine(token_major, handle2, second, second.expected(TOKEN_MAJOR), weighted=True)
            check_combine(flat, handle1, first, first.expected(FLAT), weighted=True)
            check_dispatch(out1, first.expected(FLAT)[rank])
            check_dispatch(out2, second.expected(TOKEN_MAJOR)[rank])


@pytest.mark.parametrize("size", [2, 4])
def test_communicators_interleave(size: int) -> None:
    on_ranks(size, _interleaved)


def _after_close(rank: int, size: int) -> None:
    inputs = make_inputs(Case(tokens=(4,) * size, num_experts=2 * size))
    x, ids = inputs.x[rank], inputs.ids[rank]
    closed, open_one = communicator(inputs.case), communicator(inputs.case)
    out, handle = closed.dispatch(x, ids)
    work = closed.dispatch_async(x, ids)
    closed.close()
    closed.close()
    for call in (
        lambda: closed.dispatch(x, ids),
        lambda: closed.dispatch(x, ids, previous_handle=handle),
        lambda: closed.combine(out.tokens, handle),
        lambda: closed.dispatch_async(x, ids),
        lambda: closed.combine_async(out.tokens, handle),
        closed.check,
        work.wait,
    ):
        with pytest.raises(CommunicatorClosed, match="expected an open communicator"):
            call()
    with pytest.raises(ValueError, match=rf"expected one of communicator {open_one.number}, got .* {closed.number}"):
        open_one.combine(out.tokens, handle)
    check_dispatch(out._replace(weights=inputs.expected(FLAT)[rank].weights), inputs.expected(FLAT)[rank])
    round_trip(open_one, inputs, inputs.expected(FLAT))
    open_one.close()


@pytest.mark.parametrize("size", [1, 2])
def test_closed_communicator_refuses_and_what_it_returned_stays(size: int) -> None:
    on_ranks(size, _after_close)


def _shared(rank: int, size: int) -> None:
    case = Case(tokens=ragged(size, 9, 1), num_experts=2 * size, seed=1)
    settings = {"num_experts": case.num_experts, "hidden_size": case.hidden, "topk": case.topk}
    first = MoECommunicator.shared(None, **settings)
    assert MoECommunicator.shared(None, MoECommunicatorConfig(**settings)) is first
    assert MoECommunicator.shared(dist.group.WORLD, **settings, device="cpu") is first
    other = MoECommunicator.shared(None, **settings, layout=TOKEN_MAJOR)
    part = MoECommunicator.shared(dist.new_group(list(range(size))), **settings)
    assert len({comm.number for comm in (first, other, part)}) == 3
    inputs = make_inputs(case)
    for comm in (first, other, part):
        round_trip(comm, inputs, inputs.expected(comm.config.resolved_layout))
    first.close()
    again = MoECommunicator.shared(None, **settings)
    assert again is not first and MoECommunicator.shared(None, **settings) is again
    round_trip(again, inputs, inputs.expected(FLAT))


@pytest.mark.parametrize("size", [1, 3])
def test_shared_is_one_per_group_device_and_configuration(size: int) -> None:
    on_ranks(size, _shared)


def _num_mapped() -> int:
    return sum("/memfd:ep_plugin-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _destroyed(rank: int, size: int) -> None:
    case = Case(tokens=ragged(size, 9, 1), num_experts=2 * size, seed=1)
    settings = {"num_experts": case.num_experts, "hidden_size": case.hidden, "topk": case.topk}
    inputs = make_inputs(case)
    store = dist.distributed_c10d._get_default_store()
    mapped, communicators = [], []
    for turn in range(3):
        part = dist.new_group(list(range(size)))
        for group in (None, part):
            comm = MoECommunicator.shared(group, **settings)
            assert MoECommunicator.shared(group, **settings) is comm
            round_trip(comm, inputs, inputs.expected(FLAT))
            communicators.append(comm)
        assert [comm.engine.closed for comm in communicators] == [True] * (2 * turn) + [False] * 2
        mapped.append(_num_mapped())
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="expected an initialised|has not been initialized"):
            MoECommunicator.shared(part, **settings)
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{turn}", store), rank=rank, world_size=size)
        with pytest.raises(ValueError, match="group: expected a process group that has not been destroyed, got"):
            MoECommunicator.shared(part, **settings)
    assert len(set(mapped)) == 1, mapped
    nothing_left_behind()


@pytest.mark.parametrize("size", [1, 3])
def test_shared_of_a_destroyed_group_is_closed_by_the_next_call(size: int) -> None:
    on_ranks(size, _destroyed)


def _other_tensors(rank: int, size: int) -> None:
    """Shorter tensors over the same memory as the latest handle's, maybe with the id of a freed tensor."""
    inputs = make_inputs(Case(tokens=(40,) * size, num_experts=2 * size))
    arguments = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    with communicator(inputs.case) as comm:
        for field in ("topk_ids", "plan", "recv_rows"):
            for _ in range(50):
                out, handle = comm.dispatch(*arguments)
                memory = getattr(handle, field).detach()
                handle = handle._replace(**{field: None})
                shorter = handle._replace(**{field: memory[:-3]})
                with pytest.raises(ValueError, match="handle"):
                    comm.combine(out.tokens, shorter)
        out, handle = comm.dispatch(*arguments)
        handle.topk_ids.resize_(3, 2)
        with pytest.raises(ValueError, match=r"handle.plan: expected shape"):
            comm.combine(out.tokens, handle)


def test_tensors_in_place_of_a_handles_own_are_refused() -> None:
    on_ranks(1, _other_tensors)


def _moved(rank: int, size: int) -> None:
    """The latest handle's tensors, copied to other memory."""
    inputs = make_inputs(Case(tokens=(40,) * size, num_experts=2 * size))
    expected = inputs.expected(FLAT)
    with communicator(inputs.case) as comm:
        for field in ("topk_ids", "plan", "recv_rows"):
            _, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
            tensor = getattr(handle, field)
            before = tensor.detach()
            tensor.data = before.clone()
            before.fill_(2**30)
            with named(field):
                check_combine(comm, handle, inputs, expected, weighted=True)


def test_a_handles_tensors_may_move() -> None:
    on_ranks(2, _moved)


def _wrong_fields(rank: int, size: int) -> None:
    inputs = make_inputs(Case(tokens=(4,) * size, num_experts=2 * size))
    with communicator(inputs.case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        for field, value, said in (
            ("recv_rows", None, "expected a tensor, got NoneType"),
            ("totals", handle.totals.tolist(), "expected a tensor, got list"),
            ("plan", handle.plan.float().to_mkldnn(), "expected a dense tensor, got one of layout torch._mkldnn"),
            ("topk_ids", handle.topk_ids.flatten(), r"expected 2 dimensions, got shape \(\d+,\)"),
        ):
            with pytest.raises(ValueError, match=rf"handle\.{field}: {said}"):
                comm.combine(out.tokens, handle._replace(**{field: value}))


def test_fields_that_no_dispatch_makes_are_refused_by_name() -> None:
    on_ranks(1, _wrong_fields)


def _nothing_here(rank: int, size: int) -> list[str]:
    """The full checks of a handle's tensors, on a rank that receives no row and on one that receives all."""
    inputs = make_inputs(Case(tokens=(300,) * size, num_experts=2 * size, routing="last rank only"))
    seen: list[str] = []
    with communicator(inputs.case) as comm, pytest.MonkeyPatch.context() as patch:
        comm.engine.control.denies_totals = True  # so that rows are always received early
        patch.setattr(engine, "check_routing", lambda _, name, *__: seen.append(name))
        for _ in range(4):
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            comm.combine(out.tokens, handle)
    return seen


def test_handles_need_one_check_where_nothing_has_come_too() -> None:
    assert on_ranks(2, _nothing_here) == [["handle"], ["handle"]]
