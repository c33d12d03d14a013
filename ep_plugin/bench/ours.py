"""ep_plugin in the words of the benchmark."""

from __future__ import annotations

from typing import cast

import torch

from ep_plugin.bench.peers import Received
from ep_plugin.bench.workload import Batch, Workload
from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.engine import DEFAULT_SMS
from ep_plugin.moe.layout import DispatchHandle

# SMs of the kernels that move rows at once, by the first word of a case's name; a round trip is its larger half.
_SMS = {
    "dispatch": DEFAULT_SMS["dispatch_sms"] + DEFAULT_SMS["expand_sms"],
    "combine": DEFAULT_SMS["combine_sms"] + DEFAULT_SMS["add_sms"],
}

_State = tuple[DispatchHandle, torch.Tensor | None]


class EpPlugin:
    """Dispatch and combine of one communicator. Making it is collective; close it."""

    dedup = True

    def __init__(self, workload: Workload, device: torch.device, layout: DispatchLayout) -> None:
        config = MoECommunicatorConfig(
            num_experts=workload.experts,
            hidden_size=workload.hidden,
            topk=workload.topk,
            max_tokens_per_rank=workload.tokens,
            layout=layout,
        )
        self._comm = MoECommunicator(None, config, device)

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        handle = None if previous is None else cast(_State, previous)[0]
        out, handle = self._comm.dispatch(batch.x, batch.ids, batch.weights, batch.scales, previous_handle=handle)
        return Received(
            tokens=out.tokens,
            scales=out.scales,
            counts=out.num_tokens_per_expert,
            ids=out.topk_ids,
            weights=out.weights,
            state=(handle, out.weights),
        )

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        handle, weights = cast(_State, state)
        return self._comm.combine(y, handle, weights=weights)

    def close(self) -> None:
        self._comm.close()


def default_sms(case: str) -> int:
    """SMs that ep_plugin occupies at most in a case when the configuration names none."""
    return _SMS.get(case.split("_")[0], max(_SMS.values()))
