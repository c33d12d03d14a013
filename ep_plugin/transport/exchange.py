"""All-gather of small values between the ranks of a process group, with a deadline, over the group's own store.

Ranks use it before they share memory. Each rank posts one key per exchange, ``ep_plugin/<nonce>/<n>/<rank>``, which
names the step it belongs to. Ranks in different steps therefore raise at once. A rank deletes its key after the next
exchange, when every peer has read it, and the last rank to close deletes the rest.

The nonce is agreed when an exchange is first used. Rank 0 of the exchange invites every rank that has posted a fresh
token, so neither keys of an earlier process group on the same store nor a rank that missed a construction can mislead
the ranks. The keys of this agreement are overwritten by the next one: they do not grow in number.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ep_plugin.config import MAX_TIMEOUT_S
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

T = TypeVar("T")

# The store is polled, since its own wait() keeps other threads from the store and logs each timeout.
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.01
_FAREWELL_S = 1.0  # the longest that an abort or a close waits for the store

_instances: dict[str, int] = {}  # by the name of a group; not by the object, which a group made again replaces
_instances_lock = threading.Lock()
_read_farewells: set[str] = set()  # tokens of given-up attempts to meet that this process has reported


class Exchange:
    """One rank's end of a sequence of exchanges over ``group`` (None: the default group), or between ``ranks`` of it.

    The instances of one group pair up in the order in which each rank first uses them. Creating one needs no peer.

    Args:
        group: a process group with a store; None means the default group.
        timeout_s: the longest wait of an exchange, for peers and for the store; None takes the group's own timeout.
        ranks: the group's ranks that take part, in order; None means all of them.

    ``rank`` is this rank's index in ``ranks`` and ``size`` the number of ranks. ``ranks[rank]`` is its rank within the
    group, which messages and errors name. ``name`` tells the instances of a process apart in messages; it is the same
    on every rank after the first exchange.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        from torch.distributed import distributed_c10d as c10d

        group = checked_group(group)
        self.ranks: tuple[int, ...] = tuple(range(group.size()) if ranks is None else ranks)
        self.rank: int = self.ranks.index(group.rank())
        self.size: int = len(self.ranks)
        self.group_rank: int = group.rank()
        self.timeout_s: float = timeout_of(group) if timeout_s is None else timeout_s
        self._group_name = group.group_name
        self._number = _next_instance(group.group_name)
        self._store = c10d._get_process_group_store(group)
        self._scope = "ep_plugin/all" if ranks is None else f"ep_plugin/from{self.ranks[0]}"
        self._token = secrets.token_hex(8)
        self._nonce = ""  # agreed at the first exchange
        self._count = 0
        self._closed = False
        self._lock = threading.Lock()
        self._error: EpPluginError | None = None
        self.watch: Callable[[], None] | None = None
        """Called while an exchange waits: an exception from it ends the wait."""

    @property
    def name(self) -> str:
        return f"{self._group_name}.{self._number}"

    def store(self, name: str) -> Any:
        """The group's store, for keys under `name` of this instance. Valid after the first exchange. The caller
        deletes its keys."""
        from torch.distributed import distributed_c10d as c10d

        return c10d.PrefixStore(f"ep_plugin/{self._nonce}/{name}", self._store)

    def all_gather(self, step: str, value: Any = None) -> list[Any]:
        """Gathers ``value`` of every rank. Collective: all ranks call the same steps in the same order.

        Args:
            step: a name for messages, the same on every rank.
            value: anything that JSON can hold; tuples come back as lists.

        Returns:
            The values in the order of ``ranks``.

        Raises:
            PeerTimeout: the deadline passed, here or on a peer; it names the missing ranks, or the store if that does
                not answer.
            DisagreementError: a peer is in another step.
            PeerAborted: a peer has given up. After any of these errors every further call raises it again.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                return self._all_gather(step, value)
            except EpPluginError as error:
                self._error = error
                if isinstance(error, PeerTimeout) and error.rank is not None:
                    self._leave_word(str(error), max(self._count - 1, 0), late=(error.rank, error.step))
                raise

    def barrier(self, step: str) -> None:
        """Returns when every rank has called it. Raises like all_gather."""
        self.all_gather(step)

    def abort(self, reason: str) -> None:
        """Makes every peer's current or next exchange raise PeerAborted with ``reason``. Waits for no peer."""
        with self._lock:
            if self._error is not None:
                return
            self._error = PeerAborted(f"rank {self.group_rank} aborted: {reason}", self.group_rank, reason)
            if self.size > 1:
                self._leave_word(reason, self._count)

    def close(self) -> None:
        """Gives up this rank's part in the keys: the last rank to close deletes them. Never fails; idempotent."""
        with self._lock:
            if self._closed or not self._nonce:
                return
            self._closed = True
            with contextlib.suppress(PeerTimeout):
                self._ask("close", time.monotonic() + _FAREWELL_S, self._say_goodbye, watched=False)

    def _all_gather(self, step: str, value: Any) -> list[Any]:
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        text = json.dumps({"step": step, "value": value})
        deadline = time.monotonic() + self.timeout_s
        if not self._nonce:
            self._meet(step, deadline)
        turn = self._count
        self._count += 1
        self._ask(step, deadline, self._store.set, self._key(turn, self.rank), text)
        return [post["value"] for post in self._collect(turn, step, deadline)]

    def _collect(self, turn: int, step: str, deadline: float) -> list[dict[str, Any]]:
        """What every rank posted for exchange ``turn``. Stops at the first post that does not belong to ``step``."""
        posts: dict[int, dict[str, Any]] = {}

        def poll() -> bool:
            keys = {rank: self._key(turn, rank) for rank in range(self.size) if rank not in posts}
            for rank, posted in self._ask(step, deadline, self._read, keys).items():
                self._check(rank, posted, step)
                posts[rank] = posted
            return len(posts) == self.size

        self._poll(poll, deadline, lambda: self._late([rank for rank in range(self.size) if rank not in posts], step))
        if turn > 0:  # every rank has begun this exchange, so every rank has finished the one before it
            self._ask(step, deadline, self._delete, [self._key(turn - 1, self.rank)])
        return [posts[rank] for rank in range(self.size)]

    def _check(self, rank: int, posted: dict[str, Any], step: str) -> None:
        peer = self.ranks[rank]
        if "abort" in posted:
            late, where = posted.get("late") or (self.group_rank, "")
            if late != self.group_rank:
                raise PeerTimeout(f"rank {peer} gave up: {posted['abort']}", late, where)
            raise PeerAborted(f"rank {peer} aborted: {posted['abort']}", peer, posted["abort"])
        if posted["step"] != step:
            raise DisagreementError(
                f"ranks are in different steps of {self.name}: expected {step!r} as on rank {self.group_rank}, "
                f"got {posted['step']!r} on rank {peer}"
            )

    # -- the agreement on a nonce ----------------------------------------------------------------------------------

    def _meet(self, step: str, deadline: float) -> None:
        """Agrees on the nonce: every rank posts its token, rank 0 invites the tokens it sees, each rank accepts."""
        own, others = f"{self._scope}/join/{self.rank}", [rank for rank in range(self.size) if rank != self.rank]
        self._ask(step, deadline, self._store.set, own, json.dumps({"token": self._token}))
        joins = {rank: f"{self._scope}/join/{rank}" for rank in others}
        words = {rank: f"{self._scope}/word/{rank}" for rank in others}
        invitation, accepted = f"{self._scope}/invitation", f"{self._scope}/accept"
        missing = list(others) if self.rank == 0 else [0]
        invited: list[str] = []

        def present(posts: dict[int, dict[str, Any]]) -> dict[int, str]:
            return {rank: post["token"] for rank, post in posts.items() if post["token"]}

        def farewells() -> None:
            for rank, post in self._ask(step, deadline, self._read, words).items():
                # A word of an earlier number is about an attempt that this rank has made, and left, by itself.
                if post["number"] >= self._number and post["token"] not in _read_farewells:
                    _read_farewells.add(post["token"])
                    self._check(rank, post, step)

        def lead() -> bool:
            nonlocal invited, missing
            farewells()
            joined = self._ask(step, deadline, self._read, joins)
            tokens = [self._token, *present(joined).values()]
            if len(tokens) == self.size and tokens != invited:
                invited = tokens
                text = json.dumps({"nonce": self._token, "number": self._number, "tokens": tokens})
                self._ask(step, deadline, self._store.set, invitation, text)
            accepts = self._ask(step, deadline, self._read, {rank: f"{accepted}/{rank}" for rank in missing})
            missing = [rank for rank in missing if accepts.get(rank, {}).get("nonce") != self._token]
            if missing:
                return False
            self._nonce = self._token
            return True

        def follow() -> bool:
            farewells()
            invite = self._ask(step, deadline, self._read, {0: invitation}).get(0, {"tokens": ()})
            if self._token not in invite["tokens"]:
                return False
            self._ask(step, deadline, self._store.set, f"{accepted}/{self.rank}", json.dumps(invite))
            self._nonce, self._number = invite["nonce"], invite["number"]
            with _instances_lock:  # later attempts count alike on all ranks
                _instances[self._group_name] = max(_instances[self._group_name], self._number)
            return True

        def absent() -> PeerTimeout:
            joined = present(self._ask(step, deadline, self._read, joins))
            return self._late([rank for rank in joins if rank not in joined] or missing, step)

        self._poll(lead if self.rank == 0 else follow, deadline, absent)
        # This rank waits for nobody any more, and whoever missed it has now come.
        self._ask(step, deadline, self._write, {own: {"token": ""}, f"{self._scope}/word/{self.rank}": {"number": 0}})

    def _leave_word(self, reason: str, first_turn: int, late: tuple[int, str] | None = None) -> None:
        """Peers that come to an exchange from `first_turn` to the next raise at once, and so do those that have not met
        this rank: PeerTimeout where this rank waited in vain for another one, `late` (rank, step), else PeerAborted.
        An exchange that has succeeded here keeps its post: peers may have yet to read it."""
        word: dict[str, Any] = {"abort": reason, "late": late}
        if self._nonce:
            posts = {self._key(turn, self.rank): word for turn in range(first_turn, self._count + 1)}
        else:
            posts = {
                f"{self._scope}/join/{self.rank}": {"token": ""},
                f"{self._scope}/word/{self.rank}": {**word, "token": self._token, "number": self._number},
                f"ep_plugin/{self._token}/0/{self.rank}": word,  # read by ranks that have accepted this one's nonce
            }
        with contextlib.suppress(PeerTimeout):
            self._ask("abort", time.monotonic() + _FAREWELL_S, self._write, posts, watched=False)

    # -- the store -------------------------------------------------------------------------------------------------

    def _poll(self, done: Callable[[], bool], deadline: float, late: Callable[[], PeerTimeout]) -> None:
        pause_s = _FIRST_PAUSE_S
        while not done():
            if time.monotonic() >= deadline:
                raise late()
            if self.watch is not None:
                self.watch()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, step: str, deadline: float, function: Callable[..., T], *args: Any, watched: bool = True) -> T:
        """function(*args), which uses the store, in a thread of its own.

        A store whose server is stopped blocks in recv, whatever its timeout. The thread is then left behind.
        """
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((function(*args), None))
            except BaseException as error:
                answers.put((None, error))

        threading.Thread(target=run, name="ep_plugin store", daemon=True).start()
        # An operation that begins at the deadline still gets the time that a healthy store needs.
        until = max(deadline, time.monotonic() + 0.1)
        while True:
            try:
                answer, error = answers.get(timeout=0.01)
                break
            except queue.Empty:
                if time.monotonic() >= until:
                    raise self._store_gone(step, f"no answer in {self.timeout_s:g} s") from None
                if watched and self.watch is not None:
                    self.watch()
        if isinstance(error, RuntimeError):
            raise self._store_gone(step, error) from error
        if error is not None:
            raise error
        return answer

    def _key(self, turn: int, rank: int) -> str:
        return f"ep_plugin/{self._nonce}/{turn}/{rank}"

    def _read(self, keys: dict[int, str]) -> dict[int, dict[str, Any]]:
        """The posts under those of the keys that are there."""
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _write(self, posts: dict[str, dict[str, Any]]) -> None:
        for key, post in posts.items():
            self._store.set(key, json.dumps(post))

    def _delete(self, keys: list[str]) -> None:
        """Best effort: a store that cannot delete must not fail an exchange that has succeeded."""
        with contextlib.suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(key)

    def _say_goodbye(self) -> None:
        closed = f"ep_plugin/{self._nonce}/closed"
        if self._store.add(closed, 1) == self.size:
            turns = range(max(0, self._count - 2), self._count + 1)
            self._delete([closed, *(self._key(turn, rank) for turn in turns for rank in range(self.size))])

    def _late(self, missing: list[int], step: str) -> PeerTimeout:
        ranks = [self.ranks[rank] for rank in missing]
        return PeerTimeout(
            f"rank {self.group_rank} waited {self.timeout_s:g} s at step {step!r} of {self.name} "
            f"for rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}",
            ranks[0],
            step,
        )

    def _store_gone(self, step: str, error: object) -> PeerTimeout:
        return PeerTimeout(
            f"rank {self.group_rank}: the store of the process group does not answer at step {step!r} of {self.name}; "
            f"the process that serves it (rank 0's, or the launcher) has probably died or is stopped: {error}",
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


def _next_instance(group_name: str) -> int:
    with _instances_lock:
        _instances[group_name] = _instances.get(group_name, 0) + 1
        return _instances[group_name]


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
