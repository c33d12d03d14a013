"""The logger ep_plugin: what a script sees on stderr, with and without a configuration of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAYS = """
from ep_plugin.integrations import hooks
from ep_plugin.log import log
hooks.record("fsdp2", "ready", "replaced something")
{later}
log().warning("only %d", 1)
log().info("another")
"""
CONFIGURES = "import logging; logging.basicConfig(level={level}, format='mine %(name)s %(levelname)s %(message)s')"
INFO = "ep_plugin: fsdp2: ready: replaced something"


@pytest.mark.parametrize(
    ("before", "later", "variable", "expected"),
    [
        ("", "", "", ["only 1"]),
        ("", "", "1", [INFO, "ep_plugin: only 1", "ep_plugin: another"]),
        (CONFIGURES.format(level="'WARNING'"), "", "", ["mine ep_plugin WARNING only 1"]),
        (
            CONFIGURES.format(level="'INFO'"), "", "",
            ["mine ep_plugin INFO fsdp2: ready: replaced something", "mine ep_plugin WARNING only 1",
             "mine ep_plugin INFO another"],
        ),
        ("", CONFIGURES.format(level="'WARNING'"), "1",
         [INFO, "mine ep_plugin WARNING only 1", "mine ep_plugin INFO another"]),
    ],
    ids=["as it is", "EP_PLUGIN_LOG", "warnings", "infos", "EP_PLUGIN_LOG, and configured later"],
)  # fmt: skip
def test_records_appear_once_and_as_the_script_asks(
    before: str, later: str, variable: str, expected: list[str]
) -> None:
    code = before + SAYS.format(later=later)
    variables = {**os.environ, "EP_PLUGIN_LOG": variable, "EP_PLUGIN": ""}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == expected
