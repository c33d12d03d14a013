"""How many SMs the kernels of dispatch and combine run on: what was asked for, else what keeps the links full.

An SM moves so many bytes in a time, wherever to, and has something to do for each row besides; the links take what
crosses them at a rate of their own. The ratio of both times is how many SMs fill the links: more of them where rows are
narrow, have many terms, or mostly stay here. Yet more would only queue before the links. The constants fit what two
H200s took for rows of 2 to 16 KB and 1 to 16 experts per token, docs/performance.md; small batches, which fill no
links, are done sooner the more SMs there are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

LINKS_BYTES_PER_NS = 358.0
# A token's row is loaded once and stored for each of its destinations, in no less than the first of these.
SEND_NS, LOAD_NS_PER_BYTE, STORE_NS_PER_BYTE = 250.0, 0.006, 0.0185
# A pushed row is the sum of its terms.
PUSH_NS, TERM_NS_PER_BYTE = 200.0, 0.0102
DISPATCH_SMS, COMBINE_SMS = range(8, 32 + 1), range(14, 48 + 1)  # what the ratios may say
SMALL_BATCH_TOKENS = 1024
FREE_SMS = 32  # left to others at least, by each operation
MOST_SMS = 2**31 - 1  # that a kernel's arguments can name

PAIRS = (("dispatch_send_sms", "dispatch_recv_sms"), ("combine_send_sms", "combine_recv_sms"))


class KernelSms(NamedTuple):
    """Of an operation's two kernels, which run at the same time. receiving 0: those that send also receive, in one."""

    sending: int
    receiving: int


class AskedSms(NamedTuple):
    """The same as it was asked for; None: not at all."""

    sending: int | None
    receiving: int | None


def asked_of(counts: Mapping[str, int | None], usable: int) -> tuple[AskedSms, AskedSms]:
    """Of dispatch and of combine, by the configuration's names. ValueError where it is more than `usable`."""
    for first, second in PAIRS:
        sending, receiving = counts[first], counts[second]
        least = (sending or 1) + (1 if receiving is None else receiving)
        if least > usable:
            raise ValueError(
                f"{first}: expected {first} + {second} to be at most {usable} of this device's SMs, "
                f"got {sending or 'at least 1'} + {'at least 1' if receiving is None else receiving}"
            )
    dispatch, combine = (AskedSms(counts[first], counts[second]) for first, second in PAIRS)
    return dispatch, combine


def usable_sms(device: torch.device) -> int:
    """SMs that a sending and a receiving kernel may hold together. On CPUs the numbers mean nothing."""
    if device.type != "cuda":
        return MOST_SMS
    return max(torch.cuda.get_device_properties(device).multi_processor_count - FREE_SMS, 2)


@functools.lru_cache(maxsize=1024)
def dispatch_sms(
    asked: AskedSms, usable: int, ranks: int, small: bool, row_bytes: int, topk: int, quantize: bool
) -> KernelSms:
    """For rows of `row_bytes` on the wire, scales included, and `topk` experts per token. `small`: at most
    SMALL_BATCH_TOKENS; `quantize`: the rows are made as they are sent."""
    return _fitted(asked, usable, for_dispatch(ranks, small, row_bytes, topk, quantize))


@functools.lru_cache(maxsize=1024)
def combine_sms(asked: AskedSms, usable: int, ranks: int, small: bool, row_bytes: int, topk: int) -> KernelSms:
    """The same for partial rows of `row_bytes`."""
    return _fitted(asked, usable, for_combine(ranks, small, row_bytes, topk))


def for_dispatch(ranks: int, small: bool, row_bytes: int, topk: int, quantize: bool) -> KernelSms:
    """Where nothing was asked for."""
    ranks = max(ranks, 2)
    to = _destinations(ranks, topk)
    on_an_sm = max(SEND_NS, row_bytes * (LOAD_NS_PER_BYTE + to * STORE_NS_PER_BYTE))
    sending = _within(DISPATCH_SMS, on_an_sm / _on_links(ranks, to * row_bytes))
    if quantize:  # which takes longer than storing
        sending = max(sending, 32 if small else 20)
    elif small:
        sending = max(sending, 32 if ranks == 2 else 20)
    return KernelSms(sending, 64)


def for_combine(ranks: int, small: bool, row_bytes: int, topk: int) -> KernelSms:
    """Where nothing was asked for."""
    ranks = max(ranks, 2)
    terms = topk / _destinations(ranks, topk)
    on_an_sm = PUSH_NS + TERM_NS_PER_BYTE * row_bytes * terms
    sending = _within(COMBINE_SMS, on_an_sm / _on_links(ranks, row_bytes))
    if not small:
        return KernelSms(sending, 24)
    return KernelSms(max(sending, 40), 48) if ranks == 2 else KernelSms(max(sending, 32), 64)


def _destinations(ranks: int, topk: int) -> float:
    """Ranks that have some of a token's experts, of a random routing."""
    return ranks * (1 - (1 - 1 / ranks) ** topk)


def _on_links(ranks: int, nbytes: float) -> float:
    return nbytes * (ranks - 1) / ranks / LINKS_BYTES_PER_NS


def _within(counts: range, count: float) -> int:
    return min(max(round(count), counts[0]), counts[-1])


def _fitted(asked: AskedSms, usable: int, wanted: KernelSms) -> KernelSms:
    """What was asked for, and of the rest as many as that, or the device, leaves."""
    share = min(1.0, usable / sum(wanted))
    sending, receiving = (max(1, int(count * share)) for count in wanted)
    if asked.sending is not None:
        sending = asked.sending
        receiving = max(1, min(wanted.receiving, usable - sending))
    if asked.receiving is not None:
        receiving = asked.receiving
        if asked.sending is None:
            sending = max(1, min(wanted.sending, usable - receiving))
    return KernelSms(sending, receiving)
