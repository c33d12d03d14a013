"""Train a mixture-of-experts model with Hugging Face's Trainer, its experts spread over all ranks.

    torchrun --nproc-per-node 2 examples/train_trainer.py [CHECKPOINT]

EP_PLUGIN=transformers in the environment does the same for a script that names no ep_implementation.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from ep_plugin.integrations.transformers import LoadCallback  # registers the name "ep_plugin"


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
    ranks = int(os.environ["WORLD_SIZE"])
    config = DistributedConfig(ep_size=ranks, fsdp_size=ranks, ep_implementation="ep_plugin")  # <- the line
    path = sys.argv[1] if len(sys.argv) > 1 else small_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    rows = (torch.randint(256, (512, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(64)) % 256
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_strategy="no",
        save_only_model=True,  # transformers saves no optimizer state of expert-parallel models
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.add_callback(LoadCallback(trainer))  # logs the load of experts and ranks beside the loss
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
