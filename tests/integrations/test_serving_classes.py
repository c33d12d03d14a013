"""vLLM's and SGLang's own classes over ep_plugin.deep_ep on CPU ranks, with stand-ins for the rest of the engines.

EP_TEST_VLLM and EP_TEST_SGLANG are folders with the packages `vllm` and `sglang`: a checkout (of SGLang its folder
python), or an unpacked wheel. Seen with vLLM 0.33.0 and SGLang 0.5.23. Names and shapes: serving_cases.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin.moe.reference import reference_quantize
from tests.integrations import serving_cases as cases
from tests.integrations.serving_cases import EXPERTS_PER_RANK, TOKENS_MAX, Batch, H, K
from tests.integrations.stand_ins import imported
from tests.integrations.test_serving_calls import BATCHES
from tests.ranks import run_ranks, values


def quantized(x: torch.Tensor, *_: Any, quant_dtype: Any = None, **__: Any) -> tuple[torch.Tensor, Any]:
    """In place of vLLM's kernels for quantisation."""
    return (x, None) if quant_dtype is None else reference_quantize(x)


# -- vLLM ------------------------------------------------------------------------------------------------------------

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
OF_VLLM = [
    "vllm.envs",
    "vllm.utils.import_utils",
    "vllm.v1.worker.ubatching",
    f"{FUSED_MOE}.modular_kernel",
    f"{FUSED_MOE}.topk_weight_and_reduce",
    *(f"{FUSED_MOE}.prepare_finalize.deepep_{kind}" for kind in ("ht", "ll", "v2")),
    "vllm.distributed.device_communicators.base_device_communicator",
    "vllm.distributed.device_communicators.all2all",
]


class Streams(threading.local):
    """CUDA's current stream, of each thread."""

    current: Any = None

    def set(self, stream: Any) -> None:
        self.current = stream

    def get(self) -> Any:
        return self.current


def vllm_modules(source: str, size: int) -> tuple[SimpleNamespace, contextlib.ExitStack]:
    """vLLM's modules by the last parts of their names, and what they find of a GPU until the stack is closed."""
    streams, on_cpu = Streams(), {"is_rocm": lambda: False, "is_cuda": lambda: False, "is_cpu": lambda: True}
    group = SimpleNamespace(rank_in_group=0, world_size=size)
    given: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": SimpleNamespace(**on_cpu, fp8_dtype=lambda: torch.float8_e4m3fn)},
        "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b},
        "vllm.utils.torch_utils": {"current_stream": streams.get, "PIN_MEMORY": False},
        "vllm.distributed.parallel_state": {
            "get_dp_group": lambda: group,
            "get_tp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1),
            "in_the_same_node_as": lambda cpu_group, source_rank: [True] * size,
        },
        f"{FUSED_MOE}.utils": {
            "moe_kernel_quantize_input": quantized,
            "normalize_batched_scales_shape": lambda scales, num_experts: scales,
            "_resize_cache": lambda x, shape: x.flatten()[: torch.Size(shape).numel()].view(*shape),
        },
        f"{FUSED_MOE}.moe_output": {"UnfinalizedMoEOutput": type("UnfinalizedMoEOutput", (), {})},
    }
    modules = SimpleNamespace(**imported(Path(source), OF_VLLM, given))
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(torch.cuda, "set_stream", streams.set))
    stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()))
    stack.enter_context(mock.patch.object(torch, "Event", mock.MagicMock))
    stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
    modules.import_utils._get_runtime_nccl_version = lambda: 23004  # a check that a new NCCL passes
    modules.deepep_v2._globalize_recv_topk_idx = globalized
    return modules, stack


def globalized(ids: torch.Tensor, received: torch.Tensor, first: int, num_experts: int) -> torch.Tensor:
    """In place of a Triton kernel: experts' numbers in all, -1 in rows that nobody has sent."""
    unused = torch.arange(len(ids)) >= received[-1]
    return torch.where((ids < 0) | unused[:, None], -1, ids + first)


class Experts:
    """In place of vLLM's grouped GEMMs, with what its FusedMoEKernelModularImpl asks of them."""

    expects_unquantized_inputs = False
    a2_scale = None

    def __init__(self, modules: SimpleNamespace, rank: int, size: int, fp8: bool, batched: bool) -> None:
        self.rank, self.size, self.batched = rank, size, batched
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(dp_size=size, use_ep=True))
        reduces = modules.topk_weight_and_reduce
        self.impl = reduces.TopKWeightAndReduceDelegate() if batched else reduces.TopKWeightAndReduceNoOP()
        none = dict.fromkeys(("a1_scale", "a1_gscale", "a2_scale"))
        self.quant_config = SimpleNamespace(
            **none,
            is_block_quantized=fp8,
            quant_dtype=torch.float8_e4m3fn if fp8 else None,
            block_shape=[cases.BLOCK, cases.BLOCK] if fp8 else None,
            per_act_token_quant=False,
            is_scale_swizzled=False,
            mx_alignment=0,
        )

    def finalize_weight_and_reduce_impl(self) -> Any:
        return self.impl

    def output_hidden_dim(self, hidden: int) -> int:
        return hidden

    def moe_problem_size(self, a1q: torch.Tensor, w1: Any, w2: Any, topk_ids: torch.Tensor) -> tuple[int, ...]:
        return EXPERTS_PER_RANK, a1q.shape[-2], H, H, topk_ids.shape[1]

    def workspace_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def workspace_shapes(self, rows: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (EXPERTS_PER_RANK, rows, H) if self.batched else (rows, H)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        a1q_scale: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_tokens_meta: Any,
        **_: Any,
    ) -> None:
        received = hidden_states if a1q_scale is None else (hidden_states, a1q_scale)
        if self.batched:
            output.copy_(cases.rows_by_expert(received, expert_tokens_meta.expert_num_tokens, self.rank))
            return
        ours = topk_ids // EXPERTS_PER_RANK == self.rank  # -1 is not
        local = torch.where(ours, topk_ids % EXPERTS_PER_RANK, -1)
        output.copy_(cases.rows_by_token(received, local, topk_weights.masked_fill(~ours, 0.0), self.rank))


def vllm(rank: int, size: int, source: str) -> None:
    modules, stack = vllm_modules(source, size)
    with stack:
        assert modules.import_utils.has_deep_ep()
        cpu_group = dist.new_group(backend="gloo")
        managers, num_experts = modules.all2all, EXPERTS_PER_RANK * size
        managers.get_current_vllm_config().parallel_config.enable_fault_tolerance = False
        throughput, low_latency, elastic = (
            getattr(managers, f"DeepEP{kind}All2AllManager")(cpu_group) for kind in ("HT", "LL", "V2")
        )
        throughput.set_num_sms(8)
        elastic._gin_checked = True  # a check that EP_DISABLE_GIN=1 skips, after an exchange over NCCL
        buffers = {
            "ht": throughput.get_handle({}),
            "ll": low_latency.get_handle(
                {
                    "max_num_tokens_per_dp_rank": TOKENS_MAX,
                    "token_hidden_size": H,
                    "num_ep_ranks": size,
                    "num_global_experts": num_experts,
                    "num_local_experts": EXPERTS_PER_RANK,
                }
            ),
            "v2": elastic.get_handle(
                {
                    "num_max_tokens_per_rank": TOKENS_MAX,
                    "hidden": H,
                    "num_topk": K,
                    "num_experts": num_experts,
                    "use_fp8_dispatch": True,
                }
            ),
        }
        first = rank * EXPERTS_PER_RANK
        for fp8 in (False, True):
            kinds: dict[str, Any] = {
                "ht": modules.deepep_ht.DeepEPHTPrepareAndFinalize(buffers["ht"], size, size, first),
                "ll": modules.deepep_ll.DeepEPLLPrepareAndFinalize(buffers["ll"], TOKENS_MAX, size, fp8),
                "decode": modules.deepep_v2.DeepEPV2PrepareAndFinalize(
                    buffers["v2"], size, size, first, num_experts, K, fp8, use_cudagraph=True
                ),
                "prefill": modules.deepep_v2.DeepEPV2PrepareAndFinalize(
                    buffers["v2"], size, size, first, num_experts, K, fp8, use_cudagraph=False
                ),
            }
            for kind, prepare_finalize in kinds.items():
                experts = Experts(modules, rank, size, fp8, batched=kind == "ll")
                kernel = modules.modular_kernel.FusedMoEKernelModularImpl(prepare_finalize, experts)
                for turn, tokens in enumerate(BATCHES):
                    metadata = modules.deepep_v2.get_forward_context().dp_metadata
                    metadata.num_tokens_across_dp_cpu = torch.tensor(tokens)
                    batches = [cases.batch_of(tokens[rank], num_experts, 8 * turn + 2 * i + rank) for i in range(2)]
                    for outs in layers(modules, kernel, batches, num_experts, kind in ("ht", "ll")):
                        for batch, out in zip(batches, outs, strict=True):
                            assert not cases.is_wrong(batch, out, fp8), (kind, fp8, tokens)
        for manager in (throughput, low_latency, elastic):
            manager.destroy()


def layers(
    modules: SimpleNamespace, kernel: Any, batches: list[Batch], num_experts: int, may_overlap: bool
) -> Iterator[list[torch.Tensor]]:
    """The outputs of two batches, one after the other; then as two micro-batches in flight, by vLLM's ubatching.py."""
    weights = torch.empty((EXPERTS_PER_RANK, 0))

    @torch.inference_mode()
    def layer(batch: Batch) -> torch.Tensor:
        result: torch.Tensor = kernel.apply(
            batch.x, weights, weights, batch.ids, batch.weights, global_num_experts=num_experts
        )
        return result

    yield [layer(batch) for batch in batches]
    if not may_overlap:
        return
    start, outs = threading.Barrier(len(batches) + 1), [torch.empty(0)] * len(batches)
    streams = SimpleNamespace(name="compute", wait_event=id), SimpleNamespace(name="comm", wait_event=id)
    contexts = modules.ubatching.make_ubatch_contexts(len(batches), *streams, [object() for _ in batches], start)

    def run(number: int) -> None:
        torch.cuda.set_stream(streams[0])
        with contexts[number]:
            for _ in range(2):  # layers
                outs[number] = layer(batches[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    start.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join()
    yield outs


# -- SGLang ----------------------------------------------------------------------------------------------------------

MOE = "sglang.srt.layers.moe"
OF_SGLANG = [
    "sglang.srt.environ",
    f"{MOE}.utils",
    *(f"{MOE}.token_dispatcher.{name}" for name in ("base", "deepep", "deepep_v2")),
]
SETTINGS = dict.fromkeys(
    ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"),
    str(TOKENS_MAX),
)


def sglang_modules(source: str, extends: list[bool]) -> SimpleNamespace:
    """SGLang's modules by the last parts of their names. extends: its last item says whether a batch is a prefill."""
    os.environ.update(SETTINGS)
    resources = SimpleNamespace(buffers={})
    deep_gemm = {"ENABLE_JIT_DEEPGEMM": True, "DEEPGEMM_NEED_TMA_ALIGNED_SCALES": True}
    deep_gemm |= dict.fromkeys(("DEEPGEMM_BLACKWELL", "DEEPGEMM_SCALE_UE8M0"), False)
    no: Callable[..., bool] = lambda *_: False  # noqa: E731
    questions = ("is_npu", "is_cuda", "is_hip", "is_blackwell", "is_flashinfer_available", "get_bool_env_var")
    given: dict[str, dict[str, Any]] = {
        "sglang.srt.utils": {**dict.fromkeys(questions, no), "get_cuda_version": lambda: (12, 9)},
        "sglang.srt.layers": {"deep_gemm_wrapper": SimpleNamespace(**deep_gemm)},
        "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: extends[-1]},
        "sglang.srt.runtime_context": {
            "get_resources": lambda: resources,
            "get_server_args": lambda: None,
            "get_flags": lambda: SimpleNamespace(moe=SimpleNamespace(deepep_config="", tbo_enabled=True)),
        },
        "sglang.kernels.ops.quantization.fp8_kernel": {
            "sglang_per_token_group_quant_fp8": lambda x, block, **_: reference_quantize(x)
        },
    }
    return SimpleNamespace(**imported(Path(source), OF_SGLANG, given))


def sglang(rank: int, size: int, source: str) -> None:
    extends = [False]
    modules, num_experts = sglang_modules(source, extends), EXPERTS_PER_RANK * size
    theirs = modules.deepep
    assert theirs.use_deepep, theirs._deepep_import_error
    settings = {
        "group": dist.group.WORLD,
        "router_topk": K,
        "num_experts": num_experts,
        "num_local_experts": EXPERTS_PER_RANK,
        "hidden_size": H,
        "params_dtype": torch.bfloat16,
    }
    properties = SimpleNamespace(multi_processor_count=132)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties):
        for fp8 in (False, True):
            two = [
                theirs.DeepEPDispatcher(
                    **settings,
                    permute_fusion=True,
                    deepep_mode=modules.utils.DeepEPMode.AUTO,
                    async_finish=True,
                    return_recv_hook=True,
                )
                for _ in range(2)
            ]
            for dispatcher in two:
                dispatcher.set_quant_config({"dispatcher_output_dtype": "fp8" if fp8 else "bf16"})
            elastic = modules.deepep_v2.DeepEPv2Dispatcher(**settings, use_fp8_dispatch=fp8)
            for turn, tokens in enumerate(BATCHES):
                batches = [cases.batch_of(tokens[rank], num_experts, 8 * turn + 2 * i + rank, 0.2) for i in range(2)]
                for extend in (False, True, False):
                    extends.append(extend)
                    with torch.inference_mode():
                        outs = in_two_batches(theirs, two, batches, rank)
                    for batch, out in zip(batches, outs, strict=True):
                        assert not cases.is_wrong(batch, out, fp8), ("deepep", extend, fp8, tokens)
                for extend, expands in ((False, True), (True, True), (True, False)):
                    extends.append(extend)
                    elastic._impl._prefill_expand_enabled = expands
                    with torch.inference_mode():
                        out = through_elastic(modules.deepep_v2, elastic, batches[0], rank)
                    assert not cases.is_wrong(batches[0], out, fp8), ("deepep_v2", extend, expands, fp8, tokens)


def topk_output(batch: Batch) -> SimpleNamespace:
    return SimpleNamespace(topk_weights=batch.weights, topk_ids=batch.ids.int())


def in_two_batches(theirs: Any, two: list[Any], batches: list[Batch], rank: int) -> list[torch.Tensor]:
    """The outputs of two micro-batches in flight, in the order of SGLang's two-batch overlap."""
    for dispatcher, batch in zip(two, batches, strict=True):
        dispatcher.dispatch_a(batch.x, topk_output(batch))
    for dispatcher in two:
        out = dispatcher.dispatch_b()
        received = out.hidden_states
        if out.hidden_states_scale is not None:
            received = received, out.hidden_states_scale
        if isinstance(out, theirs.DeepEPLLDispatchOutput):
            y = cases.rows_by_expert(received, out.masked_m, rank)
            dispatcher.combine_a(theirs.DeepEPLLCombineInput(y, out.topk_ids, out.topk_weights))
        else:
            y = cases.rows_by_token(received, out.topk_ids, out.topk_weights, rank)
            dispatcher.combine_a(theirs.DeepEPNormalCombineInput(y, out.topk_ids, out.topk_weights))
    return [dispatcher.combine_b() for dispatcher in two]


def through_elastic(theirs: Any, dispatcher: Any, batch: Batch, rank: int) -> torch.Tensor:
    out = dispatcher.dispatch(batch.x, topk_output(batch))
    received = out.hidden_states
    if out.hidden_states_scale is not None:
        received = received, out.hidden_states_scale
    local, weights = out.topk_ids, out.topk_weights
    if out.is_expanded:
        local, weights, begin = torch.full((len(weights), 1), -1), weights[:, None], 0
        for expert, end in enumerate(out.psum_num_recv_tokens_per_expert.tolist()):
            local[begin:end] = expert
            begin = -(-end // out.expert_alignment) * out.expert_alignment
    y = cases.rows_by_token(received, local, torch.where(local < 0, 0.0, weights), rank)
    result: torch.Tensor = dispatcher.combine(theirs.DeepEPv2CombineInput(y, out.topk_weights))
    return result


# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_its_classes_give_what_experts_on_one_rank_do(
    engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"EP_TEST_{engine.__name__.upper()}"
    source = os.environ.get(name)
    if not source:
        pytest.skip(f"needs {name}, a folder with the package {engine.__name__}")
    monkeypatch.setenv("EP_PLUGIN", "deep_ep")
    values(run_ranks(2, engine, 2, source, timeout_s=200, start="spawn"))
