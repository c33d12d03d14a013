"""The forms of tensors, by which calls that are alike are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep_plugin import _C

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int4,
    torch.uint4,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


def test_tensors_that_differ_in_what_kernels_must_know_have_other_forms() -> None:
    wide = torch.zeros(4, 16)
    different = [
        *(torch.empty(4, 8, dtype=dtype) for dtype in DTYPES),
        torch.zeros(8, 4),
        torch.zeros(32),
        torch.zeros(4, 8, 1),
        torch.zeros(8, 4).t(),
        wide[:, :8],
        wide.flatten()[1:33].view(4, 8),  # four bytes past a multiple of 16
        torch.zeros(0, 8),
        None,
    ]
    assert len({_C.form_of(tensor) for tensor in different}) == len(different)
    assert len({_C.form_of(*pair) for pair in ((wide, None), (None, wide), (wide,), (wide, wide))}) == 4


def test_tensors_of_other_values_and_addresses_have_one_form() -> None:
    with torch.inference_mode():
        made_for_inference = torch.ones(3, 4)
    alike = [torch.zeros(3, 4), torch.nn.Parameter(torch.ones(3, 4)), made_for_inference, torch.ones(5, 4)[2:]]
    assert len({_C.form_of(tensor) for tensor in alike}) == 1


class _Subclass(torch.Tensor):
    pass


def _resized(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _late(wrapped: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> torch.Tensor:
    """A tensor that torch.func has wrapped, after its transform is over."""
    seen = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.sum()

    wrapped(keep)
    return seen[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: 3,
        lambda: torch.zeros(3).as_subclass(_Subclass),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.zeros(3).to_sparse(),
        lambda: torch.zeros(3).to_mkldnn(),
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
        lambda: torch._efficientzerotensor((3,)),
        lambda: torch._to_functional_tensor(torch.zeros(3)),
        lambda: _late(lambda keep: torch.func.grad(keep)(torch.zeros(3))),
        lambda: _late(lambda keep: torch.func.vmap(keep)(torch.zeros(3, 4))),
        lambda: _resized(0),
        lambda: _resized(31),
    ],
)
def test_what_kernels_cannot_read_has_no_form(make: Callable[[], object]) -> None:
    assert _C.form_of(torch.zeros(2), make()) is None
    assert _C.form_of(torch.zeros(2)) is not None  # no error is left behind


class _Interrupted(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, *given: object) -> object:
        raise KeyboardInterrupt


def test_an_interruption_is_no_answer() -> None:
    tensor = torch.zeros(2)
    with pytest.raises(KeyboardInterrupt), _Interrupted():
        _C.form_of(tensor)
    assert _C.form_of(tensor) is not None


def test_a_storage_may_end_where_the_tensor_does() -> None:
    assert _C.form_of(_resized(32)) is not None
    assert _C.form_of(torch.zeros(4, 16)[1:, 8:]) is not None
