"""Trains adapters of experts by PEFT in a loop, and writes losses, adapters and logits.

torchrun --nproc-per-node N train_experts_lora.py OUT MODEL EP_SIZE. With an EP_SIZE of 1 nothing is sharded.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

STEPS = 4


def average(parameter: torch.Tensor) -> None:
    """As in docs/fsdp2.md."""
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


def main() -> None:
    out, path, ep_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.is_initialized() or dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded = dict(distributed_config=DistributedConfig(ep_size=ep_size, fsdp_size=world)) if ep_size > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **sharded)
    assert "peft" not in sys.modules  # train_stack.py imports it before the model is loaded
    from peft import LoraConfig, get_peft_model

    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters))
    generator = torch.Generator().manual_seed(1)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for adapter in adapters:
        adapter.data.normal_(std=0.1, generator=generator)
        adapter.register_post_accumulate_grad_hook(average)

    words = torch.randint(4, 64, (STEPS, 4, 12), generator=generator)
    optimizer = torch.optim.SGD(adapters, lr=0.5)
    losses = []
    for step in range(STEPS):
        batch = words[step].chunk(world)[rank]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach().div_(world))
        losses.append(loss.item())
    model.save_pretrained(out / f"adapters.{rank}")
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=words[0]).logits
    if rank == 0:
        (out / "losses.json").write_text(json.dumps(losses))
        torch.save({"input_ids": words[0], "logits": logits}, out / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
