"""The oracle that judges combines on GPUs, judged itself: sums as the kernels round them pass, no other ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_plugin import MoECommunicator
from ep_plugin.moe.reference import ReferenceOutput, reference_combine
from tests.gpu import checks
from tests.moe.moe_cases import on_ranks

SIZE, RANK, SEED = 3, 1, 5


def _rounded_sum(shares: list[ReferenceOutput], tokens: int, dtype: torch.dtype, weighted: bool) -> torch.Tensor:
    """A partial sum per rank, rounded for the wire, and their sum, rounded."""
    partial = []
    for share in shares:
        weights = [share.weights] if weighted else None
        partial.append(reference_combine([share.tokens], [share], [tokens], weights)[0].to(dtype).float())
    return torch.stack(partial).sum(0).to(dtype)


def _without(share: ReferenceOutput, lost: torch.Tensor) -> ReferenceOutput:
    token, k, row = (part[~lost] for part in (share.pair_token, share.pair_k, share.pair_row))
    return replace(share, pair_token=token, pair_k=k, pair_row=row)


def _first_row_twice(share: ReferenceOutput) -> ReferenceOutput:
    """Some token's second local row is not taken, its first twice."""
    second = int((share.pair_token[1:] == share.pair_token[:-1]).nonzero()[0]) + 1
    rows = share.pair_row.clone()
    rows[second] = rows[second - 1]
    return replace(share, pair_row=rows)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("layout", [checks.FLAT, checks.TOKEN_MAJOR])
@pytest.mark.parametrize("weighted", [True, False])
def test_every_lost_pair_is_seen(dtype: torch.dtype, layout: checks.DispatchLayout, weighted: bool) -> None:
    case = checks.Case(dtype=dtype, layout=layout, tokens=40, hidden=256, topk=8)
    given = checks.make_inputs(case, SIZE, SEED)
    oracle = checks.CombineOracle(case, given, RANK, SEED)
    first, *others = (checks.share_of(case, given, holder, RANK, SEED)[0] for holder in range(SIZE))

    def judge(share: ReferenceOutput) -> None:
        z = _rounded_sum([share, *others], given.tokens[RANK], dtype, weighted)
        oracle.check("combine", z, weighted=weighted)

    judge(first)
    by_row = layout is checks.TOKEN_MAJOR and not weighted  # there a row counts once, however many pairs it has
    for pair, row in enumerate(first.pair_row):
        with pytest.raises(AssertionError, match="combine: "):
            judge(_without(first, first.pair_row == row if by_row else torch.arange(len(first.pair_row)) == pair))
    if layout is checks.FLAT:
        with pytest.raises(AssertionError, match="combine: "):
            judge(_first_row_twice(first))


def test_nan_and_another_type_are_seen() -> None:
    case = checks.Case(tokens=4, hidden=8)
    given = checks.make_inputs(case, 1, SEED)
    oracle = checks.CombineOracle(case, given, 0, SEED)
    z = _rounded_sum([checks.share_of(case, given, 0, 0, SEED)[0]], 4, case.dtype, True)
    with pytest.raises(AssertionError, match="expected torch.bfloat16, got torch.float32"):
        oracle.check("combine", z.float(), weighted=True)
    z[3, 7] = torch.nan
    with pytest.raises(AssertionError, match=r"1 of 32 elements, first \[3, 7\]"):
        oracle.check("combine", z, weighted=True)


def _rounds(rank: int, size: int) -> None:
    for name in ("plain", "aligned", "fp32_token_major", "fp16", "empty_ranks", "all_dropped"):
        case = checks.CASES[name]
        with MoECommunicator(None, checks.config_of(case, size), "cpu") as comm:
            checks.check_round(comm, case, seed=1)


@pytest.mark.parametrize("size", [1, 3])
def test_a_round_on_the_cpu_passes(size: int) -> None:
    on_ranks(size, _rounds)
