"""What dispatch and combine share: the routing that a handle owns, as tensors and as kernels see it.

Shapes: T tokens, K experts per token, R ranks, S received slots.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES
from ep_plugin.moe.arguments import check_routing
from ep_plugin.moe.high_throughput.engine import Engine

WORD_BYTES = 4


class RoutingTensors(NamedTuple):
    """The tensors of a DispatchHandle, without the communicator's number."""

    topk_ids: torch.Tensor
    plan: torch.Tensor
    recv_rows: torch.Tensor
    totals: torch.Tensor


class KnownRouting(NamedTuple):
    """A routing whose tensors are sound, as kernels see it, and its `totals` as a list."""

    tensors: RoutingTensors
    struct: Any
    totals: list[int]


class LatestRouting(NamedTuple):
    """What is known of the routing that a communicator made last; its tensors may be gone."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    shapes: tuple[torch.Size, ...]  # of those that kernels take the addresses of
    struct: Any
    totals: list[int]

    def is_of(self, tensors: RoutingTensors) -> bool:
        """Whether it made these very tensors, and they have the shapes and the memory that it gave them."""
        ids, plan, recv_rows, totals = tensors
        same_ids, same_plan, same_recv_rows, same_totals = self.tensors
        return (
            same_ids() is ids
            and same_plan() is plan
            and same_recv_rows() is recv_rows
            and same_totals() is totals
            and self.shapes == (ids.shape, plan.shape, recv_rows.shape)
            and self.struct.lies_at(ids.data_ptr(), plan.data_ptr(), recv_rows.data_ptr())
        )


def known_routing(engine: Engine, name: str, tensors: RoutingTensors) -> KnownRouting:
    """`tensors`, which the caller's `name` holds. ValueError where they are not as dispatch made them.

    Those of the latest dispatch, as they mostly are, need no further look.
    """
    latest = engine.latest_routing
    if latest is not None and latest.is_of(tensors):
        return KnownRouting(tensors, latest.struct, latest.totals)
    check_routing(engine, name, tensors)
    struct = routing_struct(engine, tensors.topk_ids, tensors.plan, tensors.recv_rows)
    return KnownRouting(tensors, struct, tensors.totals.tolist())


def remember_routing(engine: Engine, made: KnownRouting) -> None:
    """Keeps what is known of a routing that this rank has just made."""
    ids, plan, recv_rows, _ = made.tensors
    shapes = ids.shape, plan.shape, recv_rows.shape
    engine.latest_routing = LatestRouting(tuple(map(weakref.ref, made.tensors)), shapes, made.struct, made.totals)


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


@functools.lru_cache(maxsize=1024)
def header_of(
    op: int,
    row_bytes: int,
    scale_bytes: int,
    weight_bytes: int,
    topk: int,
    dtype: torch.dtype,
    layout: int,
    config_hash: int,
    num_tokens: int,
) -> Any:
    """What ranks compare at each operation. Most calls are like an earlier one: it is made once, and never changed."""
    return _C.Header(
        op=op,
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
        weight_bytes=weight_bytes,
        topk=topk,
        dtype=DTYPE_CODES[dtype],
        layout=layout,
        config_hash=config_hash,
        num_tokens=num_tokens,
    )


def wait_for_sender(engine: Engine, step: Any, fresh: bool = False) -> None:
    """`fresh`: of a dispatch that makes its routing."""
    engine.kernels.wait_for_sender(
        _C.WaitForSenderArgs(comm=engine.comm, step=step, fresh=int(fresh), stream=engine.lanes.receive)
    )


def roomy(needed: int, present: int) -> int:
    """`needed` when it fits; else a quarter more, so that slowly growing batches do not grow the pool each time."""
    return needed if needed <= present else max(needed + needed // 4, 4096)
