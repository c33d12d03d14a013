"""`MoECommunicator.stats()` against a count of what the routers of all ranks chose."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_plugin
from ep_plugin import _C, CaptureRefused, CommunicatorClosed, LoadStats, MoECommunicator, MoECommunicatorConfig
from ep_plugin.moe.statistics import Sums, skew_of
from ep_plugin.runtime.streams import Streams
from tests.moe.low_latency_cases import low_latency
from tests.moe.moe_cases import FLAT, LAYOUTS, Case, Inputs, communicator, make_inputs, named, on_ranks
from tests.moe.test_one_kernel import ONE_KERNEL
from tests.ranks import run_ranks, values

NODES_OF_2 = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
CASE = Case(tokens=(17, 0, 40, 9), num_experts=8, topk=3, hidden=32)
# Random, skewed and empty ranks.
CASES = [replace(CASE, routing=routing, seed=5) for routing in ("random", "one expert", "even ranks drop")]
CASES += [replace(CASE, routing="last rank only", tokens=(5, 5, 33, 0)), replace(CASE, tokens=(0, 0, 0, 0))]
ROW, HEAD, PARTIAL = 4 * CASE.hidden, 3 * 16, 4 * CASE.hidden  # a head: ids, positions and weights, to 16 bytes each


def _chosen(inputs: Inputs, rank: int) -> torch.Tensor:
    """``[R, E_l]``: the tokens that the routers of all ranks chose the experts of `rank` for."""
    case = inputs.case
    counts = torch.stack([torch.bincount(ids[ids >= 0], minlength=case.num_experts) for ids in inputs.ids])
    return counts.view(case.size, case.size, -1)[:, rank]


def _rows(inputs: Inputs, node: range) -> torch.Tensor:
    """``[R, R]``: rows from each rank to each, for ranks of one `node`: one for a token and rank."""
    case = inputs.case
    found = torch.zeros(case.size, case.size, dtype=torch.int64)
    for source in node:
        owners = inputs.ids[source].div(case.num_experts // case.size, rounding_mode="floor")
        for dest in node:
            found[source, dest] = (owners == dest).any(1).sum()
    return found.fill_diagonal_(0)


def _check_tokens(found: LoadStats, inputs: Inputs, rank: int, times: int = 1) -> None:
    expected = times * _chosen(inputs, rank)
    assert found.tokens.dtype is torch.int64 and torch.equal(found.tokens, expected)
    assert found.skew == skew_of(expected.sum(0))
    assert (found.rank, found.num_experts) == (rank, inputs.case.num_experts)


def _one_node(rank: int, size: int, settings: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        with communicator(CASE, layout, **settings) as comm:
            ep_plugin.record_stats()
            for case in CASES:
                inputs = make_inputs(case)
                with named((layout, case)):
                    _round_trips(comm, inputs)
            ep_plugin.record_stats(False)


def _round_trips(comm: MoECommunicator, inputs: Inputs) -> None:
    """Two dispatches, the second of which is cached, and two combines."""
    rank = comm.rank
    out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
    comm.combine(out.tokens, handle, weights=out.weights)
    comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank], previous_handle=handle)
    comm.combine(out.tokens, handle)
    found = comm.stats(reset=True)
    _check_tokens(found, inputs, rank)
    assert (found.dispatches, found.cached_dispatches, found.combines) == (1, 1, 2)
    assert found.dropped_ids == int((inputs.ids[rank] == -1).sum()) and found.dropped_rows == 0
    node = range(comm.size) if comm.engine.node_map.num_nodes == 1 else range(rank // 2 * 2, rank // 2 * 2 + 2)
    rows = _rows(inputs, node)
    if len(node) == comm.size:
        sent, back = int(rows[rank].sum()), int(rows[:, rank].sum())
        assert found.link_bytes_sent == 2 * (sent * (HEAD + ROW) + back * PARTIAL)
        assert found.link_bytes_received == 2 * (back * (HEAD + ROW) + sent * PARTIAL)
        assert found.rail_bytes_sent == found.rail_bytes_received == 0
    assert comm.stats().dispatches == 0 and not comm.stats().tokens.any()


@pytest.mark.parametrize("settings", [{}, ONE_KERNEL], ids=["two kernels", "one kernel"])
def test_one_node(settings: dict[str, Any]) -> None:
    on_ranks(4, _one_node, settings)


def _over_nodes(rank: int) -> list[tuple[Any, ...]]:
    found = []
    with communicator(CASE, rail_chunks=2) as comm:
        ep_plugin.record_stats()
        for case in CASES:
            with named(case):
                _round_trips(comm, make_inputs(case))
        for case in CASES:
            inputs, before = make_inputs(case), comm.rail_bytes_sent
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            comm.combine(out.tokens, handle)
            stats = comm.stats(reset=True)
            assert stats.rail_bytes_sent == comm.rail_bytes_sent - before > 0
            links = stats.link_bytes_sent, stats.link_bytes_received
            found.append((*links, stats.rail_bytes_sent, stats.rail_bytes_received))
    return found


@pytest.mark.parametrize("per_node", [1, 2])
def test_over_nodes(per_node: int) -> None:
    """The ranks of a node, and those of a rail, have received as many bytes as they have sent each other."""
    ranks = values(run_ranks(4, _over_nodes, env={"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}))
    for case in zip(*ranks, strict=True):
        links_sent, links_received, rails_sent, rails_received = zip(*case, strict=True)
        for first in range(0, 4, per_node):
            node = slice(first, first + per_node)
            assert sum(links_sent[node]) == sum(links_received[node])
        for index in range(per_node):
            assert sum(rails_sent[index::per_node]) == sum(rails_received[index::per_node])
    assert all((rank[0][0] > 0) == (per_node > 1) for rank in ranks)


def _capacity(rank: int, size: int) -> None:
    inputs = make_inputs(CASES[1])
    for layout in LAYOUTS:
        with communicator(CASE, layout, max_tokens_per_rank=40, expert_alignment=4 if layout is FLAT else 1) as comm:
            ep_plugin.record_stats()
            over = 0
            for capacity in (4, 16, 400):
                out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], capacity=capacity)
                over += max(0, int(out.required) - capacity)
            found = comm.stats()
            _check_tokens(found, inputs, rank, times=3)
            assert found.dropped_rows == over
            ep_plugin.record_stats(False)


@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_beyond_capacity(nodes: int) -> None:
    env = NODES_OF_2 if nodes == 2 else {}
    values(run_ranks(4, _capacity, 4, env=env))


def _backward(rank: int, size: int) -> None:
    inputs = make_inputs(CASES[0])
    with communicator(CASE) as comm:
        ep_plugin.record_stats()
        x = inputs.x[rank].requires_grad_()
        weights = inputs.weights[rank].requires_grad_()
        out, handle = comm.dispatch(x, inputs.ids[rank], weights)
        comm.combine(out.tokens, handle, weights=out.weights).sum().backward()
        found = comm.stats()
        _check_tokens(found, inputs, rank)
        assert (found.dispatches, found.cached_dispatches, found.combines) == (1, 1, 2)


def test_backward_counts_no_token_twice() -> None:
    on_ranks(4, _backward)


def _low_latency(rank: int, size: int) -> None:
    with low_latency(CASE) as comm:
        ep_plugin.record_stats()
        for case in CASES:
            inputs = make_inputs(case)
            given = inputs.x[rank], inputs.ids[rank]
            out, handle = comm.dispatch(*given)
            again = comm.dispatch_async(*given)
            comm.dispatch(*given, previous_handle=handle)
            again.wait()
            comm.combine(out.tokens, handle, weights=inputs.weights[rank])
            found = comm.stats(reset=True)
            with named(case):
                _check_tokens(found, inputs, rank, times=2)
                assert (found.dispatches, found.cached_dispatches, found.combines) == (2, 1, 1)
                assert found.dropped_ids is found.link_bytes_sent is found.link_bytes_received is None


def test_low_latency() -> None:
    on_ranks(4, _low_latency)


def _layers(rank: int, size: int, mode: str) -> None:
    first, second, third = (make_inputs(case) for case in CASES[:3])

    def given(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs.x[rank], inputs.ids[rank]

    with low_latency(CASE) if mode == "ll" else communicator(CASE) as comm:
        ep_plugin.record_stats()
        with ep_plugin.layer("first"):
            comm.dispatch(*given(first))
            with ep_plugin.layer("second"):
                later = comm.dispatch_async(*given(second))
            _, handle = comm.dispatch(*given(first))
        later.wait()
        with ep_plugin.layer("second"):
            comm.dispatch(*given(first), previous_handle=handle)
        comm.dispatch(*given(third))
        expected = [_chosen(inputs, rank) for inputs in (first, second, third)]
        found = comm.stats(reset=True)
        assert found.layers.keys() == {"first", "second"} and found.dispatches == 4
        assert torch.equal(found.layers["first"], 2 * expected[0]) and torch.equal(found.layers["second"], expected[1])
        assert torch.equal(found.tokens, 2 * expected[0] + expected[1] + expected[2])
        assert not any(tokens.any() for tokens in comm.stats().layers.values())
        with pytest.raises(KeyError), ep_plugin.layer("third"):
            raise KeyError
        with pytest.raises(ValueError, match="layer: expected a string, got 12"):
            ep_plugin.layer(12)  # type: ignore[arg-type]
        comm.dispatch(*given(third))
        assert "third" not in comm.stats().layers


@pytest.mark.parametrize(("mode", "nodes"), [("ht", 1), ("ht", 2), ("ll", 1)])
def test_layers_that_share_a_communicator(mode: str, nodes: int) -> None:
    values(run_ranks(4, _layers, 4, mode, env=NODES_OF_2 if nodes == 2 else {}))


LATE_S = 0.5


def _late(rank: int, mode: str) -> list[int]:
    """The milliseconds that each rank is waited for, when the last one comes late."""
    case = replace(CASE, drop=0.0)
    inputs = make_inputs(case)
    with low_latency(case) if mode == "ll" else communicator(case) as comm:
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
        ep_plugin.record_stats()
        dist.barrier()
        if rank == 3:
            time.sleep(LATE_S)
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
        waited = comm.stats().waited_ns
        assert waited.shape == (4,) and waited.dtype is torch.int64
        return (waited // 10**6).tolist()


@pytest.mark.parametrize("mode", ["ht", "ll"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_waits_name_the_late_rank(mode: str, nodes: int) -> None:
    if (mode, nodes) == ("ll", 2):
        pytest.skip("low latency serves one node")
    found = values(run_ranks(4, _late, mode, env=NODES_OF_2 if nodes == 2 else {}))
    waiting = range(3) if nodes == 1 else (1, 2)  # the late rank's node and its rail
    for rank in waiting:
        assert found[rank][3] > 0.6e3 * LATE_S and found[rank][3] == max(found[rank])
    assert found[3][3] == 0


def _reset_outside_inference_mode(rank: int) -> None:
    with torch.inference_mode():
        comm = MoECommunicator(None, MoECommunicatorConfig(num_experts=4, hidden_size=64, topk=2))
    with comm:
        ep_plugin.record_stats()
        assert comm.stats(reset=True).dispatches == comm.stats().dispatches == 0


def test_a_communicator_that_was_made_for_inference_has_statistics() -> None:
    for env in ({}, NODES_OF_2):
        values(run_ranks(4, _reset_outside_inference_mode, env=env))


def _switch(rank: int, folder: str) -> None:
    inputs = make_inputs(CASES[0])
    given = inputs.x[rank], inputs.ids[rank]
    with communicator(CASE) as early:
        early.dispatch(*given)
        with pytest.raises(ValueError, match=r"stats: expected ep_plugin\.record_stats\(\) before"):
            early.stats()
        ep_plugin.record_stats()
        early.dispatch(*given)
        with low_latency(CASE) as late:
            late.dispatch(*given)
            found = ep_plugin.stats()
            assert list(found) == [early.engine.name, late.engine.name]
            for record in found.values():
                _check_tokens(record, inputs, rank)
            path = Path(folder, f"{rank}.json")
            ep_plugin.write_stats(path, reset=True)
            for name, record in ep_plugin.read_stats(path).items():
                for field, value in record._asdict().items():
                    expected = getattr(found[name], field)
                    same = torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
                    assert same, (field, value, expected)
            assert not any(record.tokens.any() for record in ep_plugin.stats().values())
            ep_plugin.record_stats(False)
            early.dispatch(*given)
            ep_plugin.record_stats()
            assert ep_plugin.stats()[early.engine.name].dispatches == 0
        assert list(ep_plugin.stats()) == [early.engine.name]
    with pytest.raises(CommunicatorClosed):
        early.stats()


def test_the_switch_and_the_file(tmp_path: Path) -> None:
    values(run_ranks(4, _switch, str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "got no JSON"),
        ("[]", "with {'format': 'ep_plugin load', 'version': 1}, got {}"),
        (json.dumps({"format": "ep_plugin load", "version": 2}), "'version': 2"),
        (json.dumps({"format": "ep_plugin load", "version": 1, "communicators": {"a": {}}}), "got other fields"),
    ],
)
def test_files_of_others_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"load\.json: expected a file that ep_plugin\.write_stats wrote") as caught:
        ep_plugin.read_stats(path)
    assert message in str(caught.value)


class _Captured(Streams):
    captured = 7

    def capturing(self) -> int:
        return self.captured


def test_a_graph_counts_if_its_sums_are_there() -> None:
    streams, counts, waited = _Captured(), torch.arange(6, dtype=torch.int32).view(2, 3)[:, :2], torch.ones(3)
    sums = Sums("communicator 0.1", streams, _C.cpu)
    with pytest.warns(RuntimeWarning, match="statistics do not count this CUDA graph"):
        sums.add("dispatch", counts)
    for refused in (sums.read, sums.reset):
        with pytest.raises(CaptureRefused, match="outside of the capture of a CUDA graph"):
            refused(lambda: waited)
    streams.captured = 0
    with torch.inference_mode():
        sums.add("dispatch", counts)
    streams.captured = 7
    sums.add("dispatch", counts)
    streams.captured = 0
    found, copied = sums.read(lambda: waited)
    assert found["dispatch"].tolist() == [[0, 2], [6, 8]] and sums.counts["dispatch"] == 2
    assert torch.equal(copied, waited)
    sums.reset(waited.zero_)
    assert not sums.read(lambda: waited)[0]["dispatch"].any() and not waited.any() and copied.all()


def test_skew() -> None:
    assert skew_of(torch.tensor([0, 0])) == 0
    assert skew_of(torch.tensor([3, 3, 3])) == 1
    assert skew_of(torch.tensor([8, 0, 0, 0])) == 4
