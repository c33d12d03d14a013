"""ep_plugin.deep_ep on GPUs, against the oracle of the CPU tests; ranks share GPUs where there are fewer of them."""

from __future__ import annotations

import pytest

from tests.integrations import test_deep_ep
from tests.ranks import run_ranks, values


def on_gpus(rank: int, size: int) -> None:
    import torch

    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}"
    test_deep_ep._all_calls(rank, size, test_deep_ep.CASES[size], device)
    torch.cuda.synchronize()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_call_gives_what_the_oracle_says(size: int) -> None:
    values(run_ranks(size, on_gpus, size, timeout_s=280))
