"""Dispatch and combine on two GPUs, by SMs and shape of the rows. The data behind moe/high_throughput/sms.py.

    python benchmarks/sms_by_shape.py OUT.json

Cases of "two" have random routing over two ranks. In cases of "four" each GPU has the load of one of four ranks: slots,
terms, and bytes on the links. One of four ranks with 4096 tokens receives some 14,700 rows, three of four from other
ranks, each for as many experts as eight random ones of 256 fall on it. Here each token is for one rank, and all rows
that leave go to the one peer. Two things differ from four ranks: a send loads a row for each row that it stores, not
for each 3.6, and combine receive adds 14,700 sums of one term, not 4096 sums. So 48 SMs receive, and the cases with
K = 1 show how SMs bound the sends of four ranks. Wider rows are fewer in proportion.

Routing is known, as with `previous_handle`. An `impl` is SMs that send + SMs that receive.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.bench.suite import SMS_ARE, Row, Suite, row
from ep_plugin.bench.timing import Run, clock_of, time_in_turn

LOCAL = 64  # experts of a rank
TOKENS, HIDDEN = {"four": 14_700, "two": 4096}, 7168
SHAPES = [("four", hidden, 8, "bf16") for hidden in (1024, 2048, 2880, 4096, 5120, 7168, 8192)]
SHAPES += [("two", hidden, 8, "bf16") for hidden in (1024, 2048, 2880, 4096, 7168)]
SHAPES += [(ranks, HIDDEN, topk, "bf16") for ranks in ("four", "two") for topk in (1, 2, 4, 16)]
SHAPES += [(ranks, HIDDEN, 8, "fp8") for ranks in ("four", "two")]
SENDING = (6, 9, 10, 12, 14, 17, 20, 24)
COMBINING = (8, 12, 14, 17, 20, 24, 28, 32, 40, 48)
DISPATCH_SMS = [
    *((sms, 64) for sms in SENDING),
    *((14, sms) for sms in (32, 48, 80)),
    *((24, sms) for sms in (6, 12, 24)),
]
COMBINE_SMS = [
    *((sms, 48) for sms in COMBINING),
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


@dataclass(frozen=True, kw_only=True)
class SmsByShape(Suite):
    """Dispatch and combine by SMs and shape."""

    command_name: ClassVar[str] = "sms-by-shape"

    def command(self) -> str:
        return "python benchmarks/sms_by_shape.py"

    def measure(self, device: torch.device) -> dict[str, Any]:
        rows = [line for shape in SHAPES for line in of_shape(device, *shape)]
        return {"rows": rows, "notes": [SMS_ARE]}


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
    made = SmsByShape(backend="cuda", ranks=2).run()
    out.write_text(json.dumps(made, indent=1) + "\n")
    for case in dict.fromkeys(line["case"] for line in made["rows"]):
        best = min((line for line in made["rows"] if line["case"] == case), key=lambda line: line["median_us"])
        print(f"{case}: {best['median_us']:.0f} us with {best['impl']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
