"""The parts that all suites share: they read options, compare and time implementations, and write the result."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

import torch
import torch.distributed as dist
import typer

from ep_plugin import env
from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.timing import Clock, Run, Timing, time_in_turn
from ep_plugin.counts import Holder, held_bytes

Row = dict[str, Any]
Through = Callable[[Run], Any]  # makes a call, alone or beside something else, and returns its result
OURS, FLOOR = "ep_plugin", "floor"  # implementations in results
CALLS_HELP = "Calls in a row in a timed iteration, whose mean is the time of one."
SMS_ARE = "SMs: of the kernels that move rows; plan and notify run on others, for some microseconds"
BY_BACKEND: Any = None  # the default of a field whose value Suite.defaults has for each backend


class WrongResult(RuntimeError):
    """Raised if an implementation disagrees with the oracle. Nothing is timed then."""


@dataclass(frozen=True, kw_only=True)
class Suite(ABC):
    """One run of a suite. Its fields are the options of the command, and `least` has their smallest values."""

    command_name: ClassVar[str]
    defaults: ClassVar[dict[str, dict[str, Any]]] = {"cpu": {"ranks": 4}, "cuda": {"ranks": None}}
    least: ClassVar[dict[str, int]] = {"ranks": 2, "iterations": 1}

    backend: Annotated[str, typer.Option(help="cpu: shared memory against gloo; cuda: NVLink against NCCL.")]
    ranks: Annotated[int, typer.Option(help="Processes. Default on cuda: one for every GPU.")] = BY_BACKEND
    iterations: Annotated[int, typer.Option(help="Timed iterations of each case and implementation.")] = 30

    def __post_init__(self) -> None:
        check_names("backend", self.defaults, [self.backend])
        for name, value in self.defaults[self.backend].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.ranks is None:
            if not torch.cuda.is_available():
                raise ValueError("backend: expected a machine with GPUs for cuda, found none")
            object.__setattr__(self, "ranks", torch.cuda.device_count())
        check_least(self.least, self)

    @abstractmethod
    def measure(self, device: torch.device) -> dict[str, Any]:
        """Measures, and returns "rows" and "notes". Those of rank 0 are kept. Collective. Raises WrongResult."""

    @property
    def name(self) -> str:
        """The name of the suite in results, and of the result's file without the suffix."""
        return self.command_name.replace("-", "_")

    def command(self) -> str:
        """Returns the command line of this run."""
        words = ["ep-bench", self.command_name]
        for field in fields(self):
            value, option = getattr(self, field.name), f"--{field.name}"
            if value is True:
                words.append(option)
            elif value is not None and value is not False:
                values = value if isinstance(value, list) else [value]
                words += [word for each in values for word in (option, shlex.quote(f"{each}"))]
        return " ".join(words)

    def run(self) -> dict[str, Any]:
        """Runs the suite on ranks of its own.

        Returns:
            The result for JSON. `command` starts with the launcher's command, if there is one.

        Raises:
            WrongResult: an implementation disagreed with the oracle.
            ValueError: the suite cannot run here.
        """
        code = {"code_hash": provenance.hash_sources(), "commit": provenance.commit()}
        found = run_on_ranks(self.ranks, self.backend, measured, self)
        if "wrong" in found:
            raise WrongResult("\n".join(found["wrong"]))
        settings = env.settings()
        command = f"{settings.launched_by} -- {self.command()}" if settings.launched_by else self.command()
        return {
            "suite": self.name,
            "hardware": provenance.hardware(self.backend, self.ranks),
            "versions": provenance.versions(),
            **code,
            "command": command,
            **({"emulation": settings.emulation} if settings.emulation else {}),
            **found,
        }


@dataclass(frozen=True, kw_only=True)
class OverNodes(Suite):
    """A suite whose ranks on this machine may stand for ranks on several nodes."""

    least: ClassVar = Suite.least | {"nodes": 1}

    nodes: Annotated[int, typer.Option(help="Nodes that the ranks of this machine stand for.")] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks % self.nodes:
            raise ValueError(f"nodes: expected a divisor of {self.ranks} ranks, got {self.nodes}")

    def named(self, name: str) -> str:
        """Returns the suite's name in results. `name` is its name on one node."""
        return name if self.nodes == 1 else f"{name}_{self.nodes}_nodes"

    def run(self) -> dict[str, Any]:
        if self.nodes > 1:
            os.environ["EP_PLUGIN_RANKS_PER_NODE"] = str(self.ranks // self.nodes)
        return super().run()

    def check_nodes(self, found: int) -> None:
        """Raises ValueError unless the ranks are on as many nodes as the option says."""
        if found != self.nodes:
            raise ValueError(f"nodes: expected {found}, which the ranks are on, got {self.nodes}")


def measured(device: torch.device, suite: Suite) -> dict[str, Any]:
    """Returns this rank's measurements, or {"wrong": sentences of all ranks}. Collective."""
    try:
        return suite.measure(device)
    except WrongResult as error:
        return {"wrong": error.args[0]}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One implementation of a case.

    Attributes:
        run: the call that is timed.
        check: repeats the call through its argument, on data that no call has moved before. It returns a sentence that
            says what is wrong with the result, or None. Collective. By default nothing is compared.
        bytes_wire, sms: as in `row`.
        holders: the communicators whose peer memory is measured after the timing.
    """

    case: str
    impl: str
    run: Run
    check: Callable[[Through], str | None] = lambda through: None
    bytes_wire: int = 0
    sms: int | None = None
    holders: Sequence[Holder] = ()


def time_ways(clock: Clock, ways: list[Way], iterations: int) -> list[Row]:
    """Compares the results of all ways, times the ways in turn, and compares again. Raises WrongResult. Collective."""

    def compare(when: str) -> None:
        found = [(way, way.check(lambda run: run())) for way in ways]
        require_right([f"{way.case} by {way.impl}: {problem}{when}" for way, problem in found if problem])

    compare("")
    timings = time_in_turn(clock, {(way.case, way.impl): way.run for way in ways}, iterations)
    compare(" (after the timing)")
    return [row(way.case, way.impl, timings[way.case, way.impl], way.bytes_wire, way.sms, way.holders) for way in ways]


def backend_of(device: torch.device) -> str:
    """Returns the name of the backend on this device, which names its own collectives in results."""
    return "nccl" if device.type == "cuda" else "gloo"


def require_right(mine: list[str]) -> None:
    """Raises WrongResult on every rank if any rank passes a sentence that says what is wrong. Collective."""
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, [f"rank {dist.get_rank()}: {sentence}" for sentence in mine])
    sentences = [sentence for theirs in everyones for sentence in theirs]
    if sentences:
        raise WrongResult(sentences)


def row(
    case: str, impl: str, timing: Timing, bytes_wire: int, sms: int | None = None, holders: Sequence[Holder] = ()
) -> Row:
    """Makes one line of a result.

    Args:
        bytes_wire: bytes per GPU, in one direction of the links.
        sms: SMs of ep_plugin's kernels; None: there are none.
        holders: ep_plugin's communicators. The line has the bytes of peer memory that they hold now on this rank.
    """
    gb_s = round(bytes_wire / timing.median_us / 1e3, 2)
    about = {"bytes_wire": bytes_wire, "gb_s": gb_s, "sms": sms, "peer_bytes": held_bytes(holders) or None}
    return {"case": case, "impl": impl, **asdict(timing), **about}


def matching(names: Iterable[str], patterns: list[str], option: str = "case") -> list[str]:
    """Returns the names that match a shell pattern, or all names. Raises ValueError for a pattern without a match."""
    names = list(dict.fromkeys(names))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"{option}: expected a pattern for {', '.join(names)}, got {pattern!r}")
    return [name for name in names if not patterns or any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def require_module(module: str, option: str, use: str) -> None:
    """Raises ValueError, with the option's name, if the module is not installed."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{option}: expected {module}, {use}: {error}") from error


def take_fields(command: Callable[..., None], kind: type, **more: Any) -> None:
    """Makes the annotated fields of the dataclass `kind` the options of a typer command.

    Args:
        more: annotations of further, optional parameters, by name.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = [each.replace(annotation=hints[each.name]) for each in inspect.signature(kind).parameters.values()]
    options = [each for each in options if get_origin(each.annotation) is Annotated]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options += [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in more.items()]
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]


def check_least(least: Mapping[str, float], given: object) -> None:
    """Raises ValueError, with the attribute's name, if an attribute of `given` is below its least value."""
    for name, smallest in least.items():
        if getattr(given, name) < smallest:
            raise ValueError(f"{name}: expected at least {smallest}, got {getattr(given, name):g}")


def check_names(option: str, known: Iterable[str], given: list[str]) -> None:
    """Raises ValueError, with the option's name, if a given name is not known."""
    for name in given:
        if name not in known:
            raise ValueError(f"{option}: expected one of {', '.join(known)}, got {name!r}")
