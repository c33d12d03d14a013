"""Trains by Trainer, or TRL's SFTTrainer, with checkpoints. It continues from the latest, and ends itself by a signal
where it is told.

torchrun --nproc-per-node 2 train_resume.py OUT MODEL STEPS [KILL]

KILL is RANK:STEP or RANK:STEP:save, the latter while the checkpoint of that step is written.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from ep_plugin.integrations.transformers import CheckpointCallback

GLOBAL_BATCH = 8


class Drawer(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        random.random()  # an interrupted run must go on with the same numbers


class Killer(TrainerCallback):
    def __init__(self, rank: str, step: str, place: str = "") -> None:
        self.rank, self.step, self.place = int(rank), int(step), place
        if place:
            write = dcp.FileSystemWriter.write_data

            def kill(writer: Any, *given: Any) -> Any:
                self.end(int(Path(writer.path).parent.name.removeprefix("checkpoint-")))
                return write(writer, *given)

            dcp.FileSystemWriter.write_data = kill

    def end(self, step: int) -> None:
        if dist.get_rank() == self.rank and step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.place:
            self.end(state.global_step + 1)


def main() -> None:
    out, path, steps, *kill = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    options = json.loads(os.environ.get("TEST_OPTIONS", "{}"))
    config = DistributedConfig(ep_size=min(world, 2), fsdp_size=world) if world > 1 else None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=config)
    rows = torch.randint(model.config.vocab_size, (256, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in rows]
    trainer_type, arguments_type = Trainer, TrainingArguments
    if options.get("trl"):
        import datasets
        import trl

        trainer_type, arguments_type = trl.SFTTrainer, trl.SFTConfig
        rows = datasets.Dataset.from_list(rows)
    arguments = arguments_type(
        output_dir=str(Path(out, "trainer")),
        max_steps=int(steps),
        learning_rate=1e-2,
        per_device_train_batch_size=GLOBAL_BATCH // world,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        save_only_model=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer_type(model=model, args=arguments, train_dataset=rows)
    checkpoints = CheckpointCallback(trainer, asynchronous=options.get("asynchronous", False))
    trainer.add_callback(Drawer())
    for place in kill:
        trainer.add_callback(Killer(*place.split(":")))
    begin = checkpoints.latest()
    trainer.train(resume_from_checkpoint=begin)
    if dist.get_rank() == 0:
        found = {"begin": begin, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
        found["drawn"] = random.random()
        Path(out, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
