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

_WINDOW_BYTES = 3 << 29  # of 1 GiB, and of what a rank of two has left of it
_windows: dict[str, tuple[Any, torch.Tensor, Any]] = {}  # by policy: group, window, and the pool that it lies in
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
    group, window = _window(device, "ZERO")
    (out,) = _places(window, dtype, whole)
    source = out.narrow(0, dist.get_rank() * count, count)
    return source, out, lambda: _all_gather(out, source, group=group)


def _window_scatter(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    """NCCL on a symmetric window, by SMs: its copy engines add nothing."""
    group, window = _window(device, "DEFAULT")
    source, out = _places(window, dtype, whole, count)
    return source, out, lambda: _reduce_scatter(out, source, group=group)


def _window(device: torch.device, policy: str) -> tuple[Any, torch.Tensor]:
    """A group and one window for all sizes: NCCL refuses memory that is registered twice."""
    if policy not in _windows:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.cta_policy = getattr(nccl, f"NCCL_CTA_POLICY_{policy}")
        group: Any = dist.new_group(backend="nccl", pg_options=options, device_id=device)
        backend: Any = group._get_backend(device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            window = torch.empty(_WINDOW_BYTES, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool, symm=True)
        _windows[policy] = group, window, pool
    return _windows[policy][:2]


def _places(window: torch.Tensor, dtype: torch.dtype, *counts: int) -> list[torch.Tensor]:
    """So many elements each, one after the other in `window`."""
    if sum(counts) * dtype.itemsize > len(window):
        raise ValueError(f"size: expected at most {len(window)} bytes, got {sum(counts) * dtype.itemsize}")
    return list(window[: sum(counts) * dtype.itemsize].view(dtype).split(counts))


def _low_contention_gather(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    """PyTorch's own over symmetric memory: it returns a new tensor, and leaves `out` alone."""
    source, name = _symmetric(count, dtype, device)

    def run() -> torch.Tensor:
        return _waited(torch.ops.symm_mem._low_contention_all_gather(source, name))

    return source, run(), run


def _low_contention_scatter(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    """The same of a sum: ranks pull from an input in symmetric memory, then each adds what it has."""
    source, name = _symmetric(whole, dtype, device)

    def run() -> torch.Tensor:
        return _waited(torch.ops.symm_mem._low_contention_reduce_scatter(source, "sum", name))

    return source, run(), run


def _low_contention_push_scatter(whole: int, count: int, dtype: torch.dtype, device: torch.device) -> Made:
    """The same of an input that peers have not mapped: ranks push it into a workspace of PyTorch's."""
    name, source = _world(), torch.empty(whole, dtype=dtype, device=device)

    def run() -> torch.Tensor:
        return _waited(torch.ops.symm_mem._low_contention_reduce_scatter(source, "sum", name))

    return source, run(), run


def _symmetric(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, Any]:
    """Memory that all ranks of a group have mapped, and the group's name."""
    import torch.distributed._symmetric_memory as symmetric

    made, name = symmetric.empty(elements, dtype=dtype, device=device), _world()
    symmetric.rendezvous(made, name)
    return made, name


def _world() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def _waited(result: Any) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(result)


PEERS: dict[tuple[str, str], dict[str, Maker]] = {
    ("allgather", "cpu"): {"gloo": _backend_gather},
    ("reduce_scatter", "cpu"): {"gloo": _backend_scatter},
    ("allgather", "cuda"): {
        "nccl": _backend_gather,
        "nccl zero-cta": _zero_cta_gather,
        "low-contention": _low_contention_gather,
    },
    ("reduce_scatter", "cuda"): {
        "nccl": _backend_scatter,
        "nccl window": _window_scatter,
        "low-contention": _low_contention_scatter,
        "low-contention, foreign input": _low_contention_push_scatter,
    },
}
