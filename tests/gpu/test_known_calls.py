"""Calls whose forms are known, on GPUs: what can differ between such calls is still looked at."""

from __future__ import annotations

import pytest
import torch

from ep_plugin import MoECommunicator
from tests.gpu.checks import device_of
from tests.moe.test_known_calls import EXPERTS, HT, LL, tokens
from tests.ranks import run_ranks, values


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins 8 bytes past a multiple of 16."""
    memory = tensor.new_empty(tensor.numel() + 4)
    return memory[4:].view(tensor.shape).copy_(tensor)


def _alike(rank: int, size: int) -> None:
    device = device_of(rank)
    x, ids, weights = (part.to(device) for part in tokens())
    for config in (HT, LL):
        with MoECommunicator(None, config, device) as comm:
            given = None if config is LL else weights
            for turn in range(6):
                place = _misaligned if turn % 2 else torch.clone
                out, handle = comm.dispatch(place(x + turn), ids, given)
                y = place(out.tokens.contiguous())
                sums = comm.combine(y, handle, weights if config is LL else out.weights)
                assert torch.equal(sums[:3], (x + turn)[:3]), turn
            _capture_is_refused(comm, x, ids, given)


def _capture_is_refused(comm: MoECommunicator, *given: torch.Tensor | None) -> None:
    if comm.config.mode == "ll":
        return
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ValueError, match="capacity: expected a number of rows while a CUDA graph is captured"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        comm.dispatch(*given)  # type: ignore[arg-type]
    comm.dispatch(*given)  # type: ignore[arg-type]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_are_copied_are_copied_each_time(size: int) -> None:
    values(run_ranks(size, _alike, size, timeout_s=120))


def _bad_ids(rank: int, size: int) -> None:
    device = device_of(rank)
    x, ids, weights = (part.to(device) for part in tokens())
    bad = ids.clone()
    bad[1, 0] = EXPERTS
    for config in (HT, LL):
        with MoECommunicator(None, config, device) as comm:
            given = None if config is LL else weights
            comm.dispatch(x, ids, given)
            with pytest.raises(ValueError, match="topk_ids: expected -1 or 0 to 3, got 4 at token 1"):
                comm.dispatch(x, bad, given)
            comm.dispatch(x, ids, given)


@pytest.mark.gpu(1)
def test_ids_are_looked_at_each_time_if_asked() -> None:
    values(run_ranks(2, _bad_ids, 2, timeout_s=120, env={"EP_PLUGIN_CHECK_IDS": "1"}))
