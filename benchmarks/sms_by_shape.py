"""Dispatch and combine on two GPUs, by SMs and shape of the rows. The data behind moe/high_throughput/sms.py.

    python benchmarks/sms_by_shape.py OUT.json

Cases of "two" are what they say: random routing over two ranks. In those of "four" each GPU has as much as one of four
has: slots, terms, and bytes on the links. Of four ranks with 4096 tokens each one receives some 14,700, three of four
from elsewhere, each for as many of its experts as eight random ones of 256 are its own. There are as many here, all for
one rank, and all that leave go to the one peer. What is not as on four: a send loads a row for each that it stores, not
for each 3.6, and what adds has 14,700 sums, of one term each, not 4096. So 48 SMs add, and how SMs bound the sends of
four is seen with K = 1, where they are the same. Rows are as many fewer as they are wider.

Routing is known, as in a dispatch's `previous_handle`. An `impl` is SMs that send + SMs that receive.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.results import SMS_ARE, Row, result, row
from ep_plugin.bench.timing import Run, clock_of, time_in_turn

LOCAL = 64  # experts of a rank
TOKENS, HIDDEN = {"four": 14_700, "two": 4096}, 7168
SHAPES = [("four", hidden, 8, "bf16") for hidden in (1024, 2048, 2880, 4096, 5120, 7168, 8192)]
SHAPES += [("two", hidden, 8, "bf16") for hidden in (1024, 2048, 2880, 4096, 7168)]
SHAPES += [(ranks, HIDDEN, topk, "bf16") for ranks in ("four", "two") for topk in (1, 2, 4, 16)]
SHAPES += [(ranks, HIDDEN, 8, "fp8") for ranks in ("four", "two")]
SENDING = (6, 9, 10, 12, 14, 17, 20, 24)
PUSHING = (8, 12, 14, 17, 20, 24, 28, 32, 40, 48)
DISPATCH_SMS = [
    *((sms, 64) for sms in SENDING),
    *((14, sms) for sms in (32, 48, 80)),
    *((24, sms) for sms in (6, 12, 24)),
]
COMBINE_SMS = [
    *((sms, 48) for sms in PUSHING),
    *((17, sms) for sms in (24, 36)),
    *((40, sms) for sms in (4, 8, 16, 24)),
]


def routing(ranks: str, rank: int, tokens: int, topk: int, device: torch.device) -> torch.Tensor:
    """Expert ids ``[T, K]`` of 128; in cases of "four" a token's are all on one rank, and -1 beyond its terms."""
    generator = torch.Generator(device).manual_seed(rank + 7)

    def random(rows: int, experts: int) -> torch.Tensor:
        return torch.rand(rows, experts, device=device, generator=generator).topk(topk, dim=1).indices

    if ranks == "two":
        return random(tokens, 2 * LOCAL).int()
    terms = (random(4 * 4096 + tokens, 4 * LOCAL) < LOCAL).sum(dim=1)
    terms = terms[terms > 0].repeat(8 if topk == 1 else 2)[:tokens]
    target = torch.where(torch.arange(tokens, device=device) % 4 == 0, rank, 1 - rank)
    ids = random(tokens, LOCAL) + LOCAL * target[:, None]
    return torch.where(torch.arange(topk, device=device) < terms[:, None], ids, -1).int()


def measure(device: torch.device, shapes: list[tuple[str, int, int, str]]) -> dict[str, Any]:
    """One rank's part. Collective."""
    return {"rows": [line for shape in shapes for line in of_shape(device, *shape)], "wrong": [], "sms_are": SMS_ARE}


def of_shape(device: torch.device, ranks: str, hidden: int, topk: int, dtype: str) -> list[Row]:
    tokens, rank = TOKENS[ranks] * HIDDEN // hidden, dist.get_rank()
    config = MoECommunicatorConfig(
        num_experts=2 * LOCAL, hidden_size=hidden, topk=topk, max_tokens_per_rank=tokens, timeout_s=60
    )
    with MoECommunicator(None, config, device) as comm:
        x, scales = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16), None
        if dtype == "fp8":
            x, scales = x.to(torch.float8_e4m3fn), torch.rand(tokens, hidden // 128, device=device)
        ids = routing(ranks, rank, tokens, topk, device)
        weights = torch.rand(tokens, topk, device=device)
        out, handle = comm.dispatch(x, ids, weights, scales)

        def dispatch(sending: int, receiving: int) -> object:
            comm.set_sms(dispatch_send_sms=sending, dispatch_recv_sms=receiving)
            return comm.dispatch(x, ids, weights, scales, previous_handle=handle)

        def combine(sending: int, receiving: int) -> object:
            comm.set_sms(combine_send_sms=sending, combine_recv_sms=receiving)
            return comm.combine(out.tokens, handle, weights=out.weights)

        runs: dict[tuple[str, int, int], Run] = {
            ("dispatch", *sms): functools.partial(dispatch, *sms) for sms in DISPATCH_SMS
        }
        if dtype == "bf16":
            back = comm.combine(out.tokens, handle)
            torch.testing.assert_close(back, x * (ids >= 0).sum(dim=1, keepdim=True), rtol=0.02, atol=0.02)
            runs |= {("combine", *sms): functools.partial(combine, *sms) for sms in COMBINE_SMS}
        timings = time_in_turn(clock_of(device), runs, iterations=9, warmup=2)
        crossing = (ids // LOCAL == 1 - rank).any(dim=1).sum().item()
        row_bytes = hidden * x.element_size() + (0 if scales is None else scales.shape[1] * scales.element_size())
    torch.cuda.empty_cache()
    rows = []
    for (what, sending, receiving), timing in timings.items():
        case, impl = f"{what}_{ranks}_h{hidden}_k{topk}_{dtype}", f"{sending}+{receiving}"
        rows.append(row(case, impl, timing, int(crossing) * row_bytes, sending + receiving))
    return rows


def main(out: Path) -> None:
    code_hash = provenance.hash_sources()
    found = run_on_ranks(2, "cuda", measure, SHAPES)
    command = f"python benchmarks/sms_by_shape.py {out.name}"
    made = result("sms_by_shape", "cuda", 2, command, found, code_hash)
    out.write_text(json.dumps(made, indent=1) + "\n")
    for case in dict.fromkeys(line["case"] for line in made["rows"]):
        best = min((line for line in made["rows"] if line["case"] == case), key=lambda line: line["median_us"])
        print(f"{case}: {best['median_us']:.0f} us with {best['impl']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
