"""Options of Megatron's that differ from version to version, on 4 CPU ranks: the backend ncclep, SMs, rows padded for
experts, overlapped shared experts, budgets, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported
from tests.integrations.on_cpus import make_distributed_optimizer_run_here, make_megatron_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

from tests.integrations import megatron_schedule
from tests.integrations.megatron_cases import (
    DEEPSEEK,
    HYBRIDEP,
    LIMIT,
    RELEASE,
    VERSION,
    WORLD,
    Case,
    refusal,
    run_case,
)
from tests.integrations.megatron_layers import initialise, make_config, make_layer

BF16_LIMIT = 2e-2
NCCLEP = {"moe_flex_dispatcher_backend": "ncclep"}
BACKENDS = ["deepep", "hybridep"] + ["ncclep"] * (RELEASE >= (0, 19))
FUSER = {"use_transformer_engine_op_fuser": True}
FUSED = [False, True] if RELEASE >= (0, 18) else [False]
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "moe_router_topk": 2}
PADDED_ROWS = 256  # of an expert's, with the op fuser

CASES = {"bf16": Case(options=BF16), "bf16-hybridep": Case(options=BF16, ours=HYBRIDEP)}
if RELEASE >= (0, 18):
    OVERLAPPED = {"moe_shared_expert_overlap": True}
    RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    CASES |= {
        f"op-fuser-{backend}": Case(options=FUSER, ours={"moe_flex_dispatcher_backend": backend})
        for backend in BACKENDS
    }
    CASES |= {
        "op-fuser-bf16": Case(options=FUSER | BF16, ours=HYBRIDEP),
        "op-fuser-tp2": Case(tp=2, options=FUSER, ours=HYBRIDEP),
        "shared-overlap-hybridep": Case(options=DEEPSEEK, ours=OVERLAPPED | HYBRIDEP),
        "shared-overlap-gate": Case(options=DEEPSEEK | {"moe_shared_expert_gate": True}, ours=OVERLAPPED),
        "shared-overlap-recompute": Case(options=DEEPSEEK | RECOMPUTED, ours=OVERLAPPED),
    }
if RELEASE >= (0, 19):
    # Megatron's own ncclep asks for a factor. At 0.1 the rows that arrive would not fit its buffer.
    CASES |= {
        "ncclep": Case(ours=NCCLEP),
        "ncclep-factor": Case(ours=NCCLEP | {"moe_expert_rank_capacity_factor": 2.0}),
        "ncclep-small-factor-tp2": Case(tp=2, ours=NCCLEP | {"moe_expert_rank_capacity_factor": 0.1}),
        "ncclep-capacity": Case(options={"moe_expert_capacity_factor": 0.5}, ours=NCCLEP),
        "ncclep-shared-overlap": Case(options=DEEPSEEK, ours=OVERLAPPED | NCCLEP),
    }

# Options, and the SMs that they fix; None: our choice.
SMS: dict[str, tuple[dict[str, Any], int | None]] = {
    "default": ({}, None),
    "default-hybridep": (HYBRIDEP, None),
    "deepep": ({"moe_deepep_num_sms": 6}, 6),
    "hybridep": (HYBRIDEP | {"moe_hybridep_num_sms": 12}, 12),
}
if RELEASE < (0, 19):
    SMS |= {
        "deepep-default": ({"moe_deepep_num_sms": 20}, None),
        "of-another-backend": ({"moe_hybridep_num_sms": 12}, None),
        # The default up to 0.17.0.
        "hybridep-16": (HYBRIDEP | {"moe_hybridep_num_sms": 16}, None if VERSION in ("0.16.1", "0.17.0") else 16),
    }
else:
    SMS |= {
        **{
            f"flex-{backend}": ({"moe_flex_dispatcher_backend": backend, "moe_flex_dispatcher_num_sms": 6}, 6)
            for backend in BACKENDS
        },
        "flex-before-old-name": ({"moe_flex_dispatcher_num_sms": 6, "moe_deepep_num_sms": 8}, 6),
        "deepep-20": ({"moe_deepep_num_sms": 20}, 20),
    }

# Recipe by recipe, the multiple to which each expert's rows are padded.
ALIGNMENTS: dict[str, tuple[dict[str, Any], int]] = {
    "bf16": ({}, 1),
    "fp8-delayed": ({"fp8": "e4m3", "fp8_recipe": "delayed"}, 16),
    "fp8-mxfp8": ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
    "fp4": ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, 128),
}
if RELEASE >= (0, 18):
    ALIGNMENTS |= {
        "op-fuser": (FUSER, PADDED_ROWS),
        "op-fuser-mxfp8": (FUSER | {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, PADDED_ROWS),
    }

REFUSED: dict[str, tuple[dict[str, Any], str]] = {}
if RELEASE >= (0, 18):
    BUDGET = HYBRIDEP | FUSER | {"moe_expert_rank_capacity_factor": 1.5}
    REFUSED["hybridep's budget"] = (BUDGET, "moe_expert_rank_capacity_factor: expected None, .*drops none, got 1.5")
if RELEASE >= (0, 19):
    REFUSED |= {
        "ncclep's fixed shape": (
            NCCLEP | {"moe_ncclep_static_shape": True},
            "moe_ncclep_static_shape: expected False, since dispatch returns the rows that arrive .*got True",
        ),
        "ncclep's buffers": (
            NCCLEP | {"moe_ncclep_zero_copy": True},
            "moe_ncclep_zero_copy: expected False, since dispatch returns the rows that arrive .*got True",
        ),
        "paged stash": (
            NCCLEP | FUSER | {"moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash": True},
            "moe_paged_stash: expected False, since dispatch returns the rows that arrive .*got True",
        ),
    }


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, Any]]]:
    """What every rank found; the world runs once, all of its cases."""
    return functools.cache(lambda: values(run_ranks(WORLD, _run_rank, timeout_s=240, framework="megatron")))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_matches_alltoall(results, name: str) -> None:
    limit = BF16_LIMIT if CASES[name].options.get("bf16") else LIMIT
    times = 2 if name == "shared-overlap-recompute" else 1
    for rank, found in enumerate(results()):
        assert found[name]["ours"] == {"dispatch": times, "combine": times, "stock": 0}
        difference = found[name]["difference"]
        worst = max(difference, key=difference.get)
        assert difference[worst] <= limit, f"rank {rank}: {worst} differs by {difference[worst]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SMS)
def test_the_option_for_sms_fixes_those_of_both_kernels(results, name: str) -> None:
    asked = SMS[name][1]
    for found in results():
        assert found["sms"][name] == ([None] * 4 if asked is None else [asked, 0, asked, 0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_the_alignment_is_what_the_experts_products_need(results, name: str) -> None:
    for found in results():
        assert found["alignments"][name] == ALIGNMENTS[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fuse", FUSED, ids=["plain", "op-fuser"][: len(FUSED)])
def test_experts_get_bf16_rows_padded_as_their_products_need(results, backend: str, fuse: bool) -> None:
    multiple = PADDED_ROWS if fuse else 1
    for found in results():
        seen = found["rows"][backend, fuse]
        assert seen["counts"] == [-(-count // multiple) * multiple for count in seen["routed"]]
        assert seen["rows"] == seen["probs"] == sum(seen["counts"])
        assert seen["padding is zero"] and sum(seen["routed"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_building_a_layer_refuses(results, name: str) -> None:
    for found in results():
        with pytest.raises(NotSupported, match=REFUSED[name][1]):
            raise found["refused"][name]


@pytest.mark.slow
@pytest.mark.skipif(RELEASE < (0, 18), reason="before 0.18 Megatron refuses it for flex")
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_experts_run_beside_both_halves_of_the_exchange(results, backend: str) -> None:
    first = ["wait_current_stream", "dispatch", "pre_forward_comm", "linear_fc1_forward_and_act", "experts"]
    then = ["wait_current_stream", "combine", "linear_fc2_forward", "post_forward_comm", "get_output"]
    for found in results():
        assert found["calls"][backend] == first + then


@pytest.mark.slow
@pytest.mark.skipif(RELEASE >= (0, 18), reason="from 0.18 on it is served")
def test_overlapped_shared_experts_are_refused_by_megatron_itself(results) -> None:
    for found in results():
        assert "moe_shared_expert_overlap only works with alltoall" in found["overlap refused"]


@pytest.mark.slow
@pytest.mark.skipif(RELEASE < (0, 18), reason="Megatron asks from 0.18 on")
@pytest.mark.parametrize("backend", BACKENDS)
def test_megatron_finds_no_layer_over_its_budget(results, backend: str) -> None:
    for found in results():
        asked, said, flags = found["budgets"][backend]
        assert asked == megatron_schedule.LAYERS and said == [None] * asked
        assert flags == (0, 0, 0)


def _run_rank(rank: int) -> dict[str, Any]:
    make_megatron_run_here()
    import ep_plugin.integrations.megatron

    ep_plugin.integrations.megatron.enable()
    found: dict[str, Any] = {}
    initialise(2, WORLD // 2)
    for name, case in CASES.items():
        if case.tp == 2:
            found[name] = run_case(rank, case)
    initialise(1, WORLD)
    for name, case in CASES.items():
        if case.tp == 1:
            found[name] = run_case(rank, case)
    found["sms"] = {name: _sms(options) for name, (options, _) in SMS.items()}
    found["alignments"] = {name: _alignment(options) for name, (options, _) in ALIGNMENTS.items()}
    found["rows"] = {
        (backend, fuser): _rows_of_experts(rank, backend, fuser) for backend in BACKENDS for fuser in FUSED
    }
    found["refused"] = {name: refusal(options) for name, (options, _) in REFUSED.items()}
    if RELEASE >= (0, 18):
        found["calls"] = {backend: _calls(rank, backend) for backend in BACKENDS}
        make_distributed_optimizer_run_here()  # for what Megatron makes on "cuda"
        found["budgets"] = {backend: _budgets(backend) for backend in BACKENDS}
    else:
        with pytest.raises(ValueError) as caught:
            make_config("flex", 1, WORLD, **DEEPSEEK, moe_shared_expert_overlap=True)
        found["overlap refused"] = str(caught.value)
    return found


def _layer(**options: Any) -> Any:
    return make_layer(make_config("flex", 1, WORLD, **options))


def _input(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((7, 2, 32), generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()


def _sms(options: dict[str, Any]) -> list[int | None]:
    """The SMs of a layer's communicator: for dispatch, sending and receiving, and for combine."""
    config = _layer(**options).token_dispatcher._communicator.config
    return [config.dispatch_send_sms, config.dispatch_recv_sms, config.combine_send_sms, config.combine_recv_sms]


def _alignment(options: dict[str, Any]) -> int:
    from ep_plugin.integrations.megatron.dispatcher import alignment_of

    config = make_config("flex", 1, WORLD)
    for option, value in options.items():  # FP8 passes the checks of TransformerConfig only where TransformerEngine is
        setattr(config, option, value)
    return alignment_of(config)


def _rows_of_experts(rank: int, backend: str, fuse: bool) -> dict[str, Any]:
    """The rows that experts are given, and how many of theirs the router chose."""
    layer = _layer(moe_flex_dispatcher_backend=backend, **BF16 | (FUSER if fuse else {}))
    given: list[Any] = []
    maps: list[Any] = []
    layer.experts.register_forward_pre_hook(lambda _, inputs: given.extend(inputs))
    layer.router.register_forward_hook(lambda _, inputs, outputs: maps.append(outputs[1]))
    layer(_input(rank, torch.bfloat16))
    rows, counts, probs = given
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, maps[0].reshape(-1, layer.config.num_moe_experts))
    routed = torch.cat(everyone).sum(0).view(WORLD, -1)[rank].tolist()
    padding = [
        part[count:]
        for tensor in (rows, probs)
        for part, count in zip(tensor.split(counts.tolist()), routed, strict=True)
    ]
    return {
        "rows": len(rows),
        "probs": len(probs),
        "counts": counts.tolist(),
        "routed": routed,
        "padding is zero": not any(part.any() for part in padding),
    }


def _calls(rank: int, backend: str) -> list[str]:
    """In order, the steps of overlapped shared experts, the exchanges and the experts in a forward."""
    layer = _layer(moe_flex_dispatcher_backend=backend, moe_shared_expert_overlap=True, **DEEPSEEK)
    shared, communicator = layer.shared_experts, layer.token_dispatcher._communicator
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        patch.setattr(owner, name, watched)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("wait_current_stream", "pre_forward_comm", "linear_fc1_forward_and_act", "linear_fc2_forward"):
            watch(shared, name)
        for name in ("post_forward_comm", "get_output", "forward"):
            watch(shared, name)
        for name in ("dispatch", "combine"):
            watch(communicator, name)
        layer.experts.register_forward_pre_hook(lambda *_: calls.append("experts"))
        layer(_input(rank))
    return calls


def _budgets(backend: str) -> tuple[int, list[Any], tuple[int, int, int]]:
    """How many layers Megatron asks after a step with paged stash, what they say, and what it makes of it."""
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    model = megatron_schedule._model("flex", backend, WORLD, torch.device("cpu"), overlap=False)
    runner = PagedStashRunner(model.config, False, [model], None, None)
    said = [layer.token_dispatcher.check_over_budget() for layer in runner.moe_layers]
    for layer in runner.moe_layers:
        layer.token_dispatcher.reset_over_budget()
    return len(runner.moe_layers), said, runner.check_moe_overflow()
