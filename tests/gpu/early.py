"""Dispatches that receive before the host has their totals, which `denies_totals` keeps from it."""

from __future__ import annotations

import itertools
import unittest.mock
from dataclasses import replace

import torch

from ep_plugin.moe.reference import reference_dispatch
from tests.gpu.checks import FLAT, TOKEN_MAJOR, Case, Inputs, assert_received, check_round, communicator, make_inputs


def receives_early(rank: int, size: int) -> None:
    """Rows go ahead of the totals: into room that is enough, or too small on one rank, and to pools that must grow."""
    alike = Case(tokens=2000, dropped=0.7, ragged=0, topk=2)
    wide, skewed = replace(alike, hidden=1024), replace(alike, hidden=1024, dropped=0.0, only_rank=size - 1)
    for layout, most in itertools.product((FLAT, TOKEN_MAJOR), (None, alike.tokens)):
        with communicator(replace(wide, layout=layout), rank, size, timeout_s=60, max_tokens_per_rank=most) as comm:
            history, flags = [], []
            kernels = unittest.mock.Mock(wraps=comm.engine.kernels)
            kernels.dispatch_recv.side_effect = lambda args, to=flags: (
                to.append(args.optimistic) or unittest.mock.DEFAULT
            )
            comm.engine.kernels, comm.engine.control.denies_totals = kernels, True
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
    case = Case(tokens=2000, ragged=0, hidden=1024, topk=2)
    for busy, early in itertools.product((0, size - 1), (False, True)):
        with communicator(case, rank, size, timeout_s=60) as comm:
            kernels = comm.engine.kernels = unittest.mock.Mock(wraps=comm.engine.kernels)
            comm.engine.control.denies_totals = early
            history = []
            for seed, many in enumerate((False, False, True, True)):
                given = _sparse_but_of(busy if many else None, case, size, seed)
                kernels.reset_mock()
                out, _ = comm.dispatch(*(part[rank].to(comm.engine.device) for part in (given.x, given.ids)))
                assert_received(out, given.expected[rank])
                history.append((kernels.dispatch_send.call_count, kernels.dispatch_recv.call_count))
            known = [(1, 1), (1, 1), (2, 1), (1, 1)]
            guessed = [(1, 1), (1, 1), (2, 2), (1, 1)]
            expected = [guessed] if early else [known, guessed]  # the device decides whether the totals come in time
            assert history in expected, f"expected sends and receives among {expected}, got {history}"


def _sparse_but_of(busy: int | None, case: Case, size: int, seed: int) -> Inputs:
    """Inputs in which nine tenths of all ids are dropped, but none of rank `busy`."""
    sparse, full = (make_inputs(replace(case, dropped=dropped), size, seed) for dropped in (0.9, 0.0))
    ids = [(full if rank == busy else sparse).ids[rank] for rank in range(size)]
    experts = case.experts_per_rank * size
    expected = reference_dispatch(
        sparse.x, ids, sparse.weights, num_experts=experts, layout=case.layout, expert_alignment=case.alignment
    )
    return Inputs(sparse.x, ids, sparse.weights, expected)


def changes_streams(rank: int, size: int) -> None:
    """Receiving moves to the lane that sends, and back; nothing orders the callers' streams, and peers are late."""
    case = Case(tokens=400, hidden=1024)
    with communicator(case, rank, size, timeout_s=60) as comm:
        comm.engine.control.denies_totals = True
        device = comm.engine.device
        given = [make_inputs(case, size, seed) for seed in range(8)]
        parts = [[part[rank].to(device) for part in (g.x, g.ids, g.weights)] for g in given]
        streams = [torch.cuda.Stream(device) for _ in given]
        torch.cuda.synchronize(device)
        outs = []
        for turn, (arguments, stream) in enumerate(zip(parts, streams, strict=True)):
            with torch.cuda.stream(stream):
                comm.set_sms(dispatch_recv_sms=0 if turn % 2 else None)
                if rank == turn % size:
                    torch.cuda._sleep(20_000_000)  # some 10 ms
                outs.append(comm.dispatch(*arguments)[0])
        torch.cuda.synchronize(device)
        for out, of_all in zip(outs, given, strict=True):
            assert_received(out, of_all.expected[rank])
