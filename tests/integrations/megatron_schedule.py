"""Megatron's 1F1B schedule that overlaps exchanges: two micro batches of a small GPT of MoE layers, on CPUs or GPUs.

Experts of a token are two, so that the sums of its rows in BF16 are the same in any order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.megatron_cases import RELEASE
from tests.integrations.megatron_layers import make_config

MICRO_BATCHES, LAYERS = 2, 2
PIPELINE = 2  # stages, chunks of each, and ranks that share the experts
VOCABULARY, SEQUENCE, BATCH = 64, 16, 2
# Dispatcher and backend; with "deepep" the schedule frees the rows under the experts, with the others it does not.
ARMS = {"alltoall": ("alltoall", "deepep"), "deepep": ("flex", "deepep"), "hybridep": ("flex", "hybridep")}
if RELEASE >= (0, 19):
    ARMS["ncclep"] = ("flex", "ncclep")


def run(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """By arm: the losses of the micro batches, how far they and the gradients are, relatively, from those of alltoall
    without the schedule, and what was called. Megatron's groups are initialised, and our dispatcher is in its place.
    """
    reference = _model("alltoall", "deepep", size, device, overlap=False)
    expected = _in_turn(reference, rank, device)
    found: dict[str, Any] = {}
    for name, (dispatcher, backend) in ARMS.items():
        model = _model(dispatcher, backend, size, device, overlap=True)
        model.load_state_dict(reference.state_dict())
        counts: Counter[str] = Counter()
        with _watched(counts):
            losses = _overlapped(model, rank, device)
        found[name] = {
            "losses": losses,
            "difference": {
                "loss": max(abs(a - b) / b for a, b in zip(losses, expected["losses"], strict=True)),
                **_differences(_gradients(model), expected["gradients"]),
            },
            "calls": dict(counts),
        }
    return found


def every_exchange_is_as_named(found: dict[str, Any]) -> None:
    """Asserts that each arm overlapped its layers, and exchanged in its own way only."""
    exchanges = MICRO_BATCHES * LAYERS
    for name, arm in found.items():
        calls = arm["calls"]
        assert calls.pop("overlapped") == (MICRO_BATCHES - 1) * LAYERS
        if name == "alltoall":
            assert calls.keys() == {"stock"}
        else:
            assert calls == {"dispatch": exchanges, "combine": exchanges}


class _Attention(torch.nn.Module):
    """PyTorch's in the place of Megatron's, which asks CUDA for random numbers."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **more: Any
    ) -> torch.Tensor:
        """``[S, B, N, D]`` each: ``[S, B, N * D]``."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return output.permute(2, 0, 1, 3).flatten(2)


def _model(
    dispatcher: str,
    backend: str,
    size: int,
    device: torch.device,
    overlap: bool,
    place: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """place: of a chunk of a pipeline's model, as GPTModel takes it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    settings: dict[str, Any] = {"num_layers": LAYERS} | options
    config = make_config(
        dispatcher,
        1,
        size,
        hidden_size=64,
        moe_ffn_hidden_size=32,
        moe_router_topk=2,
        moe_flex_dispatcher_backend=backend,
        overlap_moe_expert_parallel_comm=overlap,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **settings,
    )
    stage = {"vp_stage": place["vp_stage"]} if place else {}
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization, **stage)
    spec.layer_norm = WrappedTorchNorm
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = _Attention
    torch.manual_seed(5)
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **place,
    )
    return model.to(device=device, dtype=torch.bfloat16).train()


def over_a_pipeline(device: torch.device, enable: Callable[[], None]) -> dict[str, Any]:
    """By arm: how far losses and gradients are, relatively, from those of alltoall without the schedule and before
    `enable`, and what was called. The model has PIPELINE stages with as many chunks each, of one layer. Megatron's
    groups are those of `initialise_pipeline`.
    """
    found: dict[str, Any] = {}
    reference = _chunks("alltoall", "deepep", device, overlap=False)
    expected = _through(reference, device)
    enable()
    for name, (dispatcher, backend) in ARMS.items():
        chunks = _chunks(dispatcher, backend, device, overlap=True)
        for chunk, model in zip(chunks, reference, strict=True):
            chunk.load_state_dict(model.state_dict())
        counts: Counter[str] = Counter()
        with _watched(counts):
            losses = _through(chunks, device)
        differences = {"loss": max((abs(a - b) / b for a, b in zip(losses, expected, strict=True)), default=0.0)}
        for number, (chunk, model) in enumerate(zip(chunks, reference, strict=True)):
            found_here = _differences(_gradients(chunk), _gradients(model))
            differences |= {f"chunk {number}: {key}": value for key, value in found_here.items()}
        found[name] = {"losses": losses, "difference": differences, "calls": dict(counts)}
    return found


def pipelines_are_as_alltoall(by_rank: list[dict[str, Any]], limit: float) -> None:
    """Asserts that each arm overlapped its layers, sent our messages, exchanged in its own way only, and has losses and
    gradients within `limit`. by_rank: what `over_a_pipeline` returned."""
    assert any(arm["losses"] for found in by_rank for arm in found.values())
    for rank, found in enumerate(by_rank):
        assert found.keys() == ARMS.keys()
        for name, arm in found.items():
            worst = max(arm["difference"], key=arm["difference"].get)
            assert arm["difference"][worst] <= limit, f"rank {rank}, {name}: {worst} differs: {arm['difference']}"
            calls = arm["calls"]
            assert calls["overlapped"] and calls["messages"]
            assert ("dispatch" in calls) == ("stock" not in calls) == (name != "alltoall")


def initialise_pipeline() -> None:
    """Makes Megatron's groups for `over_a_pipeline`, on PIPELINE * PIPELINE ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=PIPELINE,
        virtual_pipeline_model_parallel_size=PIPELINE,
        expert_model_parallel_size=PIPELINE,
    )


def _chunks(dispatcher: str, backend: str, device: torch.device, overlap: bool) -> list[Any]:
    from megatron.core import parallel_state

    pipeline: dict[str, Any] = {
        "num_layers": PIPELINE * PIPELINE,
        "pipeline_model_parallel_size": PIPELINE,
        "virtual_pipeline_model_parallel_size": PIPELINE,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": True,
    }
    made = []
    for stage in range(PIPELINE):
        is_first, is_last = (
            getattr(parallel_state, f"is_pipeline_{which}_stage")(ignore_virtual=False, vp_stage=stage)
            for which in ("first", "last")
        )
        place = {"pre_process": is_first, "post_process": is_last, "vp_stage": stage}
        made.append(_model(dispatcher, backend, PIPELINE, device, overlap, place, **pipeline))
    return made


def _through(chunks: list[Any], device: torch.device) -> list[float]:
    """A step through Megatron's pipeline. The losses of the micro batches, where the last stage is."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    seed = parallel_state.get_expert_model_parallel_rank()
    stored = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(_batches(seed, device, 2 * PIPELINE)) for _ in chunks],
        model=chunks,
        num_microbatches=2 * PIPELINE,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [each["loss"] for each in stored]


def _forward_step(batches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """The output of the next micro batch, or its plan for the overlapping schedule, and the function of its loss."""
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(**next(batches)), _loss_of


def _loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output.float().mean()
    return loss, {"loss": float(loss.detach())}


def _batches(rank: int, device: torch.device, count: int = MICRO_BATCHES) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE)
    found = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(device)
        labels = ids.roll(-1, dims=1)
        found.append({"input_ids": ids, "position_ids": positions, "attention_mask": None, "labels": labels})
    return found


def _in_turn(model: Any, rank: int, device: torch.device) -> dict[str, Any]:
    """Forward and backward of one micro batch after the other."""
    losses = []
    for batch in _batches(rank, device):
        loss = model(**batch).float().mean()
        (loss / MICRO_BATCHES).backward()
        losses.append(float(loss.detach()))
    return {"losses": losses, "gradients": _gradients(model)}


def _overlapped(model: Any, rank: int, device: torch.device) -> list[float]:
    """The same by Megatron's schedule, which runs the backward of each micro batch beside the next one's forward."""
    from megatron.core.pipeline_parallel.combined_1f1b import combined_1f1b_schedule_for_no_pipelining

    def forward_step(batches: Any, model: Any, return_schedule_plan: bool) -> tuple[Any, Any]:
        assert return_schedule_plan
        return _forward_step(batches, model, return_schedule_plan)

    stored, _ = combined_1f1b_schedule_for_no_pipelining(
        forward_step,
        iter(_batches(rank, device)),
        model,
        MICRO_BATCHES,
        None,
        None,
        [],
        model.config,
        False,
        None,
        False,
        contextlib.nullcontext,
        torch.zeros([], dtype=torch.int),
        lambda first: first,
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [each["loss"] for each in stored]


@contextlib.contextmanager
def _watched(counts: Counter[str]) -> Iterator[None]:
    """Counts our exchanges, torch's, and the layers whose forward ran beside another micro batch's backward."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    from ep_plugin import MoECommunicator
    from ep_plugin.collectives.send_receive import SendReceive

    def counted(key: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[key] += 1
            return function(*args, **kwargs)

        return call

    run_layers = TransformerLayerSchedulePlan.run

    def run(f_layer: Any, b_layer: Any, **more: Any) -> Any:
        counts["overlapped"] += f_layer is not None and b_layer is not None
        return run_layers(f_layer, b_layer, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerLayerSchedulePlan, "run", staticmethod(run))
        patch.setattr(dist, "all_to_all_single", counted("stock", dist.all_to_all_single))
        for name in ("dispatch", "combine"):
            patch.setattr(MoECommunicator, name, counted(name, getattr(MoECommunicator, name)))
        patch.setattr(SendReceive, "batch", counted("messages", SendReceive.batch))
        yield


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest of each gradient over the largest value of theirs."""
    assert ours.keys() == theirs.keys()
    return {
        name: float((ours[name].double() - other.double()).abs().max() / other.double().abs().max().clamp_min(1e-6))
        for name, other in theirs.items()
    }
