"""Starts the ranks of one arm, in fresh processes, and waits for them. A rank that fails ends the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
from torch.multiprocessing.spawn import ProcessException
from typer import BadParameter, Exit, Option

from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.testing.nodes import parse_rate
from examples.compare.options import Options

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Comparison(Options):
    """What both arms train, how often, and on which ranks. typer.BadParameter names an option that cannot be."""

    rounds: Annotated[int, Option(min=1, help="How often each arm trains.")] = 2
    ranks: Annotated[
        int, Option(min=1, help="Processes; more than GPUs share them. (default: one per GPU; 4 without GPUs)")
    ] = None
    nodes: Annotated[int, Option(min=1, help="Emulated nodes of as many ranks each.")] = 1
    rate: Annotated[str | None, Option(help="Of a node's link, such as 1gbit. (default: no limit)")] = None
    out: Annotated[Path, Option(help="Folder for metrics.json and loss.png.")] = Path("runs/compare")

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.ranks or torch.cuda.device_count() or 4)
        if self.ranks % self.nodes:
            raise BadParameter(f"expected a divisor of {self.ranks} ranks, got {self.nodes}", param_hint="--nodes")
        if self.rate is not None and self.nodes == 1:
            raise BadParameter(f"expected none with one node, which has no link, got {self.rate}", param_hint="--rate")
        try:
            if self.rate is not None:
                parse_rate(self.rate)
        except ValueError as error:
            raise BadParameter(str(error), param_hint="--rate") from None

    def train(self, options: Options) -> dict[str, Any]:
        """What `train.run` returns on rank 0. typer.Exit when a rank fails, or this process is asked to end."""
        from examples.compare import train

        with _ended_by_signals():
            if self.nodes > 1 or 0 < torch.cuda.device_count() < self.ranks:
                return self._over_nodes(options)
            if self.ranks > 1:
                os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it
            try:
                return run_on_ranks(self.ranks, train.backend(), train.run, asdict(options), timeout=None)
            except ValueError as error:
                raise BadParameter(str(error), param_hint="--ranks") from None
            except ProcessException as error:
                print(error, file=sys.stderr)
                raise Exit(1) from None

    def _over_nodes(self, options: Options) -> dict[str, Any]:
        """Trains through the launcher of emulated nodes, which also lets ranks share GPUs.

        It ends the other ranks when one dies, and all when this process ends it.
        """
        rate = [] if self.rate is None else ["--rate", self.rate]
        sizes = ["--nodes", str(self.nodes), "--ranks", str(self.ranks // self.nodes)]
        launcher = [sys.executable, "-m", "ep_plugin.testing.nodes", *sizes, *rate, "--"]
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            train = [sys.executable, "-u", "-m", "examples.compare.train", json.dumps(asdict(options)), str(result)]
            with subprocess.Popen([*launcher, *train]) as ranks:
                try:
                    status = ranks.wait()
                except BaseException:
                    ranks.terminate()
                    raise
            if status:
                raise Exit(1)
            return json.loads(result.read_text())


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    def stop(signum: int, _: FrameType | None) -> None:
        print(f"stopped: got {signal.Signals(signum).name}", file=sys.stderr)
        raise Exit(128 + signum)

    ignored = signal.SIG_IGN  # as nohup has SIGHUP
    before = {signum: signal.signal(signum, stop) for signum in _SIGNALS if signal.getsignal(signum) is not ignored}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
