"""What PyTorch hands to NVTX around operations, with EP_PLUGIN_RANGES=nvtx."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import checks


def pushed(rank: int, size: int) -> tuple[list[str], list[str]]:
    """The names of the ranges of a dispatch and a combine: as PyTorch got them, and as it should."""
    case, names = checks.Case(), list[str]()
    push = torch.cuda.nvtx.range_push

    def noted(name: str) -> int | None:
        names.append(name)
        return push(name)

    given = checks.make_inputs(case, size, seed=0)
    with checks.communicator(case, rank, size, timeout_s=60) as comm, pytest.MonkeyPatch.context() as patch:
        x, ids, weights = (part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights))
        patch.setattr(torch.cuda.nvtx, "range_push", noted)
        out, handle = comm.dispatch(x, ids, weights)
        comm.combine(out.tokens, handle, weights=out.weights)
        sizes = {"dispatch": x.nbytes, "combine": out.tokens.nbytes}
    return names, [f"{operation} of {comm.engine.name}, {nbytes} bytes" for operation, nbytes in sizes.items()]
