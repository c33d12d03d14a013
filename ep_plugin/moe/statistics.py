"""Load statistics: the tokens that reached each expert, the bytes that moved, and the ranks that were waited for.

While statistics are recorded, each operation adds its routing to a tensor in device memory, with one addition on the
stream of its kernels. The host reads the sums on request. `ep_plugin.moe.recording` switches statistics on.

Shapes: R ranks, E_l local experts.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.errors import CaptureRefused
from ep_plugin.ranges import NOTHING
from ep_plugin.runtime.streams import Streams

_here = threading.local()


def layer(name: str) -> AbstractContextManager[None]:
    """Returns a context in which this thread's dispatches also count in `LoadStats.layers` under `name`.

    Use it for models whose layers share a communicator. The integrations with frameworks enter it themselves. It has no
    effect while statistics are off, and no effect inside code that torch.compile traces: enter it around the compiled
    call.

    Args:
        name: the layer's name.

    Raises:
        ValueError: `name` is no string.
    """
    if not isinstance(name, str):
        raise ValueError(f"layer: expected a string, got {name!r}")
    return _entered(name) if Sums.recording else NOTHING


@contextlib.contextmanager
def _entered(name: str) -> Iterator[None]:
    before, _here.layer = current_layer(), name
    try:
        yield
    finally:
        _here.layer = before


def current_layer() -> str | None:
    """Returns the name of the innermost `layer` that this thread is in, or None."""
    return getattr(_here, "layer", None)


class LoadStats(NamedTuple):
    """The load of one communicator on this rank since its last reset. The tensors are copies in host memory.

    Operations count when they are complete. An operation in a CUDA graph counts once, when it is captured. Its tokens
    and link bytes count at each replay.
    """

    rank: int
    """This rank in the communicator's group."""
    num_experts: int
    """E. This rank has the experts from rank * E_l on."""
    dispatches: int
    """Dispatches that made a routing. A forward that activation checkpointing runs again counts again."""
    cached_dispatches: int
    """Dispatches with ``previous_handle``. The backward of a combine is one."""
    combines: int
    """Combines. The backward of a dispatch is one."""
    tokens: torch.Tensor
    """int64 ``[R, E_l]``: tokens from each source rank for each local expert, in dispatches that made a routing. It
    includes rows beyond ``capacity``."""
    layers: dict[str, torch.Tensor]
    """Tensors like `tokens`, by the layer that started the dispatch, in the order of the layers' first dispatches. It
    leaves out dispatches outside of any `layer`."""
    dropped_ids: int | None
    """The number of ids that were -1 in this rank's topk_ids, in dispatches that made a routing; None in mode="ll"."""
    dropped_rows: int
    """Output rows beyond ``capacity``, padding included, in dispatches that made a routing."""
    link_bytes_sent: int | None
    """Bytes of rows, and of ids, weights and scales beside them, to other ranks of this node; None in mode="ll"."""
    link_bytes_received: int | None
    """Bytes of rows, and of ids, weights and scales beside them, from other ranks of this node; None in mode="ll"."""
    rail_bytes_sent: int
    """Bytes to other nodes, with counts and ids."""
    rail_bytes_received: int
    """Bytes from other nodes, with counts and ids."""
    waited_ns: torch.Tensor
    """int64 ``[R]``, nanoseconds that this rank waited for each rank.

    - On CPUs: time that the host waited for signals from ranks of this node and for messages from other nodes.
    - On GPUs: time that a kernel waited until a rank of this node began the same operation. For ranks of other nodes, a
      dispatch that makes a routing counts how much later than this rank the last one came to the exchange of counts.
      The next such dispatch adds that time, which includes pauses of this rank's own host.
    - In mode="ll": time of the longest-waiting thread in receive halves and in the send half of combines. Operations
      whose caller passed a tensor for these times do not count.
    """

    @property
    def skew(self) -> float:
        """The tokens of the busiest local expert in all layers, divided by the mean of the local experts. 1: balanced,
        0: no tokens."""
        return skew_of(self.tokens.sum(0))


def skew_of(tokens: torch.Tensor) -> float:
    """Returns the largest of some counts divided by their mean; 0 if all are 0."""
    return float(tokens.max() / tokens.double().mean()) if tokens.any() else 0.0


class Sums:
    """Adds up int32 counts of operations, by key. It runs on the caller's stream, after each operation.

    kernels: the kernels of the communicator's device.
    """

    recording = False
    """Whether operations of this process add their counts. A class attribute."""

    def __init__(self, name: str, streams: Streams, kernels: Any) -> None:
        self._name, self._streams, self._kernels = name, streams, kernels
        self._sums: dict[Hashable, torch.Tensor] = {}
        self._args: dict[Hashable, Any] = {}
        self.counts: Counter[Hashable] = Counter()
        """The number of additions, by key."""

    def add(self, key: Hashable, counts: torch.Tensor) -> None:
        """Adds `counts` to the sums of `key`. All counts of a key have one shape.

        counts: int32 ``[N, C]`` with contiguous rows. It must be ready on the caller's stream, which reads it.
        """
        args = self._args.get(key)
        if args is None:
            if self._streams.capturing():  # new memory would start at zero at each replay
                warnings.warn(
                    f"{self._name}: statistics do not count this CUDA graph: after record_stats(), run one step of all "
                    "its layers before capturing",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
            args = self._args[key] = self._begin(key, counts)
        args.counts, args.stream = counts.data_ptr(), self._streams.caller()
        self._kernels.add_counts(args)
        self.counts[key] += 1

    def add_made(self, key: Hashable, make: Callable[[], torch.Tensor]) -> None:
        """Adds one number, int32 ``[]``, which `make` computes."""
        self.add(key, make().view(1, 1))

    def read(self, waited: Callable[[], torch.Tensor]) -> tuple[dict[Any, torch.Tensor], torch.Tensor]:
        """Returns the sums, int64, and the result of `waited`: copies in host memory."""
        self._enter("read")
        return {key: total.to("cpu", copy=True) for key, total in self._sums.items()}, waited().to("cpu", copy=True)

    def reset(self, waited: Callable[[], Any]) -> None:
        """Sets all sums to zero, and calls `waited`. Keeps the memory, since captured graphs add to it."""
        self._enter("reset")
        for total in self._sums.values():
            total.zero_()
        waited()
        self.counts.clear()

    def _begin(self, key: Hashable, counts: torch.Tensor) -> Any:
        """Makes the sums of a key. Returns the kernel's arguments without the counts."""
        rows, columns = counts.shape
        with torch.inference_mode(False):  # they outlive the caller's mode
            sums = self._sums[key] = torch.zeros(rows, columns, dtype=torch.int64, device=counts.device)
        return _C.AddCountsArgs(
            sums=sums.data_ptr(),
            row_stride=counts.stride(0),
            num_rows=rows,
            num_columns=columns,
        )

    def _enter(self, what: str) -> None:
        """Orders the caller's stream after all operations."""
        if self._streams.capturing():
            raise CaptureRefused(
                f"{self._name}: expected statistics to be {what} outside of the capture of a CUDA graph, got it in one"
            )
        self._streams.enter()
