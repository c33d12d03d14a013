"""FSDP2 through ep_plugin against FSDP2's own collectives: real processes on CPUs."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ep_plugin.errors import PeerTimeout
from tests.integrations import fsdp2_cases as cases
from tests.ranks import run_ranks, values

WORLD = 4


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, dict]]]:
    """Results by case of every rank; the ranks run once however many tests ask."""
    return functools.cache(lambda: values(run_ranks(WORLD, _run_cases, timeout_s=280)))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_gathering_through_us_changes_no_bit(results, name: str) -> None:
    for rank in results():
        assert rank[name]["all_gather only"] == {"losses": 0.0, "parameters": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_reducing_through_us_changes_the_last_bits_only(results, name: str) -> None:
    for rank in results():
        assert rank[name]["both"]["losses"] <= cases.CASES[name].limit


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_every_collective_went_through_us(results, name: str) -> None:
    for rank in results():
        ours, theirs = rank[name]["launches"], rank[name]["stock"]
        assert ours["all_gathers"] == theirs["all_gathers"] > 0
        assert ours["reduce_scatters"] == theirs["reduce_scatters"] > 0
        assert rank[name]["left to stock"] == {"all_gathers": 0, "reduce_scatters": 0}


def _run_cases(rank: int) -> dict[str, dict[str, Any]]:
    return {name: _run_case(case) for name, case in cases.CASES.items()}


def _run_case(case: cases.Case) -> dict[str, Any]:
    from ep_plugin.integrations import fsdp2

    with cases.counting_stock_calls() as stock:
        theirs = cases.train(case, cases.build(case, gloo_reduces=True))
    model = cases.build(case, gloo_reduces=True)
    fsdp2.enable(model, reduce_scatter=False)
    gathered = cases.train(case, model)
    fsdp2.disable(model)
    model = cases.build(case)
    fsdp2.enable(model)
    with cases.counting_stock_calls() as left:
        both = cases.train(case, model)
    ran = fsdp2.launches(model)
    fsdp2.disable(model)
    return {
        "all_gather only": cases.difference(gathered, theirs),
        "both": cases.difference(both, theirs),
        "launches": cases.as_dict(ran),
        "stock": cases.as_dict(stock),
        "left to stock": cases.as_dict(left),
    }


@pytest.mark.slow
def test_switching_it_on_and_off_between_steps() -> None:
    for ours, stock in values(run_ranks(2, _switch_between_steps)):
        assert ours["losses"] == stock["losses"]
        assert ours["counts"] == [(0, 0), (2 * cases.LAYERS + 1, cases.LAYERS + 1), (0, 0), (2 * cases.LAYERS + 1, 0)]


def _switch_between_steps(rank: int) -> tuple[dict, dict]:
    """Steps through stock, ours, stock; each brings back the very objects that were there, and `status()` follows."""
    from ep_plugin.integrations import fsdp2, status

    def state() -> tuple[str, str]:
        return next((row.state, row.detail) for row in status() if row.name == "fsdp2")

    def served() -> int:
        return next(row.served for row in status() if row.name == "fsdp2")

    case = cases.Case()
    results = []
    for switching in (True, False):
        model = cases.build(case)
        before = cases.collectives_of(model)
        losses, counts = [], []
        for turn in range(4):
            if switching and turn in (1, 3):
                assert fsdp2.enable(model, reduce_scatter=turn == 1) == 5
                assert fsdp2.enable(model, reduce_scatter=turn == 1) == 5  # again changes nothing
                assert state() == ("ready" if turn == 1 else "on", f"fsdp2.enable({type(model).__name__})")
            losses += cases.train(case, model, steps=1).losses
            if switching:
                ran = fsdp2.launches(model)
                counts.append((ran.all_gathers, ran.reduce_scatters))
                assert served() == sum(map(sum, counts))
                fsdp2.disable(model)
                assert all(now is then for now, then in zip(cases.collectives_of(model), before, strict=True))
                assert fsdp2.launches(model).parameter_groups == 0
                assert state() == ("off", "disabled")
        results.append({"losses": losses, "counts": counts})
    return results[0], results[1]


def test_one_rank_gathers_nothing() -> None:
    (losses,) = values(run_ranks(1, _train_alone))
    assert losses["ours"] == losses["stock"]
    assert losses["launches"] == (0, 0)


@pytest.mark.parametrize("case", [cases.Case(replicas=2), cases.Case(replicas=2, micro_batches=2, divide=3.0)])
def test_a_rank_alone_in_its_shard_group(case: cases.Case) -> None:
    """Replicas of a whole model: gradients are reduced over them alone."""
    assert values(run_ranks(2, _train_replicas, case)) == [{"losses": 0.0, "parameters": 0.0}] * 2


def _train_replicas(rank: int, case: cases.Case) -> dict[str, float]:
    from ep_plugin.integrations import fsdp2

    stock = cases.train(case, cases.build(case, gloo_reduces=True))
    model = cases.build(case, gloo_reduces=True)
    fsdp2.enable(model)
    return cases.difference(cases.train(case, model), stock)


def _train_alone(rank: int) -> dict[str, Any]:
    from ep_plugin.integrations import fsdp2

    case, model = cases.Case(), cases.build(cases.Case())
    fsdp2.enable(model)
    ours = cases.train(case, model).losses
    ran = fsdp2.launches(model)
    stock = cases.train(case, cases.build(case)).losses
    return {"ours": ours, "stock": stock, "launches": (ran.all_gathers, ran.reduce_scatters)}


def test_every_group_of_a_module_with_several() -> None:
    """From PyTorch 2.12 on a module's parameters may be sharded over different meshes."""
    for result in values(run_ranks(WORLD, _train_two_meshes)):
        assert result["groups"] == 2
        assert result["all_gather only"] == {"losses": 0.0, "parameters": 0.0}
        assert result["left"] == {"all_gathers": 0, "reduce_scatters": 0}


def _train_two_meshes(rank: int) -> dict[str, Any]:
    from ep_plugin.integrations import fsdp2

    trained = {}
    for arm in ("stock", "all_gather only", "both"):
        model = cases.build_on_two_meshes()
        if arm != "stock":
            groups = fsdp2.enable(model, reduce_scatter=arm == "both")
        with cases.counting_stock_calls() as left:
            trained[arm] = cases.train(cases.Case(), model)
    return {
        "groups": groups,
        "all_gather only": cases.difference(trained["all_gather only"], trained["stock"]),
        "left": cases.as_dict(left),
    }


def test_switched_on_for_whatever_is_sharded_later() -> None:
    for result in values(run_ranks(2, _switched_on)):
        assert result["before"] == 0
        assert result["after"] == {
            "parameter_groups": 5,
            "all_gathers": cases.STEPS * 9,
            "reduce_scatters": cases.STEPS * 5,
        }
        assert result["left"] == {"all_gathers": 0, "reduce_scatters": 0}
        assert result["restored"] and result["disabled"] == 0


def _switched_on(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from ep_plugin.integrations import fsdp2

    case, stock = cases.Case(), FSDPParamGroup.__init__
    fsdp2.disable()
    earlier = cases.build(case)
    assert fsdp2.enable() == fsdp2.enable() == 0  # a reload of the framework does it again
    model = cases.build(case)
    with cases.counting_stock_calls() as left:
        cases.train(case, model)
    for _ in range(2):
        fsdp2.disable()
    return {
        "restored": FSDPParamGroup.__init__ is stock,
        "disabled": fsdp2.launches(cases.build(case)).parameter_groups,
        "before": fsdp2.launches(earlier).parameter_groups,
        "after": cases.as_dict(fsdp2.launches(model)),
        "left": cases.as_dict(left),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "kept after forward", "checkpointed", "mixed precision", "large embedding"])
def test_memory_is_at_most_four_buffers_above_stock(name: str) -> None:
    """Two of what a layer gathers and two of what it reduces, also beside a larger module. Stock holds up to three of
    these itself at its peak; how many, and so what is left, changes from run to run.
    """
    for rank in values(run_ranks(2, _measure_memory, name)):
        assert rank["gathered"] > 0 and rank["reduced"] > 0
        buffers = 2 * (rank["layer"] + rank["layer"] // (2 if name == "mixed precision" else 1)) + 4 * 4096
        assert rank["ours"] + rank["gathered"] + rank["reduced"] <= rank["stock"] + buffers, rank


def _held(blocks: Any) -> int:
    """Bytes of the blocks that are open."""
    return sum(block.buffer.nbytes for block in blocks._blocks.values())


def _measure_memory(rank: int, name: str) -> dict[str, int]:
    from ep_plugin.integrations import fsdp2, pairs

    case = cases.CASES.get(name, cases.Case(vocabulary=9000))
    case = dataclasses.replace(case, sequences=60, width=160)
    peaks = {}
    for arm in ("stock", "ours"):
        model = cases.build(case)
        if arm == "ours":
            fsdp2.enable(model)
        cases.train(case, model, steps=2)
        peaks[arm] = cases.peak_bytes(functools.partial(cases.train, case, model, steps=2))
    (pair,) = pairs._pairs.values()
    layer = sum(whole.numel() * whole.element_size() for whole in model.blocks[0].parameters())
    gathered, reduced = (_held(each._engine.blocks) for each in (pair.all_gather, pair.reduce_scatter))
    return {**peaks, "layer": layer, "gathered": gathered, "reduced": reduced}


@pytest.mark.slow
def test_what_is_remembered_of_a_model_goes_with_it() -> None:
    """Twenty models after one another, dropped without `disable`, on ranks that collect garbage when they like."""
    first, second = values(run_ranks(2, _many_models, 20, timeout_s=200))
    assert first["mapped"] == second["mapped"] == first["mapped by one"] > 0
    assert first["remembered"] == 1, "of the model that is still there"
    assert second["remembered"] == 20
    assert first["sizes after disable"] == 0
    # What ranks do when one of many models is disabled cannot depend on which of the others are gone.
    assert first["open after disable"] and second["open after disable"]


def _many_models(rank: int, models: int) -> dict[str, Any]:
    """Rank 0 has each model freed before the next one is made, rank 1 keeps them all."""
    from ep_plugin.integrations import fsdp2, pairs

    # What one module alone gathers is ordinary memory, however many models had such a one.
    case, kept, mapped = cases.Case(vocabulary=2000), [], []
    gc.disable()
    for _ in range(models):
        if rank == 0:
            model = None
            gc.collect()
        model = cases.build(case)
        kept.append(weakref.ref(model) if rank == 0 else model)
        fsdp2.enable(model)
        cases.train(case, model, steps=2)
        (pair,) = pairs._pairs.values()
        blocks = [collective._engine.blocks for collective in (pair.all_gather, pair.reduce_scatter)]
        mapped.append(sum(map(_held, blocks)))
    if rank == 0:
        assert [each() for each in kept[:-1]] == [None] * (models - 1)
    remembered = len(pair.sizes)
    fsdp2.disable(model)
    return {
        "mapped by one": mapped[0],
        "mapped": max(mapped),
        "remembered": remembered,
        "sizes after disable": sum(len(sizes) for sizes in pair.sizes.values()),
        "open after disable": list(pairs._pairs.values()) == [pair],
    }


@pytest.mark.deadline
def test_a_rank_that_dies_makes_the_others_raise() -> None:
    victim, deadline_s = 1, 8.0
    outcomes = run_ranks(3, _die_in_backward, victim, deadline_s, timeout_s=120)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for blamed, took in values([outcomes[0], outcomes[2]]):
        assert blamed == victim and took < deadline_s + 5


def _die_in_backward(rank: int, victim: int, deadline_s: float) -> tuple[int, float]:
    """Whom a survivor's step blames, and after how long."""
    from ep_plugin.integrations import fsdp2

    case = cases.Case()
    group = dist.new_group(timeout=datetime.timedelta(seconds=deadline_s))
    model = cases.build(case, mesh=DeviceMesh.from_group(group, "cpu"))
    fsdp2.enable(model)
    cases.train(case, model, steps=1)
    if rank == victim:
        model.blocks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        cases.train(case, model, steps=1)
    return caught.value.rank, time.monotonic() - began


@pytest.mark.slow
def test_over_two_nodes() -> None:
    """Emulated: in network namespaces where this machine allows them."""
    script = str(Path(__file__).parents[1] / "node_ranks.py")
    command = [sys.executable, "-m", "ep_plugin.testing.nodes", "--device", "cpu", "--", sys.executable, script]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*command, "train_fsdp2"], env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["differences"]["False"] == {"losses": 0.0, "parameters": 0.0}
        assert rank["differences"]["True"]["losses"] <= 1e-6
        assert all(sent > 0 for sent in rank["rails"])


@pytest.mark.slow
def test_after_accelerate_has_wrapped_the_model() -> None:
    pytest.importorskip("accelerate")
    for result in values(run_ranks(2, _prepared_by_accelerate)):
        assert result["ours"] == result["stock"]
        assert result["launches"]["all_gathers"] > 0 and result["launches"]["parameter_groups"] == cases.LAYERS + 1


def _prepared_by_accelerate(rank: int) -> dict[str, Any]:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    from ep_plugin.integrations import fsdp2

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    losses = {}
    for arm in ("stock", "ours"):
        # It offers FSDP on accelerators only, and prepare() takes it back; what it does to a model is the same.
        accelerator.state.distributed_type = DistributedType.FSDP
        torch.manual_seed(0)
        model = cases.Model(cases.Case())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        if arm == "ours":
            fsdp2.enable(model, reduce_scatter=False)
        losses[arm] = []
        for step in range(3):
            ids = torch.randint(61, (5, 7), generator=torch.Generator().manual_seed(10 * step + rank))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[arm].append(float(loss.detach()))
    return {**losses, "launches": cases.as_dict(fsdp2.launches(model))}
