"""Train a Qwen3-MoE of transformers, its experts spread over all ranks, on CPUs or GPUs as found.

torchrun --nproc-per-node 2 examples/train_qwen3_moe.py [CHECKPOINT]
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import ep_plugin.integrations.transformers  # noqa: F401  registers the name "ep_plugin"


def small_checkpoint() -> str:
    """A folder with a small model of random weights, the same on all ranks."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=32, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder := tempfile.mkdtemp())
    return folder


def main() -> None:
    # Before the process group exists: afterwards save_pretrained would write on one rank only.
    path = sys.argv[1] if len(sys.argv) > 1 else small_checkpoint()
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    config = DistributedConfig(ep_size=ranks, fsdp_size=ranks, ep_implementation="ep_plugin")  # <- the line
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        # Sequences that count up from a random number: a small model learns them in a few steps.
        tokens = (torch.randint(256, (4, 1), generator=generator) + torch.arange(64)) % 256
        tokens = tokens.to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 in (0, 4):
            print(f"step {step:2}  loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
