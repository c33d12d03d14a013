"""Starts the ranks of one arm, in fresh processes, and waits for them. A rank that fails ends the command."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import FrameType

import torch
import typer

from ep_plugin.testing.nodes import parse_rate

_TRAIN = "examples.compare.train"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of an arm. nodes: of as many ranks each, emulated. rate: of a node's link, None for no limit."""

    number: int
    nodes: int = 1
    rate: str | None = None

    @classmethod
    def of(cls, ranks: int | None, nodes: int, rate: str | None) -> Ranks:
        """From the command line's options. typer.BadParameter names one that cannot be."""
        number = ranks or torch.cuda.device_count() or 4
        if number % nodes:
            raise typer.BadParameter(f"expected a divisor of {number} ranks, got {nodes}", param_hint="--nodes")
        if rate is not None and nodes == 1:
            raise typer.BadParameter(f"expected none with one node, which has no link, got {rate}", param_hint="--rate")
        try:
            if rate is not None:
                parse_rate(rate)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--rate") from None
        return cls(number=number, nodes=nodes, rate=rate)

    def run(self, options: str, result: str, folder: str) -> None:
        """Runs ``train.run(options, result)`` on every rank. folder: for their logs. typer.Exit when a rank fails."""
        if self.nodes == 1:
            _on_one_node((options, result), self.number, folder)
        else:
            _over_nodes((options, result), self)


def _on_one_node(arguments: tuple[str, str], ranks: int, folder: str) -> None:
    """Ranks without GPUs are forks of one process that has imported what they need. CUDA does not survive a fork.
    torch's agent ends the other ranks when one dies, and all of them when this process is interrupted."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    on_gpus = torch.cuda.is_available()
    multiprocessing.get_context("forkserver").set_forkserver_preload([_TRAIN, "examples.compare.models"])
    config = LaunchConfig(
        start_method="spawn" if on_gpus else "forkserver",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="compare",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    try:
        if on_gpus:
            elastic_launch(config, sys.executable)("-u", "-m", _TRAIN, *arguments)
        else:
            elastic_launch(config, _train)(*arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except SignalException as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise typer.Exit(128 + error.sigval) from None


def _train(*arguments: str) -> None:
    from examples.compare import train

    train.run(*arguments)


def _over_nodes(arguments: tuple[str, str], ranks: Ranks) -> None:
    """The launcher of emulated nodes ends the other ranks when one dies, and all of them when this process ends it."""
    rate = [] if ranks.rate is None else ["--rate", ranks.rate]
    sizes = ["--nodes", str(ranks.nodes), "--ranks", str(ranks.number // ranks.nodes)]
    command = [sys.executable, "-m", "ep_plugin.testing.nodes", *sizes, *rate, "--", sys.executable, "-u", "-m", _TRAIN]

    def stop(signum: int, _: FrameType | None) -> None:
        print(f"stopped: got {signal.Signals(signum).name}", file=sys.stderr)
        raise typer.Exit(128 + signum)

    before = {signum: signal.signal(signum, stop) for signum in _SIGNALS}
    try:
        with subprocess.Popen([*command, *arguments]) as launcher:
            try:
                status = launcher.wait()
            except BaseException:
                launcher.terminate()
                raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if status:
        raise typer.Exit(1)
