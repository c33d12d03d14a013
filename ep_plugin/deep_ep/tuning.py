"""The tuning of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ep_plugin.moe.high_throughput.sms import LINKS_BYTES_PER_NS, LOAD_NS_PER_BYTE, STORE_NS_PER_BYTE

_LEAST_SMS = 4


@dataclass(frozen=True)
class Config:
    """Tuning of one call. num_sms: SMs that the call may use; None: as many as fill the links.

    The chunk sizes are DeepEP's. They are accepted and have no effect.
    """

    num_sms: int | None = None
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms is not None and (not isinstance(self.num_sms, int) or self.num_sms < 1):
            raise ValueError(f"num_sms: expected an integer of at least 1 or None, got {self.num_sms!r}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0, since memory is allocated when an operation needs it."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


def sms_that_fill(ranks: int, num_experts: int, topk: int, rates: tuple[float, float, float], most: int) -> int:
    """Return the number of SMs on which one kernel that sends and receives moves rows as fast as the links take them.

    A row of a token that goes to D ranks is loaded 1 + D times and stored 2 D times: in D slots, and in the output of
    each of the D ranks. D (R - 1) / R rows cross the links. So the number does not depend on a row's bytes.

    Args:
        ranks: R, of a node, on which all experts are taken to be.
        num_experts, topk: experts in all, and of each token, drawn at random.
        rates: of the links, of an SM's loads and of its stores in GB/s; 0: as measured (high_throughput/sms.py).
        most: the largest result.

    Returns:
        An even number, at least 4 where `most` allows it.
    """
    measured = LINKS_BYTES_PER_NS, 1 / LOAD_NS_PER_BYTE, 1 / STORE_NS_PER_BYTE
    links, load, store = (given or own for given, own in zip(rates, measured, strict=True))
    ranks = max(ranks, 2)
    elsewhere = math.comb(num_experts - num_experts // ranks, topk) / math.comb(num_experts, topk)
    to = max(ranks * (1 - elsewhere), 1.0)
    on_an_sm = (1 + to) / load + 2 * to / store
    on_links = to * (ranks - 1) / ranks / links
    wanted = max(math.ceil(on_an_sm / on_links), _LEAST_SMS)
    return min(wanted + wanted % 2, most - most % 2)
