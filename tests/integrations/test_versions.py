"""The versions of frameworks that integrations accept are those of which tests have run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks

PASSED = json.loads(Path(__file__).with_name("megatron_receipt.json").read_text())


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = map(int, version.split("."))
    return major, minor


def test_every_recorded_version_of_megatron_is_accepted() -> None:
    for version, found in PASSED.items():
        assert found["passed"] > 0
        hooks.check_version("megatron", version)


def test_other_minor_versions_of_megatron_are_refused() -> None:
    recorded = {_minor(version) for version in PASSED}
    for minor in range(40):
        version = f"0.{minor}.9"
        if _minor(version) in recorded:
            hooks.check_version("megatron", version)
        else:
            with pytest.raises(NotSupported, match=f"expected megatron.core .*, got {version}"):
                hooks.check_version("megatron", version)
    with pytest.raises(NotSupported, match="got 0.16.0"):
        hooks.check_version("megatron", "0.16.0")
