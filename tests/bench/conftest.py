"""ep-bench starts a server that its ranks are forked from, unless one runs. Other tests need that of tests/ranks.py."""

from __future__ import annotations

import pytest

from tests.ranks import start_server


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    start_server()
