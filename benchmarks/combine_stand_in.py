"""A combine on two GPUs, each of which has as much of it as one of four has: slots, terms, and bytes on the links.

    torchrun --nproc-per-node 2 benchmarks/combine_stand_in.py [COMBINE_SMS ...]

prints the median of the slower rank in microseconds, for each number of SMs that push (24 add). Of four ranks, 4096
tokens each, top 8 of 256 experts, one receives some 14,700 tokens, three of four from elsewhere, each for as many of
its experts as eight random ones of 256 are its own. There are as many here, and all from elsewhere come from the one
peer. What adds has more to do than on four: there are 14,700 sums, of one term each, not 4096.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig

HIDDEN, TOPK, LOCAL = 7168, 8, 64
TOKENS = 14_700
SMS = (12, 14, 16, 17, 18, 20, 22, 24, 28)


def routing(rank: int, device: torch.device) -> torch.Tensor:
    """Expert ids ``[T, K]`` of 128, -1 beyond a token's terms; all of a token's experts are on one rank."""
    generator = torch.Generator(device).manual_seed(rank + 7)
    chosen = torch.rand(4 * 4096, 4 * LOCAL, device=device, generator=generator).topk(TOPK, dim=1).indices
    terms = (chosen < LOCAL).sum(dim=1)
    terms = terms[terms > 0][:TOKENS]
    target = torch.where(torch.arange(TOKENS, device=device) % 4 == 0, rank, 1 - rank)
    experts = torch.rand(TOKENS, LOCAL, device=device, generator=generator).topk(TOPK, dim=1).indices
    ids = experts + LOCAL * target[:, None]
    return torch.where(torch.arange(TOPK, device=device) < terms[:, None], ids, -1).int()


def main() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    config = MoECommunicatorConfig(num_experts=2 * LOCAL, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=TOKENS)
    with MoECommunicator(None, config, device) as comm:
        x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
        out, handle = comm.dispatch(x, routing(rank, device), torch.rand(TOKENS, TOPK, device=device))
        flush, token = torch.empty(100 << 20, dtype=torch.uint8, device=device), torch.zeros(1, device=device)
        for sms in map(int, sys.argv[1:] or SMS):
            comm.set_sms(combine_sms=sms, add_sms=24)
            took = []
            for _ in range(25):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(1_200_000)  # so that the host is ahead
                flush.zero_()
                dist.all_reduce(token)
                begin.record()
                comm.combine(out.tokens, handle, weights=out.weights)
                end.record()
                torch.cuda.synchronize()
                took.append(1e3 * begin.elapsed_time(end))
            slower = torch.tensor(took[5:], device=device)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            if rank == 0:
                print(f"{sms} + 24 SMs: {slower.median():.0f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
