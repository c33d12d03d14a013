"""All-gather and reduce-scatter on GPUs; several ranks share a GPU where there are more ranks than GPUs."""

from __future__ import annotations

import signal

import pytest

from tests.gpu import collectives, large, small_operations
from tests.ranks import run_ranks, values


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("size", "path"),
    [
        *((size, path) for size in (2, 3, 4, 8) for path in collectives.PATHS),
        (5, "auto"),
        (6, "sm"),
        (7, "copy_engine"),
    ],
)
def test_all_gather_is_bit_exact(size: int, path: str) -> None:
    values(run_ranks(size, collectives.gathers, size, path, timeout_s=200))


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("size", "path"), [*((size, path) for size in (2, 3, 4) for path in ("auto", "sm")), (5, "auto"), (9, "auto")]
)
def test_reduce_scatter_is_its_oracle(size: int, path: str) -> None:
    values(run_ranks(size, collectives.scatters, size, size, path, timeout_s=200))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kinds", [("small", "smaller"), ("small", "large"), ("large", "small"), ("small", "halves")])
def test_ranks_that_disagree_are_told(kinds: tuple[str, str]) -> None:
    told = values(run_ranks(2, collectives.disagree, 1, kinds, timeout_s=100))
    what = "element" if "halves" in kinds else "bytes of a shard"
    assert any(what in sentence for sentence in told), told


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 3])
def test_reduce_scatters_of_two_streams_take_turns_in_their_cells(size: int) -> None:
    values(run_ranks(size, collectives.scatters_of_two_streams, size, 20, timeout_s=100))


@pytest.mark.gpu(1)
def test_inputs_of_asynchronous_calls_may_be_freed_early() -> None:
    assert values(run_ranks(2, collectives.inputs_that_are_freed, 2, timeout_s=100)) == [8, 8]


@pytest.mark.gpu(4)
def test_two_nodes_of_two_over_nccl() -> None:
    environment = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
    values(run_ranks(4, collectives.gathers, 4, "auto", "nccl", timeout_s=200, env=environment))
    values(run_ranks(4, collectives.scatters, 4, 2, "auto", "nccl", timeout_s=200, env=environment))


@pytest.mark.gpu(1)
def test_rails_of_gpus_over_gloo_are_refused_by_name() -> None:
    environment = {"EP_PLUGIN_RANKS_PER_NODE": "1"}
    for said in values(run_ranks(2, collectives.refused, timeout_s=100, env=environment)):
        assert "expected a backend that sends GPU memory between nodes, such as NCCL, got" in said


@pytest.mark.gpu(1)
@pytest.mark.parametrize("path", collectives.PATHS)
def test_captured_operations_are_right_in_every_replay(path: str) -> None:
    values(run_ranks(2, collectives.replayed, 2, path, timeout_s=200))


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("size", "calls"), [(2, 2500), (4, 250)])
def test_gathers_of_two_groups_alternate(size: int, calls: int) -> None:
    assert values(run_ranks(size, collectives.two_groups, size, calls, timeout_s=250)) == [[]] * size


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kind", small_operations.KINDS)
def test_numbers_of_small_operations_come_round(kind: str) -> None:
    assert values(run_ranks(2, small_operations.come_round, 2, kind, timeout_s=250)) == [[]] * 2


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", small_operations.DIFFERENT)
def test_kernels_find_small_operations_that_differ(name: str) -> None:
    for said in values(run_ranks(3, small_operations.differs, name, 1, timeout_s=100)):
        assert small_operations.DIFFERENT[name][2] in said, said


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("much memory")
@pytest.mark.parametrize("memory", ["mapped", "foreign"])
@pytest.mark.parametrize("path", ["copy_engine", "sm"])
def test_a_gather_of_more_than_two_gibibytes(path: str, memory: str) -> None:
    values(run_ranks(2, large.gather, 2, path, memory, timeout_s=200))


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("much memory")
def test_a_sum_of_more_than_two_gibibytes() -> None:
    values(run_ranks(2, large.scatter, 2, "auto", timeout_s=200))


@pytest.mark.gpu(2)
def test_a_gather_by_copy_engines_needs_no_sm() -> None:
    assert all(values(run_ranks(2, collectives.without_sms, 2, timeout_s=100)))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("path", collectives.PATHS)
def test_a_gather_can_be_waited_for_after_close(path: str) -> None:
    assert all(values(run_ranks(2, collectives.wait_after_close, path, timeout_s=100)))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("path", collectives.PATHS)
@pytest.mark.parametrize("what", collectives.DIFFERENT)
def test_ranks_that_disagree_on_one_gather_are_told_so(what: str, path: str) -> None:
    for said in values(run_ranks(3, collectives.differ, path, what, timeout_s=100)):
        assert "ranks disagree on" in said and collectives.DIFFERENT[what] in said and "on rank 1" in said, said


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize(
    ("path", "behind"), [*((path, 0) for path in (*collectives.PATHS, "sum")), ("copy_engine", 5000)]
)
def test_a_dead_rank_is_named_by_every_survivor(path: str, behind: int) -> None:
    """behind: kernels after the operation, more than a device's queue takes."""
    victim = 1
    outcomes = run_ranks(3, collectives.survive, path, victim, behind, timeout_s=100)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for blamed, step, took in values([outcomes[0], outcomes[2]]):
        assert (blamed, step) == (victim, "reduce_scatter" if path == "sum" else "all_gather")
        assert took < collectives.DEADLINE_S + 5, f"it took {took:.1f} s"
