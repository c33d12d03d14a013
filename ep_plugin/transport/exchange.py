"""All-gather of small values between the ranks of a process group, with a deadline, over the group's own store.

It carries what ranks must tell each other before there is shared memory. The n-th exchange of a rank is one key of the
store, ``ep_plugin/<instance>/<n>/<rank>``, that says which step it belongs to: two ranks in different steps find out at
once and not by waiting. A rank deletes its key when it has finished the exchange after it, for by then every peer has
read it: a store holds at most two keys per rank and instance, however many exchanges there were.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from ep_plugin.config import MAX_TIMEOUT_S
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

# The store is polled, since its own wait() keeps other threads from the store and logs each timeout.
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.01

_instances: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_instances_lock = threading.Lock()


class Exchange:
    """One rank's end of a sequence of exchanges over ``group`` (None: the default group), or between ``ranks`` of it.

    The instances of one group pair up in the order in which each rank creates them. Creating one talks to nobody.
    ``timeout_s`` is how long an exchange waits for its peers; None takes the process group's own timeout.

    ``rank`` and ``size`` are this rank's place in the group (or in ``ranks``) and the number of ranks. ``name``
    tells the instances of a process apart, in messages, and is the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        from torch.distributed import distributed_c10d as c10d

        group = checked_group(group)
        self.rank: int = group.rank() if ranks is None else ranks.index(group.rank())
        self.size: int = group.size() if ranks is None else len(ranks)
        self.timeout_s: float = timeout_of(group) if timeout_s is None else timeout_s
        instance = _next_instance(group)
        self.name = f"{group.group_name}.{instance}"
        self._store = c10d._get_process_group_store(group)
        # Ranks of several parts of a group are in instances of one number.
        self._prefix = f"ep_plugin/{instance}" if ranks is None else f"ep_plugin/{instance}/from{ranks[0]}"
        self._count = 0
        self._lock = threading.Lock()
        self._error: EpPluginError | None = None
        self.watch: Callable[[], None] | None = None
        """Called while an exchange waits for peers: what it raises ends the wait."""

    def store(self, name: str) -> Any:
        """The group's store, for keys of this instance's and of `name`'s alone, which nobody deletes."""
        from torch.distributed import distributed_c10d as c10d

        return c10d.PrefixStore(f"{self._prefix}/{name}", self._store)

    def all_gather(self, step: str, value: Any = None) -> list[Any]:
        """Every rank's ``value``, in rank order. ``value`` is what JSON can hold: tuples come back as lists.

        Collective: all ranks call the same steps in the same order. Raises PeerTimeout with the missing ranks and the
        step when the deadline passes, DisagreementError when a peer is in another step, and PeerAborted when one has
        given up. After such an error every further call raises it again, for the ranks are no longer in step.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                return self._all_gather(step, value)
            except EpPluginError as error:
                self._error = error
                raise

    def barrier(self, step: str) -> None:
        """Returns when every rank has called it. Raises like all_gather."""
        self.all_gather(step)

    def abort(self, reason: str) -> None:
        """Makes every peer's current or next exchange raise PeerAborted with ``reason``. Waits for nobody."""
        with self._lock:
            if self._error is not None:
                return
            message = f"rank {self.rank} aborted: {reason}"
            self._error = PeerAborted(message, self.rank, reason)
            if self.size > 1:
                self._post(self._count, {"abort": reason})

    def _all_gather(self, step: str, value: Any) -> list[Any]:
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        turn = self._count
        self._count += 1
        self._post(turn, {"step": step, "value": value})
        posts = self._collect(turn, step)
        if turn > 0:
            # Everyone has begun this exchange, so everyone has finished the one before it.
            self._delete(turn - 1)
        return [post["value"] for post in posts]

    def _collect(self, turn: int, step: str) -> list[dict[str, Any]]:
        """What every rank posted for exchange ``turn``. Stops at the first post that does not belong to ``step``."""
        posts: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            for rank in [rank for rank in range(self.size) if rank not in posts]:
                posted = self._read(turn, rank, step)
                if posted is None:
                    continue
                posts[rank] = posted
                self._check(rank, posted, step)
            if len(posts) == self.size:
                return [posts[rank] for rank in range(self.size)]
            if time.monotonic() >= deadline:
                raise self._late([rank for rank in range(self.size) if rank not in posts], step)
            if self.watch is not None:
                self.watch()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _check(self, rank: int, posted: dict[str, Any], step: str) -> None:
        if "abort" in posted:
            raise PeerAborted(f"rank {rank} aborted: {posted['abort']}", rank, posted["abort"])
        if posted["step"] != step:
            raise DisagreementError(
                f"ranks are in different steps of {self.name}: expected {step!r} as on rank {self.rank}, "
                f"got {posted['step']!r} on rank {rank}"
            )

    def _late(self, missing: list[int], step: str) -> PeerTimeout:
        ranks = ", ".join(map(str, missing))
        return PeerTimeout(
            f"rank {self.rank} waited {self.timeout_s:g} s at step {step!r} of {self.name} "
            f"for rank{'s' if len(missing) > 1 else ''} {ranks}",
            missing[0],
            step,
        )

    def _key(self, turn: int, rank: int) -> str:
        return f"{self._prefix}/{turn}/{rank}"

    def _post(self, turn: int, post: dict[str, Any]) -> None:
        text = json.dumps(post)
        try:
            self._store.set(self._key(turn, self.rank), text)
        except RuntimeError as error:
            raise self._store_gone(post.get("step", "abort"), error) from error

    def _read(self, turn: int, rank: int, step: str) -> dict[str, Any] | None:
        """What ``rank`` has posted for exchange ``turn``, or None so far."""
        key = self._key(turn, rank)
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise self._store_gone(step, error) from error

    def _delete(self, turn: int) -> None:
        """Best effort: a store that cannot delete, or is gone, must not fail an exchange that has succeeded."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(self._key(turn, self.rank))

    def _store_gone(self, step: str, error: RuntimeError) -> PeerTimeout:
        return PeerTimeout(
            f"rank {self.rank}: the store of the process group does not answer at step {step!r} of {self.name}; the "
            f"process that serves it (rank 0's, or the launcher) has probably died: {error}",
            None,
            step,
        )


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default group for None. ValueError unless it is there and this rank belongs to it."""
    from torch.distributed import distributed_c10d as c10d

    if not c10d.is_initialized():
        raise ValueError("group: expected an initialised torch.distributed process group, got none")
    group = c10d.GroupMember.WORLD if group is None else group
    if not isinstance(group, c10d.ProcessGroup):  # new_group() returns a plain marker to ranks that it leaves out
        raise ValueError(f"group: expected a process group that this rank belongs to, got {group!r}")
    if not is_alive(group):
        raise ValueError(f"group: expected a process group that has not been destroyed, got {group.group_name}")
    return group


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the process group has not been destroyed."""
    from torch.distributed import get_process_group_ranks

    try:
        return bool(get_process_group_ranks(group))
    except KeyError:
        return False


def _next_instance(group: dist.ProcessGroup) -> int:
    with _instances_lock:
        _instances[group] = _instances.get(group, 0) + 1
        return _instances[group]


def timeout_of(group: dist.ProcessGroup) -> float:
    """The group's timeout in seconds: the shortest of its backends', torch's default if none has one."""
    from torch.distributed import distributed_c10d as c10d

    timeouts = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            timeouts.append(timeout.total_seconds())
    return min(*timeouts, MAX_TIMEOUT_S) if timeouts else c10d.default_pg_timeout.total_seconds()
