"""The options of suites that exchange tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from ep_plugin.bench.exchange.workload import Workload
from ep_plugin.bench.suite import BY_BACKEND, Suite

# The sizes of README's table, and sizes that two cores can exchange.
CPU_SIZES: dict[str, Any] = {"ranks": 4, "tokens": 1024, "hidden": 2048, "topk": 4, "experts": 32}
CUDA_SIZES: dict[str, Any] = {"ranks": None, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256}


@dataclass(frozen=True, kw_only=True)
class ExchangeSuite(Suite):
    """A suite with a workload."""

    defaults: ClassVar[dict[str, dict[str, Any]]] = {"cpu": CPU_SIZES, "cuda": CUDA_SIZES}

    tokens: Annotated[int, typer.Option(help="Tokens per rank, T. Default on cuda: 4096.")] = BY_BACKEND
    hidden: Annotated[int, typer.Option(help="Elements of a row, H. Default on cuda: 7168.")] = BY_BACKEND
    topk: Annotated[int, typer.Option(help="Experts per token, K. Default on cuda: 8.")] = BY_BACKEND
    experts: Annotated[int, typer.Option(help="Experts in all, E. Default on cuda: 256.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.workload  # raises for sizes that cannot be

    @property
    def workload(self) -> Workload:
        """The sizes; routing is uniformly random."""
        return Workload(ranks=self.ranks, tokens=self.tokens, hidden=self.hidden, topk=self.topk, experts=self.experts)
