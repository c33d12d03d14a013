"""The command line of `ep-bench`. It has a command for each suite, and `plan`, `report` and `load`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ep_plugin.bench import bars, load, plan, plan_costs, plan_low_latency, provenance, report
from ep_plugin.bench.suite import Suite, WrongResult, take_fields
from ep_plugin.bench.suites.collectives import AllGatherSuite, ReduceScatterSuite, SendReceiveSuite
from ep_plugin.bench.suites.fsdp2 import Fsdp2Suite
from ep_plugin.bench.suites.host import HostSuite
from ep_plugin.bench.suites.layers import LayersSuite
from ep_plugin.bench.suites.moe import LowLatencySuite, MoeSuite
from ep_plugin.bench.suites.overlap import OverlapSuite
from ep_plugin.bench.suites.stand_in import StandInSuite
from ep_plugin.bench.suites.wire import WireSuite

SUITES: tuple[type[Suite], ...] = (
    *(MoeSuite, LowLatencySuite, StandInSuite),
    *(AllGatherSuite, ReduceScatterSuite, SendReceiveSuite),
    *(HostSuite, OverlapSuite, LayersSuite, Fsdp2Suite, WireSuite),
)

Out = Annotated[str | None, typer.Option(help="The JSON's file, or a folder (ends in /) that has one per hardware.")]

main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@main.callback()
def about() -> None:
    """Measures ep_plugin and what it replaces, in one run, after checking the results of both."""


def _add_command(kind: type[Suite]) -> None:
    """Adds a command that runs the suite. The options of the command are the fields of the suite."""

    def command(out: str | None = None, **options: Any) -> None:
        with _refusals():
            suite = kind(**options)
            path = None if out is None else Path(out)
            if path is not None and f"{out}".endswith("/"):
                path /= f"{provenance.hardware_folder(suite.backend, suite.ranks)}/{suite.name}.json"
            _check_writable("out", path)  # before anything is measured
            result = suite.run()
        typer.echo(report.markdown(result))
        if path is not None:
            path.write_text(json.dumps(result, indent=2) + "\n")
            typer.echo(f"wrote {path}", err=True)

    take_fields(command, kind, out=Out)
    main.command(kind.command_name, help=kind.__doc__)(command)


for _kind in SUITES:
    _add_command(_kind)


def _plan(plot: Path | None = None, **options: Any) -> None:
    with _refusals():
        asked = plan.Plan(**options)
        if plot is not None and asked.nodes < 2:
            raise ValueError(f"nodes: expected at least 2 for --plot, got {asked.nodes}")
        _check_writable("plot", plot)
        typer.echo(plan.markdown(asked))
        if asked.nodes > 1:
            typer.echo(f"\n{plan_costs.markdown(asked)}")
            if low_latency := plan_low_latency.markdown(asked):
                typer.echo(f"\n{low_latency}")
        if plot is not None:
            plan.plot(asked, plot)


Plot = Annotated[Path | None, typer.Option(help="The file of a PNG with the bytes over 2 to N nodes.")]
take_fields(_plan, plan.Plan, plot=Plot)
main.command("plan", help=plan.Plan.__doc__)(_plan)


@main.command("report")
def report_command(
    files: Annotated[
        list[Path], typer.Argument(help="Results of ep-bench or examples.compare.", exists=True, dir_okay=False)
    ],
    plot: Annotated[Path | None, typer.Option(help="The PNG's file: bars of tokens per second, and of times.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Pattern of case names, as a shell's; repeatable.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Pattern of implementations' names; repeatable.")] = None,
) -> None:
    """Prints results as markdown tables with ratios. Names files that are no results, and then exits with status 2."""
    loaded, refused = [], []
    for path in files:
        try:
            loaded.append(report.load(path))
        except ValueError as error:
            refused.append(str(error))
    with _refusals():
        _check_writable("plot", plot)
        results = report.of_cases(loaded, case or [], impl or []) if loaded else []
        _print(report.markdown, bars.plot, results, plot)
    if refused:
        typer.echo("\n".join(refused), err=True)
        raise typer.Exit(2)


@main.command("load")
def load_command(
    files: Annotated[list[Path], typer.Argument(help="Files of ep_plugin.write_stats.", exists=True, dir_okay=False)],
    plot: Annotated[Path | None, typer.Option(help="The PNG's file: tokens from each rank for each expert.")] = None,
) -> None:
    """Prints the load of a run from the files of its ranks: tokens, drops, bytes and waits."""
    with _refusals():
        loads = load.load(files)
        _check_writable("plot", plot)
    _print(load.markdown, load.plot, loads, plot)


def _print(
    markdown: Callable[[Any], str], draw: Callable[[list[Any], Path], None], results: list[Any], plot: Path | None
) -> None:
    """Prints each result, and draws all of them into the file `plot` if it is given."""
    for result in results:
        typer.echo(markdown(result))
    if plot is not None and results:
        draw(results, plot)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns a ValueError into typer's error for a wrong parameter. Wrong results end the command with status 1."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except WrongResult as error:
        typer.echo(f"wrong results, so nothing was timed:\n{error}", err=True)
        raise typer.Exit(1) from error


def _check_writable(option: str, path: Path | None) -> None:
    """Makes the folder of `path`. Raises ValueError, with the option's name, if no file can be written there."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: expected a folder that can be made for {path}, got: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: expected a file that can be written, or a folder that ends in /, got {path}")
