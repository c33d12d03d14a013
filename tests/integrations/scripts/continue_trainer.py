"""Trains a mixture-of-experts model with transformers' Trainer, and goes on from one of its checkpoints.

torchrun --nproc-per-node 2 continue_trainer.py OUT MODEL
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig


def trainer_of(path: Path, out: Path, steps: int, **more) -> Trainer:
    """With examples that are all alike and an optimizer without state, so that a step depends on the weights alone."""
    world = int(os.environ["WORLD_SIZE"])
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=DistributedConfig(ep_size=world, fsdp_size=world)
    )
    row = torch.arange(16) * 3 % model.config.vocab_size
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        **more,
    )
    return Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row}] * 64)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    out, path = map(Path, sys.argv[1:])
    whole = trainer_of(path, out / "whole", 4, save_only_model=True)
    whole.train()
    checkpoint = out / "whole" / "checkpoint-2"
    continued = trainer_of(checkpoint, out / "continued", 2, save_only_model=True)
    continued.train()
    found = {"whole": losses(whole), "continued": losses(continued)}
    refused = {
        "saving the optimizer": lambda: trainer_of(path, out / "state", 2).train(),
        "resuming": lambda: whole.train(resume_from_checkpoint=str(checkpoint)),
    }
    for what, call in refused.items():
        try:
            call()
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
