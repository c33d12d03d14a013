"""What Buffer and ElasticBuffer share: their group's communicators, and settings for them."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from ep_plugin import counts
from ep_plugin.config import MoECommunicatorConfig, in_one_kernel
from ep_plugin.deep_ep.utils.event import comm_stream
from ep_plugin.errors import CommunicatorClosed, NotSupported
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.registry import communicator
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import Group, checked_group
from ep_plugin.transport.topology import NodeMap, discover

# A limit of the communicators, not a size: memory is allocated for the rows that are sent.
MOST_HIDDEN = 1 << 24
# Calls with a bound make a communicator for at least so many tokens per rank, and for powers of two. Callers who pass
# another number at every call, or at every rank, then share a few communicators.
_LEAST_BOUND = 128

# How many buffers use a communicator, by its number. Ranks must close communicators alike, but collect garbage at
# different times: so a buffer leaves by destroy() alone. One that is never destroyed keeps its communicators open.
_users: Counter[int] = Counter()
_node_maps: weakref.WeakKeyDictionary[dist.ProcessGroup, NodeMap] = weakref.WeakKeyDictionary()


class _NotInBuffer(NotSupported, AttributeError):
    """An AttributeError too, so that hasattr() returns False."""


def refuse(owner: str, name: str, reasons: dict[str, str]) -> NoReturn:
    """Refuses an attribute by name. reasons: why DeepEP's are not served, by the begin of their names."""
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
        """Collective for the first buffer of the group."""
        self.group = checked_group(group)
        self.explicitly_destroy = explicitly_destroy
        self._nodes = _nodes_of(self.group)
        self._numbers: set[int] = set()  # of the communicators that it uses
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

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream on which asynchronous calls run, on the current GPU."""
        if not torch.cuda.is_available():
            raise ValueError("get_comm_stream(): expected a GPU, got a machine without one, where calls have no stream")
        return comm_stream(torch.device("cuda", torch.cuda.current_device()))

    def _check_open(self) -> None:
        if self._destroyed:
            raise CommunicatorClosed(f"{type(self).__name__}: expected one that is in use, got one after destroy()")

    def _communicator(self, config: MoECommunicatorConfig, device: torch.device) -> MoECommunicator:
        """The shared communicator of this configuration, which this buffer uses until `destroy`."""
        comm = MoECommunicator.shared(self.group, config, device=device)
        comm.in_flight.serves = "deep_ep"
        if comm.number not in self._numbers:
            counts.holds("deep_ep", comm)
            self._numbers.add(comm.number)
            _users[comm.number] += 1
        return comm

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)


def _nodes_of(group: dist.ProcessGroup) -> NodeMap:
    """The nodes of a group. Collective for the first buffer of the group."""
    if group not in _node_maps:
        with contextlib.closing(Exchange(group)) as exchange:
            _node_maps[group], _ = discover(exchange, torch.device("cpu"))
    return _node_maps[group]


def least_bound(tokens: int) -> int:
    """`max_tokens_per_rank` of the communicator that serves calls with at most so many tokens per rank."""
    return max(_LEAST_BOUND, 1 << (tokens - 1).bit_length())


def sms_of(num_sms: int | None) -> dict[str, int]:
    """SM counts for `MoECommunicator.set_sms`: one kernel sends and receives. None: those that fill the links."""
    return {} if num_sms is None else in_one_kernel(num_sms)
