"""Kernels that wait for peers, on devices whose SMs do not suffice for all of them at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin import HierarchicalAllGather, MoECommunicator
from ep_plugin.errors import PeerTimeout
from tests import emulation
from tests.emulation import few_sms
from tests.gpu import sms
from tests.moe import low_latency_cases
from tests.moe.moe_cases import Case, Inputs, communicator, make_inputs
from tests.ranks import run_ranks, values

SIMT = {"EP_TEST_KERNELS": "simt"}
CASE = Case(tokens=(20, 20), num_experts=4, topk=2, dtype=torch.bfloat16, hidden=64)
CAPACITY = 64
BLOCKS, FITS = 1000, few_sms.PRESENT  # SMs that communicators count on


def _dispatch(comm: MoECommunicator, inputs: Inputs, kept: list[Any]) -> None:
    """Dispatches. `kept` holds the results, since no stream of the emulation keeps their memory."""
    x, ids = inputs.x[comm.rank], inputs.ids[comm.rank]
    call = (x, ids, None, None, None if comm.config.mode == "ll" else CAPACITY, None, [], comm.number)
    kept.append(comm.in_flight.run(comm.new_dispatch(*call)))


def _against_each_other(rank: int, size: int, budgeted: int) -> list[str]:
    """Rank 0's receive waits for rank 1, whose low-latency kernel waits for rank 0. Returns the errors."""
    streams, device, inputs = few_sms.serve_with_few_sms(budgeted), emulation.load(), make_inputs(CASE)
    kept: list[Any] = []
    timeout_s = 15.0 if budgeted == BLOCKS else 60.0
    throughput = communicator(CASE, max_tokens_per_rank=20, timeout_s=timeout_s)
    latency = low_latency_cases.low_latency(CASE, timeout_s=timeout_s)
    for streams.current, comm in ((few_sms.FIRST, throughput), (few_sms.SECOND, latency)):  # makes its memory
        _dispatch(comm, inputs, kept)
        streams.drain()
    if rank == 1:
        device.shut(few_sms.FIRST)  # the caller computes what it will dispatch
    streams.current = few_sms.FIRST
    _dispatch(throughput, inputs, kept)
    if rank == 0:
        few_sms.until(lambda: device.resident(few_sms.FIRST) >= 2)  # notify and the sending kernel wait for rank 1
    streams.current = few_sms.SECOND
    _dispatch(latency, inputs, kept)
    if rank == 1:
        assert (device.resident(few_sms.SECOND) > 0) == (budgeted == BLOCKS)
        device.open(few_sms.FIRST)
    streams.drain()
    errors = []
    for comm in (throughput, latency):
        try:
            comm.check()
        except PeerTimeout as error:
            errors.append(error.step)
        comm.close()
    return errors


def _in_random_order(rank: int, size: int, count: int) -> int:
    streams = few_sms.serve_with_few_sms(FITS)
    comms = sms.communicators(size, torch.device("cpu"))
    with HierarchicalAllGather() as gather:
        few_sms.serve_gather(gather, streams)
        late = sms.rounds(rank, size, count, few_sms.turn(streams), comms, gather)
    for comm in comms:
        comm.close()
    return late


@pytest.mark.deadline
def test_kernels_that_do_not_fit_block_each_other() -> None:
    """They end only by the deadline of the first of them, after which the others may run."""
    assert any(values(run_ranks(2, _against_each_other, 2, BLOCKS, timeout_s=120, env=SIMT)))


def test_a_receive_and_a_low_latency_kernel_take_turns() -> None:
    assert values(run_ranks(2, _against_each_other, 2, FITS, timeout_s=120, env=SIMT)) == [[], []]


def test_operations_of_several_communicators_end() -> None:
    assert min(values(run_ranks(2, _in_random_order, 2, 60, timeout_s=240, env=SIMT))) > 0
