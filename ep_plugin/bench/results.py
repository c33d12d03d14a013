"""What every suite returns: rows, and what they belong to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ep_plugin import env
from ep_plugin.bench import provenance
from ep_plugin.bench.timing import Timing

Row = dict[str, Any]
SMS_ARE = "of the kernels that move rows; plan, notify and admission run on others, for some microseconds"


class WrongResult(RuntimeError):
    """An implementation disagreed with the oracle, so nothing was timed."""


def row(case: str, impl: str, timing: Timing, bytes_wire: int, sms: int | None) -> Row:
    """One line of a result. bytes_wire: that cross the links in one direction, per GPU."""
    gb_s = round(bytes_wire / timing.median_us / 1e3, 2)
    return {"case": case, "impl": impl, **asdict(timing), "bytes_wire": bytes_wire, "gb_s": gb_s, "sms": sms}


def floor_row(case: str, bytes_wire: int, rate_gb_s: float) -> Row:
    """How long `bytes_wire` take at the best rate that SM stores reached in the same run."""
    us = round(bytes_wire / rate_gb_s / 1e3, 1)
    return row(case, "floor", Timing(median_us=us, p10_us=us, p90_us=us), bytes_wire, None)


def everyones_wrong(mine: list[str]) -> list[str]:
    """The sentences of all ranks, each with its rank. Collective."""
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, [f"rank {dist.get_rank()}: {sentence}" for sentence in mine])
    return [sentence for theirs in everyones for sentence in theirs]


def result(suite: str, backend: str, ranks: int, command: str, found: dict[str, Any], code_hash: str) -> dict[str, Any]:
    """A result from what rank 0 `found`: {"rows", "wrong", more keys}. Raises WrongResult.

    command: without the launcher, whose words come before it. code_hash: taken before the run, so that it is the hash
    of the code that ran.
    """
    settings = env.settings()
    if found["wrong"]:
        raise WrongResult("\n".join(found["wrong"]))
    return {
        "suite": suite,
        "hardware": provenance.hardware(backend, ranks),
        "versions": provenance.versions(),
        "code_hash": code_hash,
        "command": f"{settings.launched_by} -- {command}" if settings.launched_by else command,
        **({"emulation": settings.emulation} if settings.emulation else {}),
        **{name: value for name, value in found.items() if name != "wrong"},
    }
