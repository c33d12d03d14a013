"""Decode with a Qwen3-MoE of transformers, sequences and experts split over all ranks, on CPUs or GPUs as found.

torchrun --nproc-per-node 2 examples/generate_qwen3_moe.py [CHECKPOINT]
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache

from ep_plugin.integrations.transformers import InferenceConfig, low_latency

SEQUENCES, PROMPT, NEW = 5, 8, 24


def small_checkpoint() -> str:
    """A folder with a small model of random weights, the same on all ranks."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=32, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        initializer_range=0.2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder := tempfile.mkdtemp())
    return folder


def generate(model: torch.nn.Module, prompts: torch.Tensor, most: int) -> torch.Tensor:
    """The likeliest tokens `[B, NEW]` after `prompts` `[B, S]`. most: sequences of a rank."""
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    token = model(input_ids=prompts, past_key_values=cache).logits[:, -1:].argmax(-1)  # high throughput
    tokens = [token.clone()]

    def step() -> None:
        token.copy_(model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1))

    with low_latency(model, max_tokens_per_rank=most):  # <- decoding: one token per sequence
        step()  # the first one makes the communication memory
        tokens.append(token.clone())
        if token.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        for _ in range(NEW - 2):
            graph.replay() if token.is_cuda else step()
            tokens.append(token.clone())
    return torch.cat(tokens, dim=1)


@torch.no_grad()
def main() -> None:
    # Before the process group exists: afterwards save_pretrained would write on one rank only.
    path = sys.argv[1] if len(sys.argv) > 1 else small_checkpoint()
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    config = InferenceConfig(ep_size=ranks, ep_implementation="ep_plugin")  # <- the line
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

    prompts = torch.randint(256, (SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(0)).to(model.device)
    mine = prompts[rank::ranks]  # ranks may differ in sequences
    if len(mine) == 0:
        mine = prompts[:1]  # transformers has no batch of none, so this rank decodes one for nothing
    tokens = generate(model, mine, most=-(-SEQUENCES // ranks))
    print(f"rank {rank}: {len(mine)} sequences of {NEW} new tokens, the first begins {tokens[0, :6].tolist()}")

    if len(sys.argv) == 1:
        alone = AutoModelForCausalLM.from_pretrained(path).to(model.device)
        expected = alone.generate(mine, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)[:, PROMPT:]
        assert torch.equal(tokens, expected), f"rank {rank}: expected {expected.tolist()}, got {tokens.tolist()}"
        print(f"rank {rank}: one rank alone gives the same tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
