"""Dispatch and combine over emulated nodes when ranks die, stop, abort, disagree, or send garbage: every rank of every
node raises in time, says who and where, closes, and leaves nothing behind."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.moe.across_nodes.nodes import Nodes
from tests.faults.fault_cases import (
    RAIL_CHUNKS,
    at_gate,
    nothing_left_behind,
    open_communicator,
    open_with_deadline,
    orphaned_names,
    signal_self,
    tokens_for,
)
from tests.ranks import run_ranks, values

DEADLINE_S = 2.0
GRACE_S = 5.0
PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline
AT_ONCE_S = 1.5  # a second, and what a crowded machine adds
LONG = os.environ.get("EP_TEST_LONG") == "1"
TOKENS = 200
TWO_NODES = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
WIDE = 2048  # rows that no socket's buffer holds


def _nodes_of(comm: MoECommunicator) -> Nodes:
    return comm.new_dispatch.args[0]  # type: ignore[attr-defined]


def _open(size: int, timeout_s: float = DEADLINE_S) -> MoECommunicator:
    return open_with_deadline(size, timeout_s, hidden_size=WIDE)


def _round_trip(comm: MoECommunicator, hidden: int = WIDE) -> None:
    x, ids, weights = tokens_for(comm.rank, comm.size, TOKENS, hidden)
    out, handle = comm.dispatch(x, ids, weights)
    torch.testing.assert_close(comm.combine(out.tokens, handle, weights=out.weights), x)


def _fails(comm: MoECommunicator) -> tuple[EpPluginError, float]:
    """The error of this rank, which has lost a peer, and how long the call has lasted that raised it."""
    x, ids, weights = tokens_for(comm.rank, comm.size, TOKENS, WIDE)
    began = time.monotonic()
    with pytest.raises((PeerTimeout, PeerAborted)) as caught:
        for _ in range(3):
            began = time.monotonic()
            out, handle = comm.dispatch(x, ids, weights)
            began = time.monotonic()
            comm.combine(out.tokens, handle, weights=out.weights)
    return caught.value, time.monotonic() - began


def _ends(comm: MoECommunicator, error: EpPluginError) -> None:
    """Every later call raises `error` again, at once, and nothing of the communicator is left when it is closed."""
    x, ids, _ = tokens_for(comm.rank, comm.size, 3)
    began = time.monotonic()
    for call in (comm.check, lambda: comm.dispatch(x, ids), lambda: comm.dispatch_async(x, ids)):
        with pytest.raises(type(error)) as again:
            call()
        assert str(again.value) == str(error)
    comm.close()
    assert time.monotonic() - began < 1
    nothing_left_behind()


def _before_call(nodes: Nodes, method: str, number: int, act: Callable[[], None]) -> None:
    """Calls `act` before the call of this number, 1 for the next, of a method of `nodes`."""
    known, calls = getattr(nodes, method), iter(range(1, number + 1))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == number:
            act()
        return known(*args, **kwargs)

    setattr(nodes, method, call)


def _crossings(chunks: int) -> dict[str, tuple[str, int]]:
    """When the victim dies: in which call of Nodes, counted from the start of a round trip in `chunks`."""
    return {
        "before the counts cross": ("exchange_counts", 1),
        "before rows cross": ("start_chunk", 1),
        "while rows cross": ("finish", 1 + 1 + chunks // 3),
        "before combine": ("agree", 1),
        "before sums return": ("start_chunk", chunks + 1),
        "while sums return": ("start_chunk", chunks + 1 + chunks // 2),
        "before sums land": ("finish", 2 + chunks + 1),
    }


GATES = ("plan", "notify", "dispatch_send", "dispatch_recv", "combine_send")


def _loses(rank: int, size: int, victim: int, when: str, how: int = signal.SIGKILL) -> tuple[EpPluginError, float]:
    """The victim sends itself the signal `how`."""
    if rank == victim and when in GATES:
        os.environ["EP_PLUGIN_TEST_GATE"] = when
    comm = _open(size)
    gate, comm.engine.comm.gate = comm.engine.comm.gate, 0
    _round_trip(comm)  # the pools are there when it happens
    comm.engine.comm.gate = gate
    store = dist.distributed_c10d._get_default_store()
    if rank == victim:
        store.set("victim", str(os.getpid()))
        if when in GATES:
            at_gate(comm, lambda: signal_self(how))
        else:
            nodes = _nodes_of(comm)
            _before_call(nodes, *_crossings(nodes.chunks)[when], lambda: signal_self(how))
    dist.barrier()  # the deadline is for what follows
    error, took = _fails(comm)
    _ends(comm, error)
    if store.add("survivors", 1) == size - 1 and how == signal.SIGSTOP:
        os.kill(int(store.get("victim")), signal.SIGKILL)
    return error, took


def _assert_all_name(size: int, victim: int, outcomes: list[Any]) -> None:
    assert outcomes[victim].exitcode == -signal.SIGKILL
    survivors = [outcomes[rank] for rank in range(size) if rank != victim]
    for error, took in values(survivors):
        assert took < DEADLINE_S + GRACE_S
        assert error.rank == victim, repr(error)
        assert isinstance(error, PeerAborted) or error.step, repr(error)
    assert not orphaned_names()


MOMENTS = [*_crossings(0), *GATES]
KILLED = [(2, 2, 3, when) for when in MOMENTS]  # nodes, ranks of each, the victim, when
KILLED += [(3, 1, 1, when) for when in ("before rows cross", "notify", "before sums land")]
if LONG:
    KILLED += [
        (*shape, shape[0] * shape[1] - 1, when) for shape in ((2, 1), (2, 4), (3, 2), (4, 2)) for when in MOMENTS
    ]


@pytest.mark.deadline
@pytest.mark.parametrize(("num_nodes", "per_node", "victim", "when"), KILLED)
def test_a_rank_killed_on_another_node_is_named_by_every_survivor(
    num_nodes: int, per_node: int, victim: int, when: str
) -> None:
    size, env = num_nodes * per_node, {"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}
    _assert_all_name(size, victim, run_ranks(size, _loses, size, victim, when, env=env))


@pytest.mark.deadline
@pytest.mark.parametrize("when", ["before combine", "combine_send", "while sums return"])
def test_a_rank_that_stops_during_combine_is_named_in_time(when: str) -> None:
    _assert_all_name(4, 2, run_ranks(4, _loses, 4, 2, when, signal.SIGSTOP, env=TWO_NODES))


def _aborts(rank: int, during: str, own_thread: bool) -> tuple[float, PeerAborted]:
    """Rank 1 aborts before it calls `during`, for which the others wait."""
    comm = _open(4, timeout_s=PATIENCE_S)
    _round_trip(comm)
    x, ids, weights = tokens_for(rank, 4, TOKENS, WIDE)
    if during == "combine":
        out, handle = comm.dispatch(x, ids, weights)
    dist.barrier()
    began = time.monotonic()
    if rank == 1 and not own_thread:
        comm.abort("MemoryError: no room")
    elif rank == 1:
        timer = threading.Timer(0.2, comm.abort, ["MemoryError: no room"])
        timer.start()
        timer.join()
    with pytest.raises(PeerAborted, match="rank 1 aborted: MemoryError: no room") as caught:
        if during == "combine":
            comm.combine(out.tokens, handle, weights=out.weights)
        while True:
            _round_trip(comm)
    took = time.monotonic() - began
    error = caught.value
    del caught
    _ends(comm, error)
    return took, error


@pytest.mark.parametrize("during", ["dispatch", "combine"])
@pytest.mark.parametrize("own_thread", [False, True])
def test_an_abort_ends_the_waits_of_the_other_node(during: str, own_thread: bool) -> None:
    for took, error in values(run_ranks(4, _aborts, during, own_thread, env=TWO_NODES)):
        assert took < AT_ONCE_S and (error.rank, error.reason) == (1, "MemoryError: no room")


def _errs(rank: int) -> None:
    """Rank 3 passes wrong arguments before every right call."""
    with _open(4, timeout_s=PATIENCE_S) as comm:
        x, ids, weights = tokens_for(rank, 4, TOKENS, WIDE)
        if rank == 3:
            for wrong in ((x[1:], ids, weights), (x, ids.float(), weights), (x[:, :3], ids, weights), (x, ids[0])):
                with pytest.raises(ValueError):
                    comm.dispatch(*wrong)
        out, handle = comm.dispatch(x, ids, weights)
        if rank == 3:
            torn = handle._replace(totals=handle.totals - 1)
            for wrong in ((out.tokens[1:], handle), (out.tokens, None), (out.tokens.to(torch.int32), handle)):
                with pytest.raises(ValueError):
                    comm.combine(*wrong)
            with pytest.raises(ValueError):
                comm.combine(out.tokens, torn)
            with pytest.raises(ValueError):
                comm.dispatch(x, ids[:, :1], previous_handle=handle)
        torch.testing.assert_close(comm.combine(out.tokens, handle, weights=out.weights), x)
        _round_trip(comm)


def test_wrong_arguments_on_one_rank_disturb_nobody() -> None:
    values(run_ranks(4, _errs, env=TWO_NODES))


def _dispatch(comm: Any, k: int = 2, count: int = 9, hidden: int = 8, dtype: Any = None, **beside: Any) -> Any:
    x, ids, weights = tokens_for(comm.rank, comm.size, count, hidden)
    given = {"topk_weights": weights[:, :k]} | beside
    return comm.dispatch(x.to(dtype or x.dtype), ids[:, :k].contiguous(), **given)


def _combine(comm: Any, hidden: int = 8, dtype: Any = torch.float32, **beside: Any) -> Any:
    _, handle = _dispatch(comm, **beside)
    return comm.combine(torch.zeros(int(handle.totals[1]), hidden, dtype=dtype), handle)


def _other_call(comm: Any, odd: bool) -> None:
    out, handle = _dispatch(comm)
    _ = comm.combine(out.tokens, handle) if odd else _dispatch(comm)


def _other_handle(comm: Any, odd: bool) -> None:
    (_, first), (_, second) = _dispatch(comm), _dispatch(comm, count=5)
    handle = second if odd else first
    comm.combine(torch.zeros(int(handle.totals[1]), 8), handle)


def _cached(comm: Any, odd: bool, **differs: Any) -> None:
    _, handle = _dispatch(comm)
    _dispatch(comm, **({"previous_handle": handle} | (differs if odd else {})))


# What differs, in the message; the call of a communicator, by whether this rank is one that differs.
CALLS: dict[str, tuple[str, Callable[[Any, bool], Any]]] = {
    "top-k": ("top-k is", lambda c, odd: _dispatch(c, k=1 if odd else 2)),
    "dtype": ("dtype is|torch.int32", lambda c, odd: _dispatch(c, dtype=torch.int32 if odd else None)),
    "hidden size": ("row bytes is", lambda c, odd: _dispatch(c, hidden=16 if odd else 8)),
    "weights": ("weight bytes is", lambda c, odd: _dispatch(c, **({"topk_weights": None} if odd else {}))),
    "capacity": ("operation is dispatch", lambda c, odd: _dispatch(c, capacity=200 if odd else None)),
    "top-k with capacity": ("top-k is", lambda c, odd: _dispatch(c, k=1 if odd else 2, capacity=200)),
    "cached": ("dtype is", lambda c, odd: _cached(c, odd, dtype=torch.int32)),
    "cached, hidden size": ("row bytes is", lambda c, odd: _cached(c, odd, hidden=16)),
    "cached or fresh": ("operation is", lambda c, odd: _cached(c, odd, previous_handle=None)),
    "combine: dtype": ("dtype is|row bytes is", lambda c, odd: _combine(c, dtype=(torch.float32, torch.float16)[odd])),
    "combine: hidden size": ("row bytes is", lambda c, odd: _combine(c, hidden=16 if odd else 8)),
    "combine or dispatch": ("operation is", _other_call),
    "another handle": ("rows that cross is|number of", _other_handle),
}


def _disagrees(rank: int, odd_ranks: tuple[int, ...]) -> dict[str, tuple[str, str, float]]:
    said = {}
    for name, (_, call) in CALLS.items():
        group = dist.new_group()  # an abort breaks the connections of its group
        config = MoECommunicatorConfig(
            num_experts=8, hidden_size=64, topk=2, max_tokens_per_rank=40, timeout_s=PATIENCE_S
        )
        comm = MoECommunicator(group, config)
        _combine(comm)
        dist.barrier()
        began = time.monotonic()
        with pytest.raises(EpPluginError) as caught:
            call(comm, rank in odd_ranks)
            while time.monotonic() < began + PATIENCE_S:
                comm.check()
        error, took = caught.value, time.monotonic() - began
        del caught
        said[name] = type(error).__name__, str(error), took
        _ends(comm, error)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("odd_ranks", [(1,), (2, 3)])
def test_ranks_that_disagree_across_nodes_all_say_so(odd_ranks: tuple[int, ...]) -> None:
    for said in values(run_ranks(4, _disagrees, odd_ranks, env=TWO_NODES)):
        for name, (kind, text, took) in said.items():
            assert took < AT_ONCE_S, (name, text, took)
            assert kind == "DisagreementError", (name, kind, text)
            assert re.search(CALLS[name][0], text), (name, text)


def _other_config(rank: int) -> str:
    with pytest.raises(DisagreementError) as caught:
        open_communicator(4, timeout_s=PATIENCE_S, rail_chunks=2 if rank == 3 else None)
    nothing_left_behind()
    return str(caught.value)


def test_ranks_that_disagree_on_the_chunks_of_a_rail() -> None:
    for said in values(run_ranks(4, _other_config, env=TWO_NODES)):
        assert "rail_chunks=2" in said and "rail_chunks=None" in said and "rank 3" in said


_TOKENS_WORD = _C.header_fields.index("num_tokens")
_FIRST_COUNT = _C.message_head_words
# What rank 2 sends in place of its counts (int64), or of the expert ids of a chunk (int32): how it changes them, and
# what ranks say.
GARBAGE: dict[str, tuple[str, Callable[[torch.Tensor], Any], str]] = {
    "negative count": ("counts", lambda words: words[_FIRST_COUNT].fill_(-1), "rank 2 sent -1 rows of"),
    "large count": ("counts", lambda words: words[_FIRST_COUNT].fill_(2**40), f"rank 2 sent {2**40} rows of"),
    "one row fewer": ("counts", lambda words: words[_FIRST_COUNT].sub_(1), " waited "),
    "negative tokens": (
        "counts",
        lambda words: words[_TOKENS_WORD].fill_(-5),
        "rank 2 sent -5 as its number of tokens",
    ),
    "many tokens": ("counts", lambda words: words[_TOKENS_WORD].fill_(41), "rank 2 sent 41 as its number of tokens"),
    "header": ("counts", lambda words: words[:_FIRST_COUNT].fill_(2**62 + 7), "ranks disagree on one call"),
    "large ids": ("ids", lambda ids: ids.fill_(2**31 - 1), "topk_ids: expected -1 or an expert id below"),
    "negative ids": ("ids", lambda ids: ids.fill_(-(2**31)), "topk_ids: expected -1 or an expert id below"),
    "no ids": ("ids", lambda ids: ids.fill_(-1), "have 0 rows or pairs where their ranks counted"),
    "one expert twice": (
        "ids",
        lambda ids: ids.copy_(ids[:, :1].expand_as(ids)),
        "rows or pairs where their ranks counted",
    ),
}


def _sends_garbage(rank: int, size: int, what: str, change: Callable[[torch.Tensor], Any]) -> str:
    """What this rank says when rank 2 changes its "counts" or "ids"."""
    comm = open_with_deadline(size, DEADLINE_S, max_tokens_per_rank=40)
    _dispatch(comm, count=40)
    dist.barrier()
    if rank == 2:
        (_garbles_counts if what == "counts" else _garbles_ids)(_nodes_of(comm), change)
    began, said = time.monotonic(), ""
    try:
        for _ in range(2):
            _dispatch(comm, count=40)
    except (EpPluginError, ValueError) as error:
        said = str(error)
        assert time.monotonic() - began < DEADLINE_S + GRACE_S
    comm.close()
    nothing_left_behind()
    return said


def _garbles_counts(nodes: Nodes, change: Callable[[torch.Tensor], Any]) -> None:
    """Changes the counts that the next dispatch sends over the rail."""
    start, calls = nodes._start, itertools.count(1)

    def garbled(sends: Any, receives: Any, what: str) -> Any:
        if next(calls) == 1:
            sends = [(node, half[begin : begin + size].clone(), 0, size) for node, half, begin, size in sends]
            for _, tensor, _, _ in sends:
                change(tensor.view(torch.int64))
        return start(sends, receives, what)

    nodes._start = garbled  # type: ignore[method-assign]


def _garbles_ids(nodes: Nodes, change: Callable[[torch.Tensor], Any]) -> None:
    """Changes the expert ids that travel beside the rows of the next chunk."""
    start, calls = nodes.start_chunk, itertools.count(1)

    def garbled(chunk: int, fields: Any, *rows: Any, **given: Any) -> Any:
        if next(calls) == 1:
            *others, (sent, landed, row_bytes, before) = fields
            changed = sent.clone()
            change(changed.view(torch.int32).view(-1, row_bytes // 4))
            fields = [*others, (changed, landed, row_bytes, before)]
        return start(chunk, fields, *rows, **given)

    nodes.start_chunk = garbled  # type: ignore[method-assign]


def _sends_named_garbage(rank: int, name: str) -> str:
    return _sends_garbage(rank, 4, *GARBAGE[name][:2])


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_from_a_peer_on_the_rail_is_an_error(name: str) -> None:
    said, expected = values(run_ranks(4, _sends_named_garbage, name, env=TWO_NODES)), GARBAGE[name][2]
    assert expected in said[0], said
    assert all(said) or not expected, said


# In the words of a chunk, behind the counts of all chunks: rows for each rank of the node, then pairs for each expert.
@pytest.mark.parametrize("word", [0, 1, 2, 5])
@pytest.mark.parametrize("by", [1, -1])
def test_counts_that_are_not_those_of_the_ids_are_an_error(word: int, by: int) -> None:
    """The rank that forwards the tokens finds it when they have come."""
    change = functools.partial(_add, _FIRST_COUNT + RAIL_CHUNKS + word, by)
    said = values(run_ranks(6, _sends_garbage, 6, "counts", change, env=TWO_NODES))
    found = "rows or pairs where their ranks counted", "sent an index outside what was agreed"  # more rows than tokens
    assert any(text in each for each in said for text in found), said
    assert all(said), said


def _add(at: int, by: int, words: torch.Tensor) -> None:
    words[at] += by
