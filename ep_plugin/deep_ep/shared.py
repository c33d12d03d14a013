"""Communicators that all buffers of a group share, and their settings."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ep_plugin import counts
from ep_plugin.config import MAX_TOPK, DispatchLayout, MoECommunicatorConfig, in_one_kernel
from ep_plugin.deep_ep.nodes import nodes_of
from ep_plugin.deep_ep.utils.event import comm_stream
from ep_plugin.deep_ep.utils.math import align
from ep_plugin.errors import CommunicatorClosed, NotSupported
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.in_flight import untraced
from ep_plugin.moe.registry import communicator
from ep_plugin.runtime.streams import resolve_device
from ep_plugin.transport.groups import Group, checked_group, is_alive
from ep_plugin.transport.rails import check_backend

P = ParamSpec("P")
T = TypeVar("T")

# A limit of the communicators, not a size: memory is allocated for the rows that are sent.
_MOST_HIDDEN = 1 << 24
# Calls with a bound make a communicator for at least so many tokens per rank, and for powers of two. Callers who pass
# another number at every call, or at every rank, then share a few communicators.
_LEAST_BOUND = 128

_COLUMN_BYTES = 16  # what TMA asks of a column's address

# How many buffers use a communicator, by its number. Ranks must close communicators alike, but collect garbage at
# different times: so a buffer leaves by destroy() alone. One that is never destroyed keeps its communicators open.
_users: Counter[int] = Counter()


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function`, which then records no gradients and is not traced by torch.compile.

    torch.no_grad() does the first, but makes an object and calls a dozen functions each time.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return untraced(call)


class _NotInBuffer(NotSupported, AttributeError):
    """An AttributeError too, so that hasattr() returns False."""


def refuse(owner: str, name: str, reasons: dict[str, str]) -> NoReturn:
    """Refuse an attribute by name. reasons: why it is not served, by the first letters of its name."""
    for begin, reason in reasons.items():
        if name.startswith(begin):
            raise _NotInBuffer(f"{owner}.{name} is not supported: {reason}")
    raise AttributeError(f"{owner!r} has no attribute {name!r}")


class RefusesByName(type):
    """Refuses DeepEP's other functions by name, on the class too, before a buffer exists."""

    not_served: dict[str, str]

    def __getattr__(cls, name: str) -> NoReturn:
        refuse(cls.__name__, name, cls.not_served)


class SharedCommunicators(metaclass=RefusesByName):
    """The communicators of one group that a buffer uses. Buffers of a group share them."""

    not_served: ClassVar[dict[str, str]] = {}
    """As in `refuse`."""

    def _join(self, group: Group, explicitly_destroy: bool) -> None:
        """Find the group's nodes and check its backend. Collective for the first buffer of the group."""
        self.group = checked_group(group)
        self.explicitly_destroy = explicitly_destroy
        self._nodes = nodes_of(self.group)
        if self._nodes.num_nodes > 1:
            check_backend(self.group, device_of(self.group))
        self._numbers: set[int] = set()  # of the communicators that it uses
        self._throughput: dict[tuple[Any, ...], MoECommunicator] = {}
        self._destroyed = False

    def destroy(self) -> None:
        """Free the memory of communicators that no other buffer uses. Needs explicitly_destroy=True."""
        if not self.explicitly_destroy:
            raise ValueError(
                f"destroy(): expected a {type(self).__name__} made with explicitly_destroy=True, got False"
            )
        self._destroyed = True
        for number in self._numbers:
            _users[number] -= 1
            if not _users[number]:
                del _users[number]
                with contextlib.suppress(CommunicatorClosed):  # with its group
                    communicator(number).close()
        self._numbers.clear()
        self._throughput.clear()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream on which asynchronous calls run, on the current GPU."""
        if not torch.cuda.is_available():
            raise ValueError("get_comm_stream(): expected a GPU, got a machine without one, where calls have no stream")
        return comm_stream(torch.device("cuda", torch.cuda.current_device()))

    def _check_open(self) -> None:
        if self._destroyed:
            raise CommunicatorClosed(f"{type(self).__name__}: expected one that is in use, got one after destroy()")

    def _throughput_communicator(
        self,
        device: torch.device,
        num_experts: int,
        bound: int | None,
        layout: DispatchLayout = DispatchLayout.TOKEN_MAJOR,
        alignment: int = 1,
    ) -> MoECommunicator:
        """Return the communicator of calls with at most `bound` tokens per rank, or, with None, any number."""
        if bound is not None:
            bound = least_bound(bound)
        key = device, num_experts, bound, layout, alignment
        comm = self._throughput.get(key)
        if comm is None or comm.engine.closed or not is_alive(self.group):
            config = MoECommunicatorConfig(
                num_experts=num_experts,
                hidden_size=_MOST_HIDDEN,
                topk=min(num_experts, MAX_TOPK),
                layout=layout,
                expert_alignment=alignment,
                ids_as_given=layout is DispatchLayout.TOKEN_MAJOR,
                max_tokens_per_rank=bound,
                max_rows_per_node=bound,  # a Buffer leaves no row out
            )
            comm = self._throughput[key] = self._communicator(config, device)
        return comm

    def _communicator(self, config: MoECommunicatorConfig, device: torch.device) -> MoECommunicator:
        """Return the shared communicator of this configuration. This buffer uses it until `destroy`."""
        comm = MoECommunicator.shared(self.group, config, device=device)
        comm.in_flight.serves = "deep_ep"
        if comm.number not in self._numbers:
            counts.holds("deep_ep", comm)
            self._numbers.add(comm.number)
            _users[comm.number] += 1
        return comm

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors calls are expected to get: the current GPU if the process uses one.

    So a group whose backend serves CPUs alone, such as an engine's gloo group, does not mean tensors on CPUs.
    """
    return resolve_device(group, "cuda" if torch.cuda.is_initialized() else None)


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """Copy scales ``[N, S]`` into memory by columns, each padded to a multiple of 16 bytes."""
    rows, columns = scales.shape
    stored = scales.new_empty((columns, align(rows, _COLUMN_BYTES // scales.element_size())))
    return stored[:, :rows].t().copy_(scales)


def least_bound(tokens: int) -> int:
    """Return `max_tokens_per_rank` of the communicator for calls with at most `tokens` tokens per rank."""
    return max(_LEAST_BOUND, 1 << (tokens - 1).bit_length())


def sms_of(num_sms: int | None) -> dict[str, int]:
    """Return the SM counts for `MoECommunicator.set_sms`: one kernel sends and receives. None: the default."""
    return {} if num_sms is None else in_one_kernel(num_sms)
