"""Models of transformers that decode over several ranks, beside the same model on one rank. On CPUs and on GPUs.

Shapes: B sequences of a rank, S tokens of a prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROMPT, NEW, VOCABULARY = 5, 12, 64
KINDS = ("even", "deepseek", "gpt_oss")
"""Checkpoints of test_transformers: plain, with shared experts, with biases and transposed matrices."""


def save_checkpoints(folder: Path) -> None:
    from tests.integrations import test_transformers as cases

    torch.manual_seed(0)
    cases._model(hidden_size=64, num_experts=12, num_experts_per_tok=2).save_pretrained(folder / "even")
    cases._deepseek().save_pretrained(folder / "deepseek")
    cases._gpt_oss().save_pretrained(folder / "gpt_oss")


def integration() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return importlib.import_module("ep_plugin.integrations.transformers")


def load(path: Path, size: int, **settings: Any) -> torch.nn.Module:
    """The model over `size` ranks, as an inference engine has it; of one rank alone where size is 0."""
    import transformers

    ours = integration()
    if size:
        settings["distributed_config"] = ours.InferenceConfig(ep_size=size, ep_implementation="ep_plugin")
    return transformers.AutoModelForCausalLM.from_pretrained(path, **settings).eval()


def prompts(sequences: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (sequences, PROMPT), generator=torch.Generator().manual_seed(sequences))


@torch.no_grad()
def decode(model: torch.nn.Module, given: torch.Tensor, most: int | None, captured: bool = False) -> torch.Tensor:
    """The likeliest tokens ``[B, NEW]`` after `given` ``[B, S]``.

    most: sequences of a rank, for a low-latency decoding; None: without one. captured: a CUDA graph has the steps.
    """
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    token = model(input_ids=given, past_key_values=cache).logits[:, -1:].argmax(-1)
    tokens = [token.clone()]

    def step() -> None:
        token.copy_(model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1))

    def run(number: int, step: Callable[[], None]) -> None:
        for _ in range(number):
            step()
            tokens.append(token.clone())

    if most is None:
        run(NEW - 1, step)
    else:
        with integration().low_latency(model, max_tokens_per_rank=most):
            run(1 if captured else NEW - 1, step)
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    step()
        if captured:
            run(NEW - 2, graph.replay)  # outside of low_latency: the exchanges are in the graph
    return torch.cat(tokens, dim=1)


def both(
    rank: int, size: int, folder: Path, kinds: tuple[str, ...], captured: bool = False
) -> dict[str, tuple[list, list]]:
    """By case, the tokens that this rank decodes with all ranks, and those of the model on this rank alone."""
    found = {}
    for kind in kinds:
        model, alone = load(folder / kind, size), load(folder / kind, 0)
        alone.to(model.device)
        for sequences in (2 * size - 1, size - 1):
            given = prompts(sequences).to(model.device)
            # A rank without a sequence decodes one for nothing, since transformers has no batch of none.
            mine = given[rank::size] if rank < sequences else given[:1]
            tokens = decode(model, mine, -(-sequences // size), captured)
            found[f"{kind}, {sequences} sequences"] = tokens.tolist(), decode(alone, mine, None).tolist()
    return found
