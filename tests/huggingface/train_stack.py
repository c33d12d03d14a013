"""Trains by TRL and PEFT, experts sharded over all ranks, and writes what came of it.

torchrun --nproc-per-node 2 train_stack.py OUT MODEL, where MODEL has a tokenizer.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS = 3
WORDS = torch.randint(8, 64, (32, 12), generator=torch.Generator().manual_seed(0)).tolist()
TEXTS = [" ".join(f"w{word}" for word in row) for row in WORDS]
WORLD = int(os.environ["WORLD_SIZE"])


def arguments(**more):
    return (
        dict(
            output_dir=tempfile.mkdtemp(),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            save_only_model=True,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            disable_tqdm=True,
        )
        | more
    )


def distributed():
    return DistributedConfig(ep_size=WORLD, fsdp_size=WORLD)


def load(path: Path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=distributed(), **options)


def logged(trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def logits_of(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(WORDS[:2]).to(model.device)).logits.cpu()


def sft(path: Path, **more) -> SFTTrainer:
    config = SFTConfig(
        **arguments(**more),
        model_init_kwargs={"distributed_config": distributed(), "dtype": torch.float32},
        gradient_checkpointing=True,
        per_device_eval_batch_size=2,
    )
    texts = Dataset.from_dict({"text": TEXTS})
    few = Dataset.from_dict({"text": TEXTS[:5]})  # the last batch has one of 2 * WORLD rows
    return SFTTrainer(str(path), args=config, train_dataset=texts, eval_dataset=few)


def resume(path: Path) -> None:
    trainer = sft(path, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir, "checkpoint-1")))


def lora(path: Path, gradient_checkpointing: bool = False, **target) -> SFTTrainer:
    config = SFTConfig(**arguments(), gradient_checkpointing=gradient_checkpointing)
    return SFTTrainer(
        load(path),
        args=config,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        peft_config=LoraConfig(r=4, lora_dropout=0.0, **target),
    )


def refusal(call) -> str:
    """The error of `call`, on every rank."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def adapters_of(model) -> list[torch.Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def spread(tensors: list[torch.Tensor]) -> float:
    """The largest difference between the first rank and the last."""
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    everybody = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(everybody, mine)
    return float((everybody[0] - everybody[-1]).abs().max())


def average(parameter: torch.Tensor) -> None:
    """As in docs/fsdp2.md."""
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


def length(completions, **_) -> list[float]:
    return [float(len(completion.split())) / 8 for completion in completions]


def main() -> None:
    out, path = map(Path, sys.argv[1:])
    found = {}

    trainer = sft(path)
    trainer.train()
    found["sft"] = [*logged(trainer), trainer.evaluate()["eval_loss"]]
    trainer.save_model(str(out / "sft"))
    logits = {"sft": logits_of(trainer.model)}

    config = GRPOConfig(
        **arguments(per_device_train_batch_size=4),
        model_init_kwargs={"distributed_config": distributed(), "dtype": torch.float32},
        num_generations=2,
        max_completion_length=6,
        beta=0.0,
    )
    prompts = Dataset.from_dict({"prompt": [" ".join(text.split()[:4]) for text in TEXTS]})
    trainer = GRPOTrainer(str(path), reward_funcs=length, args=config, train_dataset=prompts)
    trainer.train()
    found["grpo"] = logged(trainer)
    found["grpo rewards"] = logged(trainer, "reward")
    trainer.save_model(str(out / "grpo"))
    logits["grpo"] = logits_of(trainer.model)

    trainer = lora(path, target_modules=["q_proj", "v_proj"])
    trainer.train()
    found["lora"] = logged(trainer)
    found["adapters differ"] = spread(adapters_of(trainer.model))
    trainer.save_model(str(out / "lora"))
    logits["lora"] = logits_of(trainer.model)

    model = get_peft_model(load(path), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    batch = torch.tensor(WORDS[2 * dist.get_rank() :][:2]).to(model.device)
    model(input_ids=batch, labels=batch).loss.backward()
    alone = [adapter.grad for adapter in adapters_of(model)]
    found["gradients differ in a loop"] = spread(alone)
    for adapter in adapters_of(model):
        adapter.grad = None
        adapter.register_post_accumulate_grad_hook(average)
    model(input_ids=batch, labels=batch).loss.backward()
    averaged = [adapter.grad for adapter in adapters_of(model)]
    for gradient in alone:
        dist.all_reduce(gradient)
    found["averages differ"] = spread(averaged)
    found["averages differ from the mean"] = max(
        float((one - total / WORLD).abs().max()) for one, total in zip(averaged, alone, strict=True)
    )

    found["saving the optimizer"] = refusal(lambda: sft(path, save_strategy="steps", save_only_model=False))
    found["resuming"] = refusal(lambda: resume(path))
    trainer = lora(path, gradient_checkpointing=True, target_parameters=["mlp.experts.gate_up_proj"])
    found["training adapters of experts"] = refusal(trainer.train)
    found["lora on experts"] = logged(trainer)
    found["adapters of experts differ"] = spread(adapters_of(trainer.model))
    if not found["training adapters of experts"]:
        trainer.save_model(str(out / "lora on experts"))
        logits["lora on experts"] = logits_of(trainer.model)
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))
        torch.save({"input_ids": torch.tensor(WORDS[:2])} | logits, out / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
