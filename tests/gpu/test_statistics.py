"""Load statistics on GPUs equal what the routers chose, and recording them synchronises nothing."""

from __future__ import annotations

import pytest

from tests.gpu import checks, load_cases
from tests.ranks import note, run_ranks, values


@pytest.mark.gpu(1)
@pytest.mark.parametrize("sms", [{}, checks.ONE_KERNEL], ids=["two kernels", "one kernel"])
def test_sums_equal_what_the_routers_chose(sms: dict[str, int]) -> None:
    values(run_ranks(4, _counted, 4, sms, timeout_s=200))


def _counted(rank: int, size: int, sms: dict[str, int]) -> None:
    load_cases.counted(rank, size, **sms)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("sms", [{}, checks.ONE_KERNEL], ids=["two kernels", "one kernel"])
def test_waits_name_the_late_rank(sms: dict[str, int]) -> None:
    values(run_ranks(3, _late, 3, sms, timeout_s=120))


def _late(rank: int, size: int, sms: dict[str, int]) -> None:
    load_cases.late(rank, size, **sms)


@pytest.mark.gpu(1)
def test_every_replay_of_a_graph_counts() -> None:
    values(run_ranks(2, load_cases.replayed, 2, timeout_s=120))


@pytest.mark.gpu(1)
def test_low_latency() -> None:
    values(run_ranks(2, load_cases.low_latency, 2, timeout_s=120))


@pytest.mark.gpu(1)
def test_recording_adds_one_kernel_to_an_operation_and_no_synchronisation() -> None:
    for found in values(run_ranks(2, load_cases.profiled, 2, timeout_s=200)):
        off, on = found["False"], found["True"]
        waits = {name for name in off.keys() | on.keys() if "ynchronize" in name or "Query" in name}
        for name in waits - {"cudaDeviceSynchronize"}:  # the profiler's own
            assert on.get(name, 0) <= off.get(name, 0), (name, off, on)
        kernels = [{name: calls for name, calls in each.items() if "ep_" in name} for each in (off, on)]
        added = sum(kernels[1].values()) - sum(kernels[0].values())
        assert added == 2 == sum(calls for name, calls in on.items() if "ep_add_counts" in name), kernels
        for copy in ("aten::add_", "aten::_local_scalar_dense", "aten::copy_", "cudaMemcpyAsync"):
            assert on.get(copy, 0) == off.get(copy, 0), (copy, off, on)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("trains", "limit"), [(False, 1.3), (True, 1.03)], ids=["round trip", "training step"])
def test_recording_adds_little(trains: bool, limit: float) -> None:
    """In one of three trials, since other tests share the GPUs. A round trip counts the host's time, which waits for
    the totals there. Its share differs between machines: see docs/statistics.md."""
    for _ in range(3):
        times = values(run_ranks(2, load_cases.timed, 2, trains, timeout_s=80))
        for off, on in times:
            note(f"{off:.3f} ms without, {on:.3f} ms with statistics")
        if all(on < limit * off for off, on in times):
            return
    pytest.fail(f"expected less than {limit} times as long with statistics, got {times}")
