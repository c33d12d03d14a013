"""What dispatch and combine share: the routing that a handle owns, as tensors and as kernels see it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.moe.engine import Engine


class RoutingTensors(NamedTuple):
    """The tensors of a DispatchHandle, without the communicator's number."""

    topk_ids: torch.Tensor
    send_pos: torch.Tensor
    pair_pos: torch.Tensor
    meta: torch.Tensor
    recv_rows: torch.Tensor
    totals: torch.Tensor


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def routing_struct(engine: Engine, routing: RoutingTensors, num_tokens: int) -> Any:
    return _C.Routing(
        num_tokens=num_tokens,
        topk=routing.topk_ids.shape[1],
        layout=_C.Layout[engine.config.resolved_layout.name],
        alignment=engine.config.expert_alignment,
        topk_ids=address(routing.topk_ids),
        send_pos=address(routing.send_pos),
        pair_pos=address(routing.pair_pos),
        meta=address(routing.meta),
        recv_rows=address(routing.recv_rows),
        slots=routing.recv_rows.shape[0],
    )


def admit(engine: Engine, step: Any) -> None:
    engine.kernels.admit(_C.AdmitArgs(comm=engine.comm, step=step, stream=engine.lanes.receive))


def roomy(needed: int, present: int) -> int:
    """`needed` when it fits; else a quarter more, so that slowly growing batches do not grow the pool each time."""
    return needed if needed <= present else max(needed + needed // 4, 4096)
