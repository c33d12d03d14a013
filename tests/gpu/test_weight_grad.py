"""The weights' part of combine's backward on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ep_plugin import _C
from ep_plugin.dtypes import ELEMENTS
from ep_plugin.moe.autograd import weight_grad
from tests.ranks import run_ranks, values


@dataclass(frozen=True)
class Rows:
    num_rows: int
    hidden: int


# Less than a warp's vectors, some more, whole ones; more rows than warps; more bytes than 2 GiB.
SMALL = (Rows(0, 64), Rows(1, 8), Rows(3, 40), Rows(257, 1032), Rows(4999, 2048), Rows(40000, 64), Rows(301, 7168))
LARGE = Rows(160_000, 7168)


def _like_pytorch(rank: int, size: int) -> list[str]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    generator = torch.Generator(device).manual_seed(1)
    done = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for case in SMALL:
            y, rows = (
                torch.randn(case.num_rows, case.hidden, device=device, generator=generator).to(dtype) for _ in "yr"
            )
            factors = torch.rand(case.num_rows, device=device, generator=generator)
            before, again = rows.clone(), rows.clone()
            dots = weight_grad(y, rows, factors)
            expected = (y.double() * before.double()).sum(dim=1)
            torch.testing.assert_close(dots.double(), expected, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(rows, before.mul_(factors.unsqueeze(1)), rtol=0, atol=0)
            assert torch.equal(weight_grad(y, again, factors), dots)  # to the bit
            done.append(f"{dtype} {case}")
    y = torch.ones(LARGE.num_rows, LARGE.hidden, device=device, dtype=torch.bfloat16)
    rows = torch.full_like(y, 2.0)
    factors = torch.arange(LARGE.num_rows, device=device) % 64 / 64
    assert torch.equal(weight_grad(y, rows, factors), torch.full_like(factors, 2.0 * LARGE.hidden))
    assert torch.equal(rows, (2 * factors.unsqueeze(1)).to(torch.bfloat16).expand_as(rows))
    done.append(f"{LARGE}")
    return done


def _refused(rank: int, size: int) -> list[str]:
    given = {"y": 16, "rows": 16, "factors": 4, "dots": 4, "num_rows": 1, "hidden": 8, "element": _C.Element.BFLOAT16}
    found = []
    for name, value in (("y", 8), ("rows", 24), ("hidden", 4), ("num_rows", -1), ("element", ELEMENTS[torch.float64])):
        try:
            _C.cuda.weight_grad(_C.WeightGradArgs(**{**given, name: value}))
        except ValueError as error:
            found.append(str(error).split(":")[0])
    return found


@pytest.mark.gpu(1)
def test_like_pytorch() -> None:
    (done,) = values(run_ranks(1, _like_pytorch, 1, timeout_s=200))
    assert len(done) == 3 * len(SMALL) + 1


@pytest.mark.gpu(1)
def test_refused_before_launch() -> None:
    (found,) = values(run_ranks(1, _refused, 1, timeout_s=200))
    assert found == ["y", "rows", "hidden", "num_rows", "element"]
