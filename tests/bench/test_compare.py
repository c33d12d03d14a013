"""ep-bench: comparisons find wrong, stale, permuted, unweighted and unwritten results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plugin.bench.exchange import cases
from ep_plugin.bench.exchange.cases import EpPlugin, Recorded
from ep_plugin.bench.exchange.oracle import poisoned
from ep_plugin.bench.exchange.peers import AllToAll, Routing
from ep_plugin.bench.exchange.workload import Batch, Workload
from ep_plugin.bench.suite import WrongResult, measured
from ep_plugin.bench.suites.moe import MoeSuite
from ep_plugin.moe.layout import DispatchOutput
from tests.ranks import run_ranks, values

RANKS = 2

Dispatched = tuple[DispatchOutput, Any]


class SwappedRows(AllToAll):
    """Two rows change places."""

    def dispatch(self, batch: Batch, previous: object = None) -> Dispatched:
        out, state = super().dispatch(batch, previous)
        out.tokens[[0, 1]] = out.tokens[[1, 0]]
        return out, state


class WrongScales(AllToAll):
    """The scales of a row come from the row before it."""

    def dispatch(self, batch: Batch, previous: object = None) -> Dispatched:
        out, state = super().dispatch(batch, previous)
        assert out.scales is not None
        return out._replace(scales=out.scales.roll(1, 0)), state


class PlainSum(AllToAll):
    """Combine forgets the weights."""

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        assert isinstance(state, Routing)
        return super().combine(y, dataclasses.replace(state, weights=torch.ones_like(state.weights)))


class FirstResult(AllToAll):
    """Every dispatch and combine after some of them returns what the last of those did."""

    fresh = 1

    def __init__(self, workload: Workload, device: torch.device) -> None:
        super().__init__(workload, device)
        self._kept: dict[str, list[Any]] = {"dispatch": [], "combine": []}

    def dispatch(self, batch: Batch, previous: object = None) -> Dispatched:
        return self._keep("dispatch", lambda: super(FirstResult, self).dispatch(batch, previous))

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        return self._keep("combine", lambda: super(FirstResult, self).combine(y, state))

    def _keep(self, what: str, run: Callable[[], Any]) -> Any:
        found = run()  # in any case, as the other ranks take part
        if len(self._kept[what]) < self.fresh:
            self._kept[what].append(found)
        return self._kept[what][-1]


class RightUntilTimed(FirstResult):
    """As FirstResult, after the first comparison and some calls of the timing."""

    fresh = 4


class LastRowMissing(AllToAll):
    """The last row is never written."""

    def dispatch(self, batch: Batch, previous: object = None) -> Dispatched:
        out, state = super().dispatch(batch, previous)
        tokens = torch.empty_like(out.tokens)
        tokens[:-1] = out.tokens[:-1]
        return out._replace(tokens=tokens), state


class SwappedThereAndBack(AllToAll):
    """Dispatch gives two experts' rows to each other, and combine undoes it."""

    def dispatch(self, batch: Batch, previous: object = None) -> Dispatched:
        out, state = super().dispatch(batch, previous)
        out.tokens[[0, -1]] = out.tokens[[-1, 0]]
        return out, state

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        order = list(range(len(y)))
        order[0], order[-1] = order[-1], order[0]
        return super().combine(y[order], state)


class SwappedWeights(AllToAll):
    """Combine takes the weights of a token's experts in the opposite order."""

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        assert isinstance(state, Routing)
        return super().combine(y, dataclasses.replace(state, weights=state.weights.flip(1)))


class NotANumber(AllToAll):
    """One value of combine is NaN, which compares false with everything."""

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        out = super().combine(y, state)
        out[0, 0] = float("nan")
        return out


class WrongIds(EpPlugin):
    """A row's local experts are those of another rank."""

    def dispatch(self, batch: Batch, previous: Any = None) -> Dispatched:
        out, state = super().dispatch(batch, previous)
        assert out.topk_ids is not None
        out.topk_ids.add_(1)
        return out, state


def suite(
    dtype: str = "float32", layout: str = "flat", peer: str = "all_to_all", chosen: tuple[str, ...] = ()
) -> MoeSuite:
    return MoeSuite(
        backend="cpu", ranks=RANKS, tokens=40, hidden=128, topk=2, experts=6,
        dtype=[dtype], layout=[layout], iterations=1, case=list(chosen), peer=[peer],
    )  # fmt: skip


def measure(_: int, wanted: MoeSuite) -> dict[str, list[Any]]:
    return measured(torch.device("cpu"), wanted)


def flat(peer: type[AllToAll], *chosen: str, dtype: str = "float32") -> MoeSuite:
    return suite(dtype, peer=f"{__name__}:{peer.__name__}", chosen=chosen)


@pytest.mark.parametrize(
    ("wanted", "case", "what"),
    [
        (flat(SwappedRows), "dispatch_flat_fp32", "others in 2 of"),
        (flat(WrongScales, dtype="float8"), "dispatch_flat_fp8", "scales:"),
        (flat(PlainSum), "combine_flat_fp32", "relative errors"),
        (flat(NotANumber), "combine_flat_fp32", "got nan"),
        (flat(FirstResult, "dispatch_flat*"), "dispatch_flat_fp32", "tokens:"),
        (flat(FirstResult, "dispatch_cached*"), "dispatch_cached_fp32", "tokens:"),
        (flat(FirstResult, "combine*"), "combine_flat_fp32", "relative errors"),
        (flat(FirstResult, "roundtrip_flat*"), "roundtrip_flat_fp32", "relative errors"),
        (flat(RightUntilTimed, "dispatch_flat*"), "dispatch_flat_fp32", "(after the timing)"),
        (flat(RightUntilTimed, "roundtrip_t128"), "roundtrip_t128", "(after the timing)"),
        (flat(LastRowMissing), "dispatch_flat_fp32", "others in 1 of"),
        (flat(SwappedThereAndBack, "roundtrip_flat*"), "roundtrip_flat_fp32", "relative errors"),
        (flat(SwappedWeights, "roundtrip_flat*"), "roundtrip_flat_fp32", "relative errors"),
        (flat(PlainSum, "roundtrip_flat*"), "roundtrip_flat_fp32", "relative errors"),
    ],
    ids=["swapped rows", "wrong scales", "forgotten weights", "not a number", "stale dispatch",
         "stale cached dispatch", "stale combine", "stale round trip", "stale dispatch later", "stale round trip later",
         "a row missing", "swapped there and back", "swapped weights", "forgotten weights of a round trip"],
)  # fmt: skip
def test_wrong_results_are_caught_on_every_rank(wanted: MoeSuite, case: str, what: str) -> None:
    for found in values(run_ranks(RANKS, measure, wanted)):
        assert "rows" not in found
        start = f"rank 1: {case} by {wanted.peer[0].partition(':')[2]}: "
        assert any(text.startswith(start) and what in text for text in found["wrong"])


def token_major_with_wrong_ids(_: int) -> dict[str, Any]:
    cases.EpPlugin = WrongIds  # type: ignore[misc]
    return measured(torch.device("cpu"), suite(layout="token_major"))


def test_wrong_ids_of_ep_plugin_are_caught() -> None:
    for found in values(run_ranks(RANKS, token_major_with_wrong_ids)):
        assert found["wrong"][1].startswith("rank 1: dispatch_token_major_fp32 by ep_plugin: topk_ids:")


class Replayed(Recorded):
    """A graph without a GPU: a replay runs the step again, into the same memory."""

    def _capture(self, step: Callable[[Batch], torch.Tensor]) -> None:
        self._step = step
        self._result = step(self._batch).clone()

    def _replay(self) -> None:
        self._result.copy_(self._step(self._batch))


class NothingReplayed(Replayed):
    def _replay(self) -> None:
        self._step(self._batch)


class OldInputs(Replayed):
    """The graph has read its inputs when it was made."""

    def _capture(self, step: Callable[[Batch], torch.Tensor]) -> None:
        super()._capture(step)
        self._old = dataclasses.replace(self._batch, x=self._batch.x.clone())

    def _replay(self) -> None:
        self._result.copy_(self._step(self._old))


def replay(_: int, recorded: type[Recorded]) -> dict[str, Any]:
    cases.Recorded = recorded  # type: ignore[misc]
    graph = dataclasses.replace(suite().specs()[-2], graph=True, peers=False)
    try:
        return {"rows": cases.time_cases(torch.device("cpu"), [graph], [], 1), "wrong": []}
    except WrongResult as error:
        return {"rows": [], "wrong": error.args[0]}


@pytest.mark.parametrize(
    ("recorded", "wrong"), [(Replayed, None), (NothingReplayed, "got nan"), (OldInputs, "relative errors")]
)
def test_graphs_are_compared_on_inputs_that_they_have_not_seen(recorded: type[Recorded], wrong: str | None) -> None:
    for found in values(run_ranks(RANKS, replay, recorded)):
        assert bool(found["rows"]) == (wrong is None)
        assert len(found["wrong"]) == (RANKS if wrong else 0)
        for rank, text in enumerate(found["wrong"]):
            assert text.startswith(f"rank {rank}: roundtrip_t128 by ep_plugin: ") and wrong in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_fresh_memory_holds_nan_until_it_is_written(dtype: torch.dtype) -> None:
    before = torch.get_deterministic_debug_mode()
    with poisoned():
        fresh = [torch.empty(1000, dtype=dtype), torch.zeros(8).to(dtype).new_empty(1000)]
        assert int(torch.empty(1000, dtype=torch.int32).amin()) == torch.iinfo(torch.int32).max
    assert all(bool(each.float().isnan().all()) for each in fresh)
    assert torch.get_deterministic_debug_mode() == before == 0
