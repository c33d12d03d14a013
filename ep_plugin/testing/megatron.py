"""Makes Megatron-core run without TransformerEngine or grouped_gemm.

Every function changes this process permanently.
"""

from __future__ import annotations

import functools
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch


def without_transformer_engine() -> None:
    """Defines two names that Megatron-core reads but lacks without TransformerEngine."""
    import megatron.core.utils
    from packaging.version import Version

    if megatron.core.utils._te_version is None:
        megatron.core.utils._te_version = Version("0.0.0")
        import megatron.core.transformer.moe.moe_utils as moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None


def submodules_of(spec: Any) -> Any:
    """Returns the submodules in the spec of an MoE layer. The spec is a ModuleSpec; from Megatron-core 0.19 on, a
    functools.partial."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def serve_grouped_products() -> str | None:
    """Makes Megatron's GroupedMLP multiply with PyTorch if the package grouped_gemm is missing.

    Returns the name of the implementation in use. Returns None if Megatron has no GroupedMLP: from 0.17 on it groups
    products only with TransformerEngine.
    """
    if importlib.util.find_spec("megatron.core.transformer.moe.grouped_gemm_util") is None:
        return None
    from megatron.core.transformer.moe import grouped_gemm_util

    if grouped_gemm_util.grouped_gemm_is_available() and grouped_gemm_util.ops.gmm is not _grouped_product:
        return "GroupedMLP, products of the package grouped_gemm"
    grouped_gemm_util.ops = SimpleNamespace(gmm=_grouped_product)
    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops
    return "GroupedMLP, products of torch.nn.functional.grouped_mm"


def _grouped_product(
    rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """Multiplies each group of rows ``[N, I]`` by its weights ``[E_l, I, O]``. Returns ``[N, O]``.

    counts: ``[E_l]``, rows per group.
    """
    assert not trans_b
    ends = counts.cumsum(0).to(torch.int32).to(rows.device, non_blocking=True)  # the host does not wait
    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)
