"""The processes that tests run ranks in: whoever did not end well is heard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import note, run_ranks, values


def _wait_for_nobody(rank: int) -> None:
    """Until the group's deadline, which is a little later than that of run_ranks."""
    note(f"waits for rank {1 - rank}")
    if rank == 0:
        dist.barrier()
    else:
        dist.recv(torch.empty(1), 0)


@pytest.mark.deadline
def test_ranks_that_wait_until_the_deadline_have_failed() -> None:
    with pytest.raises(AssertionError) as caught:
        values(run_ranks(2, _wait_for_nobody, timeout_s=4))
    for rank in range(2):
        said = str(caught.value).split(f"rank {rank} noted:")[1]
        assert said.index(f" s: waits for rank {1 - rank}") < said.index("in _wait_for_nobody"), said
