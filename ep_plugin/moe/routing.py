"""What dispatch and combine share: the routing that a handle owns, as tensors and as kernels see it.

Shapes: T tokens, K experts per token, R ranks, S received slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.moe.engine import Engine

WORD_BYTES = 4


class RoutingTensors(NamedTuple):
    """The tensors of a DispatchHandle, without the communicator's number."""

    topk_ids: torch.Tensor
    plan: torch.Tensor
    recv_rows: torch.Tensor
    totals: torch.Tensor


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def routing_struct(engine: Engine, topk_ids: torch.Tensor, plan: torch.Tensor, recv_rows: torch.Tensor | None) -> Any:
    """The routing as kernels see it; without `recv_rows`, as it is before dispatch has made them."""
    T, K = topk_ids.shape
    meta = plan.data_ptr()
    send_pos = meta + WORD_BYTES * engine.meta_words
    return _C.Routing(
        num_tokens=T,
        topk=K,
        layout=engine.layout,
        alignment=engine.config.expert_alignment,
        topk_ids=topk_ids.data_ptr(),
        send_pos=send_pos,
        pair_pos=send_pos + WORD_BYTES * T * engine.size,
        meta=meta,
        recv_rows=address(recv_rows),
        slots=0 if recv_rows is None else recv_rows.shape[0],
    )


def admit(engine: Engine, step: Any) -> None:
    engine.kernels.admit(_C.AdmitArgs(comm=engine.comm, step=step, stream=engine.lanes.receive))


def roomy(needed: int, present: int) -> int:
    """`needed` when it fits; else a quarter more, so that slowly growing batches do not grow the pool each time."""
    return needed if needed <= present else max(needed + needed // 4, 4096)
