"""How many SMs dispatch and combine take: by what was asked for, the shape, and what the device leaves."""

from __future__ import annotations

import sys

import pytest
import torch

from ep_plugin.config import SMS_FIELDS
from ep_plugin.moe.sms import AskedSms, KernelSms, asked_of, combine_sms, dispatch_sms, usable_sms

NOTHING = AskedSms(None, None)
USABLE = 100  # of 132 SMs
BF16, FP8 = 2 * 7168, 7168 + 4 * 56


def test_the_headline_takes_what_was_measured_to_be_best() -> None:
    assert dispatch_sms(NOTHING, USABLE, 4, False, BF16, 8, False) == (10, 64)
    assert dispatch_sms(NOTHING, USABLE, 4, False, FP8, 8, False) == (10, 64)
    assert dispatch_sms(NOTHING, USABLE, 4, False, FP8, 8, True) == (20, 64)
    assert dispatch_sms(NOTHING, USABLE, 2, False, BF16, 8, False) == (15, 64)
    assert combine_sms(NOTHING, USABLE, 4, False, BF16, 8) == (17, 24)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("small", [False, True])
def test_narrow_rows_and_many_terms_take_more(ranks: int, small: bool) -> None:
    by_width = [combine_sms(NOTHING, USABLE, ranks, small, width, 8) for width in (16, 4096, 8192, 16384, 1 << 20)]
    assert by_width == sorted(by_width, reverse=True) and all(sum(each) <= USABLE for each in by_width)
    by_terms = [combine_sms(NOTHING, USABLE, ranks, small, BF16, topk) for topk in (1, 2, 8, 16, 128)]
    assert by_terms == sorted(by_terms) and all(sum(each) <= USABLE for each in by_terms)
    by_width = [dispatch_sms(NOTHING, USABLE, ranks, small, width, 1, False) for width in (16, 4096, 16384, 1 << 20)]
    assert by_width == sorted(by_width, reverse=True) and all(sum(each) <= USABLE for each in by_width)


def test_the_fewer_ranks_the_more_stays_here() -> None:
    sending = [dispatch_sms(NOTHING, USABLE, ranks, False, BF16, 8, False).sending for ranks in (8, 4, 3, 2)]
    assert sending == sorted(set(sending))


def test_what_is_asked_for_is_had_and_the_rest_fits_beside_it() -> None:
    assert dispatch_sms(AskedSms(12, 0), USABLE, 4, False, BF16, 8, True) == (12, 0)
    assert dispatch_sms(AskedSms(12, None), USABLE, 4, True, BF16, 8, False) == (12, 64)
    assert dispatch_sms(AskedSms(90, None), USABLE, 4, False, BF16, 8, False) == (90, 10)
    assert combine_sms(AskedSms(None, 95), USABLE, 4, False, BF16, 8) == (5, 95)
    assert combine_sms(AskedSms(None, 0), USABLE, 4, False, BF16, 8) == (17, 0)


@pytest.mark.parametrize("usable", [2, 5, 26])
def test_a_small_device_is_shared(usable: int) -> None:
    for small in (False, True):
        for found in (
            dispatch_sms(NOTHING, usable, 4, small, 4096, 8, True),
            combine_sms(NOTHING, usable, 2, small, 4096, 8),
        ):
            assert min(found) >= 1 and sum(found) <= usable


def test_more_than_there_is_is_refused() -> None:
    def asked(**counts: int) -> tuple[AskedSms, AskedSms]:
        return asked_of(dict.fromkeys(SMS_FIELDS) | counts, USABLE)

    assert asked(dispatch_sms=100, expand_sms=0, add_sms=99) == ((100, 0), (None, 99))
    with pytest.raises(
        ValueError, match=r"dispatch_sms \+ expand_sms to be at most 100, .* of 132 SMs free, got 51 \+ 50"
    ):
        asked(dispatch_sms=51, expand_sms=50)
    with pytest.raises(ValueError, match=r"combine_sms \+ add_sms to be at most 100, .* got 100 \+ at least 1"):
        asked(combine_sms=100)
    with pytest.raises(ValueError, match=r"got at least 1 \+ 100"):
        asked(add_sms=100)


def test_on_cpus_the_numbers_mean_nothing() -> None:
    assert usable_sms(torch.device("cpu")) == sys.maxsize
    assert combine_sms(AskedSms(1000, 2000), sys.maxsize, 4, False, BF16, 8) == KernelSms(1000, 2000)
