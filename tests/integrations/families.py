"""Tiny models of every family of transformers that has experts, trained on ranks by two exchanges.

A family is a folder of ``transformers/models``. They are read from the installed version, so a newer one's are there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import note

# Of these, each family gets those that its configuration has.
SMALL: dict[str, Any] = dict(
    vocab_size=64, unpadded_vocab_size=64, max_position_embeddings=64, num_hidden_layers=2, hidden_size=32,
    intermediate_size=32,
    num_attention_heads=4, num_key_value_heads=4, head_dim=8, use_cache=False, initializer_range=0.2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, n_shared_experts=1, n_group=1,
    num_experts_per_tok=2, top_k=2, moe_topk=2, moe_k=2, top_k_experts=2, topk_group=1,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, first_k_dense_replace=0, num_dense_layers=0,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_heads=4, linear_head_dim=8,
)  # fmt: skip
# What a family needs beside that, to be built at all, to be small, or to have experts.
_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
_SPARSE = dict(mlp_layer_types=["sparse", "sparse"])
EXTRA: dict[str, dict[str, Any]] = {
    "beam": _SPARSE,
    "deepseek_ocr2": _SPARSE,
    "ernie4_5_vl_moe": dict(moe_intermediate_size=[16, 16], rope_parameters=_ROPE),
    "gemma4": dict(enable_moe_block=True, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8),
    "flint": dict(mlp_only_layers=[]),
    "glm4v_moe": dict(rope_parameters=_ROPE | dict(mrope_section=[1, 1, 0])),
    "glm5_next": _SPARSE | dict(qk_rope_head_dim=0),
    "granitemoehybrid": dict(mamba_n_heads=4),
    "hy_v4_vl": dict(rope_parameters=_ROPE),
    "lfm2_moe": dict(layer_types=["full_attention", "conv"]),
    "mimo_v2_flash": dict(num_key_value_heads=2),
    "step3p7": _SPARSE | dict(sliding_window=16),
    "zaya": dict(num_experts_per_tok=1),
}


@functools.cache
def families() -> dict[str, bool]:
    """All families with experts, and whether the plan of any of their configurations dispatches them."""
    import transformers

    found = {}
    for folder in sorted(Path(transformers.__file__).with_name("models").iterdir()):
        plans, code = (
            "".join(path.read_text() for path in folder.glob(f"{kind}_*.py")) for kind in ("configuration", "modeling")
        )
        is_dispatched = '"ep_dispatch_experts"' in plans
        if (code and is_dispatched) or re.search(r"^class \w*(?:Experts|MoE|Moe|MoeBlock)\(", code, re.MULTILINE):
            found[folder.name] = is_dispatched
    return found


def _model_class(family: str) -> type[Any]:
    """The class for text, with a head where there is one, of the first configuration with a plan and a vocabulary."""
    from transformers import PreTrainedConfig, PreTrainedModel

    home = f"transformers.models.{family}"
    configs, models = (importlib.import_module(f"{home}.{kind}_{family}") for kind in ("configuration", "modeling"))
    found = [
        one
        for one in vars(configs).values()
        if inspect.isclass(one) and issubclass(one, PreTrainedConfig) and one.__module__ == configs.__name__
    ]
    config = min(found, key=lambda one: (not one.base_model_ep_plan, not hasattr(one, "vocab_size")))
    classes = [
        one
        for name, one in vars(models).items()
        if inspect.isclass(one)
        and issubclass(one, PreTrainedModel)
        and one.config_class is config
        and one.__module__ == models.__name__
        and "PreTrained" not in name
    ]
    return min(classes, key=lambda one: (not one.__name__.endswith("ForCausalLM"), "For" in one.__name__))


def tiny(family: str) -> torch.nn.Module:
    """A model of two layers with random weights."""
    model_class = _model_class(family)
    config_class = model_class.config_class
    names = inspect.signature(config_class).parameters
    renamed = config_class.attribute_map
    values = {
        name: value
        for name, value in SMALL.items()
        if (name in names or name in renamed) and renamed.get(name) not in SMALL.keys() & names.keys()
    }
    torch.manual_seed(0)
    model = model_class(config_class(**values | EXTRA.get(family, {})))
    for module in model.modules():
        if hasattr(module, "tid2eid"):  # the experts of each word, which are a checkpoint's
            module.tid2eid.copy_(torch.arange(module.tid2eid.numel()).view_as(module.tid2eid) % SMALL["num_experts"])
    return model


def compare(rank: int, names: list[str], folder: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Of each family, how `steps` differ from those of transformers' own exchange. Collective.

    Each has what `_compare` returns, or why it was "not built". Where transformers fails with FSDP, "with FSDP" is its
    error, and the rest is of ranks that share a batch.
    """
    import transformers

    importlib.import_module("ep_plugin.integrations.transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for name in names:
        note(name)
        if said := _save(name, folder / name, rank):
            found[name] = {"not built": f"{said}; tests/integrations/families.py has the sizes"}
            continue
        found[name] = _compare(_model_class(name), folder / name, rank, steps, fsdp_size=2)
        if "error" in found[name]:
            shared = _compare(_model_class(name), folder / name, 0, steps, fsdp_size=1, tp_size=2)
            found[name] = shared | {"with FSDP": found[name]["error"]}
    return found


def _save(name: str, folder: Path, rank: int) -> str:
    """Rank 0 saves a tiny model. Returns on all ranks why it could not."""
    said = [""]
    if rank == 0:
        try:
            tiny(name).save_pretrained(folder)
        except Exception as error:
            said = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(said)
    return said[0]


def _compare(model_class: type[Any], folder: Path, rank: int, steps: int, **sizes: int) -> dict[str, Any]:
    """The largest "difference" of a gradient and its "tensor", and of the "loss"; how many "dispatches" were ours.

    They are of the first step; "losses" is the largest relative difference of the losses of all steps. "gradient" is
    the largest of the experts. If transformers' own exchange fails, there is only an "error".
    """
    from tests.integrations.test_transformers import _difference, _Spy

    seen = _Spy()
    try:
        theirs, expected = _train(model_class, folder, rank, steps, ep_implementation="all_to_all", **sizes)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    with seen.watching():
        ours, losses = _train(model_class, folder, rank, steps, ep_implementation="ep_plugin", **sizes)
    difference = _difference(ours, theirs)
    worst = max(difference, key=difference.__getitem__)
    return {
        "difference": difference[worst],
        "tensor": worst,
        "loss": difference["loss"],
        "losses": max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)),
        "dispatches": seen.calls["dispatch"],
        "gradient": max(float(one.abs().max()) for name, one in theirs.items() if ".experts." in name),
    }


def _train(
    model_class: type[Any], folder: Path, rank: int, steps: int, **options: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Loss and gradients of a batch of `rank`, and the losses of `steps` over that batch."""
    from transformers.distributed import DistributedConfig

    from tests.integrations.test_transformers import _gradients

    config = DistributedConfig(ep_size=2, **options)
    model = model_class.from_pretrained(folder, dtype=torch.float32, distributed_config=config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, foreach=False)
    tokens = torch.randint(3, 64, (1, 8 + 4 * rank), generator=torch.Generator().manual_seed(rank))
    first: dict[str, torch.Tensor] = {}
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        output = model(input_ids=tokens)[0]  # logits, or hidden states
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten() % output.size(-1))
        loss.backward()
        if not first:
            gradients = {name: tensor for name, tensor in _gradients(model).items() if tensor is not None}
            first = {"loss": loss.detach(), **gradients}
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return first, losses
