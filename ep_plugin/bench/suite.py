"""What all suites share: options, how ranks run, and the result that is written."""

from __future__ import annotations

import importlib
import shlex
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

from ep_plugin import env
from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.timing import Timing

Row = dict[str, Any]
WARMUP = 3  # calls of each implementation before the timed ones
SMS_ARE = "SMs: of the kernels that move rows; plan and notify run on others, for some microseconds"
BY_BACKEND: Any = None  # the default of a field that `Suite.defaults` has for each backend

Backend = Annotated[str, typer.Option(help="cpu: shared memory against gloo; cuda: NVLink against NCCL.")]
Ranks = Annotated[int, typer.Option(help="Processes. Default on cuda: one for every GPU.")]
Iterations = Annotated[int, typer.Option(help="Timed iterations of each case and implementation.")]


class WrongResult(RuntimeError):
    """An implementation disagreed with the oracle, so nothing was timed."""


@dataclass(frozen=True, kw_only=True)
class Suite(ABC):
    """One run of a suite. The fields are the options of the suite's command.

    command_name: the command. defaults: by backend, the values of fields that are BY_BACKEND. least: the smallest
    values of fields.
    """

    command_name: ClassVar[str]
    defaults: ClassVar[dict[str, dict[str, Any]]] = {"cpu": {"ranks": 4}, "cuda": {"ranks": None}}
    least: ClassVar[dict[str, int]] = {"ranks": 2, "iterations": 1}

    backend: Backend
    ranks: Ranks = BY_BACKEND
    iterations: Iterations = 30

    def __post_init__(self) -> None:
        check_names("backend", tuple(self.defaults), [self.backend])
        for name, value in self.defaults[self.backend].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.ranks is None:
            if not torch.cuda.is_available():
                raise ValueError("backend: expected a machine with GPUs for cuda, found none")
            object.__setattr__(self, "ranks", torch.cuda.device_count())
        for name, least in self.least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")

    @abstractmethod
    def measure(self, device: torch.device) -> dict[str, Any]:
        """One rank's part; collective. Raises WrongResult, see `require_right`.

        Returns:
            What JSON can hold, of which rank 0's is kept: "rows" as `row` makes them, "notes": sentences that a report
            prints below the rows, and whatever else belongs to the result.
        """

    @property
    def name(self) -> str:
        """The suite's name in results."""
        return self.command_name.replace("-", "_")

    def file_name(self) -> str:
        """The result's file in a folder of results. ValueError for runs that do not belong there."""
        return f"{self.name}.json"

    def command(self) -> str:
        """The words that ask for this run."""
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
            The result, which JSON can hold. `command` is preceded by a launcher's own words; `code_hash` and `commit`
            are of the code that ran.

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


def measured(device: torch.device, suite: Suite) -> dict[str, Any]:
    """What the suite measures on this rank, or {"wrong": sentences of all ranks}. Collective."""
    try:
        return suite.measure(device)
    except WrongResult as error:
        return {"wrong": error.args[0]}


def require_right(mine: list[str]) -> None:
    """Raises WrongResult on every rank if any rank has a sentence on what is wrong. Collective."""
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, [f"rank {dist.get_rank()}: {sentence}" for sentence in mine])
    sentences = [sentence for theirs in everyones for sentence in theirs]
    if sentences:
        raise WrongResult(sentences)


def row(case: str, impl: str, timing: Timing, bytes_wire: int, sms: int | None = None) -> Row:
    """One line of a result. bytes_wire: bytes that cross the links in one direction, per GPU."""
    gb_s = round(bytes_wire / timing.median_us / 1e3, 2)
    return {"case": case, "impl": impl, **asdict(timing), "bytes_wire": bytes_wire, "gb_s": gb_s, "sms": sms}


def require_module(module: str, option: str, use: str) -> None:
    """ValueError, naming the option, where the module is not installed."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{option}: expected {module}, {use}: {error}") from error


def check_names(option: str, known: tuple[str, ...], given: list[str]) -> None:
    """ValueError, naming the option, for a given name that is not known."""
    for name in given:
        if name not in known:
            raise ValueError(f"{option}: expected one of {', '.join(known)}, got {name!r}")
