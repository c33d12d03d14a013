"""The command line of `ep-bench`: a command for each suite, and `report`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from ep_plugin.bench import plots, provenance, report
from ep_plugin.bench.suite import Suite, WrongResult
from ep_plugin.bench.suites import SUITES

Out = Annotated[
    str | None, typer.Option(help="Where the JSON goes: a file, or a folder (ends in /) that has one per hardware.")
]

main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@main.callback()
def about() -> None:
    """Measures ep_plugin and what it replaces, in one run, after checking the results of both."""


def _add_command(kind: type[Suite]) -> None:
    """Makes a command of the suite, whose options are the suite's fields."""

    def command(out: str | None = None, **options: Any) -> None:
        with _refusals():
            suite = kind(**options)
            place = _place(out, suite)
            result = suite.run()
        _finish(result, place)

    def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    hints = get_type_hints(kind, include_extras=True)
    options = [
        option(field.name, hints[field.name], inspect.Parameter.empty if field.default is MISSING else field.default)
        for field in fields(kind)
    ]
    signature: Any = inspect.Signature([*options, option("out", Out, None)])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__doc__ = kind.__doc__
    main.command(kind.command_name)(command)


for _kind in SUITES:
    _add_command(_kind)


@main.command("report")
def report_command(
    files: Annotated[list[Path], typer.Argument(help="Results that ep-bench wrote.", exists=True, dir_okay=False)],
    plot: Annotated[Path | None, typer.Option(help="Where a PNG with a panel per result goes.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Pattern of case names, as a shell's; repeatable.")] = None,
) -> None:
    """Prints results as markdown tables with ratios. Exit status 2 when a file was none, which is named."""
    loaded, refused = [], []
    for path in files:
        try:
            loaded.append(report.load(path))
        except ValueError as error:
            refused.append(str(error))
    with _refusals():
        if plot is not None:
            _check_writable("plot", plot)
        results = report.of_cases(loaded, case or []) if loaded else []
    for result in results:
        typer.echo(report.markdown(result))
    if plot is not None and results:
        plots.plot(results, plot)
    for sentence in refused:
        typer.echo(sentence, err=True)
    if refused:
        raise typer.Exit(2)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns ValueError into a wrong parameter. Wrong results end the command with status 1."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except WrongResult as error:
        typer.echo(f"wrong results, so nothing was timed:\n{error}", err=True)
        raise typer.Exit(1) from error


def _place(out: str | None, suite: Suite) -> Path | None:
    """The result's file. ValueError, before anything is measured, when it cannot be written."""
    if out is None:
        return None
    path = Path(out)
    if out.endswith("/"):
        name = suite.file_name()
        path = path / provenance.hardware_folder(suite.backend, suite.ranks) / name
    _check_writable("out", path)
    return path


def _check_writable(option: str, path: Path) -> None:
    """Makes the folder of `path`. ValueError, naming the option, when no file can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: expected a folder that can be made for {path}, got: {error}") from error
    if path.is_dir():
        raise ValueError(f"{option}: expected a file, or a folder that ends in /, got the folder {path}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: expected a place that can be written, got {path}")


def _finish(result: dict[str, Any], place: Path | None) -> None:
    """Prints the result, and writes it."""
    console = Console()
    if not console.is_terminal:  # wide enough for the table: a log has no use for cut cells
        console = Console(width=160)
    console.print(report.rich_table(result))
    for note in report.notes(result):
        console.print(note, highlight=False)
    if place is not None:
        place.write_text(json.dumps(result, indent=2) + "\n")
        typer.echo(f"wrote {place}", err=True)


if __name__ == "__main__":
    main(prog_name="ep-bench")
