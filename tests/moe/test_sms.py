"""The number of SMs of dispatch and combine: by configuration, by shape, and by the free SMs of the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
from ep_plugin.moe.high_throughput.sms import (
    MOST_SMS,
    SMALL_BATCH_TOKENS,
    Asked,
    KernelSms,
    asked_of,
    fitted,
    for_combine,
    for_dispatch,
    usable_sms,
)
from tests.moe.moe_cases import FLAT, TOKEN_MAJOR, Case, communicator, make_inputs, on_ranks

NOTHING = (None, None)
USABLE = 100  # of 132 SMs
BF16, FP8 = 2 * 7168, 7168 + 4 * 56


def dispatch_sms(asked: Asked, usable: int, *shape: Any) -> KernelSms:
    return fitted(asked, usable, for_dispatch(*shape))


def combine_sms(asked: Asked, usable: int, *shape: Any) -> KernelSms:
    return fitted(asked, usable, for_combine(*shape))


def test_the_headline_takes_what_was_measured_to_be_best() -> None:
    assert dispatch_sms(NOTHING, USABLE, 4, False, BF16, 8, False) == (10, 64)
    assert dispatch_sms(NOTHING, USABLE, 4, False, FP8, 8, False) == (10, 64)
    assert dispatch_sms(NOTHING, USABLE, 4, False, FP8, 8, True) == (20, 64)
    assert dispatch_sms(NOTHING, USABLE, 2, False, BF16, 8, False) == (15, 64)
    assert combine_sms(NOTHING, USABLE, 4, False, BF16, 8) == (17, 24)


def sending_of_combine(ranks: int, row_bytes: int, topk: int) -> int:
    return combine_sms(NOTHING, USABLE, ranks, False, row_bytes, topk).sending


def test_other_shapes_take_what_fills_the_links() -> None:
    """docs/where-time-goes.md has the best measured numbers: 32, 28, 24, 20, 14 and 28 for the first six."""
    by_width = [sending_of_combine(4, 2 * hidden, 8) for hidden in (2048, 2880, 4096, 5120)]
    assert by_width == [34, 27, 22, 20]
    assert [sending_of_combine(4, BF16, topk) for topk in (1, 16)] == [14, 26]
    assert [sending_of_combine(2, BF16, topk) for topk in (1, 2, 4, 6, 8)] == [17, 20, 26, 32, 39]
    by_width = [dispatch_sms(NOTHING, USABLE, 2, False, width, 8, False).sending for width in (2048, 4096, 5760, BF16)]
    assert by_width == [32, 22, 16, 15]
    by_terms = [dispatch_sms(NOTHING, USABLE, 4, False, BF16, topk, False).sending for topk in (1, 8)]
    assert by_terms == [12, 10]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("small", [False, True])
def test_narrow_rows_and_many_terms_do_not_take_fewer(ranks: int, small: bool) -> None:
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
    assert dispatch_sms((12, 0), USABLE, 4, False, BF16, 8, True) == (12, 0)
    assert dispatch_sms((12, None), USABLE, 4, True, BF16, 8, False) == (12, 64)
    assert dispatch_sms((90, None), USABLE, 4, False, BF16, 8, False) == (90, 10)
    assert combine_sms((None, 95), USABLE, 4, False, BF16, 8) == (5, 95)
    assert combine_sms((None, 0), USABLE, 4, False, BF16, 8) == (17, 0)


@pytest.mark.parametrize("usable", [2, 5, 26])
def test_a_small_device_is_shared(usable: int) -> None:
    for small in (False, True):
        for found in (
            dispatch_sms(NOTHING, usable, 4, small, 4096, 8, True),
            combine_sms(NOTHING, usable, 2, small, 4096, 8),
        ):
            assert min(found) >= 1 and sum(found) <= usable


def test_more_than_there_is_is_refused() -> None:
    def asked(**counts: int) -> tuple[Asked, Asked]:
        return asked_of(MoECommunicatorConfig(num_experts=4, hidden_size=8, topk=2, **counts), USABLE)

    assert asked(dispatch_send_sms=100, dispatch_recv_sms=0, combine_recv_sms=99) == ((100, 0), (None, 99))
    with pytest.raises(
        ValueError, match=r"dispatch_send_sms \+ dispatch_recv_sms to be at most 100 of this device's SMs, got 51 \+ 50"
    ):
        asked(dispatch_send_sms=51, dispatch_recv_sms=50)
    with pytest.raises(
        ValueError, match=r"combine_send_sms \+ combine_recv_sms to be at most 100 .* got 100 \+ at least 1"
    ):
        asked(combine_send_sms=100)
    with pytest.raises(ValueError, match=r"got at least 1 \+ 100"):
        asked(combine_recv_sms=100)


def test_on_cpus_the_numbers_mean_nothing() -> None:
    assert usable_sms(torch.device("cpu")) == MOST_SMS
    assert combine_sms((1000, 2000), MOST_SMS, 4, False, BF16, 8) == KernelSms(1000, 2000)


def _too_many(rank: int, size: int) -> None:
    inputs = make_inputs(Case(tokens=(4,) * size, num_experts=2 * size))
    with communicator(inputs.case) as comm:
        with pytest.raises(
            ValueError, match=rf"expected dispatch_send_sms \+ dispatch_recv_sms to be at most {MOST_SMS} "
        ):
            comm.set_sms(dispatch_send_sms=2**31)
        comm.dispatch(inputs.x[rank], inputs.ids[rank])


def test_what_no_argument_can_name_is_refused_before_anything_is_launched() -> None:
    on_ranks(1, _too_many)


class _Kernels(SimpleNamespace):
    """Wraps the communicator's kernels, and stores the SMs of the last launch of each."""

    def __init__(self, kernels: Any) -> None:
        super().__init__(given={})
        for name in (
            "plan",
            "notify",
            "dispatch_send",
            "dispatch_recv",
            "combine_send",
            "combine_recv",
        ):
            setattr(self, name, self._noting(name, getattr(kernels, name)))

    def _noting(self, name: str, kernel: Any) -> Any:
        def launch(args: Any) -> None:
            self.given[name] = getattr(args, "num_sms", 0)
            kernel(args)

        return launch

    def of_both(self) -> tuple[KernelSms, KernelSms]:
        given = self.given
        return KernelSms(given["dispatch_send"], given["dispatch_recv"]), KernelSms(
            given["combine_send"], given["combine_recv"]
        )


def _as_launched(rank: int, size: int, tokens: int, layout: DispatchLayout) -> None:
    """BF16 rows, FP8 rows with scales, rows that dispatch quantises; then with configured counts."""
    small, hidden, topk = tokens <= SMALL_BATCH_TOKENS, 5120, 6
    terms = topk if layout is FLAT else 1
    case = Case(tokens=(tokens,) * size, num_experts=4 * size, hidden=hidden, topk=topk, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    x, ids = inputs.x[rank], inputs.ids[rank]
    with communicator(case, layout) as comm:
        kernels = comm.engine.kernels = _Kernels(comm.engine.kernels)

        def launched(rows: torch.Tensor, **call: Any) -> tuple[KernelSms, KernelSms]:
            out, handle = comm.dispatch(rows, ids, **call)
            comm.combine(out.tokens.to(torch.bfloat16), handle)
            return kernels.of_both()

        back = for_combine(size, small, 2 * hidden, terms)
        fp8, scales = x.to(torch.float8_e4m3fn), torch.ones(tokens, hidden // 128)
        on_the_wire = hidden + 4 * hidden // 128
        assert launched(x) == (for_dispatch(size, small, 2 * hidden, topk, False), back)
        assert launched(fp8, scales=scales) == (for_dispatch(size, small, on_the_wire, topk, False), back)
        assert launched(x, quantize="e4m3") == (for_dispatch(size, small, on_the_wire, topk, True), back)
        comm.set_sms(dispatch_send_sms=9, dispatch_recv_sms=21, combine_send_sms=35)
        assert launched(x) == ((9, 21), (35, back.receiving))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FLAT, TOKEN_MAJOR])
@pytest.mark.parametrize("tokens", [SMALL_BATCH_TOKENS, SMALL_BATCH_TOKENS + 1])
def test_kernels_are_given_what_their_rows_ask_for(tokens: int, layout: DispatchLayout) -> None:
    on_ranks(2, _as_launched, tokens, layout)
