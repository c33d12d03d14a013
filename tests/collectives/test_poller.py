"""The polling thread ends before the interpreter, which would stop it anywhere and abort the process inside C++."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit

from ep_plugin.runtime.poller import Poller


class Polled:
    def poll(self):
        return True


def check():  # runs after what the poller has registered later
    print(poller._thread.is_alive(), flush=True)


atexit.register(check)
poller, polled = Poller("test", pause_s=0.01), Polled()
poller.add(polled)
poller.wake()
"""


def test_the_thread_ends_before_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
