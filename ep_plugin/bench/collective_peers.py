"""What all-gather and reduce-scatter are compared with: the backend's own, and on GPUs what else PyTorch offers.

Each maker returns the input, the output and the call for `whole` elements, `count` of them on each rank; a call that
returns a tensor has its result there. A maker raises where this PyTorch, or this machine, does not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Made = tuple[torch.Tensor, torch.Tensor, Callable[[], object]]
Maker = Callable[[int, int, torch.dtype, torch.device], Made]

_WINDOW_BYTES = 1 << 30
_zero_cta: list[Any] = []
# By the names that PyTorch 2.13 prefers, or by those that it had before.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _backend_gather(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    """In place, as FSDP2 calls it."""
    out = torch.empty(whole, dtype=dtype, device=device)
    source = out.narrow(0, dist.get_rank() * count, count)
    if device.type == "cuda":
        return source, out, lambda: _all_gather(out, source)
    source = torch.empty(count, dtype=dtype)  # gloo's would overlap
    return source, out, lambda: _all_gather(out, source)


def _backend_scatter(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    source = torch.empty(whole, dtype=dtype, device=device)
    out = torch.empty(count, dtype=dtype, device=device)
    return source, out, lambda: _reduce_scatter(out, source)


def _zero_cta_gather(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    """NCCL on a symmetric window, told to use copy engines where it can."""
    group, window = _zero_cta_window(device)
    out = window[: whole * dtype.itemsize].view(dtype)
    if len(out) != whole:
        raise ValueError(f"whole: expected at most {len(window)} bytes, got {whole * dtype.itemsize}")
    source = out.narrow(0, dist.get_rank() * count, count)
    return source, out, lambda: _all_gather(out, source, group=group)


def _zero_cta_window(device: torch.device) -> Any:
    """The group and one window for all sizes: NCCL refuses memory that is registered twice."""
    if not _zero_cta:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        group = dist.new_group(backend="nccl", pg_options=options, device_id=device)
        backend: Any = group._get_backend(device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            window = torch.empty(_WINDOW_BYTES, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool, symm=True)
        _zero_cta.extend([group, window, pool])
    return _zero_cta[:2]


def _low_contention_gather(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    """PyTorch's own over symmetric memory: it returns a new tensor, and leaves `out` alone."""
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    source = symmetric.empty(count, dtype=dtype, device=device)
    symmetric.rendezvous(source, name)

    def run() -> torch.Tensor:
        made = torch.ops.symm_mem._low_contention_all_gather(source, name)
        return torch.ops._c10d_functional.wait_tensor(made)

    return source, run(), run


PEERS: dict[tuple[str, str], dict[str, Maker]] = {
    ("allgather", "cpu"): {"gloo": _backend_gather},
    ("reduce_scatter", "cpu"): {"gloo": _backend_scatter},
    ("allgather", "cuda"): {
        "nccl": _backend_gather,
        "nccl zero-cta": _zero_cta_gather,
        "low-contention": _low_contention_gather,
    },
    ("reduce_scatter", "cuda"): {"nccl": _backend_scatter},
}
