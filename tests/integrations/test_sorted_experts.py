"""Experts on rows that are grouped already, beside transformers' own forward on the same rows, in one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers.integrations import finegrained_fp8, moe  # noqa: E402
from transformers.models.aria.modeling_aria import AriaExperts  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from ep_plugin.integrations.transformers.expert_parallel import (  # noqa: E402
    block_experts,
    is_grouped,
    sorted_experts,
    takes_sorted_rows,
)

EXPERTS, HIDDEN = 4, 32
KINDS = {
    "gated": Qwen3MoeExperts,
    "transposed": AriaExperts,
    "biased, transposed, a gate of its own": GptOssExperts,
    "not gated": NemotronHExperts,
    "normed": MuseSparkExperts,
}
COUNTS = {"even": [3, 3, 3, 3], "uneven": [7, 1, 0, 2], "first and last empty": [0, 5, 4, 0], "one row": [0, 0, 1, 0]}


def _experts(kind: type[torch.nn.Module], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    sizes = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    widths = {"intermediate_size": 16, "moe_intermediate_size": 16, "moe_latent_size": None}
    activations = {"hidden_act": "silu", "mlp_hidden_act": "relu2", "swiglu_alpha": 1.7, "swiglu_limit": 7.0}
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_hidden_size=HIDDEN,
        post_norm_eps=1e-6,
        _experts_implementation="grouped_mm",
        **dict.fromkeys(sizes, EXPERTS),
        **widths,
        **activations,
    )
    torch.manual_seed(0)
    experts = kind(config).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_same_bits_as_transformers(kind: type[torch.nn.Module], counts: list[int], dtype: torch.dtype) -> None:
    ours, theirs = _experts(kind, dtype), _experts(kind, dtype)
    ids = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    x, grad = torch.randn(2, len(ids), HIDDEN).to(dtype)
    rows, their_rows = x.clone().requires_grad_(), x.clone().requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()

    results = sorted_experts(ours, rows, ids.int(), ends)
    expected = theirs(their_rows, ids.unsqueeze(1), torch.ones(len(ids), 1, dtype=dtype))
    for y in (results, expected):
        y.backward(grad)
    assert results.dtype is dtype and results.is_contiguous()
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    torch.testing.assert_close(rows.grad, their_rows.grad, rtol=0, atol=0)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_blocks_of_rows_and_of_nan(kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    experts, counts = _experts(kind, dtype), torch.tensor([7, 1, 0, 2])
    present = torch.arange(8) < counts.unsqueeze(1)
    tokens = torch.randn(EXPERTS, 8, HIDDEN).to(dtype).masked_fill(~present.unsqueeze(2), torch.nan)

    results = block_experts(experts, tokens)
    ids = torch.arange(EXPERTS).repeat_interleave(counts)
    expected = experts(tokens[present], ids.unsqueeze(1), torch.ones(len(ids), 1, dtype=dtype))
    assert results.shape == tokens.shape and results.dtype is dtype and results.is_contiguous()
    limit = 1e-5 if dtype is torch.float32 else 2e-2  # a bias is added before the sum is rounded
    torch.testing.assert_close(results[present], expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_decorated_experts_take_sorted_rows(kind: type[torch.nn.Module]) -> None:
    experts = _experts(kind)
    assert takes_sorted_rows(experts) and is_grouped(experts)
    assert takes_sorted_rows(copy.deepcopy(experts))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "deepgemm", "sonicmoe", None])
def test_other_implementations_do_not(implementation: str | None) -> None:
    experts = _experts(Qwen3MoeExperts)
    experts.config._experts_implementation = implementation
    assert not is_grouped(experts)


def test_a_replaced_implementation_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "grouped_mm", lambda *given: given[1])
    assert not is_grouped(_experts(Qwen3MoeExperts))


def test_a_replaced_forward_does_not() -> None:
    experts = _experts(Qwen3MoeExperts)
    experts.forward = lambda rows, ids, weights: rows
    assert not takes_sorted_rows(experts)

    class Doubled(Qwen3MoeExperts):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(*given)

    assert not takes_sorted_rows(_experts(Doubled))
    assert takes_sorted_rows(_experts(type("Renamed", (Qwen3MoeExperts,), {})))


def test_quantised_experts_do_not() -> None:
    experts = _experts(Qwen3MoeExperts)
    experts.__class__ = moe.use_experts_implementation(
        type("Fp8", (finegrained_fp8.FP8Experts,), {}), experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    assert not takes_sorted_rows(experts)
    one_byte = _experts(Qwen3MoeExperts)
    for name in ("gate_up_proj", "down_proj"):
        packed = getattr(one_byte, name).detach().to(torch.float8_e4m3fn)
        setattr(one_byte, name, torch.nn.Parameter(packed, requires_grad=False))
    assert not is_grouped(one_byte)
