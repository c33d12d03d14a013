"""Buffer's arguments: checks, and DeepEP's routing in MoECommunicator's terms.

A check raises ValueError with the expected and the actual value. Shapes: T tokens here, K experts per token, E experts
in all, R ranks on N nodes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.config import MAX_LL_TOKENS, MAX_TOPK
from ep_plugin.deep_ep.handles import LowLatencyHandle
from ep_plugin.dtypes import weight_dtype
from ep_plugin.errors import NotSupported
from ep_plugin.moe.arguments import MOST_ROWS, check_tensors
from ep_plugin.runtime import tensors
from ep_plugin.transport.topology import NodeMap

Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"

# Arguments that only forks of DeepEP have, and how to make their callers leave them out. "": `overlap` alone reads it.
_NVFP4 = "unset VLLM_DEEPEPLL_NVFP4_DISPATCH, or start SGLang with --deepep-dispatcher-output-dtype bf16"
_BESIDE_OVERLAP = ("packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms", "src_signals")
_OF_FORKS = {"use_nvfp4": _NVFP4, "x_global_scale": _NVFP4}
_OF_FORKS |= {"overlap": "start SGLang without --enable-single-batch-overlap"}
_OF_FORKS |= dict.fromkeys((*_BESIDE_OVERLAP, "src_signal_expect_value"), "")


def check_of_forks(call: str, given: dict[str, object]) -> None:
    """Refuse an argument of DeepEP's forks by name, unless it is None or False. TypeError for any other name."""
    for name, value in given.items():
        if name not in _OF_FORKS:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if _OF_FORKS[name] and value is not None and value is not False:
            got = value if isinstance(value, bool) else type(value).__name__
            raise NotSupported(f"{call}({name}=...): expected None or False, got {got}; {_OF_FORKS[name]}")


def rows_of(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split dispatch's `x` into rows and scales. The scales are None without a pair."""
    rows, scales = x if _is_pair(x) else (x, None)
    if not isinstance(rows, torch.Tensor):
        raise ValueError(f"x: expected a tensor, or a tuple of rows and scales, got {_described(x)}")
    _check_dense("x", rows)
    if scales is not None:
        _check_dense("scales", scales)
    if rows.dim() != 2:
        raise ValueError(f"x: expected rows of shape [T, H], got shape {list(rows.shape)}")
    return rows, scales


def biases_of(bias: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return no, one or two biases. ValueError unless they have x's dtype and one shape."""
    biases: Any = bias if _is_pair(bias) else () if bias is None else (bias,)
    for one in biases:
        if not isinstance(one, torch.Tensor):
            raise ValueError(f"bias: expected None, a tensor or a tuple of two, got {_described(bias)}")
        check_tensor("bias", one, (x.dtype,), *biases[0].shape)
    return biases


def sum_of(biases: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Return the bias from which combine's sums start. Two are added up in float32 (float64)."""
    if len(biases) < 2:
        return biases[0].contiguous() if biases else None
    first, second = biases
    first = first.to(weight_dtype(first.dtype))  # torch then adds the second one in this type, too
    return first + second


def as_floats(weights: torch.Tensor | None) -> torch.Tensor | None:
    """Return weights as DeepEP returns them, in float32. They travel in float64 beside float64 rows."""
    return weights.float() if weights is not None and weights.dtype is not torch.float32 else weights


def check_tensor(
    name: str, given: torch.Tensor, dtypes: tuple[torch.dtype, ...], *shape: int | str, is_read: bool = True
) -> None:
    """ValueError unless `given` is dense, of one of the dtypes, and of this shape. A name in it allows any size.

    is_read: whether its values are used. If not, its storage may have been freed.
    """
    _check_dense(name, given, is_read)
    sizes = zip(shape, given.shape, strict=False)
    fits = given.dim() == len(shape) and all(isinstance(wanted, str) or wanted == size for wanted, size in sizes)
    if given.dtype not in dtypes or not fits:
        raise ValueError(
            f"{name}: expected {dtypes[0]} of shape [{', '.join(map(str, shape))}], got {given.dtype} of shape "
            f"{list(given.shape)}"
        )


def _check_dense(name: str, given: torch.Tensor, is_read: bool = True) -> None:
    """ValueError for sparse and mkldnn tensors, which many of torch's operators refuse without a name, and for freed
    memory, which they read."""
    if given.layout is not torch.strided:
        tensors.check_kind(name, given)
    if is_read and not tensors.is_traced():
        tensors.check_storage(name, given)


def check_at_least(least: int, **given: object) -> None:
    """ValueError unless all are integers of at least `least`."""
    for name, value in given.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")


def check_kind(kind: type, **given: object) -> None:
    """ValueError unless each value is of `kind` or None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}: expected None or an instance of {kind.__name__}, got {type(value).__name__}")


def check_layout(per_rank: Any, per_node: Any, in_rank: Any, per_expert: Any, tokens: int, nodes: NodeMap) -> None:
    """ValueError unless all are as `get_dispatch_layout` returns them. `per_node` is not used on one node."""
    size = nodes.num_nodes * nodes.ranks_per_node
    layout: dict[str, Any] = {
        "num_tokens_per_rank": (per_rank, torch.int32, size),
        "is_token_in_rank": (in_rank, torch.bool, tokens, size),
        "num_tokens_per_expert": (per_expert, torch.int32, "E"),
    }
    if nodes.num_nodes > 1:
        layout["num_tokens_per_rdma_rank"] = (per_node, torch.int32, nodes.num_nodes)
    for name, (given, dtype, *shape) in layout.items():
        if not isinstance(given, torch.Tensor):
            raise ValueError(
                f"{name}: expected the tensor that get_dispatch_layout returned, or a handle=, got "
                f"{'None' if given is None else type(given).__name__}"
            )
        check_tensor(name, given, (dtype,), *shape, is_read=False)
    check_experts(per_expert.numel(), size)


def check_experts(num_experts: int, size: int) -> None:
    """ValueError unless `num_experts` is a positive multiple of R."""
    if not isinstance(num_experts, int) or num_experts < 1 or num_experts % size:
        raise ValueError(f"num_experts: expected a positive multiple of the group's {size} ranks, got {num_experts}")


def check_sizes(num_worst_tokens: Any, expert_alignment: Any, tokens: int, size: int) -> None:
    """ValueError unless num_worst_tokens is 0 or at least R times the tokens, and expert_alignment at least 1."""
    least = size * max(tokens, 1)
    if type(num_worst_tokens) is not int or (num_worst_tokens and num_worst_tokens < least):
        raise ValueError(
            f"num_worst_tokens: expected 0, or an integer of at least {least}, {size} ranks times {tokens} tokens "
            f"here, got {num_worst_tokens!r}"
        )
    if num_worst_tokens > MOST_ROWS:
        raise ValueError(f"num_worst_tokens: expected at most {MOST_ROWS}, got {num_worst_tokens}")
    if not isinstance(expert_alignment, int) or expert_alignment < 1:
        raise ValueError(f"expert_alignment: expected an integer of at least 1, got {expert_alignment!r}")


def check_topk(topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None = None) -> None:
    """ValueError unless ids are [T, K] or None, and their weights [T, K] or None."""
    check_kind(torch.Tensor, topk_idx=topk_idx, topk_weights=topk_weights)
    if topk_idx is not None:
        check_tensor("topk_idx", topk_idx, (torch.int64, torch.int32), "T", "K")
    if topk_weights is not None:
        if topk_idx is None:
            raise ValueError("topk_weights: expected None without topk_idx, got a tensor")
        check_tensor("topk_weights", topk_weights, (torch.float32,), topk_idx.shape[0], "K")


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(one, torch.Tensor) for one in value)


def _described(value: Any) -> str:
    if not isinstance(value, (tuple, list)):
        return type(value).__name__
    return f"a {type(value).__name__} of ({', '.join(type(one).__name__ for one in value)})"


def check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    """ValueError unless ids are from -1 to E - 1. GPUs check only with EP_PLUGIN_CHECK_IDS=1."""
    if topk_idx.numel() and (topk_idx.device.type == "cpu" or env.check_ids()):
        least, most = map(int, topk_idx.aminmax())
        if least < -1 or most >= num_experts:
            raise ValueError(f"topk_idx: expected ids from -1 to {num_experts - 1}, got {least} to {most}")


def ranks_as_experts(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """Return ids int32 ``[T, R]`` that route by rank alone: each rank counts as one expert."""
    tensors.check_storage("is_token_in_rank", is_token_in_rank)
    size = is_token_in_rank.shape[1]
    if size > MAX_TOPK:
        raise NotSupported(f"topk_idx: expected expert ids in groups of more than {MAX_TOPK} ranks, got None of {size}")
    ranks = torch.arange(size, dtype=torch.int32, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, ranks, -1)


def received_per_expert(num_tokens_per_expert: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Count the pairs that all ranks send to each local expert, for dispatches without expert ids. Collective."""
    tensors.check_storage("num_tokens_per_expert", num_tokens_per_expert)
    total = num_tokens_per_expert.clone()
    dist.all_reduce(total, group=group)
    return total.view(group.size(), -1)[group.rank()]


# -- low latency: T_max tokens of any rank at most, E_l = E / R experts here, N = R * T_max rows of each ---------------


def quantized_as(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> str | None:
    """Return MoECommunicator's `quantize` for DeepEP's three arguments."""
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0: expected False without round_scale=True, got True")
    if not use_fp8:
        return None
    return "e4m3_ue8m0" if use_ue8m0 else "e4m3_pow2" if round_scale else "e4m3"


def check_max_tokens(max_tokens: Any) -> None:
    """ValueError unless this is a T_max that low-latency calls serve."""
    if type(max_tokens) is not int or not 0 < max_tokens <= MAX_LL_TOKENS:
        raise ValueError(f"num_max_dispatch_tokens_per_rank: expected 1 to {MAX_LL_TOKENS}, got {max_tokens!r}")


def check_low_latency_dispatch(x: Any, topk_idx: Any, max_tokens: int, num_experts: int, use_fp8: bool) -> None:
    """ValueError unless x is bfloat16 [T, H], ids are [T, K], and T is at most T_max."""
    check_tensors(x=x, topk_idx=topk_idx)
    check_tensor("x", x, (torch.bfloat16,), "T", "H")
    _check_pairs(topk_idx, None, x.shape[0], max_tokens, num_experts)
    if use_fp8 and x.shape[1] % _C.scale_block:
        raise ValueError(
            f"x: expected a hidden size that is a multiple of {_C.scale_block} with use_fp8=True, got {x.shape[1]}"
        )


def check_low_latency_combine(
    x: Any, topk_idx: Any, topk_weights: Any, out: Any, handle: LowLatencyHandle, use_logfmt: bool
) -> None:
    """ValueError unless x is bfloat16 [E_l, N, H], ids and weights are [T, K], and out is bfloat16 [T, H] or None."""
    check_tensors({"out": out}, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    src_info, _, max_tokens, hidden, num_experts = handle
    check_tensor("x", x, (torch.bfloat16,), *src_info.shape, hidden)
    _check_pairs(topk_idx, topk_weights, "T", max_tokens, num_experts)
    if out is not None:
        check_tensor("out", out, (torch.bfloat16,), topk_idx.shape[0], hidden)
    for name, given in (("x", x), ("out", out)):
        if given is not None and not given.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(given.stride())}")
    if use_logfmt and hidden % _C.ll_logfmt_group:
        raise ValueError(
            f"x: expected a hidden size that is a multiple of {_C.ll_logfmt_group} with use_logfmt=True, got {hidden}"
        )


def _check_pairs(
    topk_idx: torch.Tensor, weights: torch.Tensor | None, tokens: int | str, max_tokens: int, num_experts: int
) -> None:
    check_tensor("topk_idx", topk_idx, (torch.int64, torch.int32), tokens, "K")
    if topk_idx.shape[0] > max_tokens:
        raise ValueError(
            f"topk_idx: expected at most num_max_dispatch_tokens_per_rank={max_tokens} tokens, got {topk_idx.shape[0]}"
        )
    if not 0 < topk_idx.shape[1] <= min(MAX_TOPK, num_experts):
        raise ValueError(
            f"topk_idx: expected 1 to {min(MAX_TOPK, num_experts)} experts per token, got {topk_idx.shape[1]}"
        )
    if weights is not None:
        check_tensor("topk_weights", weights, (torch.float32,), *topk_idx.shape)
