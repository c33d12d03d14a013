"""MoECommunicator: expert-parallel dispatch and combine over a process group.

Shapes: T tokens on this rank, H hidden size, K experts per token, E experts in all, R ranks, E_l = E / R local
experts, N rows received.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.errors import CaptureRefused, EpPluginError
from ep_plugin.moe import operators as ops
from ep_plugin.moe.arguments import as_weights, bulk_ready, check_combine, check_dispatch, check_quantize, check_tensors
from ep_plugin.moe.high_throughput.combine import PendingCombine, Sums, finish_combine, start_combine, whole_combine
from ep_plugin.moe.high_throughput.dispatch import finish_dispatch, start_dispatch, whole_dispatch
from ep_plugin.moe.high_throughput.dispatch_args import DispatchCall, DispatchResult, PendingDispatch
from ep_plugin.moe.high_throughput.engine import Engine
from ep_plugin.moe.high_throughput.routing import KnownRouting, RoutingTensors, known_routing
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput
from ep_plugin.moe.registry import register
from ep_plugin.moe.shared import shared_communicator
from ep_plugin.moe.untraced import untraced
from ep_plugin.moe.work import CombineWork, DispatchWork
from ep_plugin.runtime.base import leave, resolve_device


class MoECommunicator:
    """Dispatch and combine for one group of ranks and one configuration.

    Construction is collective. All ranks of the group call the same operations in the same order, and ranks that hold
    several communicators on one device call all of them in one order. Raises ValueError (with the expected and the
    actual value) before anything is launched, PeerTimeout and PeerAborted when peers fail; after such a fault every
    call raises that first error again, and only `close` works.
    """

    @untraced
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: MoECommunicatorConfig,
        device: torch.device | str | None = None,
    ) -> None:
        """`group`: None is the default group. `device`: where tensors live; None is this process's current CUDA device
        for a group with a backend of GPUs (NCCL), else the CPU."""
        self.config = config
        self.engine = Engine(group, config, resolve_device(group, device))
        self.number = register(self)
        self._under_way: PendingDispatch | PendingCombine | None = None
        self._waited_for: PendingDispatch | PendingCombine | None = None

    @classmethod
    @untraced
    def shared(
        cls,
        group: dist.ProcessGroup | None,
        config: MoECommunicatorConfig | None = None,
        *,
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> MoECommunicator:
        """The one communicator of this process for (group, device, configuration); made on first use, collectively.

        `settings` are MoECommunicatorConfig's fields, in place of `config`. Communicators of groups that have been
        destroyed since are closed by the next call, which only warns of what goes wrong then. On CPUs threads may make
        those of different groups in any order; on GPUs, where PyTorch maps one block at a time, ranks keep to one.
        """
        config = config if config is not None else MoECommunicatorConfig(**settings)
        return shared_communicator(
            group, lambda: resolve_device(group, device), config, lambda: cls(group, config, device)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MoECommunicator:
        """Itself: a copy of a model exchanges over the same memory."""
        return self

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.engine.rank

    @property
    def size(self) -> int:
        """Ranks in the group, R."""
        return self.engine.size

    @property
    def num_local_experts(self) -> int:
        """Experts on this rank, E_l; expert e lives on rank e // E_l."""
        return self.engine.local_experts

    # -- operations ----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        previous_handle: DispatchHandle | None = None,
        capacity: int | None = None,
        quantize: str | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:
        """Brings every token to the ranks that hold its experts.

        x: ``[T, H]``, rows of a multiple of 16 bytes. topk_ids: int32 or int64 ``[T, K]``, global expert ids, -1:
        dropped; a token names an expert once (checked on CPUs, and on GPUs with EP_PLUGIN_CHECK_IDS=1). topk_weights:
        ``[T, K]`` of any float dtype. scales: ``[T, S]``, travels with the rows unchanged.
        previous_handle: reuse the routing of an earlier dispatch with the same topk_ids. capacity: rows of the output;
        the host then waits for nothing, and ``overflow`` tells on the device when rows were dropped. quantize: "e4m3"
        sends BF16, FP16 or FP32 rows (H a multiple of 16) as float8_e4m3fn with a float32 scale for each 128 elements,
        both made as the rows leave: ``scales`` comes back as ``[N, ceil(H / 128)]``, a row is about tokens * scales.
        reference.reference_quantize is what it computes; multiplied out, a block with an infinity is NaN, and one whose
        largest magnitude is below 2**-137 is up to a third off, or 0.

        Returns the rows and the handle that `combine` needs. Differentiable in `x` and `topk_weights`; backward is
        collective, so every rank must run it. With `quantize` no gradient leads to `x`: one that requires some is
        refused. Gradients that reach the returned `scales`, or FP8 tokens, lead nowhere, without a word.
        """
        return self._dispatch(x, topk_ids, topk_weights, scales, previous_handle, capacity, quantize)

    def combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Brings the experts' rows back and sums them per token, in float32: ``[T, H]`` of y's dtype.

        y: ``[N, H]``, one row per dispatched row. weights: as dispatch returned them, applied to the rows; None: a
        plain sum. In TOKEN_MAJOR a row's weights are summed over its local experts. bias: ``[T, H]``, added to the
        result. Differentiable in `y`, `weights` and `bias`; without `weights`, `y` is not kept for backward. Backward
        is collective, so every rank must run it.
        """
        return self._combine(y, handle, weights, bias)

    @untraced
    def dispatch_async(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        previous_handle: DispatchHandle | None = None,
        capacity: int | None = None,
        quantize: str | None = None,
    ) -> DispatchWork:
        """Starts a dispatch; `.wait()` returns its result. The next operation completes one that nobody waited for.

        The arguments must not be written to before `.wait()`. With ``dispatch_recv_sms=0``, and neither `capacity` nor
        `previous_handle`, the host waits here until every rank has told how many rows it sends.
        """
        check_tensors({"scales": scales}, x=x, topk_ids=topk_ids)
        check_quantize(x, quantize)
        routing = None if previous_handle is None else self._known_routing("previous_handle", previous_handle)
        weights = as_weights("topk_weights", topk_weights, x, detached=True)
        call = DispatchCall(bulk_ready(x.detach()), topk_ids, weights, scales, routing, capacity, quantize)
        with self.engine.lock:
            self._complete()
            check_dispatch(self.engine, call)
            begun = self.engine.run("dispatch", self._begin_dispatch, call)
        arguments = (x, topk_ids, topk_weights, scales, previous_handle, capacity, quantize)
        return DispatchWork(begun, lambda: self._dispatch(*arguments, begun=begun))

    @untraced
    def combine_async(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> CombineWork:
        """Starts a combine; `.wait()` returns its result. The next operation completes one that nobody waited for.

        The arguments must not be written to before `.wait()`.
        """
        check_tensors({"bias": bias}, y=y)
        routing = self._known_routing("handle", handle)
        rows = as_weights("weights", weights, y, detached=True)
        kept = bulk_ready(y.detach()), None if bias is None else bulk_ready(bias.detach())
        with self.engine.lock:
            self._complete()
            check_combine(self.engine, kept[0], rows, kept[1], None, routing)
            begun = self.engine.run("combine", self._begin_combine, kept[0], rows, kept[1], routing)
        return CombineWork(begun, lambda: self._combine(y, handle, weights, bias, begun=begun))

    def set_sms(self, **sms: int | None) -> None:
        """Sets the SM counts of later operations: ``dispatch_send_sms``, ``dispatch_recv_sms``, ``combine_send_sms``,
        ``combine_recv_sms``. None or left out: the configuration's. Ranks may differ.

        Completes an operation that nobody has waited for. Raises as `check`, and ValueError as the configuration does.
        """
        with self.engine.lock:
            self.engine.check()
            if sms != self.engine.asked_sms:
                self._complete()
                self.engine.set_sms(sms)

    # -- faults and the end --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises the first error of this communicator, if there is one. Costs no synchronisation."""
        self.engine.check()

    def abort(self, reason: str) -> None:
        """Tells the peers that this rank has failed: their waits raise PeerAborted(rank, reason) at once."""
        self.engine.abort(reason)

    def close(self) -> None:
        """Gives all memory back. Not collective: works after a fault and with dead peers. May be called again."""
        self.engine.close()

    def __enter__(self) -> MoECommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self, error)

    # -- what the operators call ---------------------------------------------------------------------------------

    def run_dispatch(self, call: DispatchCall, pending: bool) -> tuple[DispatchResult, RoutingTensors]:
        """The whole of a dispatch, or, when `pending`, the rest of the one that is being waited for."""
        engine = self.engine
        with engine.lock:
            if pending:
                return cast("tuple[DispatchResult, RoutingTensors]", self._collect())
            self._complete()
            check_dispatch(engine, call)
            return engine.run("dispatch", whole_dispatch, call)

    def run_combine(
        self,
        y: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        extra: torch.Tensor | None,
        routing: KnownRouting,
        pending: bool,
    ) -> Sums:
        """The whole of a combine, or, when `pending`, the rest of the one that is being waited for."""
        engine = self.engine
        with engine.lock:
            if pending:
                return cast("Sums", self._collect())
            self._complete()
            check_combine(engine, y, weights, bias, extra, routing)
            return engine.run("combine", whole_combine, y, weights, bias, extra, routing)

    # -- inside --------------------------------------------------------------------------------------------------

    def _begin_dispatch(self, engine: Engine, call: DispatchCall) -> PendingDispatch:
        begun = self._under_way = start_dispatch(engine, call)
        begun.capture = engine.lanes.capturing()
        engine.lanes.record(*call[:4], begun.topk_ids, begun.plan, begun.block_counts, *_tensors_of(call.previous))
        if begun.made is not None:
            engine.lanes.record(*begun.made[0], *begun.made[1])  # a fault may keep it from ever being joined
        return begun

    def _begin_combine(
        self,
        engine: Engine,
        y: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        routing: KnownRouting,
    ) -> PendingCombine:
        begun = self._under_way = start_combine(engine, y, weights, bias, None, routing)
        begun.capture = engine.lanes.capturing()
        engine.lanes.record(y, weights, bias, *_tensors_of(routing), *(begun.made or ()))
        return begun

    def _dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        previous_handle: DispatchHandle | None,
        capacity: int | None,
        quantize: str | None,
        begun: PendingDispatch | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:
        check_tensors({"scales": scales}, x=x, topk_ids=topk_ids)
        check_quantize(x, quantize)
        previous = None if previous_handle is None else self._routing_of("previous_handle", previous_handle)
        weights = as_weights("topk_weights", topk_weights, x)
        arguments = (x, topk_ids, weights, scales, list(previous or ()), self.number, capacity, quantize)
        if begun is None:
            tensors = ops.dispatch(*arguments, False)
        else:
            with self.engine.lock:
                self._waited_for = begun
                tensors = ops.dispatch(*arguments, True)
        results = len(DispatchResult._fields)
        made = DispatchResult(*tensors[:results])
        routing = previous if previous is not None else RoutingTensors(*tensors[results:])
        flat = self.engine.flat
        limits = made.limits if capacity is not None else None
        out = DispatchOutput(
            tokens=made.tokens,
            scales=None if scales is None and quantize is None else made.scales,
            weights=None if topk_weights is None else made.weights,
            topk_ids=None if flat else made.ids,
            row_expert_ids=made.ids if flat else None,
            num_tokens_per_expert=made.expert_counts,
            num_tokens_per_expert_cpu=made.host_counts if capacity is None else None,
            expert_offsets=made.expert_offsets,
            overflow=None if limits is None else limits[0],
            required=None if limits is None else limits[1],
        )
        return out, DispatchHandle(*routing, self.number)

    def _combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        begun: PendingCombine | None = None,
    ) -> torch.Tensor:
        check_tensors({"bias": bias}, y=y)
        routing = self._routing_of("handle", handle)
        rows = as_weights("weights", weights, y)
        arguments = (y, rows, bias, None, list(routing), self.number)
        if begun is None:
            return ops.combine(*arguments, False)[0]
        with self.engine.lock:
            self._waited_for = begun
            return ops.combine(*arguments, True)[0]

    def _routing_of(self, name: str, handle: DispatchHandle) -> RoutingTensors:
        if not isinstance(handle, DispatchHandle):
            raise ValueError(f"{name}: expected a DispatchHandle, got {type(handle).__name__}")
        if handle.comm != self.number:
            raise ValueError(
                f"{name}: expected one of communicator {self.number}, got one of communicator {handle.comm}"
            )
        return RoutingTensors(*handle[:-1])

    def _known_routing(self, name: str, handle: DispatchHandle) -> KnownRouting:
        return known_routing(self.engine, name, self._routing_of(name, handle))

    def _complete(self) -> None:
        """Completes what was started and is not complete; its result stays there until somebody waits for it.

        This may happen below another operator or inside a backward, where autograd records nothing: that is left to
        the wait(). A CUDA graph has both ends of an operation or none: CaptureRefused, and nothing is enqueued.
        """
        begun = self._under_way
        if begun is not None:
            capture = self.engine.lanes.capturing()
            if begun.capture != capture:
                self.check()
                if begun.capture:
                    self._under_way = None  # nothing of it was run
                raise self._torn(begun, capture)
        self._under_way = None
        if isinstance(begun, PendingDispatch):
            begun.result = self.engine.run("dispatch", finish_dispatch, begun)
        elif begun is not None:
            begun.result = self.engine.run("combine", finish_combine, begun)

    def _torn(self, begun: PendingDispatch | PendingCombine, capture: int) -> CaptureRefused:
        """The error of an operation that was begun in one capture, or none, and goes on in another, or none."""
        began = "in the capture of a CUDA graph" if begun.capture else "before the capture of a CUDA graph began"
        now = ("in another" if begun.capture else "in it") if capture else "after it"
        return CaptureRefused(
            f"{self.engine.name}: expected an operation that was begun {began} to be completed and waited for there "
            f"too, got its wait(), or the next operation, {now}"
        )

    def _collect(self) -> object:
        """The result of the operation that is being waited for, ordered before the caller's stream goes on."""
        begun, self._waited_for = self._waited_for, None
        assert begun is not None
        if begun is self._under_way:
            self._complete()
        elif begun.result is None:
            self.check()
            raise EpPluginError("wait(): expected an operation under way, got one whose completion has failed before")
        else:
            capture = self.engine.lanes.capturing()
            if capture not in (0, begun.capture):  # which would wait for what is not in it
                raise self._torn(begun, capture)
            self.engine.lanes.join()
        assert begun.result is not None
        self.engine.lanes.hand_over(begun.result)  # parts of it were made on the stream on which it was started
        result, begun.result = begun.result, None
        return result


def _tensors_of(routing: KnownRouting | None) -> tuple[torch.Tensor, ...]:
    return () if routing is None else routing.tensors
