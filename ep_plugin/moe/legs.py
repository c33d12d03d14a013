"""The legs of an operation over N nodes: which rank sends which tokens to which rank over the rail, in which order.

Every rank cuts its tokens into C chunks. A leg brings one chunk's rows to one other node. A rank of node n sends to
nodes n + 1, n + 2, ... in turn, and receives from n - 1, n - 2, .... So no two nodes send to one node at the same time.
The legs have the same numbers on all ranks of a node. Inside a node, tokens are dispatched in M = C + 1 segments.
Segment 0 has the tokens of the node's own ranks. Segment c + 1 has the tokens that the legs of chunk c bring, one leg's
after the other's. So the number of segments depends on C alone, however many nodes there are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ep_plugin.config import MoECommunicatorConfig

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}  # a chunk costs as much time as some MiB on the rail
MOST_CHUNKS = 4
_USUAL_TOKENS = 4096  # of a rank, where the configuration gives no bound
# A chunk has room for so many tokens for a node: the larger of 2 m and m + 8 sqrt(m) + 8, m the mean of evenly drawn
# experts.
_TIMES_MEAN, _DEVIATIONS, _MORE_ROWS = 2, 8, 8


class Leg(NamedTuple):
    """A leg sends the rows of chunk `chunk` to node `to`, and receives the rows of that chunk of node `source`."""

    chunk: int
    to: int
    source: int


def default_chunks(num_nodes: int, max_tokens: int | None, hidden_size: int, topk: int, kind: str) -> int:
    """Returns C where the configuration gives none: one chunk is forwarded while the next one crosses, so more bytes
    that cross need more chunks.

    max_tokens: the most tokens of a rank; None: unknown. Their rows have hidden_size elements of 2 bytes, and their
    experts are drawn evenly. kind: of the devices, "cpu" or "cuda".
    """
    crossings = (num_nodes - 1) * (1 - (1 - 1 / num_nodes) ** topk)  # of a token, on average
    nbytes = (_USUAL_TOKENS if max_tokens is None else max_tokens) * crossings * hidden_size * 2
    return min(max(round(nbytes / CHUNK_BYTES[kind]), 1), MOST_CHUNKS)


def num_chunks(num_nodes: int, config: MoECommunicatorConfig, kind: str) -> int:
    """Returns C. One node has no legs. kind: of the devices, "cpu" or "cuda"."""
    if num_nodes == 1:
        return 0
    if config.rail_chunks is not None:
        return config.rail_chunks
    return default_chunks(num_nodes, config.max_tokens_per_rank, config.hidden_size, config.topk, kind)


def padded_rows(num_nodes: int, config: MoECommunicatorConfig, kind: str) -> int:
    """Returns the rows of each leg of a dispatch with a capacity, whose legs all have room for as many.

    No rank has a longer chunk than a rank with ``max_tokens_per_rank`` tokens, although its i-th chunk may be longer
    than the i-th chunk of that rank. kind: of the devices, "cpu" or "cuda".
    """
    most, chunks = config.max_tokens_per_rank, num_chunks(num_nodes, config, kind)
    assert most is not None
    if config.max_rows_per_node is not None:
        return -(-min(config.max_rows_per_node, most) // chunks)
    tokens = -(-most // chunks)
    mean = config.topk * tokens / num_nodes
    return min(tokens, math.ceil(max(_TIMES_MEAN * mean, mean + _DEVIATIONS * math.sqrt(mean) + _MORE_ROWS)))


def num_segments(num_nodes: int, config: MoECommunicatorConfig, kind: str) -> int:
    """Returns M: one segment, and one for each chunk."""
    return 1 + num_chunks(num_nodes, config, kind)


def num_origins(num_nodes: int) -> int:
    """Returns the most nodes whose tokens are in one segment."""
    return max(1, num_nodes - 1)


def chunk_bounds(num_tokens: int, chunks: int) -> list[int]:
    """Returns the first token of each chunk of T tokens, then T: C + 1 numbers."""
    return [num_tokens * chunk // chunks for chunk in range(chunks + 1)]


def legs_of(node: int, num_nodes: int, chunks: int) -> list[Leg]:
    """Returns the legs of the ranks of `node`, in the order in which they start."""
    return [
        Leg(chunk, (node + step) % num_nodes, (node - step) % num_nodes)
        for chunk in range(chunks)
        for step in range(1, num_nodes)
    ]
