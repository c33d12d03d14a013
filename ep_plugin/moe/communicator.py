"""MoECommunicator: expert-parallel dispatch and combine over a process group.

The file is long because most of its lines are public docstrings.

Shapes: T tokens on this rank, H hidden size, K experts per token, S scales per token, E experts in all, R ranks,
E_l = E / R local experts, N rows received.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
from ep_plugin.counts import held_bytes
from ep_plugin.moe import operators as ops
from ep_plugin.moe.across_nodes.combine import CombineAcrossNodes
from ep_plugin.moe.across_nodes.dispatch import DispatchAcrossNodes
from ep_plugin.moe.across_nodes.nodes import Nodes
from ep_plugin.moe.arguments import as_weights, check_quantize, check_tensors
from ep_plugin.moe.high_throughput.combine import Combine
from ep_plugin.moe.high_throughput.dispatch import Dispatch
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.moe.in_flight import CombineWork, DispatchWork, InFlight, Work, untraced
from ep_plugin.moe.layout import NOTHING, DispatchHandle, DispatchOutput, DispatchResult, HandleSizes
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from ep_plugin.moe.low_latency.engine import NO_FUNCTIONS, LowLatencyEngine
from ep_plugin.moe.low_latency.in_flight import LowLatencyInFlight
from ep_plugin.moe.registry import register, shared_communicator
from ep_plugin.moe.statistics import LoadStats, Sums
from ep_plugin.runtime.base import leave
from ep_plugin.runtime.streams import resolve_device
from ep_plugin.transport.groups import Group, checked_group
from ep_plugin.transport.peer import PeerBuffer

_NUM_RESULTS = len(DispatchResult._fields)
_NUM_ROUTING = len(DispatchHandle._fields) - 1  # tensors of a handle


class MoECommunicator:
    """Dispatch and combine for one group of ranks and one configuration.

    In mode="ht" the group may span nodes, with as many ranks on each. A backend of the kind that the group has then
    carries rows between nodes: gloo for CPUs, NCCL for GPUs. In mode="ll" all GPUs must be on one node.

    Construction is collective. All ranks of the group must call the same operations in the same order. Ranks that hold
    several communicators on one device must call all of these in one order. Otherwise ranks wait for each other until
    the deadline.

    Every method raises ValueError for wrong arguments, before anything is launched, and PeerTimeout or PeerAborted when
    peers fail. After such a fault every call raises that first error again, and only `close` works.

    Args:
        group: the ranks, a process group or a DeviceMesh of one dimension; None: the default process group.
        config: the settings, equal on all ranks but for the timeout and the SM counts.
        device: where tensors live; None: this process's current CUDA device for a group with a backend of GPUs (NCCL),
            else the CPU.

    Raises:
        DisagreementError: ranks have different configurations or devices.
        NotSupported: this build or machine cannot serve the group, such as one whose nodes have different numbers of
            ranks, or one of GPUs over nodes whose backend cannot send GPU memory.
    """

    @untraced
    def __init__(
        self,
        group: Group,
        config: MoECommunicatorConfig,
        device: torch.device | str | None = None,
    ) -> None:
        group = checked_group(group)
        if not isinstance(config, MoECommunicatorConfig):
            raise ValueError(f"config: expected a MoECommunicatorConfig, got {type(config).__name__}")
        self.config = config
        resolved = resolve_device(group, device)
        self.engine: Any = None  # HighThroughputEngine or LowLatencyEngine
        self.in_flight: Any = None  # InFlight or LowLatencyInFlight
        self.new_dispatch: Callable[..., Any]  # an Operation or a LowLatencyCall
        """Makes the operation of a dispatch from its operator's arguments."""
        self.new_combine: Callable[..., Any]
        self.handle_sizes: HandleSizes  # not in mode="ll"
        self._layout = config.resolved_layout
        self.num_routing = _NUM_ROUTING
        """The number of a handle's tensors that operations need: all, or in mode="ll" topk_ids and the plan."""
        self.nodes: Nodes | None = None
        """The facts that operations over several nodes share; None on one node."""
        sizes = self._open_low_latency(group, resolved) if config.mode == "ll" else self._open(group, resolved)
        self.number = register(self, sizes)
        self._in_c = self.operators_in_c = NO_FUNCTIONS
        self._runs_in_c = self.nodes is None
        engine: Any = self.engine
        control = engine.control
        control.set_number(self.number)
        if self.config.mode == "ll":
            self._in_c = engine.in_c
        elif self.nodes is None and engine.is_direct:
            self._in_c = NO_FUNCTIONS._replace(dispatch=control.dispatch_function(), combine=control.combine_function())
            self.operators_in_c = NO_FUNCTIONS._replace(
                dispatch=control.dispatch_operator(), combine=control.combine_operator()
            )

    def _open(self, group: dist.ProcessGroup, device: torch.device) -> str:
        """Makes the parts of a high-throughput communicator. Returns a key of all that its results' sizes depend on."""
        engine = self.engine = HighThroughputEngine(group, self.config, device)
        self.in_flight, self.handle_sizes = InFlight(engine), engine
        self.new_dispatch, self.new_combine = functools.partial(Dispatch, engine), functools.partial(Combine, engine)
        if engine.rails.nodes:
            with torch.inference_mode(False):  # what it makes is written to outside of the caller's mode
                nodes = self.nodes = self.handle_sizes = Nodes(engine)
            self.new_dispatch = functools.partial(DispatchAcrossNodes, nodes)
            self.new_combine = functools.partial(CombineAcrossNodes, nodes)
        return f"{engine.config_hash} {engine.size} {engine.node_map.num_nodes} {engine.meta_words} {_C.num_totals}"

    def _open_low_latency(self, group: dist.ProcessGroup, device: torch.device) -> str:
        """Does the same for a low-latency communicator."""
        engine = self.engine = LowLatencyEngine(group, self.config, device)
        self.in_flight = LowLatencyInFlight(engine)
        self.num_routing = 2
        self.new_dispatch = functools.partial(LowLatencyDispatch, engine)
        self.new_combine = functools.partial(LowLatencyCombine, engine)
        return f"{engine.config_hash} {engine.size} ll"

    @classmethod
    @untraced
    def shared(
        cls,
        group: Group,
        config: MoECommunicatorConfig | None = None,
        *,
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> MoECommunicator:
        """Returns the one communicator of this process for (group, device, configuration).

        The first call makes it, collectively. A call also closes the communicators of groups that have been destroyed;
        an error in that is only a warning.
        On CPUs threads may make communicators of different groups in any order. On GPUs all ranks must use one order,
        because PyTorch maps one block of memory at a time.

        Args:
            group, config, device: as in the constructor.
            settings: fields of MoECommunicatorConfig, in place of `config`.
        """
        if config is None:
            config = MoECommunicatorConfig(**settings)
        elif not isinstance(config, MoECommunicatorConfig):
            raise ValueError(f"config: expected a MoECommunicatorConfig, got {type(config).__name__}")
        return shared_communicator(
            group, lambda known: (resolve_device(known, device), config), lambda known: cls(known, config, device)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MoECommunicator:
        """Returns itself, so that a copy of a model exchanges over the same memory."""
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

    @property
    def rail_bytes_sent(self) -> int:
        """Bytes that this rank has sent to other nodes in all operations so far: rows with their scales and weights,
        expert ids and counts. 0 if the group has one node."""
        return self.engine.rails.bytes_sent

    @property
    def peer_bytes(self) -> int:
        """Bytes of memory that this rank holds for the communicator, and that peers map: pools, the control block and
        the board. Pools grow with the rows of an operation; in mode="ll" the first operation makes the memory."""
        return held_bytes([self])

    def peer_buffers(self) -> list[PeerBuffer]:
        """The open blocks of that memory."""
        return self.engine.peer_buffers()

    @property
    def rank_mask(self) -> torch.Tensor:
        """int32 ``[R]`` on the device, with ``shrink=True`` in mode="ll": 1 for masked ranks, which others neither send
        to nor wait for. Kernels mask ranks that are late. You may write to it between operations. A rank that was late
        has missed operations, so clear its mask only if all ranks have done the same number of operations.

        Raises:
            ValueError: the communicator was made without ``shrink=True``.
        """
        if not self.config.shrink:
            raise ValueError("rank_mask: expected a communicator with shrink=True, got shrink=False")
        self.engine.streams.enter()  # the caller's use of the mask comes after the kernels
        return self.engine.mask

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
        """Sends every token to the ranks that hold its experts.

        Differentiable in `x` and `topk_weights`. Backward is collective: every rank must run it. Quantised rows and
        scales are not differentiable: gradients into the returned `scales`, or into FP8 tokens, are dropped.

        Args:
            x: ``[T, H]``, rows of a multiple of 16 bytes.
            topk_ids: int32 or int64 ``[T, K]``, global expert ids; -1: dropped. A token may name an expert once
                (checked on CPUs, and on GPUs with EP_PLUGIN_CHECK_IDS=1).
            topk_weights: ``[T, K]`` of any float dtype. Not in mode="ll", where `combine` takes the weights.
            scales: ``[T, S]``, sent with the rows unchanged. Not in mode="ll".
            previous_handle: reuse the routing of an earlier dispatch, which had the same topk_ids.
            capacity: rows of the output. The host then waits for nothing, and the output's ``overflow`` says on the
                device whether rows were dropped, and over nodes ``left_out`` whether some have not crossed. In
                mode="ll": rows of each expert's block, a multiple of R; each rank may then have capacity / R tokens.
            quantize: "e4m3": BF16, FP16 or FP32 rows (H a multiple of 16) are sent as float8_e4m3fn with a float32
                scale for each 128 elements. The returned ``scales`` are ``[N, ceil(H / 128)]``, and a row is about
                tokens * scales. reference.reference_quantize computes the same. A block with an infinity is NaN when
                multiplied out; a block whose largest magnitude is below 2**-137 is up to a third off, or 0. In
                mode="ll", where H is a multiple of 128, also "e4m3_pow2", with scales rounded up to powers of two, and
                "e4m3_ue8m0", which returns the exponents of these, four in an int32.

        Returns:
            The rows, and the handle that `combine` needs. The caller owns both. Small tensors may share memory: clone
            one before storing it for long.

        Raises:
            ValueError: wrong arguments; also an `x` that requires gradients with `quantize`; in mode="ll" a third
                un-received dispatch.
        """
        if self._runs_in_c and not torch.compiler.is_compiling():
            made = self._in_c.dispatch(x, topk_ids, topk_weights, scales, previous_handle, capacity, quantize)
            if made is not None:
                return made
        return self._dispatch(0, x, topk_ids, topk_weights, scales, previous_handle, capacity, quantize)

    def combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sends the experts' rows back and sums them per token, in float32.

        Differentiable in `y`, `weights` and `bias`; without `weights`, `y` is not saved for backward. Backward is
        collective: every rank must run it.

        Args:
            y: ``[N, H]``, contiguous, one row per dispatched row. In EXPERT_MAJOR ``[E_l, R * T_max, H]``; rows that
                belong to no token are not read.
            handle: as dispatch returned it.
            weights: factors of the rows, as dispatch returned them: ``[N]`` or, in TOKEN_MAJOR, ``[N, K]``. In
                TOKEN_MAJOR the factor of a row is the sum of its weights over its local experts. In EXPERT_MAJOR
                ``[T, K]``, the weights of this rank's own tokens. None: a plain sum.
            bias: ``[T, H]`` of y's dtype or, in mode="ht", of float32 (float64 for float64 rows): where the sum starts.

        Returns:
            ``[T, H]`` of y's dtype; the caller owns it.
        """
        if self._runs_in_c and not torch.compiler.is_compiling():
            made = self._in_c.combine(y, handle, weights, bias)
            if made is not None:
                return made
        return self._combine(0, y, handle, weights, bias)

    def combine_with_values(
        self, y: torch.Tensor, handle: DispatchHandle, values: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Combines without weights, and sums values that travel beside the rows. Not in mode="ll".

        Every rank must call it for the same combine, also a rank without values: zeros travel in their place. Not
        differentiable in `values`.

        Args:
            y, handle, bias: as in `combine`.
            values: in the shape of the weights that dispatch returned, ``[N]`` or, in TOKEN_MAJOR, ``[N, K]``. The
                values of pairs whose experts are on other ranks are summed, too.

        Returns:
            The rows' sums, and for each pair the sum of its values over the ranks that its token went to, in the order
            of the ranks: ``[T, K]``, or None without `values`.

        Raises:
            ValueError: the communicator has mode="ll", `values` require a gradient, or an argument is wrong.
        """
        if self.config.mode == "ll":
            raise ValueError('combine_with_values: expected mode="ht", got mode="ll"')
        y, _, bias, _, _, *rest = self._combine_arguments(y, handle, None, bias)
        values = as_weights("values", values, y)
        if values is not None and values.requires_grad and torch.is_grad_enabled():
            raise ValueError("values: expected a tensor without gradient, got one with requires_grad=True")
        out, sums = ops.combine(y, None, bias, values, True, *rest, 0)
        return out, None if values is None else sums

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
        """Starts a dispatch. The communicator's next operation completes it if nobody has waited for it.

        In mode="ll" this is the send half. Only the work's ``wait()`` runs the receive half, and two dispatches may be
        un-received.

        With ``dispatch_recv_sms=0``, and neither `capacity` nor `previous_handle`, the host waits here until every rank
        has sent its number of rows.

        Args:
            x, topk_ids, topk_weights, scales, previous_handle, capacity, quantize: as in `dispatch`. Do not write to
                them before `wait()`: the kernels read them until then.

        Returns:
            A work whose `wait()` returns what `dispatch` does.
        """
        given = (x, topk_ids, topk_weights, scales, previous_handle, capacity, quantize)
        work = self._start_in_c(self._in_c.start_dispatch, self._dispatch, given)
        if work is not None:
            return work
        started = self.in_flight.start(self.new_dispatch(*self._dispatch_arguments(*given)))
        return DispatchWork(started, lambda: self._dispatch(started.number, *given))

    @untraced
    def combine_async(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> CombineWork:
        """Starts a combine. The communicator's next operation completes it if nobody has waited for it. In mode="ll" it
        has two halves, as in `dispatch_async`.

        Args:
            y, handle, weights, bias: as in `combine`. Do not write to them before `wait()`.

        Returns:
            A work whose `wait()` returns what `combine` does.
        """
        given = (y, handle, weights, bias)
        work = self._start_in_c(self._in_c.start_combine, self._combine, given)
        if work is not None:
            return work
        started = self.in_flight.start(self.new_combine(*self._combine_arguments(*given)))
        return CombineWork(started, lambda: self._combine(started.number, *given))

    def set_sms(self, **sms: int | None) -> None:
        """Sets the SM counts of later operations. Ranks may differ.

        Completes an operation that nobody has waited for.

        Args:
            sms: ``dispatch_send_sms``, ``dispatch_recv_sms``, ``combine_send_sms``, ``combine_recv_sms``. A count that
                is None or left out comes from the configuration.

        Raises:
            ValueError: the configuration would refuse these counts, or the communicator has mode="ll", which takes
                none. Other errors are as in `check`.
        """
        with self.engine.lock:
            self.engine.check()
            if sms != self.engine.asked_sms:
                self.in_flight.complete()
                self.engine.set_sms(sms)

    def stats(self, reset: bool = False) -> LoadStats:
        """Returns the load of this communicator on this rank since its last reset, or since `ep_plugin.record_stats()`.

        The call waits for the operations that are enqueued. Recording itself waits for nothing. Not collective.

        Args:
            reset: start at zero again.

        Raises:
            ValueError: this process does not record.
            CaptureRefused: a CUDA graph is being captured.
        """
        with self.engine.lock:
            self.engine.check()
            if not Sums.recording:
                raise ValueError("stats: expected ep_plugin.record_stats() before the operations, got no recording")
            found = self.engine.load.read()
            if reset:
                self.engine.load.reset()
            return found

    # -- faults and the end --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises the first error of this communicator, if there is one. Costs no synchronisation."""
        self.engine.check()

    def abort(self, reason: str) -> None:
        """Reports to the peers that this rank has failed: their waits raise PeerAborted(rank, reason) at once."""
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

    # -- from arguments to operators and back --------------------------------------------------------------------

    def _dispatch(self, started: int, *given: Any) -> tuple[DispatchOutput, DispatchHandle]:
        """Dispatches with the arguments `given`, or collects the result of a dispatch that has been started."""
        tensors = ops.dispatch(*self._dispatch_arguments(*given), started)
        _, _, topk_weights, scales, handle, capacity, quantize = given
        made = DispatchResult(*tensors[:_NUM_RESULTS])
        if handle is None:
            routing = tensors[_NUM_RESULTS:][: self.num_routing]  # compiled code has empty tensors for the others
            nothing = (NOTHING,) * (_NUM_ROUTING - len(routing))
            handle = DispatchHandle._make((*routing, *nothing, self.number))
        layout = self._layout
        low_latency = layout is DispatchLayout.EXPERT_MAJOR
        limits = None if capacity is None or low_latency else made.limits
        over_nodes = None if self.engine.node_map.num_nodes == 1 else limits
        out = DispatchOutput(
            tokens=made.tokens,
            scales=None if scales is None and quantize is None else made.scales,
            weights=None if topk_weights is None else made.weights,
            topk_ids=made.ids if layout is DispatchLayout.TOKEN_MAJOR else None,
            row_expert_ids=made.ids if layout is DispatchLayout.FLAT else None,
            num_tokens_per_expert=made.expert_counts,
            num_tokens_per_expert_cpu=made.host_counts if capacity is None and not low_latency else None,
            expert_offsets=made.expert_offsets,
            overflow=None if limits is None else limits[0],
            required=None if limits is None else limits[1],
            left_out=None if over_nodes is None else over_nodes[2],
            required_per_node=None if over_nodes is None else over_nodes[3],
        )
        return out, handle

    def _combine(self, started: int, *given: Any) -> torch.Tensor:
        """Combines with the arguments `given`, or collects the result of a combine that has been started."""
        return ops.combine(*self._combine_arguments(*given), started)[0]

    def _start_in_c(
        self, start: Callable[..., Any], collect: Callable[..., Any], given: tuple[Any, ...]
    ) -> Work[Any] | None:
        """Starts an operation by `start`, a function of C. None: Python must check the call or take it.

        collect: `_dispatch` or `_combine`, for works that C cannot receive.
        """
        started = None if self.config.mode != "ll" else self.in_flight.start_in_c(start, *given)
        if started is None:
            return None
        by_python = functools.partial(collect, started.number, *given)
        return Work(started, functools.partial(self.in_flight.receive, started, by_python))

    def _dispatch_arguments(self, *given: Any) -> tuple[Any, ...]:
        """Returns the operator's arguments except `started`."""
        x, topk_ids, topk_weights, scales, previous_handle, capacity, quantize = given
        check_tensors({"scales": scales}, x=x, topk_ids=topk_ids)
        check_quantize(x, quantize, self.config.mode)
        previous = [] if previous_handle is None else self._tensors_of("previous_handle", previous_handle)
        weights = as_weights("topk_weights", topk_weights, x)
        return x, topk_ids, weights, scales, capacity, quantize, previous, self.number

    def _combine_arguments(self, *given: Any) -> tuple[Any, ...]:
        """Returns the operator's arguments except `started`."""
        y, handle, weights, bias = given
        check_tensors({"bias": bias}, y=y)
        routing = self._tensors_of("handle", handle)
        return y, as_weights("weights", weights, y), bias, None, False, routing, self.number

    def _tensors_of(self, name: str, handle: object) -> list[torch.Tensor]:
        """Returns the tensors of a handle that this communicator has made. name: the argument's name, for errors."""
        if not isinstance(handle, DispatchHandle):
            raise ValueError(f"{name}: expected a DispatchHandle, got {type(handle).__name__}")
        if handle.comm != self.number:
            raise ValueError(
                f"{name}: expected one of communicator {self.number}, got one of communicator {handle.comm}"
            )
        return [handle.topk_ids, handle.plan, handle.recv_rows, handle.totals][: self.num_routing]
