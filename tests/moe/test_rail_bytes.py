"""`MoECommunicator.rail_bytes_sent`: what a rank has sent to other nodes."""

from __future__ import annotations

import torch

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from tests.ranks import run_ranks, values

TOKENS, HIDDEN, CHUNKS = 10, 64, 2
# The header, what was left out, how long the sender waited; for each chunk counts of a node, its ranks and experts.
COUNTS = 8 * (9 + 2 + 1 + CHUNKS * (1 + 2 + 2))
IDS, ROW = 4 * 2, 4 * HIDDEN


def test_each_token_is_counted_once_for_a_node() -> None:
    # Two experts of the other node; one there and one here; two here.
    for near, once, far in values(run_ranks(4, _run, env={"EP_PLUGIN_RANKS_PER_NODE": "2"})):
        assert near == [COUNTS, COUNTS]
        assert once == far == [COUNTS + TOKENS * (IDS + ROW), COUNTS + TOKENS * ROW]


def test_nothing_is_counted_on_one_node() -> None:
    assert values(run_ranks(2, _run, env={"EP_PLUGIN_RANKS_PER_NODE": "2"})) == [[[0, 0]] * 3] * 2


def _run(rank: int) -> list[list[int]]:
    """Bytes that a dispatch and its combine send, for each of three routings."""
    config = MoECommunicatorConfig(num_experts=4, hidden_size=HIDDEN, topk=2, rail_chunks=CHUNKS)
    found = []
    with MoECommunicator(None, config) as comm:
        other = comm.size // 2 * comm.num_local_experts  # the first expert of the upper half of the ranks
        here, there = (0, other) if rank < comm.size / 2 else (other, 0)
        for experts in ((here, here + 1), (here, there), (there, there + 1)):
            x, ids = torch.randn(TOKENS, HIDDEN), torch.tensor([experts] * TOKENS)
            before = comm.rail_bytes_sent
            out, handle = comm.dispatch(x, ids)
            dispatched = comm.rail_bytes_sent
            comm.combine(out.tokens, handle)
            found.append([dispatched - before, comm.rail_bytes_sent - dispatched])
    return found
