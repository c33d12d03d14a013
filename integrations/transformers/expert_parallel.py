"""Expert parallelism of transformers through MoECommunicator.

transformers' grouped experts sort rows, count them, mask the rows of other ranks, multiply, and restore the order. FLAT
dispatches return rows that are already grouped by expert. So this module only multiplies, with transformers' functions.
Low-latency dispatches return a block of rows for each expert. The products of blocks are batched.

Shapes: T tokens here, H hidden size, K experts per token, N rows that this rank receives, E_l experts on it, B rows of
each expert's block.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllToAllEP, AutoEP, EPImplementation
from transformers.integrations import moe

from ep_plugin import DispatchOutput, MoECommunicator, NotSupported, env
from ep_plugin.integrations import hooks
from ep_plugin.integrations.communicators import communicator_or_none, in_layer
from ep_plugin.integrations.groups import check_group
from ep_plugin.integrations.transformers.lora import serve_adapters
from ep_plugin.moe.low_latency.engine import check_nodes
from ep_plugin.ranges import opener

if TYPE_CHECKING:
    from ep_plugin.integrations.transformers.shared_experts import SharedAhead

Experts: TypeAlias = Any  # a module of a class that transformers' decorator for experts has made
# The key is the id of the experts module. The exchange keeps that module alive.
exchanges: weakref.WeakValueDictionary[int, EpPluginExpertParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count()  # numbers MoE layers, since an exchange cannot find out which layer of the model it is in


class EpPluginExpertParallel(EPImplementation):
    """The exchange of one experts module. Exchanges share one communicator per expert group and shape.

    Each call looks the communicator up, for two reasons: transformers builds this object before weights are loaded, and
    an object without communication memory can be copied with its model.

    Experts get FLAT rows, grouped by expert. Combine applies the weights in float32. Experts that run as transformers'
    grouped products multiply the rows in this order. Other implementations, such as eager or quantised ones, get the
    rows through the experts' own forward, which sorts them.

    Attributes:
        max_tokens_per_rank: most tokens of a rank in a low-latency exchange; None: high throughput.
    """

    max_tokens_per_rank: int | None = None

    def __init__(
        self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, is_certain: bool = True
    ) -> None:
        """Makes the exchange. is_certain: the model will certainly exchange tokens. Then the constructor refuses a
        group that is not served."""
        super().__init__(experts, ep_mesh, tp_mesh)
        if is_certain:
            check_group("transformers", ep_mesh.get_group(), ep_mesh.device_type)
        self.experts = experts
        self.takes_sorted_rows = takes_sorted_rows(experts)
        self.meanwhile: SharedAhead | None = None  # shared experts to run during the dispatch
        # Serves in our place if the fallback is on (fallback.py). It is made now, since it keeps the experts' forward.
        self._stock = AllToAllEP(experts, ep_mesh, tp_mesh) if env.settings().fallback else None
        self._left: set[int | None] = set()  # values of max_tokens_per_rank for which it serves in our place
        self._range, self._layer = opener(), f"transformers MoE layer {next(_numbers)}"
        exchanges[id(experts)] = self
        serve_adapters(experts, tp_mesh.size())

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted expert output ``[T, H]`` of tokens ``[T, H]``, given global ids and weights ``[T, K]``.

        Raises:
            NotSupported: a low-latency exchange while gradients are enabled.
        """
        if self.max_tokens_per_rank is not None and torch.is_grad_enabled():
            # Rows that belong to no token may be NaN, and would reach the gradients of weights.
            raise NotSupported(
                "low_latency: expected a forward under torch.no_grad() or torch.inference_mode(), got one with "
                "gradients; train outside of low_latency()"
            )
        is_left = self.max_tokens_per_rank in self._left
        comm = None if is_left else self._communicator(hidden_states, top_k_index)
        if comm is None:
            return self._run_stock(hidden_states, top_k_index, top_k_weights)
        num_tokens, is_sliced = hidden_states.size(0), self.tp_mesh.size() > 1
        if is_sliced:
            hidden_states, top_k_index, top_k_weights = (
                _slice_over(tensor, self.tp_mesh) for tensor in (hidden_states, top_k_index, top_k_weights)
            )
        x, topk_ids = hidden_states.contiguous(), top_k_index.contiguous()
        output = in_layer(self._layer, self._range, self._exchange, comm, x, topk_ids, top_k_weights)
        return _gather_over(output, self.tp_mesh, num_tokens) if is_sliced else output

    def check_low_latency(self) -> None:
        """Raises NotSupported if the expert-parallel group cannot exchange in low latency. Collective."""
        device = torch.device(self.ep_mesh.device_type)
        check = functools.partial(check_nodes, device=device)
        check_group("transformers", self.ep_mesh.get_group(), device.type, check)

    def _communicator(self, x: torch.Tensor, topk_ids: torch.Tensor) -> MoECommunicator | None:
        """Returns the communicator for these tokens, or None if transformers' own exchange serves the group."""
        limit = self.max_tokens_per_rank
        settings: dict[str, Any] = {}
        if limit is not None:
            settings = dict(mode="ll", max_tokens_per_rank=limit, max_row_bytes=x.size(1) * x.element_size())
        return communicator_or_none(
            "transformers",
            self.ep_mesh.get_group(),
            num_experts=cast(int, self.num_local_experts) * self.ep_mesh.size(),
            hidden_size=x.size(1),
            topk=topk_ids.size(1),
            device=x.device,
            **settings,
        )

    def _exchange(
        self, comm: MoECommunicator, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        limit = self.max_tokens_per_rank
        weights = topk_weights if limit is None else None  # in low latency combine takes them
        if self.meanwhile is None:
            out, handle = comm.dispatch(x, topk_ids, weights)
        else:
            self.meanwhile.check()
            dispatched = comm.dispatch_async(x, topk_ids, weights)
            self.meanwhile.start()
            out, handle = dispatched.wait()
        if limit is not None:
            return comm.combine(self._run_blocks(out), handle, weights=topk_weights)
        return comm.combine(self._run(out), handle, weights=out.weights)

    def _run_stock(self, *inputs: torch.Tensor) -> torch.Tensor:
        self._left.add(self.max_tokens_per_rank)
        assert self._stock is not None
        if self.meanwhile is not None:
            self.meanwhile.check()
            self.meanwhile.start()
        return _leave(self._stock, *inputs)

    def _run(self, out: DispatchOutput) -> torch.Tensor:
        """Runs the experts on the dispatched rows. Returns their output without weights, ``[N, H]``."""
        rows, expert_ids, ends = out.tokens, out.row_expert_ids, out.expert_offsets[1:]
        assert expert_ids is not None  # FLAT
        is_empty = rows.size(0) == 0
        if is_empty:
            # One row of zeros. If the experts were not called, the backward of FSDP's gather and of the dispatch would
            # not run on this rank, and every peer waits for it.
            rows, expert_ids, ends = rows.sum(dim=0, keepdim=True), expert_ids.new_zeros(1), torch.ones_like(ends)
        if self.takes_sorted_rows and is_grouped(self.experts):
            results = sorted_experts(self.experts, rows, expert_ids, ends)
        else:
            units = rows.new_ones(len(rows), 1)
            results = self.experts_forward(rows, expert_ids.long().unsqueeze(1), units).contiguous()
        return results[:0] if is_empty else results

    def _run_blocks(self, out: DispatchOutput) -> torch.Tensor:
        """Runs the experts on the rows of a low-latency dispatch. Returns their output without weights,
        ``[E_l, B, H]``."""
        tokens = out.tokens
        if self.takes_sorted_rows and is_plain(
            self.experts, moe.grouped_mm_experts_forward, moe.batched_mm_experts_forward
        ):
            return block_experts(self.experts, tokens)
        present = torch.arange(tokens.size(1), device=tokens.device) < out.num_tokens_per_expert.unsqueeze(1)
        rows = tokens.masked_fill(~present.unsqueeze(2), 0).flatten(0, 1)  # rows of no token may be NaN
        ids = torch.arange(tokens.size(0), device=tokens.device).repeat_interleave(tokens.size(1)).unsqueeze(1)
        return self.experts_forward(rows, ids, rows.new_ones(len(rows), 1)).contiguous().view_as(tokens)


class AutoEpPlugin(AutoEP):
    """transformers' default exchange, with its all-to-all replaced.

    Its other choices stay: an all-reduce if ranks share a batch and need no gradients (but not under `low_latency`),
    and Mega MoE experts, whose kernel exchanges tokens itself.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        is_certain = self.all_reduce is None and self.megamoe is None
        self.all_to_all: Any = EpPluginExpertParallel(experts, ep_mesh, tp_mesh, is_certain)
        if self.megamoe is not None:
            del exchanges[id(experts)]  # this module exchanges nothing
        for name in ("all_reduce", "megamoe"):
            if (stock := getattr(self, name)) is not None:
                setattr(self, name, functools.partial(_leave, stock))

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        is_asked = self.all_to_all.max_tokens_per_rank is not None and self.megamoe is None
        run = self.all_to_all if is_asked else super().__call__
        return run(hidden_states, top_k_index, top_k_weights)


def _leave(stock: EPImplementation, *inputs: torch.Tensor) -> torch.Tensor:
    """Runs transformers' own exchange, counts it, and returns its result."""
    if not torch.compiler.is_compiling():  # torch would compile again whenever a count has changed
        hooks.left("transformers")
    return stock(*inputs)


def _slice_over(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Returns this rank's rows of a tensor that every rank of `mesh` holds. Backward gathers their gradients."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _gather_over(rows: torch.Tensor, mesh: DeviceMesh, num_rows: int) -> torch.Tensor:
    """Gathers all `num_rows` rows from the slices of the ranks of `mesh`. Slices may be uneven or empty."""
    shape = torch.Size((num_rows, rows.size(1)))
    sliced = DTensor.from_local(rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return sliced.full_tensor()


def takes_sorted_rows(experts: torch.nn.Module) -> bool:
    """Whether `experts` has the forward that transformers' decorator gives to classes of experts.

    It has another one if somebody replaced it, or if the experts are quantised.
    """
    function = getattr(experts.forward, "__func__", None)
    if function is not type(experts).forward or not inspect.isfunction(function):
        return False
    return inspect.getclosurevars(function).nonlocals.get("experts_interface") is moe.ALL_EXPERTS_FUNCTIONS


def is_grouped(experts: Experts) -> bool:
    """Whether the experts, as configured now, run as transformers' grouped products of plain matrices."""
    return is_plain(experts, moe.grouped_mm_experts_forward)


def is_plain(experts: Experts, *implementations: Callable[..., torch.Tensor]) -> bool:
    """Whether the experts, as configured now, run one of these `implementations` on plain matrices."""
    chosen = moe.ALL_EXPERTS_FUNCTIONS.get(experts.config._experts_implementation)
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    plain = up.is_floating_point() and up.element_size() > 1 and up.dtype is experts.down_proj.dtype
    return chosen in implementations and plain


def sorted_experts(experts: Experts, rows: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Runs the experts on rows that are grouped by expert. Differentiable in rows and parameters.

    Args:
        rows: ``[N, H]``, grouped by local expert, with N > 0.
        expert_ids: int32 ``[N]``, the local expert of each row.
        ends: int32 ``[E_l]``, the end of each expert's rows. The last is N.

    Returns:
        The output without weights, ``[N, H]`` of the dtype of `rows`.
    """

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        bias = getattr(experts, f"{name}_bias")[expert_ids] if experts.has_bias else None
        return moe._grouped_linear(rows, getattr(experts, name), ends, bias=bias, is_transposed=experts.is_transposed)

    return _run_products(experts, rows, product)


def block_experts(experts: Experts, tokens: torch.Tensor) -> torch.Tensor:
    """Runs the experts on blocks of rows ``[E_l, B, H]``. Returns their output without weights, with this shape.

    Each output row depends on its input row alone, so rows that belong to no token may hold anything. Nothing waits for
    the host.
    """

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = getattr(experts, name)
        if not experts.is_transposed:
            weight = weight.transpose(1, 2)
        blocks = rows.view(*tokens.shape[:2], -1).to(weight.dtype)
        if not experts.has_bias:
            return torch.bmm(blocks, weight).flatten(0, 1)
        return torch.baddbmm(getattr(experts, f"{name}_bias").unsqueeze(1), blocks, weight).flatten(0, 1)

    return _run_products(experts, tokens.flatten(0, 1), product).view_as(tokens)


def _run_products(
    experts: Experts, rows: torch.Tensor, product: Callable[[str, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Returns the experts' output for `rows`. product: a function of a parameter's name and rows that multiplies the
    rows by the parameter."""
    hidden = product("gate_up_proj" if experts.has_gate else "up_proj", rows)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    results = product("down_proj", hidden)
    if experts.has_post_expert_norm:
        results = experts.post_expert_norm(results)
    return results.to(rows.dtype).contiguous()
