"""PyTorch's own exchange for MoE over symmetric memory, `all_to_all_vdev_2d`, as a peer: sort, gather, exchange.

It brings rows by expert and source rank, as FLAT has them.

It needs symmetric memory's NVSHMEM backend, of which a process has one, and ep_plugin needs another: so it is measured
in processes of its own, in the same run. Where it does not run, `why_not` says why.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench.cases import Peers, Scene
from ep_plugin.bench.launch import launched, run_on_ranks
from ep_plugin.bench.peers import Received
from ep_plugin.bench.results import Row, everyones_wrong, row
from ep_plugin.bench.specs import DISPATCH, FEW_LOCAL_EXPERTS, FLAT, Spec
from ep_plugin.bench.timing import clock_of, time_in_turn
from ep_plugin.bench.workload import Batch, Workload

IMPL = "torch_symm_mem"
_WARMUP = 3


def why_not(workload: Workload) -> str | None:
    """Why the operator cannot serve `workload` here; None when it can."""
    if workload.local_experts > FEW_LOCAL_EXPERTS:
        return (
            f"all_to_all_vdev_2d serves at most {FEW_LOCAL_EXPERTS} experts per rank, this workload has "
            f"{workload.local_experts}"
        )
    if launched() is not None:
        return "it takes ranks of its own, and a launcher has started one set; run ep-bench without it"
    try:
        from torch.distributed._symmetric_memory import is_nvshmem_available
    except ImportError:
        return f"PyTorch {torch.__version__} has no NVSHMEM backend"
    return None if is_nvshmem_available() else "PyTorch finds no NVSHMEM library (libnvshmem_host)"


def add_rows(rows: list[Row], specs: list[Spec], iterations: int) -> tuple[list[Row], list[str]]:
    """`rows` with this peer's beside those of the cases that it can do, and a sentence for what was left out."""
    wanted = [spec for spec in specs if spec.what == DISPATCH and spec.layout is FLAT and spec.peers]
    wanted = [spec for spec in wanted if spec.dtype != "float8" and not spec.quantize and spec.workload.skew == 1]
    notes = []
    for spec in wanted:
        reason = why_not(spec.workload)
        if reason is None:
            try:
                found = run_on_ranks(spec.workload.ranks, "cuda", measure, spec, iterations)
            except Exception as error:  # whatever it fails of, the other peers' rows stand
                lines = [line for line in str(error).splitlines() if line]
                found = {"rows": [], "wrong": [lines[-1] if lines else type(error).__name__]}
            reason = "; ".join(found["wrong"]) or None
            last = max(place for place, each in enumerate(rows) if each["case"] == spec.name)
            rows = [*rows[: last + 1], *found["rows"], *rows[last + 1 :]]
        if reason is not None:
            notes.append(f"{IMPL} left out of {spec.name}: {reason}")
    return rows, notes


def measure(device: torch.device, spec: Spec, iterations: int) -> dict[str, Any]:
    """One rank's part: a row, or what was wrong. Collective."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NVSHMEM")
    scene = Scene(spec.workload, spec.dtype, FLAT, device, Peers())
    peer = SymmMem(scene, symmetric)
    wrong = _wrong(scene, peer)
    if wrong:
        return {"rows": [], "wrong": wrong}
    timing = time_in_turn(clock_of(device), {IMPL: lambda: peer.dispatch(scene.mine)}, iterations, _WARMUP)[IMPL]
    wrong = _wrong(scene, peer)
    if wrong:
        return {"rows": [], "wrong": wrong}
    return {"rows": [row(spec.name, IMPL, timing, scene.rows_wire[False] * scene.mine.row_bytes, None)], "wrong": []}


def _wrong(scene: Scene, peer: SymmMem) -> list[str]:
    """What is wrong on any rank with rows that no call has moved before. Collective."""
    batch, oracle = scene.others()
    problem = oracle.wrong_dispatch(peer.dispatch(batch))
    return everyones_wrong([problem] if problem else [])


class SymmMem:
    """Dispatch to FLAT rows. What it returns lies in the exchange's own memory until the next call: no copy out."""

    def __init__(self, scene: Scene, symmetric: Any) -> None:
        self._experts = scene.workload.experts
        world = dist.group.WORLD
        assert world is not None
        self._group = world.group_name
        self._rows = scene.rows
        pairs, width = scene.workload.tokens * scene.workload.topk, scene.mine.row_bytes // 8

        def shared(*shape: int) -> torch.Tensor:
            return symmetric.empty(*shape, dtype=torch.int64, device=scene.device)

        self._leaving, self._arriving = shared(pairs, width), shared(scene.most_rows, width)
        self._splits, self._arrived = shared(self._experts), shared(2, self._experts)

    def dispatch(self, batch: Batch) -> Received:
        pair_ids = batch.ids.reshape(-1)
        order = torch.argsort(pair_ids.to(torch.int16), stable=True)
        torch.index_select(batch.x.view(torch.int64), 0, order // batch.ids.shape[1], out=self._leaving)
        self._splits.zero_().scatter_add_(0, pair_ids, torch.ones_like(pair_ids))
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self._leaving, self._arriving, self._splits, self._arrived, self._group, major_align=1
        )
        return Received(tokens=self._arriving[: self._rows].view(batch.x.dtype))
