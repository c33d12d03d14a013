"""Adapters of divided experts, with stand-ins for the wrapper of PEFT and its experts, and what they refuse."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin import NotSupported
from tests.ranks import run_ranks, values

pytest.importorskip("transformers", minversion="5.23")

WORLD, EXPERTS, ROWS, COLUMNS, RANK = 2, 4, 6, 5, 2


class _Experts(torch.nn.Module):
    def forward(self) -> torch.Tensor:
        weight = self._parameters["weight"]
        assert type(weight) is torch.Tensor  # not the DTensor
        return weight.sum() * 1


class _Broken(_Experts):
    def forward(self) -> torch.Tensor:
        raise RuntimeError("broken")


def _divided(experts: torch.nn.Module, whole: torch.Tensor) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    experts.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=False)
    return experts


def _wrapper(experts: torch.nn.Module, **factors: tuple[torch.Tensor, torch.Tensor, float]) -> Any:
    """Has what lora.py takes of PEFT's ParamWrapper."""
    return SimpleNamespace(
        get_base_layer=lambda: experts,
        parameter_name="weight",
        lora_A=factors,
        get_delta_factors=factors.__getitem__,
    )


def _run_rank(rank: int) -> dict[str, Any]:
    from ep_plugin.integrations.transformers import lora

    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(EXPERTS, ROWS, COLUMNS, generator=generator)
    left = torch.randn(EXPERTS, ROWS, RANK, generator=generator).requires_grad_()
    right = torch.randn(EXPERTS, RANK, COLUMNS, generator=generator).requires_grad_()
    factors = dict(one=(left, right, 0.5), two=(left * 2, right, 1.0), idle=(left, right, 100.0))
    experts = _divided(_Experts(), whole)
    parameter = experts.weight
    with lora._adapted(_wrapper(experts, **factors), ["one", "two", "elsewhere"]):
        out = experts()
    out.backward()
    mine = slice(rank * EXPERTS // WORLD, (rank + 1) * EXPERTS // WORLD)
    expected = (whole + 2.5 * left @ right)[mine].sum()
    (expected_left,) = torch.autograd.grad(expected, left)
    found: dict[str, Any] = {
        "sum": torch.allclose(out, expected),
        "gradient": torch.allclose(left.grad, expected_left) and left.grad[mine].all().item(),
        "restored": experts.weight is parameter,
        "whole": torch.allclose(lora._add(whole, list(factors.values())[:2]), whole + 2.5 * left @ right, atol=1e-5),
    }

    broken = _divided(_Broken(), whole)
    parameter = broken.weight
    with pytest.raises(RuntimeError, match="broken"), lora._adapted(_wrapper(broken, **factors), ["one"]):
        broken()
    found["restored after an error"] = broken.weight is parameter and not broken._forward_pre_hooks

    flat = _divided(_Experts(), whole[:, 0])
    with pytest.raises(NotSupported) as caught, lora._adapted(_wrapper(flat, **factors), ["one"]):
        flat()
    found["flat"] = str(caught.value)
    lora.serve_adapters(experts, tp_size=2)
    with pytest.raises(NotSupported) as caught, lora._adapted(_wrapper(experts, **factors), ["one"]):
        experts()
    found["tp"] = str(caught.value)
    return found


def test_each_rank_adapts_its_own_experts_and_refuses_others() -> None:
    for found in values(run_ranks(WORLD, _run_rank, framework="transformers")):
        for name in ("sum", "gradient", "restored", "whole", "restored after an error"):
            assert found[name], name
        assert found["flat"].startswith("LoRA on experts: expected a parameter of three dimensions, sharded over")
        assert "(4, 5)" in found["flat"]
        assert found["tp"] == "LoRA on experts: expected tp_size 1, got 2"


@pytest.mark.parametrize("missing", ["ParamWrapper", "_activate_lora", "get_param", "get_delta_factors"])
def test_another_peft_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    from ep_plugin.integrations.transformers import lora

    names = {"_activate_lora", "get_param", "get_delta_factors"} - {missing}
    wrapper_type = type("ParamWrapper", (), dict.fromkeys(names))
    before = dict(vars(wrapper_type))
    given = {} if missing == "ParamWrapper" else {"ParamWrapper": wrapper_type}
    monkeypatch.setitem(sys.modules, lora._MODULE, SimpleNamespace(**given))  # type: ignore[arg-type]
    lora._replace()
    assert dict(vars(wrapper_type)) == before
