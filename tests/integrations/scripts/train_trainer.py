"""Fine-tunes mixture-of-experts models with transformers' Trainer, experts sharded over all ranks.

torchrun --nproc-per-node 2 train_trainer.py OUT MODEL [MODEL ...]
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

STEPS = 4


def train(path: Path, out: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=DistributedConfig(ep_size=world, fsdp_size=world)
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.config.vocab_size, (64, 16), generator=generator)
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        gradient_checkpointing=True,
        per_device_eval_batch_size=2,
        save_strategy="no",
        save_only_model=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    examples = [{"input_ids": row, "labels": row} for row in rows]
    # The last batch of an evaluation has 1 of 2 * world rows.
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, eval_dataset=examples[: 2 * world + 1])
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(out / "checkpoint"))
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=rows[:2].to(model.device)).logits
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (out / "losses.json").write_text(json.dumps(losses))
        (out / "evaluated.json").write_text(json.dumps(evaluated))
        torch.save({"input_ids": rows[:2], "logits": logits.cpu()}, out / "logits.pt")


def main() -> None:
    out = Path(sys.argv[1])
    for path in map(Path, sys.argv[2:]):
        (out / path.name).mkdir(parents=True, exist_ok=True)
        train(path, out / path.name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
