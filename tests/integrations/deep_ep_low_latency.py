"""An oracle for DeepEP's low-latency interface, token by token in plain torch, from the interface's documentation."""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin.moe.reference import reference_quantize
from tests.integrations.deep_ep_cases import Case, Sent
from tests.moe.low_latency_cases import quantize_by_powers

HALF = 2**32


def rows_of(case: Case, sent: Sent, expert: int) -> list[tuple[int, int]]:
    """The (rank, token) pairs that name `expert`, in the order of its rows."""
    return [
        (source, token)
        for source, ids in enumerate(sent.ids)
        for token, chosen in enumerate(ids.tolist())
        if expert in chosen
    ]


def check_dispatch(case: Case, sent: Sent, rank: int, max_tokens: int, results: Any, fp8: str | None) -> None:
    """The rows, counts and handle of a dispatch on `rank`, bit for bit, and their strides.

    fp8: None, "plain", "round_scale" or "use_ue8m0".
    """
    received, counts, handle, _, _ = results
    rows, scales = received if fp8 else (received, None)
    size, local, H = len(case.tokens), case.experts_per_rank, case.hidden
    N = size * max_tokens
    assert rows.shape == (local, N, H) and rows.is_contiguous()
    assert rows.dtype is (torch.float8_e4m3fn if fp8 else torch.bfloat16)
    src_info, layout_range, *numbers = handle
    assert type(handle) is tuple and numbers == [max_tokens, H, case.num_experts]
    assert src_info.dtype is torch.int32 and src_info.shape == (local, N)
    assert layout_range.dtype is torch.int64 and layout_range.shape == (local, size)
    assert counts.dtype is torch.int32 and counts.shape == (local,)
    for expert in range(local):
        found = rows_of(case, sent, rank * local + expert)
        count = len(found)
        assert int(counts[expert]) == count
        assert src_info[expert, :count].tolist() == [token for _, token in found]
        begin = 0
        for source in range(size):
            of_source = sum(one == source for one, _ in found)
            word = int(layout_range[expert, source])
            assert (word % HALF, word // HALF) == (of_source, begin)
            begin += of_source
        exact = torch.stack([sent.x[source][token] for source, token in found]) if found else sent.x[0][:0]
        if fp8 is None:
            assert torch.equal(rows[expert, :count].view(torch.int16), exact.view(torch.int16))
            continue
        codes, expected = reference_quantize(exact) if fp8 == "plain" else quantize_by_powers(exact)
        assert torch.equal(rows[expert, :count].view(torch.uint8), codes.view(torch.uint8))
        assert scales is not None
        assert torch.equal(_scales(scales[expert, :count], H // 128), expected)
    if fp8 is not None:
        assert scales is not None
        columns = -(-H // 512) if fp8 == "use_ue8m0" else H // 128
        assert scales.dtype is (torch.int32 if fp8 == "use_ue8m0" else torch.float32)
        assert scales.shape == (local, N, columns) and scales.stride() == (N * columns, 1, N)


def _scales(scales: torch.Tensor, groups: int) -> torch.Tensor:
    if scales.dtype is torch.float32:
        return scales
    words = scales.contiguous().long() % HALF
    exponents = torch.stack([words >> 8 * byte & 255 for byte in range(4)], dim=2).flatten(1)  # little-endian
    return (exponents[:, :groups].float() - 127).exp2()


def results_of(case: Case, sent: Sent, rank: int, N: int) -> torch.Tensor:
    """Experts' results ``[E_l, N, H]`` on `rank`: random rows where there are rows, NaN elsewhere."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    y = torch.full((case.experts_per_rank, N, case.hidden), torch.nan, dtype=torch.bfloat16)
    for expert in range(case.experts_per_rank):
        count = len(rows_of(case, sent, rank * case.experts_per_rank + expert))
        y[expert, :count] = torch.randn((count, case.hidden), generator=generator).bfloat16()
    return y


def check_combine(
    case: Case, sent: Sent, rank: int, N: int, now: torch.Tensor, sums: torch.Tensor, tolerance: float = 2.0**-7
) -> None:
    """The sums of a combine of `results_of` all ranks. now: the ids that it named."""
    assert sums.dtype is torch.bfloat16 and sums.shape == (case.tokens[rank], case.hidden)
    y = [results_of(case, sent, other, N) for other in range(len(case.tokens))]
    exact = torch.zeros(sums.shape, dtype=torch.float64)
    magnitude = torch.zeros_like(exact)
    for token, chosen in enumerate(now.tolist()):
        for k, expert in enumerate(chosen):
            if expert < 0:
                continue
            owner, local = divmod(expert, case.experts_per_rank)
            place = rows_of(case, sent, expert).index((rank, token))
            row = y[owner][local, place].double() * sent.weights[rank][token, k].double()
            exact[token] += row
            magnitude[token] += row.abs()
    assert ((sums.double() - exact).abs() <= tolerance * magnitude + 1e-6).all()
