"""The SM counts of dispatch and combine kernels: the configured counts, else as many SMs as fill the links.

The time of a row on an SM, divided by its time on the links, is the number of SMs that fill the links. It grows when
rows are narrow, are sums of many terms, or mostly stay on this rank. More SMs would only queue for the links. The
constants fit measurements on two H200s with rows of 2 to 16 KB and 1 to 16 experts per token (docs/where-time-goes.md).
Small batches fill no links, and finish sooner with more SMs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import torch

from ep_plugin.config import SMS_FIELDS, MoECommunicatorConfig

LINKS_BYTES_PER_NS = 358.0
# A dispatched row is loaded once and stored for each of its destinations; it takes SEND_NS at least.
SEND_NS, LOAD_NS_PER_BYTE, STORE_NS_PER_BYTE = 250.0, 0.006, 0.0185
# A partial row of combine is the sum of its terms.
PARTIAL_NS, TERM_NS_PER_BYTE = 200.0, 0.0102
DISPATCH_SMS, COMBINE_SMS = range(8, 32 + 1), range(14, 48 + 1)  # limits of the sending SMs
SMALL_BATCH_TOKENS = 1024
FREE_SMS = 32  # an operation leaves at least these to others
MOST_SMS = 2**31 - 1  # the largest count that a kernel's arguments can hold


class KernelSms(NamedTuple):
    """SMs of an operation's two kernels, which run at the same time. receiving=0: one kernel sends and receives."""

    sending: int
    receiving: int


Asked: TypeAlias = tuple[int | None, int | None]
"""Sending and receiving SMs as the configuration gives them; None: not given."""


def asked_of(config: MoECommunicatorConfig, usable: int) -> tuple[Asked, Asked]:
    """Returns the counts that `config` gives for dispatch and for combine. Raises ValueError above `usable`."""
    asked = (config.dispatch_send_sms, config.dispatch_recv_sms), (config.combine_send_sms, config.combine_recv_sms)
    for (sending, receiving), first, second in zip(asked, SMS_FIELDS[::2], SMS_FIELDS[1::2], strict=True):
        if (sending or 1) + (1 if receiving is None else receiving) > usable:
            raise ValueError(
                f"{first}: expected {first} + {second} to be at most {usable} of this device's SMs, "
                f"got {sending or 'at least 1'} + {'at least 1' if receiving is None else receiving}"
            )
    return asked


def usable_sms(device: torch.device) -> int:
    """Returns the most SMs that a sending and a receiving kernel may hold together. On CPUs counts have no effect."""
    if device.type != "cuda":
        return MOST_SMS
    return max(torch.cuda.get_device_properties(device).multi_processor_count - FREE_SMS, 2)


@functools.lru_cache(maxsize=1024)
def for_dispatch(ranks: int, small: bool, row_bytes: int, topk: int, quantize: bool) -> KernelSms:
    """Returns the SMs of a dispatch if the configuration gives none.

    row_bytes: bytes of a row on the wire, with scales. topk: experts per token. small: the batch has at most
    SMALL_BATCH_TOKENS tokens. quantize: rows are quantised as they are sent.
    """
    ranks = max(ranks, 2)
    to = _destinations(ranks, topk)
    on_an_sm = max(SEND_NS, row_bytes * (LOAD_NS_PER_BYTE + to * STORE_NS_PER_BYTE))
    sending = _within(DISPATCH_SMS, on_an_sm / _on_links(ranks, to * row_bytes))
    if quantize:  # quantising takes longer than storing
        sending = max(sending, 32 if small else 20)
    elif small:
        sending = max(sending, 32 if ranks == 2 else 20)
    return KernelSms(sending, 64)


@functools.lru_cache(maxsize=1024)
def for_combine(ranks: int, small: bool, row_bytes: int, topk: int) -> KernelSms:
    """Returns the SMs of a combine if the configuration gives none. row_bytes: bytes of a partial row. Other arguments
    are as in `for_dispatch`."""
    ranks = max(ranks, 2)
    terms = topk / _destinations(ranks, topk)
    on_an_sm = PARTIAL_NS + TERM_NS_PER_BYTE * row_bytes * terms
    sending = _within(COMBINE_SMS, on_an_sm / _on_links(ranks, row_bytes))
    if not small:
        return KernelSms(sending, 24)
    return KernelSms(max(sending, 40), 48) if ranks == 2 else KernelSms(max(sending, 32), 64)


@functools.lru_cache(maxsize=1024)
def fitted(asked: Asked, usable: int, wanted: KernelSms, in_two: bool = False) -> KernelSms:
    """Returns the counts `asked`. Counts that are None come from `wanted`, as far as the device has SMs left.

    in_two: the sending kernel never receives.
    """
    if in_two:
        found = fitted(asked, usable, wanted)
        return KernelSms(found.sending, max(1, found.receiving))
    sending, receiving = asked
    if sending is not None:
        left = max(1, min(wanted.receiving, usable - sending))
        return KernelSms(sending, left if receiving is None else receiving)
    if receiving is not None:
        return KernelSms(max(1, min(wanted.sending, usable - receiving)), receiving)
    share = min(1.0, usable / sum(wanted))
    return KernelSms(max(1, int(wanted.sending * share)), max(1, int(wanted.receiving * share)))


def _destinations(ranks: int, topk: int) -> float:
    """Returns how many ranks a token goes to, on average, if its experts are drawn at random."""
    return ranks * (1 - (1 - 1 / ranks) ** topk)


def _on_links(ranks: int, nbytes: float) -> float:
    return nbytes * (ranks - 1) / ranks / LINKS_BYTES_PER_NS


def _within(counts: range, count: float) -> int:
    return min(max(round(count), counts[0]), counts[-1])
