"""The kernels of one segment: an ordinary dispatch or combine between the ranks of this node.

Shapes: T_m tokens of the segment, H hidden size, K experts per token, N rows of the output.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.moe.arguments import address
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.moe.high_throughput.sms import KernelSms

_DISPATCH_RECV, _COMBINE_RECV = _C.Step.DISPATCH_RECV, _C.Step.COMBINE_RECV


def both_kernels(sms: KernelSms) -> KernelSms:
    """`sms` where no kernel both sends and receives, as between nodes."""
    return KernelSms(sms.sending, max(1, sms.receiving))


def plan_and_notify(engine: HighThroughputEngine, struct: Any, header: Any, ids: torch.Tensor, ticket: int) -> None:
    """ids: int32 ``[T_m, K]``, which the plan keeps as they are but for bad ones."""
    words = _C.block_count_words(len(ids), engine.node_size, engine.node_experts)
    with engine.streams.on(engine.streams.send):
        block_counts = torch.empty(words, dtype=torch.int32, device=engine.device)
    common = {"comm": engine.comm, "routing": struct, "block_counts": address(block_counts)}
    common["stream"] = engine.streams.send
    engine.kernels.plan(_C.PlanArgs(ids=ids.data_ptr(), id_bytes=ids.element_size(), **common))
    engine.kernels.notify(_C.NotifyArgs(header=header, ticket=ticket, **common))


def send(
    engine: HighThroughputEngine,
    struct: Any,
    header: Any,
    sms: KernelSms,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> None:
    """x: ``[T_m, H]``; scales and weights of its rows."""
    args = _C.DispatchSendArgs(
        comm=engine.comm,
        routing=struct,
        header=header,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        scales=address(scales),
        scale_stride=0 if scales is None else scales.stride(0) * scales.element_size(),
        weights=address(weights),
        num_sms=sms.sending,
        stream=engine.streams.send,
    )
    engine.kernels.dispatch_send(args)


def receive(engine: HighThroughputEngine, struct: Any, header: Any, output: Any) -> None:
    """output: DispatchRecvArgs of the whole output, whose routing and header become the segment's."""
    output.comm, output.routing, output.header = engine.comm, struct, header
    engine.wait_for_sender(_DISPATCH_RECV)
    engine.kernels.dispatch_recv(output)


def combine_send(
    engine: HighThroughputEngine,
    common: dict[str, Any],
    sms: KernelSms,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    extra: torch.Tensor | None,
) -> None:
    args = _C.CombineSendArgs(
        y=y.data_ptr(),
        rows=y.shape[0],
        weights=address(weights),
        extra=address(extra),
        num_sms=sms.sending,
        stream=engine.streams.send,
        **common,
    )
    engine.kernels.combine_send(args)


def combine_receive(
    engine: HighThroughputEngine, common: dict[str, Any], sms: KernelSms, out: torch.Tensor, extra: torch.Tensor | None
) -> None:
    """Adds the partial rows of this node to out ``[T_m, H]``, the extra values to extra ``[T_m, K]``."""
    engine.wait_for_sender(_COMBINE_RECV)
    args = _C.CombineRecvArgs(
        out=out.data_ptr(),
        extra=address(extra),
        num_sms=sms.receiving,
        stream=engine.streams.receive,
        **common,
    )
    engine.kernels.combine_recv(args)
