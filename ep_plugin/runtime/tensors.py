"""Checks of tensors whose addresses kernels take."""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C

# Types whose value is their memory: no compiler's stand-in, no sharded tensor, no user's own subclass.
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Types that torch's dispatcher cannot pass to an operator of ours in eager mode.
_REFUSED = ("DTensor", "FakeTensor", "FunctionalTensor", "NestedTensor")


def is_lazy(tensor: torch.Tensor | None) -> bool:
    """Returns whether a sign or zeros are pending. An operator's dispatch writes them to memory."""
    return tensor is not None and (tensor.is_neg() or tensor._is_zerotensor())


def is_traced() -> bool:
    """Returns whether a compiler, a mode or a transform must see a call's operators. It may pass tensors of its own."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is not dense, or whose type stands for other tensors."""
    if type(tensor) not in PLAIN and type(tensor).__name__ in _REFUSED:
        raise ValueError(f"{name}: expected a tensor with memory of its own, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got one of layout {tensor.layout}")
    if tensor.is_quantized:
        raise ValueError(f"{name}: expected a tensor without scale and zero point, got one of {tensor.dtype}")
    if tensor.is_nested:
        raise ValueError(f"{name}: expected a dense tensor, got a nested one")
    if torch._is_functional_tensor(tensor):
        raise ValueError(f"{name}: expected a tensor with memory of its own, got a functional tensor")


def check_storage(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the storage of a dense tensor holds all of its elements."""
    extent, held = tensor.nbytes, tensor.untyped_storage().nbytes()
    if extent == 0:
        return
    if not tensor.is_contiguous():
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = (last + 1) * tensor.itemsize
    offset = tensor.storage_offset()
    needed = extent + offset * tensor.itemsize if offset else extent
    if held < needed:
        raise ValueError(
            f"{name}: expected a storage of at least {needed} bytes, got {held}: it was freed, or resized, after the "
            "tensor was made"
        )


_MOST_FORMS = 512


def keep_form(checked: set[Any], form: Any) -> None:
    """Adds to `checked` the form (_C.form_of) of arguments that have passed a check. Starts anew if it has many."""
    if len(checked) >= _MOST_FORMS:
        checked.clear()
    checked.add(form)


_C.find_torch(torch)
_dispatch_keys = torch._C._dispatch_keys
_dense_keys: set[int] = set()  # dispatch keys of tensors that have passed every check but that of the storage


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless all values of the tensor lie in its own memory, as a kernel reads them."""
    keys = _dispatch_keys(tensor).raw_repr()  # they say all that is asked below
    if keys not in _dense_keys:
        if type(tensor) not in PLAIN and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ValueError(f"{name}: expected a tensor with memory of its own, got {type(tensor).__name__}")
        check_kind(name, tensor)
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ValueError(f"{name}: expected a tensor with memory of its own, got one that torch.func has wrapped")
        if tensor.is_conj() or is_lazy(tensor):
            raise ValueError(
                f"{name}: expected a tensor that is in memory as it is, got one whose conjugation, sign or zeros are "
                "pending; pass its resolve_conj(), resolve_neg() or clone()"
            )
        _dense_keys.add(keys)
    # In the path of every operation: most tensors begin at their storage, and have no gaps.
    if tensor.storage_offset() or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() < tensor.nbytes:
        check_storage(name, tensor)


def as_plain(value: Any) -> Any:
    """Returns `value` with its tensors as objects whose class is no subclass. It may be a tuple or a list of values."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(as_plain, value))
    if not isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)
