"""Megatron-core's distributed optimizer: its parameter gathers and gradient sums through ep_plugin.

Megatron calls two functions of `param_and_grad_buffer` under a coalescing manager. They work in place: the shard is a
slice of the bucket. With overlap Megatron waits for the manager, so our Works are appended to the manager's works.

These calls are left to Megatron's own collectives, and one warning says so:

- all-reduces (without the distributed optimizer, and between its instances);
- sums with an operation or dtype that `HierarchicalReduceScatter` does not take;
- groups that ep_plugin refuses;
- on GPUs, gathers of 64 MiB and more into memory that peers have not mapped (pairs.py).

The uneven gathers of the layer-wise optimizer and Megatron-FSDP call torch.distributed themselves, so no function here
replaces them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as buffers
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from ep_plugin import counts
from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks
from ep_plugin.integrations.fallback import warn_once
from ep_plugin.integrations.pairs import PairUser

hooks.check_signatures(
    "megatron",
    buffers,
    [
        "dist_all_gather_func",
        "dist_reduce_scatter_func",
        "_coalescing_manager(group, device, async_ops)",
        "reduce_scatter_with_fp32_accumulation(output_tensor, input_tensor, op, group, async_op)",
        "_ParamAndGradBucketGroup.start_param_sync(self, force_sync)",
        "_ParamAndGradBucketGroup.start_grad_sync(self, force_all_reduce)",
        "_ParamAndGradBuffer.offload_to_cpu(self, move_params, move_grads)",
    ],
)

_SUM, _ACCUMULATED = "dist_reduce_scatter_func", "reduce_scatter_with_fp32_accumulation"
_user = PairUser("megatron")
_thread = threading.local()  # .manager: the innermost coalescing manager that is open in this thread


def enable() -> None:
    """Serves the gathers and sums of all data-parallel buckets from now on. Call it on every rank, between steps.

    Parameter buffers that are made from now on lie in peer memory.
    """
    for (owner, name), wrap in _REPLACEMENTS.items():
        stock = getattr(owner, name)
        is_ours = hooks.replaces("megatron", owner, name) or (name == _SUM and _is_reassigned())
        hooks.replace("megatron", owner, name, stock if is_ours else functools.wraps(stock)(wrap(stock)))


def disable() -> None:
    """Restores Megatron's functions, and closes the collectives. Call it on every rank, between steps.

    Parameters stay where they are.
    """
    is_reassigned = _is_reassigned()
    hooks.restore("megatron", *(owner for owner, _ in _REPLACEMENTS))
    if is_reassigned:
        setattr(buffers, _SUM, getattr(buffers, _ACCUMULATED))
    _user.leave()


def _is_reassigned() -> bool:
    """Whether a bucket group with FP32 accumulation has replaced the reduce-scatter by our accumulating function."""
    ours = getattr(buffers, _ACCUMULATED)
    return hooks.replaces("megatron", buffers, _ACCUMULATED) and getattr(buffers, _SUM) is ours


def _manage(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a coalescing manager that also waits for our Works.

    Our functions may raise in its body. Then the group stops collecting operations. torch's manager would let it
    continue.
    """

    @contextlib.contextmanager
    def managed(group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        outer = getattr(_thread, "manager", None)
        collected: dict[Any, Any] = distributed_c10d._world.pg_coalesce_state
        key = group or dist.group.WORLD
        with stock(group, *args, **kwargs) as manager:
            _thread.manager, manager.ep_plugin_calls = manager, 0
            try:
                yield manager
            except BaseException:
                collected.pop(key, None)
                raise
            finally:
                _thread.manager = outer
            num_theirs = max(1, len(collected.get(key, ())))
        if manager.ep_plugin_calls == 0 and hooks.serves("megatron", buffers, managed):
            _leave("all-reduces of gradients", num_theirs)

    return managed


def _gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> None: ...


def _sum(output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> None: ...


def _accumulate(
    output_tensor: Any, input_tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None: ...


def _serve(kind: str, form: Callable[..., None], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs our collective in the place of `stock`.

    kind: the name of the collective in a Pair. form: a function with the parameters of Megatron's own function. `stock`
    does not show them if somebody has wrapped it.
    """
    signature = inspect.signature(form)
    first, second, *_ = signature.parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hooks.serves("megatron", buffers, call):
            return stock(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments  # TypeError for arguments that stock does not take
        output, shards = given.pop(first), given.pop(second)
        group, async_op, options = given.pop("group", None), given.pop("async_op", False), given
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return stock(*args, **kwargs)
        manager = getattr(_thread, "manager", None)
        if manager is not None:
            manager.ep_plugin_calls += 1
        pair = _user.pair(group or dist.group.WORLD, output.device)
        reason = pair.why_left(kind, output, **options)
        if reason:
            _leave(reason)
            return stock(*args, **kwargs)
        hooks.served("megatron", kind=counts.COLLECTIVES)
        work = pair.run(kind, output, shards, async_op, **options)
        if async_op and manager is not None:
            manager.append(work)
        return work

    return call


def _leave(what: str, number: int = 1) -> None:
    hooks.left("megatron", number)
    warn_once("megatron", f"{what} are left to Megatron's own collectives")


def _allocate(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps `_ParamAndGradBuffer.__init__` so that parameters lie in peer memory."""

    def init_in_peer_memory(self: Any, *args: Any, **kwargs: Any) -> None:
        is_enabled = hooks.is_enabled("megatron", buffers._ParamAndGradBuffer)
        with _ParameterMemory(self) if is_enabled else contextlib.nullcontext():
            init(self, *args, **kwargs)

    return init_in_peer_memory


class _ParameterMemory(TorchFunctionMode):
    """Allocates the parameters of `buffer` in peer memory: the first torch.zeros in its constructor.

    If the user lets NCCL register the buffer's memory, this mode changes nothing.
    """

    def __init__(self, buffer: Any) -> None:
        super().__init__()
        self.buffer, self.is_answered = buffer, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, buffer = kwargs or {}, self.buffer
        if func is torch.zeros and not self.is_answered:
            self.is_answered = True
            of_parameters = buffer.ddp_config.use_distributed_optimizer and kwargs.get("dtype") is buffer.param_dtype
            if of_parameters and not buffer.nccl_ub:
                device = torch.device(kwargs["device"])
                pair = _user.pair(buffer.data_parallel_group, device)
                if pair.refused("all_gather") is None:
                    return pair.all_gather.allocate(args[0], kwargs["dtype"], device).zero_()
        return func(*args, **kwargs)


def _keep(offload: Callable[..., None]) -> Callable[..., None]:
    """Wraps `_ParamAndGradBuffer.offload_to_cpu` so that it refuses to free memory that peers have mapped."""

    def offload_others(self: Any, move_params: bool = True, move_grads: bool = True) -> None:
        data = self.param_data if move_params else None
        if data is not None and not data.untyped_storage().resizable():
            raise NotSupported(
                "offload_to_cpu(move_params=True): expected parameters in memory that can be freed, got memory that "
                "peers have mapped; call ep_plugin.integrations.megatron.optimizer.disable() before the model is built"
            )
        offload(self, move_params, move_grads)

    return offload_others


_REPLACEMENTS: dict[tuple[Any, str], Callable[..., Any]] = {
    (buffers, "_coalescing_manager"): _manage,
    (buffers, "dist_all_gather_func"): functools.partial(_serve, "all_gather", _gather),
    (buffers, _SUM): functools.partial(_serve, "reduce_scatter", _sum),
    # A bucket group with FP32 accumulation replaces the reduce-scatter by this function. Ours always accumulates in
    # FP32.
    (buffers, _ACCUMULATED): functools.partial(_serve, "reduce_scatter", _accumulate),
    (buffers._ParamAndGradBuffer, "__init__"): _allocate,
    (buffers._ParamAndGradBuffer, "offload_to_cpu"): _keep,
}
