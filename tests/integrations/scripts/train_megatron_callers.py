"""Trains Megatron-core MoE layers on random targets, as verl's and ms-swift's loops call them.

torchrun --nproc-per-node 2 train_megatron_callers.py OUT DISPATCHER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from tests.integrations.scripts.train_megatron import HIDDEN, STEPS, TOPK, build

LONGEST = 12
ROUTINGS = ("router", "all to one rank", "padded", "uneven")

# Of the exchange, both converters of models set these; the user's options replace some.
CONVERTED = dict(moe_token_dispatcher_type="alltoall", variable_seq_lengths=True)


def sequences_of(step: int, routing: str) -> list[torch.Tensor]:
    """This rank's sequences of a batch, ``[length, H]`` each."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = 1 if routing == "uneven" and rank == 1 else 4
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=generator).tolist()
    return [torch.randn((length, HIDDEN), generator=generator) for length in lengths]


def packed(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence without padding ``[T, 1, H]``, and which tokens are real ``[T, 1]``."""
    rows = torch.cat(sequences).unsqueeze(1)
    return rows, torch.ones(rows.shape[:2], dtype=torch.bool)


def padded(sequences: list[torch.Tensor], padding: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``[LONGEST, B, H]`` with rows of `padding`, which all choose the same experts, and which tokens are real."""
    rows = torch.full((LONGEST, len(sequences), HIDDEN), padding)
    is_real = torch.zeros(rows.shape[:2], dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        rows[: len(sequence), index] = sequence
        is_real[: len(sequence), index] = True
    return rows, is_real


def loss_of(layers: torch.nn.ModuleList, x: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    hidden = x.clone().requires_grad_()  # as an embedding returns it
    for layer in layers:
        hidden = hidden + layer(hidden)[0]
    difference = hidden - x.roll(1, dims=-1)
    return difference[is_real].square().sum() / (4 * LONGEST * HIDDEN)


class Verl:
    """Sequences are packed, and layers run again in the backward pass. A pass without gradients records what routers
    choose; the update replays that, or what the inference engine chose. A batch is an update."""

    def __init__(self, dispatcher: str) -> None:
        # override_transformer_config
        options = dict(moe_token_dispatcher_type=dispatcher, moe_enable_deepep=dispatcher == "flex")
        options |= dict(moe_router_dtype="fp32", moe_router_load_balancing_type="none", moe_enable_routing_replay=True)
        options |= dict(recompute_granularity="selective", recompute_modules=["moe"])
        RouterReplay.clear_global_router_replay_instances()
        self.layers = build(**CONVERTED | options)

    def backward(self, step: int, routing: str) -> float:
        sequences = sequences_of(step, routing)
        x, is_real = padded(sequences, 0.0) if routing == "padded" else packed(sequences)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        with torch.no_grad():
            loss_of(self.layers, x, is_real)
        choices = RouterReplay.get_recorded_data()
        if routing == "all to one rank":
            choices = [torch.arange(TOPK).expand_as(ids) for ids in choices]
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data(choices)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        loss = loss_of(self.layers, x, is_real)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        loss.backward()
        RouterReplay.clear_global_indices()
        return loss.item()


class MsSwift:
    """Sequences are padded to the longest, or packed (padding_free). Gradients of two batches are accumulated, with a
    loss that balances experts. Expert biases are those of DeepSeek-V3's router."""

    def __init__(self, dispatcher: str) -> None:
        # Megatron-SWIFT's arguments
        options = dict(moe_token_dispatcher_type=dispatcher, moe_enable_deepep=dispatcher == "flex")
        options |= dict(moe_router_dtype="fp32", moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-3)
        options |= dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
        self.layers = build(**CONVERTED | options)

    def backward(self, step: int, routing: str) -> float:
        for layer in self.layers:
            if routing == "all to one rank":
                layer.router.expert_bias[:TOPK] = 10.0
        total = 0.0
        for batch in range(2):
            sequences = sequences_of(2 * step + batch, routing)
            x, is_real = padded(sequences, 0.5) if routing == "padded" else packed(sequences)
            loss = loss_of(self.layers, x, is_real) / 2
            loss.backward()
            total += loss.item()
        for layer in self.layers:  # the router counts its choices
            assert routing != "all to one rank" or not layer.router.local_tokens_per_expert[TOPK:].any()
        return total


CALLERS = {"verl": Verl, "ms-swift": MsSwift}


def train(caller: str, routing: str, dispatcher: str) -> list[float]:
    model = CALLERS[caller](dispatcher)
    parameters = [parameter for parameter in model.layers.parameters() if parameter.requires_grad]
    losses = []
    for step in range(STEPS):
        losses.append(model.backward(step, routing))
        for parameter in parameters:
            if getattr(parameter, "allreduce", True):  # not an expert's
                dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                parameter.grad = None
    return losses


def main() -> None:
    out, dispatcher = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    losses = {f"{caller}, {routing}": train(caller, routing, dispatcher) for caller in CALLERS for routing in ROUTINGS}
    (out / f"losses.{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main()
