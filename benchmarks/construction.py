"""The time, the store's requests and the memory of a communicator's construction, over 2 to 64 nodes of one CPU rank.

    python benchmarks/construction.py OUT.json [NODES ...]

All ranks run on this machine. A case is a number of nodes. `first` is a communicator that connects its rail, and
`second` is one that finds it. Both are closed before the next iteration. A first iteration, which also connects each
process to the store once more and is not timed, counts:

- keys_read: the keys of the store that the construction looks for, on the rank that looks for most. Polls count once.
- writes: the requests that write or delete, on the rank with most of them.
- peer_bytes: peer memory of the communicator.
- host_bytes: what else it keeps: its tensors, and the memory of its Python objects.
- sockets, threads: of one process, more than before the first communicator.

These values are the largest of all ranks. A time is from the first rank's call to the last rank's return.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.bench.suite import OverNodes, row
from ep_plugin.bench.timing import Sample, summarise
from ep_plugin.counts import held_bytes
from ep_plugin.testing.counted_store import CountedStore, counted

NODES = (2, 4, 8, 16, 32, 64)
WHICH = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class Construction(OverNodes):
    """Constructions over nodes of one rank each."""

    command_name: ClassVar[str] = "construction"

    def measure(self, device: torch.device) -> dict[str, Any]:
        config = MoECommunicatorConfig(
            num_experts=2 * self.ranks, hidden_size=64, topk=2, max_tokens_per_rank=16, timeout_s=250
        )

        def make() -> MoECommunicator:
            return MoECommunicator(None, config, device)

        before = _open_files_and_threads()
        with counted() as store:
            counts = in_turn(make, functools.partial(_counts, store))
        for which in WHICH:
            after = counts[which].pop("process")
            counts[which] |= {"sockets": after[0] - before[0], "threads": after[1] - before[1]}
        samples = [in_turn(make, _timed) for _ in range(self.iterations)]
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, (counts, samples))
        rows, most, case = [], [], f"{self.nodes}_nodes"
        for which in WHICH:
            timing = summarise([[sample[which] for sample in theirs] for _, theirs in everyone])
            rows.append(row(case, which, timing, 0))
            most.append({name: max(theirs[which][name] for theirs, _ in everyone) for name in counts[which]})
            most[-1] |= {"case": case, "impl": which}
        notes = ["bytes_wire, gb_s and sms are those of operations, and empty here"]
        return {"rows": rows, "counts": most, "notes": notes}


def in_turn(make: Callable[[], MoECommunicator], measured: Callable[..., Any]) -> dict[str, Any]:
    """Returns measured(make, kept) of a first communicator and of a second one, and closes both."""
    found = {}
    with ExitStack() as kept:
        for which in WHICH:
            dist.barrier()
            found[which] = measured(make, kept)
        dist.barrier()
    return found


def _timed(make: Callable[[], MoECommunicator], kept: ExitStack) -> Sample:
    began = time.perf_counter_ns()
    comm = make()
    ended = time.perf_counter_ns()
    kept.enter_context(comm)
    return began / 1e3, ended / 1e3, math.nan


def _counts(store: CountedStore, make: Callable[[], MoECommunicator], kept: ExitStack) -> dict[str, Any]:
    gc.collect()
    before = _storages()
    store.requests.clear()
    store.keys_read.clear()
    tracemalloc.start()
    comm = make()
    gc.collect()
    python_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    kept.enter_context(comm)
    tensors = {address: nbytes for address, nbytes in _storages().items() if address not in before}
    return {
        "keys_read": len(store.keys_read),
        "writes": store.writes,
        "peer_bytes": held_bytes([comm]),
        "host_bytes": sum(tensors.values()) + python_bytes,
        "process": _open_files_and_threads(),
    }


def _storages() -> dict[int, int]:
    """Returns the bytes of the storages of all tensors, by address."""
    found = (one.untyped_storage() for one in gc.get_objects() if type(one) is torch.Tensor)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _open_files_and_threads() -> tuple[int, int]:
    """Returns the numbers of this process's sockets and threads."""
    sockets = 0
    for file in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{file}").startswith("socket:")
        except OSError:  # the folder's own descriptor
            continue
    return sockets, len(os.listdir("/proc/self/task"))


def main(out: Path, nodes: list[int]) -> None:
    made: dict[str, Any] = {}
    for num_nodes in nodes:
        found = Construction(backend="cpu", ranks=num_nodes, nodes=num_nodes, iterations=7).run()
        made = found | {name: made.get(name, []) + found[name] for name in ("rows", "counts")}
        for line, counts in zip(found["rows"], found["counts"], strict=True):
            print(f"{line['case']}, {line['impl']}: {line['median_us'] / 1e3:.0f} ms, {counts['keys_read']} keys read")
    made["command"] = " ".join(["python benchmarks/construction.py", out.as_posix(), *map(str, nodes)])
    out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]] or list(NODES))
