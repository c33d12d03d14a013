"""The SMs that kernels of several communicators may occupy at the same time, on stand-ins for streams."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ep_plugin import _C
from ep_plugin.config import DispatchLayout, in_one_kernel
from ep_plugin.runtime.streams import Streams
from tests.moe.moe_cases import Case, communicator, make_inputs
from tests.ranks import run_ranks, values

SMS = 132


class Device:
    """A device of SMS SMs. waits: (later, earlier) of each order of two streams."""

    def __init__(self, captured: Sequence[int] = ()) -> None:
        self.waits: list[tuple[int, int]] = []
        capture = {stream: 7 for stream in captured}
        self.budget = _C.SmBudget(
            0, SMS, lambda stream, _: capture.get(stream, 0), lambda later, earlier, _: self._order(later, earlier)
        )

    def _order(self, later: int, earlier: int) -> None:
        self.waits.append((later, earlier))

    def order(self, of_messages: bool = False) -> _C.StreamOrder:
        return _C.StreamOrder(self.budget, of_messages)

    def taken(self) -> list[tuple[int, int]]:
        """The waits since the last call."""
        waits, self.waits = self.waits, []
        return waits


def test_kernels_that_fit_are_not_ordered() -> None:
    device = Device()
    send, receive, sums = device.order(), device.order(), device.order()
    for _ in range(3):
        send.enter(1, 33, needed=1)
        receive.enter(2, 64, needed=1)
        sums.enter(3, 24)
    assert not device.waits


def test_one_communicator_is_ordered_by_its_own_calls_alone() -> None:
    device = Device()
    order = device.order()
    for stream in (5, 5, 6, 5):
        assert order.enter(stream, SMS) == stream
    assert device.taken() == [(6, 5), (5, 6)]


def test_the_streams_used_last_stay_beside() -> None:
    device = Device()
    send, receive, sums, gather = (device.order() for _ in range(4))
    receive.enter(2, 64, needed=1)
    sums.enter(3, 24)
    send.enter(1, 33, needed=1)
    assert not device.waits
    gather.enter(4, 64)  # 121 and 64
    assert device.taken() == [(4, 2)]


def test_kernels_that_take_all_sms_run_alone() -> None:
    device = Device()
    low_latency, others = device.order(), [device.order() for _ in range(3)]
    for stream, other in enumerate(others):
        other.enter(stream, 8)
    low_latency.enter(9, SMS)
    assert device.taken() == [(9, 2), (9, 1), (9, 0)]
    others[1].enter(1, 8)
    assert device.taken() == [(1, 9)]


def test_a_kernel_whose_ctas_need_not_run_together_needs_one_sm() -> None:
    device = Device()
    gather, receive = device.order(), device.order()
    gather.enter(4, 100)
    receive.enter(2, 64, needed=1)
    assert not device.waits
    gather.enter(4, 100)
    assert device.taken() == [(4, 2)]


def test_a_stream_is_never_ordered_after_itself() -> None:
    device = Device()
    for order in [device.order() for _ in range(4)]:
        order.enter(1, SMS)
    assert not device.waits


def test_messages_wait_for_no_messages() -> None:
    device = Device()
    lanes = [device.order(of_messages=True) for _ in range(20)]
    for stream, lane in enumerate(lanes):
        lane.enter(stream, 8)
    assert not device.waits
    gather, receive = device.order(), device.order()
    receive.enter(31, 64, needed=1)
    assert not device.waits, "its first CTA fits beside all of them"
    gather.enter(30, 44)
    assert device.taken() == [(30, stream) for stream in reversed(range(17))], "64 SMs and 3 messages stay beside 44"
    low_latency = device.order()
    low_latency.enter(32, SMS)
    device.taken()
    lanes[0].enter(0, 8)
    assert device.taken() == [(0, 32)]


def test_work_that_takes_no_sm_is_in_its_own_order_alone() -> None:
    device = Device()
    gather, low_latency = device.order(), device.order()
    low_latency.enter(1, SMS)
    gather.enter(2, 0)
    gather.enter(3, 0)
    assert device.taken() == [(3, 2)]
    low_latency.enter(1, SMS)
    assert not device.waits


def test_streams_of_other_captures_are_not_ordered() -> None:
    device = Device(captured=(1, 2))
    orders = [device.order() for _ in range(3)]
    for stream, order in enumerate(orders):
        order.enter(stream, SMS)
    assert device.taken() == [(2, 1)]


def test_closed_communicators_leave_their_sms() -> None:
    device = Device()
    first, second = device.order(), device.order()
    first.enter(1, 100)
    del first
    second.enter(2, 100)
    assert not device.waits


def test_reserved_sms() -> None:
    device = Device()
    for _ in range(2):
        device.budget.reserve(8)
    first, second = device.order(), device.order()
    assert device.budget.usable == first.usable == SMS - 8
    first.enter(1, 64)
    second.enter(2, 64)
    assert device.taken() == [(2, 1)]


@pytest.mark.parametrize(
    ("nbytes", "sms"), [(0, 1), (1, 1), (16 << 10, 1), (20 << 10, 2), (128 << 10, 8), (1 << 30, 8)]
)
def test_sms_of_a_message(nbytes: int, sms: int) -> None:
    assert _C.message_sms(nbytes) == sms


@pytest.mark.parametrize("seed", range(20))
def test_what_may_run_at_once_fits(seed: int) -> None:
    """Kernels that nothing orders may all run at the same time."""
    drawn, device = random.Random(seed), Device()
    orders = [device.order() for _ in range(6)]
    before: list[set[int]] = []  # by kernel: the kernels that are over when it starts
    on_stream: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    sizes: list[int] = []
    for number in range(14):
        chosen, stream, sms = drawn.randrange(6), drawn.randrange(4), drawn.choice((8, 24, 64, 97, SMS))
        orders[chosen].enter(stream, sms)
        done = set(on_stream.get(stream, set()))
        for later, earlier in device.taken():
            assert later == stream
            done |= on_stream.get(earlier, set())
        if chosen in last:
            assert last[chosen] in done, "kernels of one order run one at a time"
        before.append(done)
        on_stream[stream] = done | {number}
        last[chosen] = number
        sizes.append(sms)
    for count in range(2, 7):
        for some in itertools.combinations(range(14), count):
            if not any(one in before[other] for one, other in itertools.combinations(some, 2)):
                assert sum(sizes[one] for one in some) <= SMS, some


class _Enters(Streams):
    def __init__(self, events: list[tuple[str, int, int]]) -> None:
        self._events = events

    def enter_on(self, stream: int, sms: int, needed: int) -> None:
        if sms > 0:
            self._events.append(("enter", sms, needed))


class Launches:
    """The kernels of a communicator. events: of each launch, and of each order for kernels, what it was given."""

    def __init__(self, engine: Any) -> None:
        self._kernels, self.events = engine.kernels, list[tuple[str, int, int]]()
        engine.kernels = self
        engine.use(_Enters(self.events))

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(self._kernels, name)

        def launch(*args: Any) -> None:
            self.events.append((name, getattr(args[0], "num_sms", 0), 0))
            kernel(*args)

        return launch

    def last_before(self, at: int, end: str) -> tuple[int, int]:
        """What the last event before number `at` was given whose name ends so."""
        return next(event[1:] for event in reversed(self.events[:at]) if event[0].endswith(end))


def _high_throughput(rank: int, size: int) -> int:
    case = Case(tokens=(20,) * size, num_experts=2 * size)
    inputs, checked = make_inputs(case), 0
    with communicator(case, DispatchLayout.FLAT) as comm:
        launches = Launches(comm.engine)
        for settings in ({}, in_one_kernel(5)):
            comm.set_sms(**settings)
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            comm.dispatch(inputs.x[rank], inputs.ids[rank], previous_handle=handle)
            comm.combine(out.tokens, handle)
        for at, (name, sms, _) in enumerate(launches.events):
            if name in ("dispatch", "combine"):
                assert launches.last_before(at, "enter") == (1 + sms, 1 + sms)
            elif name in ("dispatch_recv", "combine_recv"):
                assert launches.last_before(at, "enter") == (1 + launches.last_before(at, "_send")[0] + sms, 1)
            elif name == "notify":
                assert launches.last_before(at, "enter")[0] > 1
            checked += name != "enter"
    return checked


@pytest.mark.parametrize("per_node", ["1", "2"])
def test_kernels_of_high_throughput_ask_for_their_sms(per_node: str) -> None:
    env = {"EP_PLUGIN_RANKS_PER_NODE": per_node}
    assert min(values(run_ranks(2, _high_throughput, 2, env=env))) > 12
