"""Kernels that wait for peers share the SMs of a GPU, so that none keeps out one that a peer waits for."""

from __future__ import annotations

import pytest

from tests.gpu import sms
from tests.ranks import run_ranks, values


@pytest.mark.gpu(1)
def test_operations_of_several_communicators_end_on_few_sms() -> None:
    assert min(values(run_ranks(2, sms.on_few_sms, 2, 200, timeout_s=280))) > 0
