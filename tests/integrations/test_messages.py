"""A warning says once which messages between GPUs are left to the framework."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported
from ep_plugin.integrations import messages
from tests.integrations.logs import logged_warnings
from tests.ranks import run_ranks, values


def _leaves_gpus(rank: int) -> list[str]:
    gpu, group = torch.device("cuda", 0), dist.group.WORLD
    several = mock.Mock(return_value=mock.Mock(num_nodes=2))
    refuses = mock.Mock(side_effect=NotSupported("expected peer access, got none"))
    with logged_warnings() as said:
        for made in (several, several, refuses):
            with mock.patch.object(messages, "SendReceive", made):
                assert messages._made("pipelining", group, gpu) is None
    assert several.return_value.close.call_count == 2
    return said


def test_gpus_that_are_left_are_said_once() -> None:
    (said,) = values(run_ranks(1, _leaves_gpus))
    assert said == [
        "pipelining: messages between the GPUs of ranks [0] are left to the framework "
        "(expected GPUs of one node, got those of 2 nodes)",
        "pipelining: messages between the GPUs of ranks [0] are left to the framework (expected peer access, got none)",
    ]
