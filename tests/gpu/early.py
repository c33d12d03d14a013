"""Dispatches that are expanded before the host has their totals. `knows` is answered with no: it is never too late."""

from __future__ import annotations

import itertools
import unittest.mock
from dataclasses import replace

import torch

from tests.gpu.checks import FLAT, TOKEN_MAJOR, Case, assert_received, check_round, communicator, make_inputs


def expands_early(rank: int, size: int) -> None:
    """Rows go ahead of the totals: into room that is enough, or too small on one rank, and to pools that must grow."""
    alike = Case(tokens=2000, dropped=0.7, ragged=0, topk=2)
    wide, skewed = replace(alike, hidden=1024), replace(alike, hidden=1024, dropped=0.0, only_rank=size - 1)
    for layout, most in itertools.product((FLAT, TOKEN_MAJOR), (None, alike.tokens)):
        with communicator(replace(wide, layout=layout), rank, size, timeout_s=60, max_tokens_per_rank=most) as comm:
            history, flags = [], []
            kernels = unittest.mock.Mock(wraps=comm.engine.kernels)
            kernels.expand.side_effect = lambda args, to=flags: to.append(args.optimistic) or unittest.mock.DEFAULT
            comm.engine.kernels, comm.engine.knows = kernels, lambda ticket: False
            for seed, case in enumerate((alike, alike, wide, alike, skewed, alike)):
                flags.clear()
                check_round(comm, replace(case, layout=layout), seed)
                *made, known = flags
                assert known == 0, "expected a dispatch over known routing to need no guess"
                history.append(made)
            twice = [1, 0]
            grown = twice if most is None else [1]
            outgrown = twice if rank == size - 1 else grown
            expected = [[0], [1], grown, [1], outgrown, [0]]
            assert history == expected, f"{layout}, at most {most}: expected expands {expected}, got {history}"


def grows_unevenly(rank: int, size: int) -> None:
    """One rank alone has more rows than the pools hold: it sends none, others have sent theirs, and all send again."""
    few = Case(tokens=40, ragged=0, hidden=1024, dropped=0.0)
    most_here, most_there = replace(few, tokens=600, ragged=590), replace(few, tokens=10, ragged=-2000)
    for early in (False, True):
        with communicator(few, rank, size, timeout_s=60) as comm:
            if early:
                comm.engine.knows = lambda ticket: False
            kernels = comm.engine.kernels = unittest.mock.Mock(wraps=comm.engine.kernels)
            history = []
            for seed, case in enumerate((few, few, most_here, few, most_there, most_there)):
                kernels.send.reset_mock()
                check_round(comm, case, seed)
                history.append(kernels.send.call_count - 1)  # the last one is over a known routing
            grows_again = 2 if size > 1 else 1
            expected = [1, 1, 2, 1, grows_again, 1]
            assert history == expected, f"expected sends {expected}, got {history}"


def changes_lanes(rank: int, size: int) -> None:
    """Receiving moves to the lane that sends, and back; nothing orders the callers' streams, and peers are late."""
    case = Case(tokens=400, hidden=1024)
    with communicator(case, rank, size, timeout_s=60) as comm:
        comm.engine.knows = lambda ticket: False
        device = comm.engine.device
        given = [make_inputs(case, size, seed) for seed in range(8)]
        parts = [[part[rank].to(device) for part in (g.x, g.ids, g.weights)] for g in given]
        streams = [torch.cuda.Stream(device) for _ in given]
        torch.cuda.synchronize(device)
        outs = []
        for turn, (arguments, stream) in enumerate(zip(parts, streams, strict=True)):
            with torch.cuda.stream(stream):
                comm.set_sms(expand_sms=0 if turn % 2 else None)
                if rank == turn % size:
                    torch.cuda._sleep(20_000_000)  # some 10 ms
                outs.append(comm.dispatch(*arguments)[0])
        torch.cuda.synchronize(device)
        for out, of_all in zip(outs, given, strict=True):
            assert_received(out, of_all.expected[rank])
