"""A store that counts the requests of one rank, for tests and benchmarks of constructions."""

from __future__ import annotations

import contextlib
import datetime
import unittest.mock
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

_WRITES = ("set", "add", "append", "multi_set", "compare_set", "delete_key")


class CountedStore(Store):
    """Passes requests on to `store` and counts them. Connections made by `clone` are not counted.

    Attributes:
        requests: the number of requests, by the name of the method.
        keys_read: the keys that requests have looked for, each once. So it does not depend on how often a rank polls.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self.requests: Counter[str] = Counter()
        self.keys_read: set[str] = set()

    @property
    def writes(self) -> int:
        """The number of requests that write or delete."""
        return sum(self.requests[name] for name in _WRITES)

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self._store.set(key, value)

    def add(self, key: str, num: int) -> int:
        self.requests["add"] += 1
        return self._store.add(key, num)

    def append(self, key: str, value: Any) -> None:
        self.requests["append"] += 1
        self._store.append(key, value)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.requests["multi_set"] += 1
        self._store.multi_set(keys, values)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._reads("compare_set", [key])
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        self.requests["delete_key"] += 1
        return self._store.delete_key(key)

    def get(self, key: str) -> bytes:
        self._reads("get", [key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._reads("multi_get", keys)
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        self._reads("check", keys)
        return self._store.check(keys)

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        self._reads("wait", keys)
        self._store.wait(keys, *timeout)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def clone(self) -> Any:
        return self._store.clone()

    def _reads(self, name: str, keys: list[str]) -> None:
        self.requests[name] += 1
        self.keys_read.update(keys)


@contextlib.contextmanager
def counted() -> Iterator[CountedStore]:
    """Yields a store that counts what exchanges of the default group ask for, if they are made in the block."""
    store = CountedStore(c10d._get_process_group_store(c10d._get_default_group()))
    with unittest.mock.patch.object(c10d, "_get_process_group_store", lambda group: store):
        yield store
