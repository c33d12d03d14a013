"""The suite `low-latency`: dispatch and combine in mode="ll", both halves in one and apart, and the same exchange by
collectives.

`t64` has T = 64 tokens per rank. `send` and `receive` are the halves of an operation. All ranks are released together
before each of them, so a receive half finds what the others have sent. `bytes_wire` counts the rows and scales that
cross to or from the busiest rank in its busier direction; routing and weights are left out. `routing known`: the peer
has routed the same tokens before, and exchanges rows alone, without counts.
"""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import typer

import ep_plugin.moe.operators  # noqa: F401  imported here, so that no timed call imports it
from ep_plugin import _C
from ep_plugin.bench.exchange import workload
from ep_plugin.bench.exchange.cases import time_cases
from ep_plugin.bench.exchange.peers import ALL_TO_ALL, DEEP_EP, find_peers
from ep_plugin.bench.exchange.workload import (
    COMBINE,
    DISPATCH,
    EXPERT_MAJOR,
    RECEIVE,
    SCALE_BLOCK,
    SEND,
    SHORT_NAMES,
    SUMMABLE,
    ExchangeSuite,
    Spec,
)
from ep_plugin.bench.suite import BY_BACKEND, CALLS_HELP, check_names
from ep_plugin.moe.low_latency.engine import slots_of

TOKENS = [1, 8, 32, 64, 128, 256]
CPU_SIZES: dict[str, Any] = workload.CPU_SIZES | {"hidden": 1024, "dtype": "bfloat16", "tokens": TOKENS}
CUDA_SIZES: dict[str, Any] = workload.CUDA_SIZES | {"dtype": "bfloat16", "tokens": TOKENS}


@dataclass(frozen=True, kw_only=True)
class LowLatencySizes(ExchangeSuite):
    """The options that say what is exchanged."""

    least: ClassVar = {"ranks": 1, "iterations": 1, "hidden": 128}

    tokens: Annotated[list[int], typer.Option(help="Tokens per rank, T; repeatable.")] = BY_BACKEND  # type: ignore[assignment]
    hidden: Annotated[int, typer.Option(help="Elements of a row, H: a multiple of 128.")] = BY_BACKEND
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16. FP8 rows are quantised from it.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", SUMMABLE, [self.dtype])
        if self.hidden % SCALE_BLOCK:
            raise ValueError(f"hidden: expected a multiple of {SCALE_BLOCK}, got {self.hidden}")

    def workloads(self) -> list[workload.Workload]:
        return [self.workload_of(self.ranks, tokens) for tokens in self.tokens]

    def specs(self) -> list[Spec]:
        """Of each workload: dispatch and combine, then dispatch of FP8 rows, each whole and in halves."""
        kinds = [(DISPATCH, False), (COMBINE, False), (DISPATCH, True)]
        found = []
        for sizes, (what, quantize), half in itertools.product(self.workloads(), kinds, ("", SEND, RECEIVE)):
            kind = f"{'fp8' if quantize else SHORT_NAMES[self.dtype]}_t{sizes.tokens}"
            name = "_".join(filter(None, (what, half, kind)))
            found.append(Spec(name=name, what=what, dtype=self.dtype, workload=sizes, layout=EXPERT_MAJOR,
                              quantize=quantize, half=half, peers=not half))  # fmt: skip
        return found

    def memory_notes(self) -> list[str]:
        """What a communicator takes for each workload, on its ranks and on 8."""
        notes = []
        for spec in self.specs():
            ranks, shape = spec.workload.ranks, slots_of(spec.config)[1]
            takes, on_8 = (_C.ll_block_bytes(number, shape) / 2**20 for number in (ranks, 8))
            notes.append(
                f"a communicator for T = {spec.workload.tokens} takes {takes:,.1f} MiB of peer memory on each of "
                f"{ranks} ranks; on 8 ranks {on_8:,.1f} MiB"
            )
        return list(dict.fromkeys(notes))


@dataclass(frozen=True, kw_only=True)
class LowLatencySuite(LowLatencySizes):
    """Low-latency dispatch and combine of few tokens, against all-to-all with sort and index."""

    command_name = "low-latency"
    defaults: ClassVar = {
        "cpu": CPU_SIZES | {"calls": 8, "peer": [ALL_TO_ALL]},
        "cuda": CUDA_SIZES | {"calls": 1, "peer": None},
    }
    least: ClassVar = LowLatencySizes.least | {"calls": 1}

    peer: Annotated[list[str], typer.Option(help="all_to_all, deep_ep, none, or an adapter, module:Class.")] = (
        BY_BACKEND
    )
    calls: Annotated[int, typer.Option(help=f"{CALLS_HELP} Halves are timed one by one.")] = BY_BACKEND

    def __post_init__(self) -> None:
        if self.backend == "cuda" and self.peer is None:
            has_deep_ep = importlib.util.find_spec(DEEP_EP) is not None
            object.__setattr__(self, "peer", [ALL_TO_ALL, DEEP_EP] if has_deep_ep else [ALL_TO_ALL])
        super().__post_init__()
        for name in self.peer:
            find_peers(name)

    def measure(self, device: torch.device) -> dict[str, Any]:
        rows = time_cases(device, self.specs(), self.peer, self.iterations, calls=self.calls)
        return {"rows": rows, "notes": self.memory_notes()}
