"""Expert parallelism of transformers through MoECommunicator.

Shapes: T tokens here, H hidden size, K experts per token, N rows this rank's experts run on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AutoEP, EPImplementation

from ep_plugin import DispatchOutput, MoECommunicator
from ep_plugin.integrations.transformers.sorted_experts import is_grouped, sorted_experts, takes_sorted_rows

if TYPE_CHECKING:
    from ep_plugin.integrations.transformers.shared_experts import SharedAhead

_exchanges: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[EpPluginExpertParallel]] = (
    weakref.WeakKeyDictionary()
)


def exchange_of(experts: torch.nn.Module | None) -> EpPluginExpertParallel | None:
    """What serves this experts module; None where that is not ours."""
    found = None if experts is None else _exchanges.get(experts)
    return None if found is None else found()


class EpPluginExpertParallel(EPImplementation):
    """One per experts module; all of a process share one communicator per expert group and shape.

    The communicator is looked up at each call: transformers builds this object before weights are loaded, and
    an object that holds no communication memory can be copied with its model.

    The experts get FLAT rows, one per (token, local expert), grouped by expert, and combine applies the weights, in
    float32. Where the experts run as transformers' grouped products they multiply these rows as they are. Other
    implementations, such as eager or quantised ones, get them through the experts' own forward, which brings them into
    its order.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.takes_sorted_rows = takes_sorted_rows(experts)
        self.meanwhile: SharedAhead | None = None  # what runs while tokens travel
        _exchanges[experts] = weakref.ref(self)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted expert output ``[T, H]`` of tokens ``[T, H]`` with global ids and weights ``[T, K]``."""
        num_tokens = hidden_states.size(0)
        if self.tp_mesh.size() > 1:
            hidden_states, top_k_index, top_k_weights = (
                _slice_over(tensor, self.tp_mesh) for tensor in (hidden_states, top_k_index, top_k_weights)
            )
        output = self._exchange(hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights)
        return _gather_over(output, self.tp_mesh, num_tokens) if self.tp_mesh.size() > 1 else output

    def _exchange(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        comm = MoECommunicator.shared(
            self.ep_mesh.get_group(),
            num_experts=self.num_local_experts * self.ep_mesh.size(),
            hidden_size=x.size(1),
            topk=topk_ids.size(1),
            device=x.device,
        )
        if self.meanwhile is None:
            out, handle = comm.dispatch(x, topk_ids, topk_weights)
        else:
            self.meanwhile.check()
            dispatched = comm.dispatch_async(x, topk_ids, topk_weights)
            self.meanwhile.start()
            out, handle = dispatched.wait()
        run = self._run_sorted if self.takes_sorted_rows and is_grouped(self.experts) else self._run
        return comm.combine(run(out), handle, weights=out.weights)

    def _run_sorted(self, out: DispatchOutput) -> torch.Tensor:
        """What the experts make of the dispatched rows, not weighted: ``[N, H]``."""
        rows, expert_ids, ends = out.tokens, out.row_expert_ids, out.expert_offsets[1:]
        if rows.size(0) > 0:
            return sorted_experts(self.experts, rows, expert_ids, ends)
        return sorted_experts(self.experts, _one_for_none(rows), torch.zeros_like(ends[:1]), torch.ones_like(ends))[:0]

    def _run(self, out: DispatchOutput) -> torch.Tensor:
        """What the experts' own forward makes of the dispatched rows with weights of one, as in stock: ``[N, H]``."""
        rows, expert_ids = out.tokens, out.row_expert_ids.long().unsqueeze(1)
        if rows.size(0) > 0:
            return self.experts_forward(rows, expert_ids, rows.new_ones(len(rows), 1)).contiguous()
        return self.experts_forward(_one_for_none(rows), expert_ids.new_zeros(1, 1), rows.new_ones(1, 1))[:0]


def _one_for_none(rows: torch.Tensor) -> torch.Tensor:
    """One row of zeros in place of none.

    Without a call of the experts, the backward of FSDP's gather and of the dispatch would not run here while every peer
    waits for it.
    """
    return rows.sum(dim=0, keepdim=True)


class AutoEpPlugin(AutoEP):
    """transformers' default, with the exchange of tokens replaced.

    What it decides beside that stays: where ranks share a batch and no gradients are wanted, an all-reduce; Mega MoE
    experts, whose kernel exchanges tokens itself.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.all_to_all = EpPluginExpertParallel(experts, ep_mesh, tp_mesh)


def _slice_over(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a tensor that every rank of ``mesh`` holds; backward gathers their gradients."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _gather_over(rows: torch.Tensor, mesh: DeviceMesh, num_rows: int) -> torch.Tensor:
    """All ``num_rows`` rows from the slices of the ranks of ``mesh``, which may be uneven or empty."""
    shape = (num_rows, rows.size(1))
    sliced = DTensor.from_local(rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return sliced.full_tensor()
