"""How the ranks of an exchange agree on its nonce, and how a failure ends their attempts, over keys of the store.

Every rank posts a token, rank 0 invites the tokens that it finds, each rank accepts, and rank 0 seals. The nonce is the
token of rank 0. A rank may leave the attempt before that and begin another one. Then its token is gone, or rank 0's
nonce is. Rank 0 finds tokens and answers of other branches in the copies that their leaders post (branches.py). A copy
may be old by one poll of its leader. If rank 0 seals an attempt in this time, after one of its ranks has left, the
others wait for that rank to their deadline, as for a rank that leaves right after the seal.

All attempts of a group share these keys, so a rank may find the failure of an attempt that it was too late for, or has
missed. It raises that failure, with one exception: the failed rank had waited in vain, and takes the same step again
within 2 s. Then both retry together. A rank that finds a failure reads the failures of all ranks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from ep_plugin.transport.branches import Branches

Posts = dict[int, dict[str, Any]]  # by index in an exchange's ranks
Read = Callable[[dict[int, str]], Posts]

_RETRY_S = 2.0  # ranks that retry together come within this time of each other
_reported: set[str] = set()  # tokens of attempts whose failure this process has raised, or need not raise


def by_rank(posts: dict[Any, dict[str, Any]]) -> Posts:
    """Returns posts that come from JSON, which makes text of the ranks."""
    return {int(rank): post for rank, post in posts.items()}


class Attempt:
    """One attempt of this rank to agree with the others.

    Args:
        scope: where the keys are, the same on every rank.
        rank: this rank's index, of `size` ranks.
        number: how many instances of the group this rank has made.

    Attributes:
        token: a text that no other attempt has.
        number: the largest number of all ranks after the agreement.
        nonce: "" before the agreement.
    """

    def __init__(self, scope: str, rank: int, size: int, number: int) -> None:
        self.token, self.number, self.nonce = secrets.token_hex(8), number, ""
        self._scope, self._rank, self._own_number = scope, rank, number
        self._branches = Branches(rank, size)
        self._others = [other for other in range(size) if other != rank]
        self._missing = list(self._others) if rank == 0 else [0]
        self._invited: list[str] = []
        self._passed_on: dict[str, Posts] | None = None
        self._accepted: dict[str, Any] = {}
        self._latest = ""  # token of the latest failure whose keys this rank has read

    def begin(
        self,
        step: str,
        timeout_s: float,
        read: Read,
        write: Callable[[dict[str, Any]], None],
        error_of: Callable[[dict[str, Any]], Exception],
    ) -> None:
        """Posts the token.

        Args:
            step: the first step of the exchange.
            timeout_s: how long the attempt may take.
            read: returns the posts of the keys that exist.
            write: writes posts, by key, in their order.
            error_of: returns the error of a peer's failure.
        """
        self._step, self._read, self._write, self._error_of = step, read, write, error_of
        self._patient_until = time.monotonic() + min(_RETRY_S, timeout_s / 2)
        self._earlier = [one["token"] for one in self._failures()] if self._latest_failure() else []
        self._post("join", self._rank, {"token": self.token, "number": self.number, "step": step})

    def advance(self) -> bool:
        """Goes on as far as the other ranks' posts allow. Returns whether all ranks agree. Raises a peer's failure."""
        if self._rank == 0:
            return self._lead()
        agreed = self._follow()
        if self._branches.passes_on and not agreed:
            self._pass_on()
        return agreed

    def end(self) -> None:
        """Takes back the posts of this rank after the agreement: it waits for no peer any more."""
        self._write(self.withdrawal())
        self._post("failure", self._rank, {"number": 0})

    def release(self) -> None:
        """Drops the functions that `begin` was given, which refer to the exchange that this object belongs to."""
        del self._read, self._write, self._error_of

    def missing(self, read: Read) -> list[int]:
        """Returns the ranks that this one waits for. It reads the posts of all ranks."""
        joined = self._joined(self._others, read)
        missing = [rank for rank in self._others if rank not in joined]
        if not missing and self._invited:
            unanswered = self._unanswered(joined, self._get("accept", self._others, read))
            # A rank that has another token now is not invited if its leader has not passed that on.
            is_invited = {rank: joined[rank]["token"] in self._invited for rank in unanswered}
            missing = sorted({rank if is_invited[rank] else self._branches.source(rank) for rank in unanswered})
        return missing or sorted({self._branches.source(rank) for rank in self._missing})

    def withdrawal(self) -> dict[str, Any]:
        """Returns the posts, by key, after which rank 0 does not invite this token any more."""
        posts: dict[str, Any] = {self._key("join", self._rank): {"token": ""}}
        if self._branches.passes_on:
            posts[self._key("branch", self._rank)] = {"join": {}, "accept": {}}
        return posts

    def failure(self, failure: dict[str, Any], waited: bool) -> dict[str, Any]:
        """Returns the posts, by key, that make peers raise `failure`. waited: this rank has waited for them in vain."""
        about = {"token": self.token, "number": self.number, "waited": waited}
        return {
            **self.withdrawal(),
            self._key("failure", self._rank): {**failure, **about},
            self._key("failed", 0): {"token": self.token},  # the last one: then peers read the others
        }

    def _lead(self) -> bool:
        self._raise_failure()
        joined, accepted = self._found()
        self._missing = [rank for rank in self._others if rank not in joined] or self._unanswered(joined, accepted)
        everyone = [self.token, *(post["token"] for post in joined.values())]
        if not self._missing:
            self._post("failed", 0, {"token": ""})  # the peers that an earlier failure was about have come
            self._post("sealed", 0, {"nonce": self.token})
            self.nonce = self.token
        elif len(joined) == len(self._others) and everyone != self._invited:
            self._invited = everyone
            self.number = max(self.number, *(post["number"] for post in joined.values()))
            self._post("invitation", 0, {"nonce": self.token, "number": self.number, "tokens": everyone})
        return not self._missing

    def _follow(self) -> bool:
        invitation = self._accepted or self._get("invitation", [0]).get(0, {"tokens": ()})
        self._raise_failure()  # read after the invitation
        if not self._accepted:
            if self.token in invitation["tokens"]:
                self._post("accept", self._rank, {"nonce": invitation["nonce"], "token": self.token})
                self._accepted = invitation
            return False
        leader = self._get("join", [0]).get(0, {"token": ""})["token"]
        if self._get("sealed", [0]).get(0, {"nonce": ""})["nonce"] != self._accepted["nonce"]:  # read after `leader`
            if leader != self._accepted["nonce"]:  # rank 0 has left
                self._accepted = {}
            return False
        self.nonce, self.number = self._accepted["nonce"], self._accepted["number"]
        return True

    def _pass_on(self) -> None:
        """Posts copies of what the ranks of this branch have posted, for rank 0."""
        joined, accepted = self._found()
        found = {"join": joined, "accept": accepted}
        if found != self._passed_on:
            self._post("branch", self._rank, found)
            self._passed_on = found

    def _found(self) -> tuple[Posts, Posts]:
        """Returns the tokens and the answers of the ranks of this branch, and on rank 0 of all other ranks."""
        ranks = [rank for rank in self._branches.own if rank > 0]
        joined, accepted = self._joined(ranks), self._get("accept", ranks)
        for found in self._get("branch", self._branches.leaders).values():
            joined |= by_rank(found["join"])
            accepted |= by_rank(found["accept"])
        return joined, accepted

    def _unanswered(self, joined: Posts, accepted: Posts) -> list[int]:
        """Returns the other ranks that have not accepted rank 0's invitation with the token that they have now."""
        wanted = {rank: {"nonce": self.token, "token": post["token"]} for rank, post in joined.items()}
        return [rank for rank in self._others if accepted.get(rank) != wanted[rank]]

    def _raise_failure(self) -> None:
        failed = self._latest_failure()
        if failed == self._latest:
            return
        for failure in self._failures():
            if failure["waited"] and failure["token"] in self._earlier:
                again = self._joined([failure["rank"]]).get(failure["rank"])
                if again is None and time.monotonic() < self._patient_until:
                    return
                if again is not None and again["step"] == self._step:
                    _reported.add(failure["token"])
                    self.number = self._own_number = max(self.number, again["number"])
                    continue
            _reported.add(failure["token"])
            raise self._error_of(failure)
        self._latest = failed

    def _latest_failure(self) -> str:
        return self._get("failed", [0]).get(0, {"token": ""})["token"]

    def _failures(self) -> list[dict[str, Any]]:
        """Returns the failures that this rank has not raised, the earliest first."""
        # A failure with an earlier number belongs to an attempt that this rank has left by itself.
        # `number` may be that of ranks which have failed and begun another attempt since this rank began its own.
        new = [one for one in self._get("failure", self._others).values() if one["number"] >= self._own_number]
        return sorted((one for one in new if one["token"] not in _reported), key=lambda one: one["number"])

    def _joined(self, ranks: Sequence[int], read: Read | None = None) -> Posts:
        return {rank: post for rank, post in self._get("join", ranks, read).items() if post["token"]}

    def _get(self, kind: str, ranks: Sequence[int], read: Read | None = None) -> Posts:
        return (read or self._read)({rank: self._key(kind, rank) for rank in ranks})

    def _post(self, kind: str, rank: int, post: dict[str, Any]) -> None:
        self._write({self._key(kind, rank): post})

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._scope}/{kind}/{rank}"
