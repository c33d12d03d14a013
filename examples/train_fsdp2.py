"""Train a transformer of plain PyTorch with FSDP2 over all ranks, on CPUs or GPUs as found.

torchrun --nproc-per-node 2 examples/train_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ep_plugin.integrations import fsdp2


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 128), *blocks, nn.Linear(128, 256)).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    fsdp2.enable(model)  # <- the line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        # Each token is followed by the next number.
        tokens = torch.randint(256, (4, 64), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), ((tokens + 1) % 256).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 in (0, 4):
            print(f"step {step:2}  loss {loss.item():.3f}")
    if rank == 0:
        print(fsdp2.launches(model))  # what ran through ep_plugin
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
