"""A combine on two GPUs, each of which has as much of it as one of four has: slots, terms, and bytes on the links.

    python benchmarks/combine_stand_in.py [COMBINE_SMS ...]

prints microseconds for each number of SMs that push (24 add). Of four ranks, 4096 tokens each, top 8 of 256 experts,
one receives some 14,700 tokens, three of four from elsewhere, each for as many of its experts as eight random ones of
256 are its own. There are as many here, and all from elsewhere come from the one peer. What adds has more to do than on
four: there are 14,700 sums, of one term each, not 4096.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.timing import Run, clock_of, time_in_turn

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


def measure(device: torch.device, sms: list[int]) -> dict[str, float]:
    """One rank's part: microseconds for each of `sms`. Collective."""
    config = MoECommunicatorConfig(num_experts=2 * LOCAL, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=TOKENS)
    with MoECommunicator(None, config, device) as comm:
        x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
        weights = torch.rand(TOKENS, TOPK, device=device)
        out, handle = comm.dispatch(x, routing(dist.get_rank(), device), weights)

        def combine(count: int) -> torch.Tensor:
            comm.set_sms(combine_sms=count, add_sms=24)
            return comm.combine(out.tokens, handle, weights=out.weights)

        runs: dict[str, Run] = {str(count): functools.partial(combine, count) for count in sms}
        timings = time_in_turn(clock_of(device), runs, iterations=20, warmup=3)
    return {count: timing.median_us for count, timing in timings.items()}


if __name__ == "__main__":
    for count, took in run_on_ranks(2, "cuda", measure, [int(word) for word in sys.argv[1:]] or list(SMS)).items():
        print(f"{count} + 24 SMs: {took:.0f} us")
