"""Trains a mixture of linear experts whose tokens travel through DeepEP's Buffer.

torchrun --nproc-per-node 2 train_deep_ep.py OUT
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from deep_ep import Buffer  # isort: skip  (after torch, as its own examples have it)
from deep_ep.utils import EventHandle, EventOverlap  # isort: skip

STEPS, EXPERTS, TOPK, HIDDEN, TOKENS = 4, 8, 2, 32, 24


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, buffer):
        previous = EventOverlap(EventHandle())
        per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
            ids, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        rows, local, row_weights, counts, handle, event = buffer.dispatch(
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
        ctx.buffer, ctx.handle = buffer, handle
        return rows, local, row_weights, handle

    @staticmethod
    def backward(ctx, grad_rows, grad_local, grad_weights, grad_handle):
        grad_x, grad_topk, _ = ctx.buffer.combine(grad_rows.contiguous(), ctx.handle, topk_weights=grad_weights)
        return grad_x, None, grad_topk, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = Buffer.get_dispatch_config(world)
    buffer = Buffer(dist.group.WORLD, config.get_nvl_buffer_size_hint(HIDDEN * 4, world))
    Buffer.set_num_sms(20)
    generator = torch.Generator().manual_seed(7)
    router = torch.nn.Parameter(torch.randn((HIDDEN, EXPERTS), generator=generator) / 8)
    experts = torch.randn((EXPERTS, HIDDEN, HIDDEN), generator=generator) / 8
    mine = torch.nn.Parameter(experts.chunk(world)[rank].clone())
    data = torch.randn((STEPS, world, TOKENS, HIDDEN), generator=generator)
    losses = []
    for step in range(STEPS):
        x = data[step, rank]
        weights, ids = (x @ router).softmax(dim=1).topk(TOPK, dim=1)
        rows, local, row_weights, handle = Dispatch.apply(x.requires_grad_(), ids, weights, buffer)
        y = torch.zeros_like(rows)
        for expert in range(len(mine)):
            factor = torch.where(local == expert, row_weights, 0.0).sum(1, keepdim=True)
            y = y + factor * (rows @ mine[expert])
        z = Combine.apply(y, buffer, handle)
        loss = (z - x.detach().roll(1, dims=1)).square().mean()
        loss.backward()
        dist.all_reduce(router.grad)
        with torch.no_grad():
            for parameter in (router, mine):
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    (out / f"losses.{rank}.json").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main()
