"""Train a small Qwen3 in a plain accelerate loop with FSDP2 over all ranks, on CPUs or GPUs as found.

    torchrun --nproc-per-node 2 examples/train_accelerate.py

The one line is ``fsdp2.enable(model)``, after ``accelerator.prepare()``, whose plugin wraps the model; everything else
is accelerate as it is.
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from _data import batch_at, read_text
from _options import PRESETS
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from transformers import Qwen3Config, Qwen3ForCausalLM

from ep_plugin.integrations import fsdp2


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    stock: Annotated[bool, typer.Option("--stock", help="Leave the collectives to PyTorch.")] = False,
) -> None:
    """Train, and print the loss of every fifth step and what ran through ep_plugin."""
    if "RANK" not in os.environ:
        typer.echo("expected a launcher, such as torchrun --nproc-per-node 2 or accelerate launch", err=True)
        raise typer.Exit(2)
    preset, text = PRESETS["qwen3"]["tiny"], read_text(None)
    torch.manual_seed(0)
    config = Qwen3Config(**preset.widths, num_hidden_layers=preset.layers, use_cache=False)
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.lr)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if accelerator.device.type == "cpu":  # where accelerate itself leaves models to DDP
        accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, DistributedType.FSDP
    model, optimizer = accelerator.prepare(model, optimizer)
    if not stock:
        fsdp2.enable(model)

    model.train()
    for step in range(steps):
        tokens = batch_at(
            text, batch=preset.batch, seq_len=preset.seq_len, seed=0, step=step, rank=accelerator.process_index
        ).to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == steps - 1:
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"step {step:3d}  loss {mean:.6f}")
    accelerator.print("stock collectives" if stock else fsdp2.launches(model))
    accelerator.end_training()


if __name__ == "__main__":
    typer.run(main)
