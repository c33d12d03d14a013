"""The command line of `ep-bench`: one command per suite, and `report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ep_plugin.bench import report as reports

# The sizes of design.md's reference workload, and of one that two cores can exchange.
_SIZES: dict[str, dict[str, int | None]] = {
    "cpu": {"ranks": 4, "tokens": 1024, "hidden": 2048, "topk": 4, "experts": 32},
    "cuda": {"ranks": None, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256},
}
_DTYPES = {"cpu": ["float32"], "cuda": ["bfloat16", "float8"]}
_LATER = ("wire", "allgather", "reduce-scatter")


class _Suites(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _LATER:
            ctx.fail(f"the suite {cmd_name!r} is not served in this release; expected moe, or report for results.")
        return super().get_command(ctx, cmd_name)


main = typer.Typer(cls=_Suites, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@main.callback()
def about() -> None:
    """Measures ep_plugin and what it replaces, in one run, after checking the results of both."""


@main.command()
def moe(
    backend: Annotated[str, typer.Option(help="cpu: shared memory against gloo; cuda: NVLink against NCCL.")],
    ranks: Annotated[int | None, typer.Option(help="Processes. Default: 4 on CPUs, every GPU on cuda.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank, T. Default: 1024, or 4096 on cuda.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Elements of a row, H. Default: 2048, or 7168 on cuda.")] = None,
    topk: Annotated[int | None, typer.Option(help="Experts per token, K. Default: 4, or 8 on cuda.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts in all, E. Default: 32, or 256 on cuda.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16, float16, float8; repeatable.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="flat, token_major; repeatable. Default: both.")] = None,
    iterations: Annotated[int, typer.Option(help="Timed iterations of each case and implementation.")] = 30,
    out: Annotated[
        str | None, typer.Option(help="Where the JSON goes: a file, or a folder (ends in /) that has one per hardware.")
    ] = None,
) -> None:
    """Dispatch and combine of mixture-of-experts layers, against all-to-all with sort and index."""
    from ep_plugin.bench import provenance, suite_moe
    from ep_plugin.bench.workload import Workload

    given = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts}
    try:
        suite = suite_moe.MoeSuite(
            backend=backend,
            workload=Workload(**_sizes(backend, given)),
            dtypes=tuple(dtype or _DTYPES[backend]),
            layouts=tuple(layout or ["flat", "token_major"]),
            iterations=iterations,
        )
        result = suite_moe.run(suite)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except suite_moe.WrongResult as error:
        typer.echo(f"wrong results, so nothing was timed:\n{error}", err=True)
        raise typer.Exit(1) from error
    if out is not None:
        folder = provenance.hardware_folder(backend, suite.workload.ranks)
        _write(result, Path(out, folder, f"{suite_moe.SUITE}.json") if out.endswith("/") else Path(out))
    _console().print(reports.rich_table(result))


@main.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Results that ep-bench wrote.", exists=True, dir_okay=False)],
    plot: Annotated[Path | None, typer.Option(help="Where a PNG with bars goes.")] = None,
) -> None:
    """Prints results as markdown tables with ratios."""
    try:
        results = [reports.load(path) for path in files]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for result in results:
        typer.echo(reports.markdown(result))
    if plot is not None:
        reports.plot(results, plot)


def _sizes(backend: str, given: dict[str, int | None]) -> dict[str, int]:
    if backend not in _SIZES:
        raise ValueError(f"backend: expected one of {', '.join(_SIZES)}, got {backend!r}")
    sizes = {name: default if given[name] is None else given[name] for name, default in _SIZES[backend].items()}
    if backend == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("backend: expected a machine with GPUs for cuda, found none")
        sizes["ranks"] = sizes["ranks"] or torch.cuda.device_count()
    return {name: size for name, size in sizes.items() if size is not None}


def _write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    typer.echo(f"wrote {path}", err=True)


def _console() -> Console:
    # Wide enough for the table where output is no terminal: cut cells are no use in a log.
    console = Console()
    return console if console.is_terminal else Console(width=140)


if __name__ == "__main__":
    main(prog_name="ep-bench")
