"""Faults of low-latency communicators: ranks that die in each half, aborts, masks, and wrong arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import DisagreementError, EpPluginError, NotSupported, PeerAborted, PeerTimeout
from ep_plugin.moe.layout import DispatchResult
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from tests.faults.fault_cases import at_gate, die_at_gate, finish, nothing_left_behind
from tests.moe.low_latency_cases import check_rows, check_sums, expert_results, low_latency, round_trip
from tests.moe.moe_cases import Case, Inputs, make_inputs, named, on_ranks
from tests.ranks import run_ranks, values

DEADLINE_S = 2.0
GRACE_S = 5.0
SIZE = 3
CASE = Case(tokens=(20, 12, 66), num_experts=6, topk=4, drop=0.0)
OF_FOUR = dataclasses.replace(CASE, tokens=(20, 12, 66, 5), num_experts=8)
GATES = ("ll_dispatch_send", "ll_dispatch_recv", "ll_combine_send", "ll_combine_recv")


def _die_in(comm: MoECommunicator, gate: str) -> None:
    """This process ends when a later kernel comes to the gate. The first operation has been before."""
    comm.engine.comm.gate = _C.Step[gate.upper()]
    die_at_gate(comm)


def _killed(rank: int, gate: str, *victims: int, case: Case = CASE) -> PeerTimeout:
    inputs = make_inputs(case)
    comm = low_latency(case, timeout_s=60)
    round_trip(comm, inputs)
    if rank in victims:
        _die_in(comm, gate)
    comm.engine.exchange.barrier("test")  # so that the victims alone are late
    comm.engine.comm.timeout_ns = int(DEADLINE_S * 1e9)
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        for _ in range(3):
            began = time.monotonic()
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            began = time.monotonic()
            comm.combine(out.tokens, handle, weights=inputs.weights[rank])
    assert time.monotonic() - began < DEADLINE_S + GRACE_S
    with pytest.raises(PeerTimeout):
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
    comm.close()
    del comm
    nothing_left_behind()
    return caught.value


@pytest.mark.parametrize(("gate", "victim"), [(gate, number % SIZE) for number, gate in enumerate(GATES)])
def test_a_killed_rank_is_named(gate: str, victim: int) -> None:
    outcomes = run_ranks(SIZE, _killed, gate, victim)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exitcode == -9
            continue
        assert outcome.error is None, outcome.trace
        assert outcome.value.rank == victim and outcome.value.step.startswith("ll_"), outcome.value


def _two_killed(rank: int, gate: str, victims: tuple[int, int]) -> PeerTimeout:
    return _killed(rank, gate, *victims, case=OF_FOUR)


TWO = {"ll_dispatch_send": (0, 2), "ll_combine_recv": (1, 3)}


@pytest.mark.parametrize("gate", TWO)
def test_one_of_two_killed_ranks_is_named(gate: str) -> None:
    outcomes = run_ranks(4, _two_killed, gate, TWO[gate])
    for rank, outcome in enumerate(outcomes):
        if rank in TWO[gate]:
            assert outcome.exitcode == -9
            continue
        assert outcome.error is None, outcome.trace
        assert outcome.value.rank in TWO[gate] and outcome.value.step.startswith("ll_"), outcome.value


def _left_by_a_fault(rank: int, gate: str) -> None:
    """Rank 0 dies at the gate. What the others' operations leave says nothing that is wrong."""
    inputs = make_inputs(CASE)
    comm = low_latency(CASE, timeout_s=60)
    round_trip(comm, inputs)
    device = comm.engine.device
    x, ids, weights = (part[rank].to(device) for part in (inputs.x, inputs.ids, inputs.weights))
    given = (x, ids, None, None, None, None, [], comm.number)
    dispatch = LowLatencyDispatch(comm.engine, *given)
    if gate == "ll_dispatch_send":
        _fails(comm, dispatch, gate)
        if rank:
            left = DispatchResult(*dispatch.results()[:8])
            assert not left.expert_counts.any() and not left.expert_offsets.any()
        return
    results = comm.in_flight.run(dispatch)
    sums = torch.zeros(CASE.tokens[rank], CASE.hidden, device=device)
    given = (results[0], weights, None, None, False, list(results[8:]), comm.number)
    _fails(comm, LowLatencyCombine(comm.engine, *given, out=sums), gate)
    assert (sums.view(torch.uint8) == 0xFF).all()


def _fails(comm: MoECommunicator, operation: Any, gate: str) -> None:
    if comm.rank == 0:
        _die_in(comm, gate)
    comm.engine.exchange.barrier("test")  # so that the victim alone is late
    comm.engine.comm.timeout_ns = int(DEADLINE_S * 1e9)
    with pytest.raises(PeerTimeout):
        comm.in_flight.run(operation)
        finish(comm)


@pytest.mark.parametrize("gate", ["ll_dispatch_send", "ll_combine_send"])
def test_no_results_after_a_fault(gate: str) -> None:
    outcomes = run_ranks(SIZE, _left_by_a_fault, gate)
    assert outcomes[0].exitcode == -9
    values(outcomes[1:])


def _aborted(rank: int, gate: str) -> str:
    inputs = make_inputs(CASE)
    with low_latency(CASE, timeout_s=60) as comm:
        round_trip(comm, inputs)
        if rank == 0:
            comm.engine.comm.gate = _C.Step[gate.upper()]
            at_gate(comm, lambda: comm.abort("the test says so"))
        began = time.monotonic()
        with pytest.raises(PeerAborted) as caught:
            for _ in range(3):
                out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
                comm.combine(out.tokens, handle, weights=inputs.weights[rank])
        assert time.monotonic() - began < GRACE_S
    return f"{caught.value.rank} {caught.value.reason}"


def test_an_abort_ends_every_wait() -> None:
    for gate in ("ll_dispatch_send", "ll_combine_send"):
        assert values(run_ranks(SIZE, _aborted, gate)) == ["0 the test says so"] * SIZE


# -- masks -----------------------------------------------------------------------------------------------------------


def _without(inputs: Inputs, *gone: int) -> Inputs:
    """The inputs as survivors should see them: the ranks `gone` have no tokens, and their experts none either."""
    case = inputs.case
    per_rank = case.num_experts // case.size
    tokens = tuple(0 if rank in gone else count for rank, count in enumerate(case.tokens))
    away = torch.tensor([expert // per_rank in gone for expert in range(case.num_experts)])
    ids = [one.masked_fill((one >= 0) & away[one.clamp(min=0)], -1) for one in inputs.ids]
    cut = {
        name: [t[:0] if rank in gone else t for rank, t in enumerate(given)]
        for name, given in {"x": inputs.x, "ids": ids, "weights": inputs.weights, "bias": inputs.bias}.items()
    }
    return Inputs(case=dataclasses.replace(case, tokens=tokens), **cut)


def _check_without(comm: MoECommunicator, left: Inputs, out: Any, handle: Any, weights: torch.Tensor) -> None:
    """A dispatch, and the combine after it, are those of `left`, the inputs without the rank that is gone."""
    check_rows(comm, out, left)
    y = expert_results(left, out.tokens.shape[1])
    check_sums(left, comm.rank, y, comm.combine(y[comm.rank], handle, weights=weights))


def _survive(rank: int, gate: str, *victims: int) -> list[int]:
    case = OF_FOUR
    comm = low_latency(case, timeout_s=60, shrink=True)
    round_trip(comm, make_inputs(case))
    if rank in victims:
        _die_in(comm, gate)
    comm.engine.exchange.barrier("test")  # so that the victims alone are late
    patient_ns, comm.engine.comm.timeout_ns = comm.engine.comm.timeout_ns, int(DEADLINE_S * 1e9)
    for number in range(6):
        if number == 2:  # they have been masked
            comm.engine.comm.timeout_ns = patient_ns
        inputs = make_inputs(dataclasses.replace(case, seed=number))
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = expert_results(inputs, out.tokens.shape[1])[rank]
        if number < 2:
            comm.combine(torch.nan_to_num(y), handle, weights=inputs.weights[rank])
            continue
        left = _without(inputs, *victims)
        with named((number, comm.rank_mask.tolist())):
            _check_without(comm, left, out, handle, inputs.weights[rank])
    mask = comm.rank_mask.tolist()
    comm.close()
    return mask


@pytest.mark.parametrize(("gate", "victim"), [(gate, 3 - number) for number, gate in enumerate(GATES)])
def test_survivors_mask_a_killed_rank_and_go_on(gate: str, victim: int) -> None:
    outcomes = run_ranks(4, _survive, gate, victim, timeout_s=90)
    expected = [int(rank == victim) for rank in range(4)]
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error is None, outcome.trace
            assert outcome.value == expected


@pytest.mark.parametrize("gate", TWO)
def test_survivors_mask_two_killed_ranks_and_go_on(gate: str) -> None:
    outcomes = run_ranks(4, _survive, gate, *TWO[gate], timeout_s=90)
    masks = values([outcome for rank, outcome in enumerate(outcomes) if rank not in TWO[gate]])
    assert masks == [[int(rank in TWO[gate]) for rank in range(4)]] * 2


def _slow_survivor(rank: int) -> list[int]:
    """Rank 2 is dead, and for that rank 0 is late: it comes late to a dispatch in which it waits for rank 2, and so to
    the combine after it, for which rank 1 waits. Returns whom the others mask."""
    inputs = make_inputs(CASE)
    comm = low_latency(CASE, timeout_s=60, shrink=True)
    round_trip(comm, inputs)
    comm.engine.exchange.barrier("test")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.engine.comm.timeout_ns = int(DEADLINE_S * 1e9)
    time.sleep(0.5 * DEADLINE_S if rank == 0 else 0)
    out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
    time.sleep(0.75 * DEADLINE_S if rank == 0 else 0)  # then rank 1 has waited for longer than its deadline
    _check_without(comm, _without(inputs, 2), out, handle, inputs.weights[rank])
    mask = comm.rank_mask.tolist()
    comm.close()
    return mask


def test_a_rank_that_has_waited_for_a_dead_one_is_not_masked() -> None:
    assert values(run_ranks(SIZE, _slow_survivor)[:2]) == [[0, 0, 1]] * 2


def _wait_for(flag: Path) -> None:
    ends = time.monotonic() + 40
    while not flag.exists():
        assert time.monotonic() < ends, flag
        time.sleep(0.02)


def _late(rank: int, flags: Path) -> tuple[list[float], list[int]] | None:
    """Rank 2 stops in a combine before it sends rows, is masked, and sends them when rank 1's are on their way in a
    later combine. What rank 0 gets then: its sums, and who is masked."""
    case = Case(tokens=(4, 0, 0), num_experts=3, topk=1, dtype=torch.float32, hidden=4096, drop=0.0)
    inputs, ones = make_inputs(case), torch.ones(case.tokens[rank], 1)
    comm = low_latency(case, timeout_s=60, shrink=True)

    def dispatched(to: int) -> tuple[torch.Tensor, Any]:
        out, handle = comm.dispatch(inputs.x[rank], torch.full_like(inputs.ids[rank], to))
        return torch.full_like(out.tokens, 3.0), handle

    def combine(to: int) -> None:
        y, handle = dispatched(to)
        comm.combine(y, handle, weights=ones)

    combine(2)
    y, handle = dispatched(2)
    comm.engine.exchange.barrier("test")  # so that rank 2 alone is late
    if rank == 2:
        comm.engine.comm.gate = _C.Step.LL_COMBINE_SEND
        at_gate(comm, lambda: (_wait_for(flags / "go"), _C.open_gate(comm.engine.boards.address)))  # type: ignore[func-returns-value, arg-type]
        with contextlib.suppress(EpPluginError):
            comm.combine(y + 4, handle, weights=ones)
        (flags / "gone").touch()
        return None
    patient_ns, comm.engine.comm.timeout_ns = comm.engine.comm.timeout_ns, int(DEADLINE_S * 1e9)
    comm.combine(y, handle, weights=ones)
    if rank == 0:  # the other one waits for rank 2 in the dispatch that comes now
        comm.engine.comm.timeout_ns = patient_ns
        (flags / "masked").touch()
    _wait_for(flags / "masked")
    combine(1)
    comm.engine.comm.timeout_ns = patient_ns
    y, handle = dispatched(1)
    work = comm.combine_async(y, handle, ones)
    if rank == 1:
        work.wait()
        (flags / "sent").touch()
        _wait_for(flags / "gone")
        return None
    _wait_for(flags / "sent")
    (flags / "go").touch()
    _wait_for(flags / "gone")
    return work.wait().unique().tolist(), comm.rank_mask.tolist()


def test_a_masked_rank_that_goes_on_changes_no_later_sum(tmp_path: Path) -> None:
    assert values(run_ranks(SIZE, _late, tmp_path, timeout_s=60)) == [([3.0], [0, 0, 1]), None, None]


def _masked_by_hand(rank: int, size: int) -> None:
    """Rank 2 is masked by rank 0 alone. The mask travels to rank 1, and rank 2 masks rank 0, which sends it nothing."""
    inputs = make_inputs(CASE)
    with low_latency(CASE, shrink=True, timeout_s=20) as comm:
        round_trip(comm, inputs)
        comm.engine.comm.timeout_ns = int(5e9)  # a busy machine may take longer to construct it
        if rank == 0:
            comm.rank_mask[2] = 1
        if rank == 2:
            comm.dispatch(inputs.x[rank], inputs.ids[rank])
            assert comm.rank_mask[0] == 1
            return
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
        left = _without(inputs, 2)
        out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        check_rows(comm, out, left)
        assert comm.rank_mask.tolist() == [0, 0, 1]


def test_masks_travel() -> None:
    values(run_ranks(SIZE, _masked_by_hand, SIZE))


# -- wrong arguments -------------------------------------------------------------------------------------------------


def _bad_dispatches(comm: MoECommunicator, inputs: Inputs) -> dict[str, dict[str, Any]]:
    x, ids = inputs.x[comm.rank], inputs.ids[comm.rank]
    more = torch.zeros(67, CASE.hidden), torch.zeros(67, 3, dtype=torch.int64)
    narrow = torch.zeros(len(x), 96)
    return {
        "x: expected at most max_tokens_per_rank=66 tokens, got 67": {"x": more[0], "topk_ids": more[1]},
        "x: expected at most 4 tokens, by capacity=12, got": {"capacity": 12},
        "x: expected rows of at most max_row_bytes=.* got 4096": {"x": torch.zeros(len(x), 1024)},
        "x: expected a multiple of 128 elements, at most 24, with quantize='e4m3'": {"x": narrow, "quantize": "e4m3"},
        "quantize: expected None or 'e4m3', 'e4m3_pow2', 'e4m3_ue8m0', got 'ue8m0'": {"quantize": "ue8m0"},
        'topk_weights: expected None in mode="ll"': {"topk_weights": inputs.weights[comm.rank]},
        'scales: expected None in mode="ll"': {"scales": torch.zeros(len(x), 1)},
        'capacity: expected a multiple of the 3 ranks, at most 198, in mode="ll", got 200': {"capacity": 200},
        "topk_ids: expected -1 or 0 to 5, got 6": {"topk_ids": torch.full_like(ids, -1).index_fill(0, _first(), 6)},
        "topk_ids: expected distinct experts": {"topk_ids": torch.zeros_like(ids)},
        "x: expected a dense tensor, got one of layout torch._mkldnn": {"x": x.to_mkldnn()},
        "topk_ids: expected a dense tensor, got one of layout torch._mkldnn": {"topk_ids": ids.float().to_mkldnn()},
        "x: expected a tensor without gradients": {"x": x.clone().requires_grad_(), "quantize": "e4m3"},
    }


def _first() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


def _bad_combines(comm: MoECommunicator, inputs: Inputs, y: torch.Tensor) -> dict[str, dict[str, Any]]:
    x, weights = inputs.x[comm.rank], inputs.weights[comm.rank]
    return {
        r"y: expected shape \(2, 198, H\), got \(396, 24\)": {"y": y.flatten(0, 1)},
        "y: expected a contiguous tensor": {"y": y.transpose(0, 1).contiguous().transpose(0, 1)},
        "y: expected one of .* got torch.int32": {"y": y.int()},
        r"weights: expected shape \(.*, 4\), got": {"weights": weights[:, :2].contiguous()},
        r"bias: expected shape": {"bias": torch.zeros(1, 24)},
        "handle: expected a DispatchHandle, got tuple": {"handle": ()},
        "y: expected a dense tensor, got one of layout torch._mkldnn": {"y": y.to_mkldnn()},
        "weights: expected a dense tensor, got one of layout torch._mkldnn": {"weights": weights.to_mkldnn()},
        "bias: expected a dense tensor, got one of layout torch._mkldnn": {"bias": x.to_mkldnn()},
    }


def _refused(rank: int, size: int) -> None:
    inputs = make_inputs(CASE)
    with low_latency(CASE) as comm:
        given = {"x": inputs.x[rank], "topk_ids": inputs.ids[rank]}
        for sentence, change in _bad_dispatches(comm, inputs).items():
            with pytest.raises(ValueError, match=sentence):
                comm.dispatch(**{**given, **change})
        out, handle = comm.dispatch(**given)
        y = torch.zeros_like(out.tokens)
        for sentence, change in _bad_combines(comm, inputs, y).items():
            with pytest.raises(ValueError, match=sentence):
                comm.combine(**{"y": y, "handle": handle, **change})
        with pytest.raises(ValueError, match="handle.plan: expected one of 3 ranks"):
            comm.combine(y, handle._replace(plan=handle.plan[1:]))
        with pytest.raises(ValueError, match='combine_with_values: expected mode="ht", got mode="ll"'):
            comm.combine_with_values(y, handle, None)
        with pytest.raises(ValueError, match='set_sms: expected no SM counts in mode="ll", got dispatch_send_sms'):
            comm.set_sms(dispatch_send_sms=4)
        with pytest.raises(ValueError, match="rank_mask: expected a communicator with shrink=True"):
            _ = comm.rank_mask
        round_trip(comm, inputs)
    os.environ["EP_PLUGIN_RANKS_PER_NODE"] = "1"
    with pytest.raises(NotSupported, match='mode="ll": expected all 3 ranks on one node, got 3 nodes of 1'):
        low_latency(CASE)


def test_wrong_arguments_are_refused_by_name() -> None:
    on_ranks(SIZE, _refused)


def _differ(rank: int, change: str) -> str:
    case = dataclasses.replace(CASE, tokens=(20, 12), num_experts=4)
    inputs = make_inputs(case)
    with low_latency(case, timeout_s=20) as comm:
        round_trip(comm, inputs)
        x, ids, capacity = inputs.x[rank], inputs.ids[rank], None
        if rank == 1 and change == "row bytes":
            x = x[:, :16].contiguous()
        elif rank == 1 and change == "dtype":
            x = x.view(torch.int32)
        elif rank == 1 and change == "top-k":
            ids = ids[:, :2].contiguous()
        elif rank == 1:
            capacity = 2 * 16
        with pytest.raises(EpPluginError) as caught:
            for _ in range(2):
                comm.dispatch(x, ids, capacity=capacity)
        assert isinstance(caught.value, DisagreementError), caught.value
    return str(caught.value)


@pytest.mark.parametrize("change", ["row bytes", "dtype", "top-k", "most tokens of a rank"])
def test_calls_that_differ_are_named(change: str) -> None:
    for said in values(run_ranks(2, _differ, change)):
        assert change in said and "rank 0" in said and "rank 1" in said


def _spoilt_plan(rank: int, size: int) -> None:
    inputs = make_inputs(CASE)
    with low_latency(CASE) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = torch.zeros_like(out.tokens)
        handle.plan.fill_(2**30)
        dist.barrier()  # else a rank may abort while others dispatch
        with pytest.raises((ValueError, PeerAborted), match="expected its tensors as dispatch wrote them"):
            comm.combine(y, handle)


def test_a_handle_with_other_contents() -> None:
    on_ranks(SIZE, _spoilt_plan)


def _spoilt_rows(rank: int, size: int) -> None:
    """A rank reads the rows of its own pairs where they are."""
    case = dataclasses.replace(CASE, tokens=(9,), num_experts=4)
    inputs = make_inputs(case)
    for value in (2**30, -1):
        with low_latency(case) as comm:
            out, handle = comm.dispatch(inputs.x[0], inputs.ids[0])
            rows = comm.engine.plan_layout(comm.engine.tokens_of(out.tokens.shape[1]), case.topk).rows
            handle.plan[rows:] = value
            with pytest.raises(ValueError, match="expected its tensors as dispatch wrote them"):
                comm.combine(torch.zeros_like(out.tokens), handle)


def test_a_handle_with_other_rows_of_own_pairs() -> None:
    on_ranks(1, _spoilt_rows)


def _first_use(rank: int, size: int) -> None:
    config = MoECommunicatorConfig(num_experts=6, hidden_size=7168, topk=8 % 6, max_tokens_per_rank=128, mode="ll")
    with MoECommunicator(None, config) as comm:
        assert comm.engine.comm is None, "memory before the first operation"
        assert comm.engine.memory_bytes < 40e6


def test_memory_is_made_on_first_use() -> None:
    on_ranks(SIZE, _first_use)
