"""Fine-tunes mixture-of-experts models in a plain accelerate loop, experts sharded over all ranks.

accelerate launch --num_processes 2 train_accelerate.py OUT MODEL [MODEL ...]
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

STEPS = 4


def train(accelerator: Accelerator, path: Path, out: Path) -> None:
    world = accelerator.num_processes
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=DistributedConfig(ep_size=world, fsdp_size=world)
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.config.vocab_size, (2 * world * STEPS, 16), generator=generator)
    # The model is sharded already: only what feeds it and what updates it is accelerate's.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(rows, batch_size=2))
    losses = []
    model.train()
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    model.save_pretrained(out / "checkpoint")
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=rows[:2].to(accelerator.device)).logits
    if accelerator.is_main_process:
        (out / "losses.json").write_text(json.dumps(losses))
        torch.save({"input_ids": rows[:2], "logits": logits.cpu()}, out / "logits.pt")


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    out = Path(sys.argv[1])
    for path in map(Path, sys.argv[2:]):
        (out / path.name).mkdir(parents=True, exist_ok=True)
        train(accelerator, path, out / path.name)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
