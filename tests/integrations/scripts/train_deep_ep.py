"""Trains mixtures of linear experts whose tokens travel through DeepEP's Buffer, as several projects call it.

torchrun --nproc-per-node 2 train_deep_ep.py OUT
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from deep_ep import Buffer  # isort: skip  (after torch, as its own examples have it)
from deep_ep.utils import EventHandle, EventOverlap  # isort: skip
from deep_ep_cpp import EventHandle as CppEventHandle  # isort: skip  (as XTuner does)

STEPS, EXPERTS, TOPK, HIDDEN, TOKENS = 4, 8, 2, 32, 24
ROUTINGS = ("router", "all to one rank", "padded", "empty rank")


def bytes_of(hidden: int, size: int) -> tuple[int, int]:
    """num_nvl_bytes and num_rdma_bytes, as DeepEP's README computes them."""
    configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
    nvl = max(config.get_nvl_buffer_size_hint(hidden, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden, size) for config in configs) if Buffer.is_sm90_compiled() else 0
    return nvl, rdma


class FusedDispatch(torch.autograd.Function):
    """As in Megatron-core and NeMo Automodel: events everywhere, the handle kept as it is."""

    buffer = None

    @classmethod
    def open(cls):
        cls.buffer = Buffer(dist.group.WORLD, *bytes_of(HIDDEN * 4, dist.get_world_size()), explicitly_destroy=True)
        Buffer.set_num_sms(20)

    @classmethod
    def close(cls):
        cls.buffer.destroy()

    @staticmethod
    def forward(ctx, x, ids, weights):
        previous = EventOverlap(EventHandle())
        per_rank, per_rdma, per_expert, in_rank, event = FusedDispatch.buffer.get_dispatch_layout(
            ids, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        rows, local, row_weights, counts, handle, event = FusedDispatch.buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        assert counts == [int((local == expert).sum()) for expert in range(len(counts))]
        ctx.handle = handle
        return rows, local, row_weights, handle

    @staticmethod
    def backward(ctx, grad_rows, grad_local, grad_weights, grad_handle):
        grad_x, grad_topk, event = FusedDispatch.buffer.combine(
            grad_rows.contiguous(),
            ctx.handle,
            topk_weights=grad_weights.float(),
            previous_event=EventOverlap(EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return grad_x, None, grad_topk


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, handle):
        ctx.handle = handle
        return FusedDispatch.buffer.combine(rows, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        return FusedDispatch.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None


class Holder:
    def __init__(self, handle):
        self.handle = handle


class PlainDispatch(torch.autograd.Function):
    """As in Axolotl: no events, no counts of nodes, the handle in a holder, rows in bfloat16."""

    buffer = None

    @classmethod
    def open(cls):
        cls.buffer = Buffer(group=dist.group.WORLD, num_nvl_bytes=256 << 20, num_rdma_bytes=0, low_latency_mode=False)

    @classmethod
    def close(cls):
        cls.buffer = None  # it has no destroy

    @staticmethod
    def forward(ctx, x, ids, weights):
        with torch.no_grad():
            per_rank, _, per_expert, in_rank, _ = PlainDispatch.buffer.get_dispatch_layout(ids, EXPERTS)
        rows, local, row_weights, _, handle, _ = PlainDispatch.buffer.dispatch(
            x.bfloat16(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )
        ctx.handle = handle
        return rows, local, row_weights, Holder(handle)

    @staticmethod
    def backward(ctx, grad_rows, grad_local, grad_weights, grad_holder):
        # A rank that has received no row passes no weights. Its own then get no gradient.
        weights = grad_weights.contiguous() if len(grad_rows) else None
        grad_x, grad_topk, _ = PlainDispatch.buffer.combine(grad_rows.contiguous(), ctx.handle, topk_weights=weights)
        return grad_x.float(), None, grad_topk


class PlainCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, holder):
        ctx.handle = holder.handle
        return PlainDispatch.buffer.combine(rows.bfloat16().contiguous(), holder.handle)[0].float()

    @staticmethod
    def backward(ctx, grad):
        return PlainDispatch.buffer.dispatch(grad.bfloat16().contiguous(), handle=ctx.handle)[0].float(), None


class SavedDispatch(torch.autograd.Function):
    """As in XTuner: one buffer for both modes, the handle taken apart and kept as saved tensors."""

    buffer = None

    @classmethod
    def open(cls):
        size = dist.get_world_size()
        nvl, rdma = bytes_of(HIDDEN * 4, size)
        rdma = max(rdma, Buffer.get_low_latency_rdma_size_hint(TOKENS, 128, size, EXPERTS))
        queues = max(EXPERTS // size, Buffer.num_sms // 2)
        cls.buffer = Buffer(dist.group.WORLD, nvl, rdma, low_latency_mode=True, num_qps_per_rank=queues)

    @classmethod
    def close(cls):
        cls.buffer = None

    @staticmethod
    def forward(ctx, x, ids, weights):
        event = EventOverlap(CppEventHandle())
        *layout, event = SavedDispatch.buffer.get_dispatch_layout(
            ids, EXPERTS, previous_event=event, async_finish=True, allocate_on_comm_stream=True
        )
        per_rank, per_rdma, per_expert, in_rank = layout
        rows, local, row_weights, _, handle, event = SavedDispatch.buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        ctx.save_for_backward(*handle)
        return rows, local, row_weights, handle

    @staticmethod
    def backward(ctx, grad_rows, grad_local, grad_weights, grad_handle):
        grad_x, grad_topk, event = SavedDispatch.buffer.combine(
            grad_rows, ctx.saved_tensors, topk_weights=grad_weights, async_finish=True
        )
        event.current_stream_wait()
        return grad_x, None, grad_topk


class SavedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, handle):
        ctx.save_for_backward(*handle)
        z, _, event = SavedDispatch.buffer.combine(rows, handle, async_finish=True)
        event.current_stream_wait()
        return z

    @staticmethod
    def backward(ctx, grad):
        rows, _, _, _, _, event = SavedDispatch.buffer.dispatch(grad, handle=ctx.saved_tensors, async_finish=True)
        event.current_stream_wait()
        return rows, None


STYLES = {
    "automodel": (FusedDispatch, FusedCombine),
    "axolotl": (PlainDispatch, PlainCombine),
    "xtuner": (SavedDispatch, SavedCombine),
}


def route(scores: torch.Tensor, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each token. -1: none, as for padding."""
    weights, ids = scores.softmax(dim=1).topk(TOPK, dim=1)
    if routing == "all to one rank":
        ids = torch.arange(TOPK).expand_as(ids)
        weights = scores.softmax(dim=1)[:, :TOPK]
    if routing == "padded":
        is_padding = (torch.arange(len(scores)) > len(scores) // 2).unsqueeze(1)
        weights, ids = weights.masked_fill(is_padding, 0.0), ids.masked_fill(is_padding, -1)
    return weights, ids.contiguous()


def tokens_of(data: torch.Tensor, rank: int, routing: str) -> torch.Tensor:
    """This rank's tokens of a step, from those of all ranks ``[R, T, H]``."""
    return data[rank, :0] if routing == "empty rank" and rank == 1 else data[rank]


def loss_of(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (z - x.roll(1, dims=1)).square().sum() / (TOKENS * HIDDEN)


def train(style: str, routing: str) -> list[float]:
    dispatch, combine = STYLES[style]
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    router = torch.nn.Parameter(torch.randn((HIDDEN, EXPERTS), generator=generator) / 8)
    experts = torch.randn((EXPERTS, HIDDEN, HIDDEN), generator=generator) / 8
    mine = torch.nn.Parameter(experts.chunk(world)[rank].clone())
    data = torch.randn((STEPS, world, TOKENS, HIDDEN), generator=generator)
    losses = []
    for step in range(STEPS):
        x = tokens_of(data[step], rank, routing).clone().requires_grad_()
        weights, ids = route(x @ router, routing)
        rows, local, row_weights, handle = dispatch.apply(x, ids, weights.contiguous())
        y = torch.zeros_like(rows, dtype=torch.float32)
        for expert in range(len(mine)):
            factor = torch.where(local == expert, row_weights, 0.0).sum(1, keepdim=True)
            y = y + factor * (rows.float() @ mine[expert])
        loss = loss_of(combine.apply(y, handle), x.detach())
        loss.backward()
        if router.grad is None:
            router.grad = torch.zeros_like(router)
        dist.all_reduce(router.grad)
        with torch.no_grad():
            for parameter in (router, mine):
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    losses = {}
    for style, (dispatch, _) in STYLES.items():
        dispatch.open()
        losses |= {f"{style}, {routing}": train(style, routing) for routing in ROUTINGS}
        dispatch.close()
    (Path(sys.argv[1]) / f"losses.{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main()
