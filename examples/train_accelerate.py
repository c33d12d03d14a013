"""Train a small Qwen3 in a plain accelerate loop with FSDP2 over all ranks, on CPUs or GPUs as found.

torchrun --nproc-per-node 2 examples/train_accelerate.py    # or accelerate launch --num_processes 2
"""

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from transformers import Qwen3Config, Qwen3ForCausalLM

from ep_plugin.integrations import fsdp2


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if accelerator.device.type == "cpu":  # accelerate itself would choose DDP there
        accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, DistributedType.FSDP
    model, optimizer = accelerator.prepare(model, optimizer)
    fsdp2.enable(model)  # <- the line, after prepare()

    model.train()
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for step in range(20):
        # Sequences that count up from a random number: a small model learns them in a few steps.
        tokens = (torch.randint(256, (4, 1), generator=generator) + torch.arange(64)) % 256
        tokens = tokens.to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 in (0, 4):
            accelerator.print(f"step {step:2}  loss {loss.item():.6f}")
    accelerator.print(fsdp2.launches(model))  # what ran through ep_plugin
    accelerator.end_training()


if __name__ == "__main__":
    main()
