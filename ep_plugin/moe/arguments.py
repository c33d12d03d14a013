"""Checks of arguments, before anything is launched. They raise ValueError with the expected and the actual value."""

from __future__ import annotations

import torch

from ep_plugin import _C
from ep_plugin.config import ROW_ALIGNMENT_BYTES, MoECommunicatorConfig
from ep_plugin.dtypes import DTYPE_CODES, DTYPES, ELEMENTS, QUANTIZABLE, QUANTIZED, QUANTIZED_BY_MODE, weight_dtype
from ep_plugin.moe.layout import DispatchCall, DispatchHandle, Engine, Routing
from ep_plugin.runtime.tensors import PLAIN, check_kind, check_memory, check_storage, is_traced
from ep_plugin.transport import transport_for
from ep_plugin.transport.exchange import Exchange

_ROWS, _SLOTS = _C.Total.ROWS, _C.Total.SLOTS
MOST_ROWS = 2**31 - 1  # kernels number them in 32 bits


def check_group(exchange: Exchange, config: MoECommunicatorConfig, device: torch.device) -> None:
    """Refuses a group that cannot be served, or whose ranks do not agree. Collective. Call it before allocating."""
    transport_for(device)
    exchange.agree("the communicator", f"{config.describe()}, device={device.type}")
    if config.num_experts % exchange.size:
        raise ValueError(
            f"num_experts: expected a multiple of the group's {exchange.size} ranks, got {config.num_experts}"
        )


def as_weights(name: str, weights: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Returns `weights` as they travel beside `rows`: contiguous, float32 or float64. ValueError if they are no
    floats."""
    if weights is None:
        return None
    if type(weights) not in PLAIN:
        check_tensors(**{name: weights})
    if weights.layout is not torch.strided and not is_traced():
        check_kind(name, weights)
    if not weights.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point dtype, got {weights.dtype}")
    wanted = weight_dtype(rows.dtype)
    if weights.dtype is wanted and weights.is_contiguous():
        return weights
    if not is_traced():
        check_storage(name, weights)  # before it is read
    return weights.to(wanted).contiguous()


def bulk_ready(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Returns `rows`; on CUDA, returns a copy if a row does not begin at a multiple of 16 bytes."""
    if not rows.is_cuda or rows.dim() != 2:
        return rows
    check_memory(name, rows)  # before its address is taken and its memory is read
    apart = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0
    return (
        rows.clone(memory_format=torch.contiguous_format) if (rows.data_ptr() | apart) % ROW_ALIGNMENT_BYTES else rows
    )


def check_tensors(optional: dict[str, object] | None = None, /, **given: object) -> None:
    """Raises ValueError unless each argument is a tensor that torch can pass to an operator. `optional` may be None."""
    for name, value in (given if optional is None else {**given, **optional}).items():
        if type(value) in PLAIN or (value is None and name not in given):
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
        if not is_traced():
            check_kind(name, value)


def check_quantize(x: torch.Tensor, quantize: str | None, mode: str = "ht") -> None:
    """Raises ValueError if `quantize` is unknown in this mode, or if `x` requires gradients and would be rounded."""
    if quantize is None:
        return
    known = QUANTIZED_BY_MODE[mode]
    if not isinstance(quantize, str) or quantize not in known:
        raise ValueError(f"quantize: expected None or {', '.join(map(repr, known))}, got {quantize!r}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"x: expected a tensor without gradients, such as x.detach(), with quantize={quantize!r}, since "
            f"{QUANTIZED[quantize]} rows carry none, got requires_grad=True"
        )


def check_devices(engine: Engine, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all tensors are on the communicator's device. Also takes fakes, which have no memory."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_device(engine, name, tensor)


def check_dispatch(engine: Engine, call: DispatchCall) -> None:
    """Checks x [T,H] of a known dtype, topk_ids [T,K], weights [T,K] and scales [T,S]: shapes, dtypes and devices."""
    x, ids = call.x, call.topk_ids
    dtype = x.dtype if call.quantize is None else QUANTIZED[call.quantize]
    _check_rows(engine, "x", x, dtype)
    if call.quantize is not None:
        _check_quantizable(call)
    tokens = x.shape[0]
    most = engine.config.max_tokens_per_rank
    if most is not None and tokens > most:
        raise ValueError(f"x: expected at most max_tokens_per_rank={most} tokens, got {tokens}")
    if tokens > _C.max_tokens:
        raise ValueError(f"x: expected at most {_C.max_tokens} tokens, got {tokens}")
    if x.shape[1] > engine.config.hidden_size and engine.config.max_row_bytes is None:
        raise ValueError(f"x: expected a hidden size of at most {engine.config.hidden_size}, got {x.shape[1]}")
    row_bytes, limit = x.shape[1] * dtype.itemsize, engine.config.max_row_bytes
    if limit is not None and row_bytes > limit:
        raise ValueError(f"x: expected rows of at most max_row_bytes={limit} bytes, got {row_bytes}")
    if tokens and x.stride(1) != 1:
        raise ValueError(f"x: expected contiguous rows (stride 1 along H), got strides {tuple(x.stride())}")
    _check_ids(engine, ids, tokens)
    if call.weights is not None:
        check_beside("topk_weights", call.weights, tuple(ids.shape), engine)
        if x.dtype is torch.float64 and engine.device.type == "cuda":
            raise ValueError("topk_weights: expected None beside rows of torch.float64 on cuda, got weights")
    if call.scales is not None:
        _check_scales(engine, call.scales, tokens)
    check_capture(engine, call)
    if call.capacity is not None:
        _check_capacity(engine, call)
    elif call.previous is not None and is_bounded(call.previous):
        raise ValueError(
            "capacity: expected a number of rows, since previous_handle was made with one and the host knows no other, "
            "got None"
        )
    if call.previous is not None and call.previous.tensors.topk_ids.shape != ids.shape:
        expected = tuple(call.previous.tensors.topk_ids.shape)
        raise ValueError(f"topk_ids: expected the shape {expected} of previous_handle, got {tuple(ids.shape)}")


def check_capture(engine: Engine, call: DispatchCall) -> None:
    """Refuses the capture of a CUDA graph in which the host would have to wait for the number of output rows."""
    if call.capacity is None and call.previous is None and engine.streams.capturing():
        raise ValueError(
            "capacity: expected a number of rows while a CUDA graph is captured, since the host cannot wait, got None"
        )


def check_combine(
    engine: Engine,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    extra: torch.Tensor | None,
    routing: Routing,
) -> None:
    """Checks y [N,H] of a summable dtype, weights and extra as dispatch returned them, and bias [T,H].

    bias has y's dtype or, in mode="ht", the dtype of the sums.
    """
    _check_rows(engine, "y", y, y.dtype)
    if y.dtype not in ELEMENTS or (y.dtype is torch.float64 and engine.device.type == "cuda"):
        known = ", ".join(str(dtype) for dtype in ELEMENTS if engine.device.type == "cpu" or dtype is not torch.float64)
        raise ValueError(f"y: expected one of {known} on {engine.device.type}, got {y.dtype}")
    if not y.is_contiguous():
        raise ValueError(f"y: expected a contiguous tensor, got strides {tuple(y.stride())} for shape {tuple(y.shape)}")
    rows = rows_of(engine, routing)
    if y.shape[0] < rows or (is_bounded(routing) and y.shape[0] > rows):
        raise ValueError(f"y: expected the {rows} rows that dispatch returned, got {y.shape[0]}")
    shape: tuple[int, ...] = (y.shape[0],)
    if not engine.flat:
        shape = (y.shape[0], routing.struct.topk)
    for name, beside in (("weights", weights), ("values", extra)):
        if beside is not None:
            check_beside(name, beside, shape, engine)
            if beside.dtype is not weight_dtype(y.dtype):
                raise ValueError(f"{name}: expected {weight_dtype(y.dtype)}, got {beside.dtype}")
    if bias is not None:
        check_beside("bias", bias, (routing.struct.num_tokens, y.shape[1]), engine)
        sums = y.dtype if engine.config.mode == "ll" else weight_dtype(y.dtype)
        if bias.dtype not in (y.dtype, sums):
            wanted = f"the dtype {y.dtype} of y" + (f" or {sums}" if sums is not y.dtype else "")
            raise ValueError(f"bias: expected {wanted}, got {bias.dtype}")


def rows_of(engine: Engine, routing: Routing) -> int:
    """Returns the number of rows in the output of a handle's dispatch."""
    totals = routing.totals
    if is_bounded(routing):
        return totals[0]
    return totals[_ROWS if engine.flat else _SLOTS]


def is_bounded(routing: Routing) -> bool:
    """Whether the dispatch of `routing` had a capacity. The host then knows the capacity and no other total."""
    return len(routing.totals) == 1


def check_handle_tensors(engine: Engine, name: str, handle: DispatchHandle, num_totals: int) -> None:
    """Checks that a handle's tensors have the dtypes and devices that dispatch gave them, and that totals has its
    size."""
    totals = handle.totals
    check_tensors(**{f"{name}.totals": totals})
    check_handle_words(engine, name, topk_ids=handle.topk_ids, plan=handle.plan, recv_rows=handle.recv_rows)
    check_memory(f"{name}.totals", totals)
    sizes = (1,), (num_totals,)
    if totals.device.type != "cpu" or totals.dtype is not torch.int64 or totals.shape not in sizes:
        raise ValueError(
            f"{name}.totals: expected 1 or {num_totals} torch.int64 in host memory, got shape "
            f"{tuple(totals.shape)} of {totals.dtype} on {totals.device}"
        )
    if not totals.is_contiguous():
        raise ValueError(f"{name}.totals: expected a contiguous tensor, got strides {tuple(totals.stride())}")
    if len(totals) == 1 and engine.config.max_tokens_per_rank is None:
        raise ValueError(f"{name}.totals: expected {num_totals} totals without max_tokens_per_rank, got 1")


def check_handle_words(
    engine: Engine, name: str, id_dtypes: tuple[torch.dtype, ...] = (torch.int32,), **words: torch.Tensor
) -> None:
    """Checks that the tensors of a handle that kernels read, by field, have the dtype and device of a dispatch."""
    check_tensors(**{f"{name}.{field}": tensor for field, tensor in words.items()})
    if words["topk_ids"].dim() != 2:
        raise ValueError(f"{name}.topk_ids: expected 2 dimensions, got shape {tuple(words['topk_ids'].shape)}")
    for field, tensor in words.items():
        _check_here(engine, f"{name}.{field}", tensor)
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.{field}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")
        known = id_dtypes if field == "topk_ids" else (torch.int32,)
        if tensor.dtype not in known:
            raise ValueError(f"{name}.{field}: expected {' or '.join(map(str, known))}, got {tensor.dtype}")


def check_handle_shapes(name: str, handle: DispatchHandle, plan_words: int, slots: int) -> None:
    """Checks that a handle's plan and recv_rows have these sizes."""
    pairs = (handle.plan, (plan_words,)), (handle.recv_rows, (slots, handle.topk_ids.shape[1]))
    for field, (tensor, shape) in zip(("plan", "recv_rows"), pairs, strict=True):
        if tensor.shape != shape:
            raise ValueError(f"{name}.{field}: expected shape {shape}, got {tuple(tensor.shape)}")


def check_routing(engine: Engine, name: str, routing: DispatchHandle, num_totals: int) -> None:
    """Checks that a handle's tensors are as dispatch made them, since kernels take their addresses."""
    check_handle_tensors(engine, name, routing, num_totals)
    T, K = routing.topk_ids.shape
    totals, most = routing.totals, engine.config.max_tokens_per_rank
    slots = int(totals[_SLOTS]) if len(totals) > 1 else engine.size * (most or 0)
    check_handle_shapes(name, routing, engine.plan_words(T, K), slots)


def _check_quantizable(call: DispatchCall) -> None:
    if call.x.dtype not in QUANTIZABLE:
        known = ", ".join(map(str, QUANTIZABLE))
        raise ValueError(f"x: expected one of {known} with quantize={call.quantize!r}, got {call.x.dtype}")
    if call.scales is not None:
        raise ValueError(
            f"scales: expected None with quantize={call.quantize!r}, which makes them, got shape "
            f"{tuple(call.scales.shape)}"
        )


def _check_rows(engine: Engine, name: str, rows: torch.Tensor, travels_as: torch.dtype) -> None:
    _check_here(engine, name, rows)
    if rows.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(rows.shape)}")
    if rows.dtype not in DTYPE_CODES:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, DTYPES))}, got {rows.dtype}")
    row_bytes = rows.shape[1] * travels_as.itemsize
    if row_bytes == 0 or row_bytes % ROW_ALIGNMENT_BYTES:
        raise ValueError(
            f"{name}: expected rows of a positive multiple of {ROW_ALIGNMENT_BYTES} bytes, got {row_bytes} "
            f"({rows.shape[1]} elements of {travels_as})"
        )
    if row_bytes > _C.max_row_bytes:
        raise ValueError(f"{name}: expected rows of at most {_C.max_row_bytes} bytes, got {row_bytes}")


def _check_device(engine: Engine, name: str, tensor: torch.Tensor) -> None:
    device = tensor.device
    if device == engine.device:
        return
    if device.type == "cuda" and not hasattr(_C, "cuda"):
        raise ValueError(f"{name}: expected a CPU tensor, since this build has no CUDA kernels, got {device}")
    raise ValueError(f"{name}: expected a tensor on {engine.device}, got {device}")


def _check_here(engine: Engine, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != engine.device:
        _check_device(engine, name, tensor)
    check_memory(name, tensor)


def check_beside(name: str, tensor: torch.Tensor, shape: tuple[int, ...], engine: Engine) -> None:
    _check_here(engine, name, tensor)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def _check_ids(engine: Engine, ids: torch.Tensor, tokens: int) -> None:
    _check_here(engine, "topk_ids", ids)
    if ids.dim() != 2 or ids.shape[0] != tokens:
        raise ValueError(f"topk_ids: expected shape ({tokens}, K), got {tuple(ids.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids: expected torch.int32 or torch.int64, got {ids.dtype}")
    most = engine.config.topk
    if not 1 <= ids.shape[1] <= most:
        raise ValueError(f"topk_ids: expected 1 to topk={most} experts per token, got {ids.shape[1]}")
    if not ids.is_contiguous():
        raise ValueError(f"topk_ids: expected a contiguous tensor, got strides {tuple(ids.stride())}")
    check_id_values(engine, ids)


def check_id_values(engine: Engine, ids: torch.Tensor) -> None:
    """Checks that ids ``[T, K]`` name known experts, none twice for a token. It does so on CPUs, and on GPUs with
    EP_PLUGIN_CHECK_IDS=1 at the communicator's construction."""
    if engine.checks_ids and not engine.streams.capturing():
        _check_id_values(engine, ids.cpu())


def _check_id_values(engine: Engine, ids: torch.Tensor) -> None:
    bad = _C.find_bad_id(ids.data_ptr(), ids.element_size(), ids.shape[0], ids.shape[1], engine.config.num_experts)
    if bad is None:
        return
    token, k, expert, repeated = bad
    if repeated:
        raise ValueError(f"topk_ids: expected distinct experts per token, got expert {expert} twice at token {token}")
    raise ValueError(
        f"topk_ids: expected -1 or 0 to {engine.config.num_experts - 1}, got {expert} at token {token}, position {k}"
    )


def _check_scales(engine: Engine, scales: torch.Tensor, tokens: int) -> None:
    _check_here(engine, "scales", scales)
    if scales.dim() != 2 or scales.shape[0] != tokens:
        raise ValueError(f"scales: expected shape ({tokens}, S), got {tuple(scales.shape)}")
    if scales.is_complex():
        raise ValueError(f"scales: expected a real dtype, got {scales.dtype}")
    if not scales.is_contiguous():
        raise ValueError(f"scales: expected a contiguous tensor, got strides {tuple(scales.stride())}")
    scale_bytes = scales.shape[1] * scales.element_size()
    if scale_bytes > _C.max_row_bytes:
        raise ValueError(f"scales: expected at most {_C.max_row_bytes} bytes for each token, got {scale_bytes}")


def _check_capacity(engine: Engine, call: DispatchCall) -> None:
    capacity, previous = call.capacity, call.previous
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0:
        raise ValueError(f"capacity: expected an integer of at least 0, rows, got {capacity!r}")
    if capacity > MOST_ROWS:
        raise ValueError(f"capacity: expected at most {MOST_ROWS} rows, got {capacity}")
    if previous is None:
        if engine.config.max_tokens_per_rank is None:
            raise ValueError(
                "capacity: expected a communicator with max_tokens_per_rank set, since pools cannot grow without the "
                "host, got max_tokens_per_rank=None"
            )
        return
    rows = rows_of(engine, previous)
    if capacity < rows or (is_bounded(previous) and capacity > rows):
        at_least = "" if is_bounded(previous) else "at least "
        raise ValueError(
            f"capacity: expected {at_least}{rows} rows, which previous_handle has, got {capacity}; without "
            "previous_handle it may be any number"
        )


def is_wide(bias: torch.Tensor | None, rows: torch.Tensor) -> int:
    """1 if a bias of rows is of a larger dtype than they are, else 0."""
    return int(bias is not None and bias.dtype is not rows.dtype)
