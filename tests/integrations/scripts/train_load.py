"""Trains with a LoadCallback, and counts what the routers choose.

torchrun --nproc-per-node 2 train_load.py OUT MODEL [TRACKER]
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from ep_plugin.integrations.transformers import EpPluginExpertParallel, LoadCallback

EXPERTS = 8
chosen: list[torch.Tensor] = []
logged: list[dict[str, float]] = []


class Tracker(TrainerCallback):
    """Stands for a tracker that `report_to` names."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        logged.append(logs)


def main() -> None:
    out, world = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    exchange = EpPluginExpertParallel.__call__

    def counting(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen.append(torch.bincount(ids.flatten(), minlength=EXPERTS))
        return exchange(self, x, ids, weights)

    EpPluginExpertParallel.__call__ = counting
    config = DistributedConfig(ep_size=world, fsdp_size=world, ep_implementation="ep_plugin")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32, distributed_config=config)
    rows = torch.randint(model.config.vocab_size, (64, 16), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        max_steps=4,
        learning_rate=0.0,  # routers stay as the checkpoint has them
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="no",
        save_only_model=True,
        report_to=sys.argv[3:],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Tracker()],
    )
    trainer.add_callback(LoadCallback(trainer, folder=str(out)))
    trainer.train()
    counts = torch.stack(chosen).view(2, 2, -1, EXPERTS).sum(1)  # of each log and layer
    per_rank = [torch.empty_like(counts) for _ in range(world)]
    dist.all_gather(per_rank, counts)
    if dist.get_rank() == 0:
        (out / "found.json").write_text(
            json.dumps({"chosen": torch.stack(per_rank).tolist(), "logged": logged, "steps": trainer.state.log_history})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
