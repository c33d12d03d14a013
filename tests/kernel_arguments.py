"""The argument structs of csrc/common/collectives.h, for tests that stand in for kernels or call them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ep_plugin import _C

_I32, _I64, _U64, _F64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
_PER_RANK = _U64 * _C.max_ranks


class Arguments(ctypes.Structure):
    """Fields that are not given are 0. A field for each rank takes any sequence."""

    names: ClassVar[tuple[str, ...]]

    def __init__(self, **given: Any) -> None:
        kinds: dict[str, Any] = dict(self._fields_)  # type: ignore[arg-type]
        for name, value in given.items():
            kind = kinds[name]
            if issubclass(kind, ctypes.Array):
                value = kind(*value)
            elif isinstance(value, _C.Comm):
                value = Comm.of(value)
            setattr(self, name, value)

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


class Comm(Arguments):
    _fields_ = [
        *((name, _I32) for name in ("rank", "num_ranks", "num_experts", "gate", "plain", "num_origins")),
        ("timeout_ns", _I64),
        ("pool_bytes", _I64 * 2),
        ("control", _U64),
        ("pool", _U64 * 2),
        ("own_control", _U64),
        ("own_pool", _U64 * 2),
        ("state", _U64),
        ("board", _U64),
    ]

    @classmethod
    def of(cls, comm: _C.Comm) -> Comm:
        names = (
            "rank",
            "num_ranks",
            "num_experts",
            "gate",
            "plain",
            "num_origins",
            "timeout_ns",
            "control",
            "own_control",
        )
        return cls(**{name: int(getattr(comm, name)) for name in (*names, "state", "board")})


class Piece(Arguments):
    _fields_ = [
        ("bytes", _I64),
        ("block", _I32),
        ("num_blocks", _I32),
        ("offset", _I64 * _C.max_ranks),
        ("blocks", _U64),
        ("block_bytes", _U64),
    ]


class CpuAllGatherArgs(Arguments):
    _fields_ = [("comm", Comm), ("piece", Piece), ("input", _U64), ("outputs", _PER_RANK)]


class CpuReduceScatterArgs(Arguments):
    _fields_ = [
        ("comm", Comm),
        ("piece", Piece),
        ("inputs", _PER_RANK),
        ("output", _U64),
        ("scale", _F64),
        ("element", _I32),
        ("reserved", _I32),
    ]


class AllGatherArgs(Arguments):
    _fields_ = [
        ("comm", Comm),
        ("input", _U64),
        ("bytes", _I64),
        ("blocks", _U64),
        ("host_blocks", _U64),
        ("offset", _I64),
        ("staging", _U64),
        ("outputs", _PER_RANK),
        ("place", _I64),
        *((name, _I32) for name in ("block", "num_ctas", "captured", "reserved")),
        *((name, _U64) for name in ("number", "stream_words", "begun", "finished", "stream")),
    ]


class ReduceScatterArgs(Arguments):
    _fields_ = [
        ("comm", Comm),
        ("inputs", _PER_RANK),
        ("cells", _U64),
        ("own_cells", _U64),
        ("output", _U64),
        ("bytes", _I64),
        ("scale", _F64),
        ("element", _I32),
        ("num_ctas", _I32),
        ("stream", _U64),
    ]


class SmallExchangeArgs(Arguments):
    _fields_ = [
        ("comm", Comm),
        ("words", _U64),
        ("own_words", _U64),
        ("shards", _PER_RANK),
        ("own", _U64),
        ("bytes", _I64),
        ("scale", _F64),
        ("element", _I32),
        ("num_ctas", _I32),
        ("stream", _U64),
    ]


class CollectiveKernels(ctypes.Structure):
    """The kernels of GPUs: C functions that take the address of their arguments."""

    _kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    _fields_ = [("all_gather", _kernel), ("reduce_scatter", _kernel), ("small_exchange", _kernel)]


_KINDS: dict[str, type[Arguments]] = {
    "all_gather": AllGatherArgs,
    "reduce_scatter": ReduceScatterArgs,
    "small_exchange": SmallExchangeArgs,
}


def table_of(kernels: Any) -> CollectiveKernels:
    """Returns a table of functions of Python that take the arguments, methods of `kernels` with these names."""

    def of(name: str) -> Callable[[int], None]:
        return lambda address: getattr(kernels, name)(_KINDS[name].from_address(address))

    kinds = dict(CollectiveKernels._fields_)
    return CollectiveKernels(*(kinds[name](of(name)) for name in _KINDS))


def addresses(rows: Sequence[Any]) -> list[int]:
    """The addresses of tensors."""
    return [row.data_ptr() for row in rows]
