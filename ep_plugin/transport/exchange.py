"""All-gather of small values between the ranks of a process group, with a deadline, over the group's own store.

Ranks use it before they share memory. For each exchange a rank posts one key, ``ep_plugin/<nonce>/<n>/<rank>``, with
the name of its step and its value. The leader of a branch (branches.py) reads the posts of its branch and adds them to
its own key. Rank 0 reads the keys of its branch and of the leaders, and writes all posts to ``<n>/all``, which the
others read. If a post names another step, the leader or rank 0 writes the posts that it has, and all ranks raise. A
rank that fails writes one key, which all ranks watch. A rank deletes its keys two exchanges later, when every peer has
read them. The last rank to close deletes the rest.

In a step that succeeds, a rank reads the keys of about 2 sqrt(R) of R ranks at most. At its deadline, a rank looks for
the keys of all ranks, to name those that are missing.

Ranks agree on the nonce when they first use an exchange (agreement.py). So they never read keys of an earlier process
group on the same store. A rank that has missed a construction raises its peers' error, or joins them if they retry. All
ranks count the instances of a group alike after each agreement.

The file is long because exchanges and failures share these keys, and are right only together.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from ep_plugin.errors import DisagreementError, EpPluginError, PeerTimeout, error_of_peer, reason_of
from ep_plugin.transport.agreement import Attempt, Posts, by_rank
from ep_plugin.transport.branches import Branches
from ep_plugin.transport.groups import Group, checked_group, name_of, timeout_of
from ep_plugin.transport.threads import call_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

# The store is polled: its own wait() keeps other threads from the store and logs each timeout.
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.01
_LONGEST_PAUSE_PER_RANK_S = 0.0001  # one store serves the polls of all ranks
_LEAVE_S = 1.0  # the longest that an abort, a close or an operation at the deadline waits for the store

_polled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By store, a second connection for threads that poll. Their requests do not delay those of the first."""
os.register_at_fork(after_in_child=_polled.clear)
_unanswered: weakref.WeakKeyDictionary[Any, SimpleQueue[Any]] = weakref.WeakKeyDictionary()
"""By store, where the answer to a request will be whose deadline has passed."""
_instances: dict[str, int] = {}  # by the name of a group, which a group made again shares
_instances_lock = threading.Lock()


class Exchange:
    """One rank's end of a sequence of exchanges between ranks of a process group.

    The instances of one group pair up in the order in which each rank first uses them. Creating one needs no peer.

    Args:
        group: a process group with a store; None: the default group.
        timeout_s: the longest wait of an exchange, for peers and for the store; None: the group's own timeout.
        ranks: the group's ranks that take part, in order; None: all of them.

    Attributes:
        rank: this rank's index in ``ranks``.
        size: how many ranks take part.
        group_rank: this rank within the group. Messages and errors name ranks of the group.
        job_ranks: the ranks that take part, in order, as ranks of the job.
        watch: called while an exchange waits; an exception from it ends the wait.

    Raises:
        ValueError: no such group.
    """

    def __init__(
        self,
        group: Group = None,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        from torch.distributed import distributed_c10d as c10d

        group = checked_group(group)
        self.ranks: tuple[int, ...] = tuple(range(group.size()) if ranks is None else ranks)
        self.group_rank: int = group.rank()
        self.rank: int = self.ranks.index(self.group_rank)
        self.size: int = len(self.ranks)
        self.timeout_s: float = timeout_of(group) if timeout_s is None else timeout_s
        self.watch: Callable[[], None] | None = None
        in_job = c10d.get_process_group_ranks(group)
        self.job_ranks: tuple[int, ...] = tuple(in_job[rank] for rank in self.ranks)
        self._group_name = name_of(group)
        with _instances_lock:
            number = _instances[self._group_name] = _instances.get(self._group_name, 0) + 1
        self._store = c10d._get_process_group_store(group)
        self._below: Any = self._store
        while isinstance(self._below, c10d.PrefixStore):
            self._below = self._below.underlying_store
        scope = "ep_plugin/all" if ranks is None else f"ep_plugin/from{self.ranks[0]}"
        self._branches = Branches(self.rank, self.size)
        self._attempt = Attempt(scope, self.rank, self.size, number)
        self._nonce = ""  # agreed at the first exchange
        self._count = self._done = 0  # exchanges that have begun, and those that have succeeded
        self._has_heard = False  # of a peer's failure
        self._longest_pause_s = max(_LONGEST_PAUSE_S, self.size * _LONGEST_PAUSE_PER_RANK_S)
        self._closed = False
        self._lock = threading.Lock()
        self._error: EpPluginError | None = None

    @property
    def name(self) -> str:
        """The name of this instance in messages. It is the same on every rank after the first exchange."""
        return f"{self._group_name}.{self.number}"

    @property
    def number(self) -> int:
        """The number in `name`."""
        return self._attempt.number

    @property
    def ident(self) -> str:
        """A name that no other instance or job has. It is the same on every rank. "" before the first exchange."""
        return self._nonce

    def store(self, name: str) -> Any:
        """Returns the group's store, for keys under `name` of this instance, after the first exchange. Keys stay."""
        from torch.distributed import distributed_c10d as c10d

        return c10d.PrefixStore(f"ep_plugin/{self._nonce}/{name}", self._store)

    def polled_store(self, name: str) -> Any:
        """Returns a store for other keys of this instance, for a thread that polls.

        It is a second connection, which all instances of the process share. PeerTimeout: the store does not answer.
        """
        from torch.distributed import distributed_c10d as c10d

        polled = _polled.get(self._below)
        if polled is None:
            made = self._ask("connect to the store", time.monotonic() + self.timeout_s, self._below.clone)
            polled = _polled.setdefault(self._below, made)
        return c10d.PrefixStore(f"ep_plugin/{self._nonce}/{name}", polled)

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
            DisagreementError: a peer is in another step, once rank 0 and the leader of the peer's branch have come.
            PeerAborted: a peer has failed. After any of these errors every further call raises it again.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                return self._all_gather(step, value)
            except EpPluginError as error:
                self._error = error
                if isinstance(error, PeerTimeout) and error.rank is not None and not self._has_heard:
                    self._post_failure(reason_of(error), self._done, waited=True)
                elif not self._nonce and self.size > 1:
                    self._leave(self._write, self._attempt.withdrawal())
                raise

    def barrier(self, step: str) -> None:
        """Returns when every rank has called it. Raises like all_gather."""
        self.all_gather(step)

    def agree(self, what: str, value: str) -> None:
        """Raises DisagreementError, on every rank, unless all ranks pass the same ``value``. Collective.

        Args:
            what: what the value is, for messages, the same on every rank.
            value: text, which the message quotes.
        """
        for rank, theirs in zip(self.ranks, self.all_gather(f"agree on {what}", value), strict=True):
            if theirs != value:
                raise DisagreementError(
                    f"ranks disagree on {what}: {value} on rank {self.group_rank}, {theirs} on rank {rank}"
                )

    def abort(self, reason: str) -> None:
        """Makes every peer's next exchange that is not over here raise the error of ``reason``. Waits for no peer.

        reason: what `reason_of` or `text_of` returns.
        """
        with self._lock:
            if self._error is not None:
                return
            self._error = error_of_peer(self.group_rank, reason, self.group_rank)
            if self.size > 1:
                self._post_failure(reason, self._done)

    def close(self) -> None:
        """Gives up this rank's part in the keys: the last rank to close deletes them. Never fails; idempotent."""
        with self._lock:
            if self._closed or not self._nonce:
                return
            self._closed = True
            self._leave(self._delete_if_last)

    def _all_gather(self, step: str, value: Any) -> list[Any]:
        value = json.loads(json.dumps(value))  # as peers get it
        if self.size == 1:
            return [value]
        deadline = time.monotonic() + self.timeout_s
        if not self._nonce:
            self._agree_on_nonce(step, deadline)
        turn = self._count
        self._count += 1
        post = {"step": step, "value": value}
        self._ask(step, deadline, self._post, turn, post)
        posts = self._collect(turn, post, deadline) if self.rank == 0 else self._receive(turn, step, deadline)
        for rank, one in sorted(posts.items()):
            self._check(rank, one, step)
        self._done = turn + 1
        return [posts[rank]["value"] for rank in range(self.size)]

    def _collect(self, turn: int, own: dict[str, Any], deadline: float) -> Posts:
        """Collects on rank 0 the posts of all ranks for exchange `turn`, and passes them on.

        It returns them by rank. Some are missing if one belongs to another step.
        """
        step, posts = own["step"], {0: own}

        def poll() -> bool:
            is_over = self._add_posts(posts, range(self.size), turn, step, deadline)
            if len(posts) == self.size or not is_over:
                self._raise_failure(turn, step, deadline)
            if is_over:
                self._ask(step, deadline, self._write, {self._key(turn, "all"): posts})
            return is_over

        def late() -> PeerTimeout:
            behind = {self._branches.source(rank) for rank in range(self.size) if rank not in posts}
            return self._late(self._without_post(turn, step, posts) or sorted(behind), step)

        self._poll(poll, deadline, late)
        return posts

    def _receive(self, turn: int, step: str, deadline: float) -> Posts:
        """Returns on another rank the posts that rank 0 has collected for exchange `turn`, by rank.

        If this rank leads a branch, it passes the posts of the branch on to rank 0.
        """
        posts: Posts = {}
        branch: Posts = {}
        has_passed_on = not self._branches.passes_on

        def poll() -> bool:
            nonlocal has_passed_on
            if not has_passed_on and self._add_posts(branch, self._branches.own, turn, step, deadline):
                self._ask(step, deadline, self._write, {self._key(turn, self.rank): branch})
                has_passed_on = True
            found = self._get(step, deadline, self._key(turn, "all"))
            if found is None:
                self._raise_failure(turn, step, deadline)
                return False
            posts.update(by_rank(found))
            return True

        self._poll(poll, deadline, lambda: self._late(self._without_post(turn, step, posts) or [0], step))
        return posts

    def _add_posts(self, posts: Posts, ranks: range, turn: int, step: str, deadline: float) -> bool:
        """Adds to `posts` what this rank finds from `ranks`. Returns whether they are complete, or in different steps.

        The key of a leader has its own post first, and those of its branch later.
        """
        sources = dict.fromkeys(self._branches.source(rank) for rank in ranks if rank not in posts)
        keys = {rank: self._key(turn, rank) for rank in sources}
        for found in self._ask(step, deadline, self._read, keys).values():
            posts.update(by_rank(found))
        return len(posts) == len(ranks) or any(post["step"] != step for post in posts.values())

    def _without_post(self, turn: int, step: str, posts: Posts) -> list[int]:
        """Returns the ranks that have not posted for exchange `turn`. posts: those that this rank has found."""
        keys = [(rank, self._key(turn, rank)) for rank in range(self.size) if rank not in posts]
        there = dict(self._ask(step, time.monotonic() + _LEAVE_S, self._existing, keys))
        return [rank for rank, _ in keys if rank not in there]

    def _raise_failure(self, turn: int, step: str, deadline: float) -> None:
        """Raises if a rank has failed in exchange `turn`, or before it."""
        failure = self._get(step, deadline, self._failure_key(self._nonce))
        if failure is not None and failure["turn"] <= turn:
            raise self._heard(failure)

    def _heard(self, failure: dict[str, Any]) -> EpPluginError:
        """Returns the error of a peer's failure. This rank does not publish it again, since all ranks can see it."""
        self._has_heard = True
        return error_of_peer(self.ranks[failure["rank"]], failure["abort"], self.group_rank)

    def _check(self, rank: int, posted: dict[str, Any], step: str) -> None:
        if posted["step"] != step:
            raise DisagreementError(
                f"ranks are in different steps of {self.name}: expected {step!r} as on rank {self.group_rank}, "
                f"got {posted['step']!r} on rank {self.ranks[rank]}"
            )

    # -- the nonce -------------------------------------------------------------------------------------------------

    def _agree_on_nonce(self, step: str, deadline: float) -> None:
        """Makes this exchange's nonce and number the same on all ranks."""
        attempt = self._attempt
        read = functools.partial(self._ask, step, deadline, self._read)
        write = functools.partial(self._ask, step, deadline, self._write)

        def late() -> PeerTimeout:
            until = time.monotonic() + _LEAVE_S
            return self._late(attempt.missing(functools.partial(self._ask, step, until, self._read)), step)

        try:
            attempt.begin(step, self.timeout_s, read, write, self._heard)
            self._poll(attempt.advance, deadline, late)
            self._nonce = attempt.nonce
            with _instances_lock:  # later attempts have one number on all ranks
                _instances[self._group_name] = max(_instances[self._group_name], attempt.number)
            attempt.end()
        finally:
            attempt.release()

    def _post_failure(self, reason: str, first_turn: int, waited: bool = False) -> None:
        """Makes peers raise in exchanges from `first_turn` on, and while they wait to agree on a nonce.

        They finish the exchanges before it. Of two failures under one nonce the later one stays. waited: whether this
        rank has waited for others in vain.
        """
        failure = {"rank": self.rank, "abort": reason, "turn": first_turn}
        if self._nonce:
            posts = {self._failure_key(self._nonce): failure}
        else:
            posts = self._attempt.failure(failure, waited)
            if self.rank == 0:
                posts[self._failure_key(self._attempt.token)] = failure  # for ranks that have accepted this nonce
        self._leave(self._write, posts)

    # -- the store -------------------------------------------------------------------------------------------------

    def _poll(self, done: Callable[[], bool], deadline: float, late: Callable[[], PeerTimeout]) -> None:
        pause_s = _FIRST_PAUSE_S
        if self.rank > 0:
            deadline += 2 * self._longest_pause_s  # rank 0 names the missing ranks first
        while not done():
            if time.monotonic() >= deadline:
                raise late()
            if self.watch is not None:
                self.watch()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._longest_pause_s)

    def _ask(self, step: str, deadline: float, function: Callable[..., T], *args: Any, watched: bool = True) -> T:
        """Calls function(*args), which uses the store, in another thread.

        A store whose server is stopped blocks in recv, whatever its timeout. The thread then stays behind.
        """
        answers = call_in_thread(function, *args)
        # An operation that begins at the deadline still gets the time that a healthy store needs on a busy machine.
        until = max(deadline, time.monotonic() + _LEAVE_S)
        while True:
            try:
                answer, error = answers.get(timeout=0.01)
            except Empty:
                if time.monotonic() >= until:
                    _unanswered[self._below] = answers
                    raise self._store_gone(step, f"no answer in {self.timeout_s:g} s") from None
                if watched and self.watch is not None:
                    self.watch()
                continue
            if isinstance(error, RuntimeError):
                raise self._store_gone(step, error) from error
            if error is not None:
                raise error
            return answer

    def _leave(self, function: Callable[..., None], *args: Any) -> None:
        """Calls function(*args), which uses the store, and waits at most `_LEAVE_S` seconds for it.

        It does nothing while the store has not answered an earlier request: so a store that is stopped costs this time
        once, not for each object that is closed.
        """
        earlier = _unanswered.get(self._below)
        if earlier is None or not earlier.empty():
            with contextlib.suppress(PeerTimeout):
                self._ask("leave", time.monotonic() + _LEAVE_S, function, *args, watched=False)

    def _key(self, turn: int, rank: int | str) -> str:
        return f"ep_plugin/{self._nonce}/{turn}/{rank}"

    def _failure_key(self, nonce: str) -> str:
        return f"ep_plugin/{nonce}/failure"

    def _get(self, step: str, deadline: float, key: str) -> Any:
        """Returns the value of the key. None: it does not exist."""
        return self._ask(step, deadline, self._read, {0: key}).get(0)

    def _read(self, keys: dict[int, str]) -> dict[int, Any]:
        """Returns the values of the keys that exist."""
        there = self._existing(list(keys.items()))
        texts = self._store.multi_get([key for _, key in there]) if there else []
        return {rank: json.loads(text) for (rank, _), text in zip(there, texts, strict=True)}

    def _existing(self, keys: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Returns the keys that exist. It makes one request if all do, and otherwise looks at each half in turn."""
        if not keys or self._store.check([key for _, key in keys]):
            return keys
        half = len(keys) // 2
        return self._existing(keys[:half]) + self._existing(keys[half:]) if half else []

    def _post(self, turn: int, post: dict[str, Any]) -> None:
        self._store.set(self._key(turn, self.rank), json.dumps({self.rank: post}))
        if turn > 1:  # all ranks have begun the exchange before this one, so they have read the posts before that
            self._delete([self._key(turn - 2, self.rank)])
            if self.rank == 0:
                self._delete([self._key(turn - 2, "all")])

    def _write(self, posts: dict[str, Any]) -> None:
        for key, post in posts.items():
            self._store.set(key, json.dumps(post))

    def _delete(self, keys: list[str]) -> None:
        """Best effort: a store that cannot delete must not fail an exchange that has succeeded."""
        with contextlib.suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(key)

    def _delete_if_last(self) -> None:
        closed = f"ep_plugin/{self._nonce}/closed"
        if self._store.add(closed, 1) == self.size:
            turns = range(max(0, self._count - 3), self._count + 1)
            posts = (self._key(turn, rank) for turn in turns for rank in [*range(self.size), "all"])
            self._delete([closed, self._failure_key(self._nonce), *posts])

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
