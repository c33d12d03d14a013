"""The command line of `ep-bench`: one command per suite, and `report`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ep_plugin.bench import report as reports

# The sizes of README's table, and of what two cores can exchange.
_SIZES: dict[str, dict[str, int | None]] = {
    "cpu": {"ranks": 4, "tokens": 1024, "hidden": 2048, "topk": 4, "experts": 32},
    "cuda": {"ranks": None, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256},
}
_DTYPES = {"cpu": ["float32"], "cuda": ["bfloat16", "float8"]}
# The suites' `megatron` and `torchtitan`: DeepSeek-V3's widths, and some that two cores can multiply.
_LAYER_SIZES: dict[str, dict[str, int | None]] = {
    "cpu": {"ranks": 2, "tokens": 256, "hidden": 512, "topk": 4, "experts": 16, "ffn": 128},
    "cuda": _SIZES["cuda"] | {"ffn": 2048},
}

Backend = Annotated[str, typer.Option(help="cpu: shared memory against gloo; cuda: NVLink against NCCL.")]
Ranks = Annotated[int | None, typer.Option(help="Processes. Default: 4 on CPUs, every GPU on cuda.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens per rank, T. Default: 1024, or 4096 on cuda.")]
Hidden = Annotated[int | None, typer.Option(help="Elements of a row, H. Default: 2048, or 7168 on cuda.")]
Topk = Annotated[int | None, typer.Option(help="Experts per token, K. Default: 4, or 8 on cuda.")]
Experts = Annotated[int | None, typer.Option(help="Experts in all, E. Default: 32, or 256 on cuda.")]
LayerRanks = Annotated[int | None, typer.Option("--ranks", help="Processes. Default: 2 on CPUs, every GPU on cuda.")]
LayerTokens = Annotated[int | None, typer.Option("--tokens", help="Tokens per rank, T. Default: 256, or 4096 on cuda.")]
LayerHidden = Annotated[
    int | None, typer.Option("--hidden", help="Elements of a row, H. Default: 512, or 7168 on cuda.")
]
LayerExperts = Annotated[int | None, typer.Option("--experts", help="Experts in all, E. Default: 16, or 256 on cuda.")]
Ffn = Annotated[int | None, typer.Option(help="Experts' intermediate size. Default: 128, or 2048 on cuda.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="Pattern of case names, as a shell's; repeatable.")]
Counts = Annotated[str | None, typer.Option("--sms", help="SMs in place of all cases' own: dispatch=16,expand=48,...")]
Iterations = Annotated[int, typer.Option(help="Timed iterations of each case and implementation.")]
Nodes = Annotated[int, typer.Option(help="Nodes that the ranks of this machine stand for.")]
Sizes = Annotated[list[int] | None, typer.Option("--size", help="Bytes; repeatable. Default: 64 KiB and more.")]
Out = Annotated[
    str | None, typer.Option(help="Where the JSON goes: a file, or a folder (ends in /) that has one per hardware.")
]


main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@main.callback()
def about() -> None:
    """Measures ep_plugin and what it replaces, in one run, after checking the results of both."""


@main.command()
def moe(
    backend: Backend,
    ranks: Ranks = None,
    tokens: Tokens = None,
    hidden: Hidden = None,
    topk: Topk = None,
    experts: Experts = None,
    skew: Annotated[float, typer.Option(help="Rows for rank 0's experts, as a multiple of the mean.")] = 1.0,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16, float16, float8; repeatable.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="flat, token_major; repeatable. Default: both.")] = None,
    case: Cases = None,
    sms: Counts = None,
    own_only: Annotated[bool, typer.Option("--own-only", help="Without peers: a quick run while tuning.")] = False,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """Dispatch and combine of mixture-of-experts layers, against all-to-all with sort and index."""
    from ep_plugin.bench import suite_moe
    from ep_plugin.bench.workload import Workload

    given = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts}
    with _refusals():
        suite = suite_moe.MoeSuite(
            backend=backend,
            workload=Workload(**_sizes(backend, given), skew=skew),
            dtypes=tuple(dtype or _DTYPES[backend]),
            layouts=tuple(layout or suite_moe.LAYOUTS),
            iterations=iterations,
            cases=tuple(case or ()),
            sms=_counts(sms, out, backend),
            own_only=own_only,
        )
        place = _place(out, suite_moe.SUITE, backend, suite.workload.ranks)
        result = suite_moe.run(suite)
    _finish(result, place)


@main.command()
def sweep(
    backend: Backend,
    ranks: Ranks = None,
    tokens: Tokens = None,
    hidden: Hidden = None,
    topk: Topk = None,
    experts: Experts = None,
    dtype: Annotated[
        str | None, typer.Option(help="One that can be summed. Default: float32, bfloat16 on cuda.")
    ] = None,
    case: Cases = None,
    sms: Counts = None,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """Dispatch and combine over H, K and E at equal bytes on the wire, and over T, skew and SMs, against these sizes.

    Cases end in what is changed: h2048, k1, e64, t512, skew2 (times the mean for rank 0), sms12 (in all; cuda only).
    """
    from ep_plugin.bench import suite_sweep
    from ep_plugin.bench.workload import Workload

    given = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts}
    with _refusals():
        suite = suite_sweep.SweepSuite(
            backend=backend,
            workload=Workload(**_sizes(backend, given)),
            dtype=dtype or _DTYPES[backend][0],
            iterations=iterations,
            cases=tuple(case or ()),
            sms=_counts(sms, out, backend),
        )
        place = _place(out, suite_sweep.SUITE, backend, suite.workload.ranks)
        result = suite_sweep.run(suite)
    _finish(result, place)


@main.command()
def wire(backend: Backend, ranks: Ranks = None, iterations: Iterations = 30, out: Out = None) -> None:
    """What the links and the SMs give: stores, loads, TMA and copy engines, by SMs and chunk."""
    from ep_plugin.bench import suite_wire

    with _refusals():
        found = _sizes(backend, {"ranks": ranks})["ranks"]
        suite = suite_wire.WireSuite(backend=backend, ranks=found, iterations=iterations)
        place = _place(out, suite_wire.SUITE, backend, found)
        result = suite_wire.run(suite)
    _finish(result, place)


@main.command()
def allgather(
    backend: Backend,
    ranks: Ranks = None,
    nodes: Nodes = 1,
    size: Sizes = None,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """All-gather, by size in bytes of the gathered output."""
    _collective("allgather", backend, ranks, nodes, size, iterations, out)


@main.command()
def reduce_scatter(
    backend: Backend,
    ranks: Ranks = None,
    nodes: Nodes = 1,
    size: Sizes = None,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """Reduce-scatter, by size in bytes of each rank's input."""
    _collective("reduce_scatter", backend, ranks, nodes, size, iterations, out)


def _collective(
    what: str, backend: str, ranks: int | None, nodes: int, sizes: list[int] | None, iterations: int, out: str | None
) -> None:
    from ep_plugin.bench import suite_collectives

    with _refusals():
        found = _sizes(backend, {"ranks": ranks})["ranks"]
        suite = suite_collectives.CollectiveSuite(
            what=what,
            backend=backend,
            ranks=found,
            nodes=nodes,
            sizes=tuple(sizes or suite_collectives.SIZES[backend]),
            iterations=iterations,
        )
        place = _place(out, suite.suite, backend, found)
        result = suite_collectives.run(suite)
    _finish(result, place)


@main.command()
def beside(
    backend: Annotated[str, typer.Option(help="cuda; a CPU has no SMs to share.")] = "cuda",
    ranks: Ranks = None,
    tokens: Tokens = None,
    hidden: Hidden = None,
    topk: Topk = None,
    experts: Experts = None,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """A matrix product beside dispatch and combine, and beside a kernel that only holds SMs."""
    from ep_plugin.bench import suite_beside
    from ep_plugin.bench.workload import Workload

    given = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts}
    with _refusals():
        if backend != "cuda":
            raise ValueError(f"backend: expected cuda, got {backend!r}")
        suite = suite_beside.BesideSuite(workload=Workload(**_sizes(backend, given)), iterations=iterations)
        place = _place(out, suite_beside.SUITE, backend, suite.workload.ranks)
        result = suite_beside.run(suite)
    _finish(result, place)


@main.command()
def overlap(
    backend: Annotated[str, typer.Option(help="cuda; products on a CPU take the cores that gather.")] = "cuda",
    ranks: Ranks = None,
    size: Annotated[
        list[int] | None, typer.Option("--size", help="Bytes gathered; repeatable. Default: 256 and 512 MiB.")
    ] = None,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """What an all-gather adds to the time of two matrix products that it runs beside."""
    from ep_plugin.bench import suite_overlap

    with _refusals():
        if backend != "cuda":
            raise ValueError(
                "backend: expected cuda, since on a CPU the cores that multiply are those that gather (ep-bench "
                f"allgather --backend cpu times the gather alone), got {backend!r}"
            )
        found = _sizes(backend, {"ranks": ranks})["ranks"]
        suite = suite_overlap.OverlapSuite(ranks=found, sizes=tuple(size or suite_overlap.SIZES), iterations=iterations)
        place = _place(out, suite_overlap.SUITE, backend, found)
        result = suite_overlap.run(suite)
    _finish(result, place)


@main.command()
def fsdp2(
    backend: Backend,
    ranks: Ranks = None,
    layers: Annotated[int | None, typer.Option(help="Decoder layers. Default: 4, or 36 on cuda.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank and step. Default: 128, or 4096 on cuda.")] = None,
    judged: Annotated[int, typer.Option(help="Steps whose losses are compared before anything is timed.")] = 5,
    iterations: Iterations = 30,
    compiled: Annotated[bool, typer.Option("--compile", help="Decoder layers by torch.compile.")] = False,
    unit: Annotated[int, typer.Option(help="Decoder layers that are gathered and reduced together.")] = 1,
    out: Out = None,
) -> None:
    """A training step of a dense Qwen3 under FSDP2: its own collectives, ours, and none."""
    from ep_plugin.bench import suite_fsdp2

    with _refusals():
        found = _sizes(backend, {"ranks": ranks})["ranks"]
        suite = suite_fsdp2.Fsdp2Suite(
            backend=backend,
            ranks=found,
            layers={"cpu": 4, "cuda": 36}[backend] if layers is None else layers,
            tokens={"cpu": 128, "cuda": 4096}[backend] if tokens is None else tokens,
            judged=judged,
            iterations=iterations,
            compiled=compiled,
            unit=unit,
        )
        place = _place(out, suite_fsdp2.SUITE, backend, found)
        result = suite_fsdp2.run(suite)
    _finish(result, place)


@main.command()
def megatron(
    backend: Backend,
    ranks: LayerRanks = None,
    tokens: LayerTokens = None,
    hidden: LayerHidden = None,
    topk: Topk = None,
    experts: LayerExperts = None,
    ffn: Ffn = None,
    sequential: Annotated[bool, typer.Option("--sequential", help="SequentialMLP: no grouped GEMM.")] = False,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """Megatron-core's MoE layer, forward and backward: its alltoall dispatcher, ours, and its experts alone."""
    from ep_plugin.bench import suite_megatron
    from ep_plugin.bench.workload import Workload

    given = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts, "ffn": ffn}
    with _refusals():
        sizes = _sizes(backend, given, _LAYER_SIZES)
        suite = suite_megatron.MegatronSuite(
            backend=backend,
            ffn=sizes.pop("ffn"),
            workload=Workload(**sizes),
            grouped=not sequential,
            iterations=iterations,
        )
        place = _place(out, suite.name, backend, suite.workload.ranks)
        result = suite_megatron.run(suite)
    _finish(result, place)


@main.command()
def torchtitan(
    backend: Backend,
    ranks: LayerRanks = None,
    tokens: LayerTokens = None,
    hidden: LayerHidden = None,
    topk: Topk = None,
    experts: LayerExperts = None,
    ffn: Ffn = None,
    iterations: Iterations = 30,
    out: Out = None,
) -> None:
    """torchtitan's routed experts, forward and backward: its all-to-all dispatcher, ours, and the experts alone."""
    from ep_plugin.bench import suite_torchtitan
    from ep_plugin.bench.workload import Workload

    given = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts, "ffn": ffn}
    with _refusals():
        sizes = _sizes(backend, given, _LAYER_SIZES)
        ffn = sizes.pop("ffn")
        suite = suite_torchtitan.TorchtitanSuite(
            backend=backend, ffn=ffn, workload=Workload(**sizes), iterations=iterations
        )
        place = _place(out, suite.name, backend, suite.workload.ranks)
        result = suite_torchtitan.run(suite)
    _finish(result, place)


@main.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Results that ep-bench wrote.", exists=True, dir_okay=False)],
    plot: Annotated[Path | None, typer.Option(help="Where a PNG with a panel per result goes.")] = None,
    case: Cases = None,
) -> None:
    """Prints results as markdown tables with ratios. Exit status 2 when a file was none, which is named."""
    loaded, refused = [], []
    for path in files:
        try:
            loaded.append(reports.load(path))
        except ValueError as error:
            refused.append(str(error))
    with _refusals():
        if plot is not None:
            _check_writable("plot", plot)
        results = reports.of_cases(loaded, tuple(case or ())) if loaded else []
    for result in results:
        typer.echo(reports.markdown(result))
    if plot is not None and results:
        from ep_plugin.bench import plots

        plots.plot(results, plot)
    for sentence in refused:
        typer.echo(sentence, err=True)
    if refused:
        raise typer.Exit(2)


@contextmanager
def _refusals() -> Iterator[None]:
    """What cannot be measured is a wrong parameter; wrong results end the command."""
    from ep_plugin.bench.results import WrongResult

    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except WrongResult as error:
        typer.echo(f"wrong results, so nothing was timed:\n{error}", err=True)
        raise typer.Exit(1) from error


def _counts(sms: str | None, out: str | None, backend: str) -> Any:
    from ep_plugin.bench.specs import Sms, parse_sms

    if sms is None:
        return Sms()
    if out is not None and out.endswith("/"):
        raise ValueError(f"out: expected a file with --sms, since folders are for runs with the defaults, got {out!r}")
    counts = parse_sms(sms)
    if backend == "cpu":
        raise ValueError(f"sms: expected none with cpu, whose kernels run on no SMs, got {sms!r}")
    typer.echo(f"SMs in place of the cases' own: {counts}", err=True)
    return counts


def _sizes(
    backend: str, given: dict[str, int | None], defaults: dict[str, dict[str, int | None]] = _SIZES
) -> dict[str, int]:
    if backend not in defaults:
        raise ValueError(f"backend: expected one of {', '.join(defaults)}, got {backend!r}")
    sizes = {name: default if given.get(name) is None else given[name] for name, default in defaults[backend].items()}
    if backend == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("backend: expected a machine with GPUs for cuda, found none")
        sizes["ranks"] = torch.cuda.device_count() if sizes["ranks"] is None else sizes["ranks"]
    return {name: size for name, size in sizes.items() if size is not None}


def _place(out: str | None, suite: str, backend: str, ranks: int) -> Path | None:
    """Where the result goes. ValueError when it cannot be written there: asked before anything is measured."""
    from ep_plugin.bench import provenance

    if out is None:
        return None
    path = Path(out)
    if out.endswith("/"):
        path = path / provenance.hardware_folder(backend, ranks) / f"{suite}.json"
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
    console = _console()
    console.print(reports.rich_table(result))
    for note in reports.notes(result):
        console.print(note, highlight=False)
    if place is not None:
        place.write_text(json.dumps(result, indent=2) + "\n")
        typer.echo(f"wrote {place}", err=True)


def _console() -> Console:
    # Wide enough for the table where output is no terminal: cut cells are no use in a log.
    console = Console()
    return console if console.is_terminal else Console(width=160)


if __name__ == "__main__":
    main(prog_name="ep-bench")
