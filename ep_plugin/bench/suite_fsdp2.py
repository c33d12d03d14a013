"""The suite `fsdp2`: a training step of a dense Qwen3 under FSDP2, through its own collectives and through ours.

One model is in memory, and the collectives of its parameter groups are exchanged between steps, so that the arms are
timed in turn. First each arm trains from the same weights, with PyTorch's deterministic algorithms, and stock twice, to
show that it repeats itself: with our gathers alone every loss must equal stock's, with our reductions too it must be
within 1e-3. `no communication` leaves the collectives out: what the others take more is what they expose. The same
collectives are timed by themselves too, one after the other, undisturbed and in warm memory, so at their least:
`collectives_share` is their part of stock's step, and `share_when_exposed` that of a step in which compute hid none of
them. `bytes_wire`: of all of them, per rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.results import everyones_wrong, result, row
from ep_plugin.bench.step_collectives import Call, Noted, again
from ep_plugin.bench.timing import Run, Timing, clock_of, time_in_turn

SUITE = "fsdp2"
STOCK, GATHER, BOTH, NONE = "stock", "ep_plugin, gathers only", "ep_plugin", "no communication"
STOCK_AGAIN = "stock, once more"
WARMUP = 3
LIMIT = 1e-3  # of the loss, relative, where reductions are ours
WIDTHS: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64},
    # Qwen3-4B's.
    "cuda": {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}

# The collectives of every parameter group: (group, attribute, collective).
Arm = list[tuple[Any, str, Any]]


@dataclass(frozen=True, kw_only=True)
class Fsdp2Suite:
    """What one run measures. tokens: per rank and step. judged: steps whose losses are compared. unit: decoder layers
    whose parameters are gathered, and gradients reduced, together."""

    backend: str
    ranks: int
    layers: int
    tokens: int
    judged: int
    iterations: int
    compiled: bool = False
    unit: int = 1

    def __post_init__(self) -> None:
        least_of = {"ranks": 2, "layers": 2, "tokens": 2, "judged": 1, "iterations": 1, "unit": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise ValueError(f"fsdp2: expected transformers, whose Qwen3 is trained: {error}") from error

    @property
    def case(self) -> str:
        compiled = ", compiled" if self.compiled else ""
        unit = f", {self.unit} in a unit" if self.unit > 1 else ""
        return f"dense Qwen3, {self.layers} layers{compiled}{unit}, {self.tokens} tokens per rank"

    def command(self) -> str:
        words = [f"--backend {self.backend}", f"--ranks {self.ranks}", f"--layers {self.layers}"]
        words += [f"--tokens {self.tokens}", f"--judged {self.judged}", f"--iterations {self.iterations}"]
        words += ["--compile"] if self.compiled else []
        words += [f"--unit {self.unit}"] if self.unit > 1 else []
        return " ".join(["ep-bench fsdp2", *words])


def run(suite: Fsdp2Suite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    # What deterministic products ask for, before they start.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = run_on_ranks(suite.ranks, suite.backend, measure, suite)
    return result(SUITE, suite.backend, suite.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: Fsdp2Suite) -> dict[str, Any]:
    """One rank's part: the rows, or what was wrong, the same on every rank. Collective."""
    model, parameters = _build(suite, device)
    arms = _arms(model)
    start = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    losses, peaks = {}, {}
    free_after_stock = None
    for name in (STOCK, STOCK_AGAIN, GATHER, BOTH):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.to_local().copy_(value)
        _reset_peak(device)
        with _repeatable():
            losses[name] = _train(suite, model, arms[STOCK if name == STOCK_AGAIN else name], device)
        free = _free_memory(device)
        free_after_stock = free if free_after_stock is None else free_after_stock
        # What peers map is no part of the allocator's figure: it is what else the device has less than after stock.
        peaks[name] = _allocator_peak(device) + max(0, free_after_stock - free)
    wrong = everyones_wrong(_judge(losses))
    if wrong:
        return {"rows": [], "wrong": wrong}
    del start
    optimizer = _optimizer(model)
    calls = _calls_of_a_step(suite, model, arms[STOCK], optimizer, device)
    clock = clock_of(device)
    timings: dict[str, Timing] = {}
    # Without communication weights become whatever memory held, so that comes last and by itself.
    for names in ((STOCK, GATHER, BOTH), (NONE,)):
        steps: dict[str, Run] = {name: _step(suite, model, arms[name], optimizer, device) for name in names}
        timings |= time_in_turn(clock, steps, suite.iterations, WARMUP)
    alone = {name: again(calls, [comm for *_, comm in arms[name]]) for name in (STOCK, BOTH)}
    collectives = {name: its.median_us for name, its in time_in_turn(clock, alone, suite.iterations, WARMUP).items()}
    wire = sum(call.bytes_wire for call in calls)
    rows = [row(suite.case, name, timing, 0 if name == NONE else wire, None) for name, timing in timings.items()]
    medians = {name: timing.median_us for name, timing in timings.items()}
    return {
        "rows": rows,
        "wrong": [],
        "tokens_per_s": {name: round(1e6 * suite.tokens * suite.ranks / took) for name, took in medians.items()},
        "exposed_in_stock": round(1 - medians[NONE] / medians[STOCK], 3),
        "collectives_us": collectives,
        "collectives_share": round(collectives[STOCK] / medians[STOCK], 3),
        "share_when_exposed": round(collectives[STOCK] / (collectives[STOCK] + medians[NONE]), 3),
        "losses": losses,
        "max_rel_diff": {name: _difference(losses[name], losses[STOCK]) for name in (GATHER, BOTH)},
        "peak_bytes": peaks if device.type == "cuda" else None,
        "parameters": parameters,
        "unit_bytes": _unit_bytes(suite, model),
    }


def _build(suite: Fsdp2Suite, device: torch.device) -> tuple[Any, int]:
    """The sharded model, and the number of its parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**WIDTHS[suite.backend], num_hidden_layers=suite.layers, use_cache=False)
    with device:
        model: Any = Qwen3ForCausalLM(config)
    model.to(DTYPES[suite.backend]).train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh(device.type, (suite.ranks,))
    layers = list(model.model.layers)
    for layer in layers if suite.compiled else ():
        layer.compile()
    for first in range(0, len(layers), suite.unit):
        fully_shard(layers[first : first + suite.unit], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, parameters


def _unit_bytes(suite: Fsdp2Suite, model: Any) -> int:
    """Of the parameters that are gathered together, in the decoder layers."""
    layers = model.model.layers[: suite.unit]
    return sum(parameter.numel() * parameter.dtype.itemsize for layer in layers for parameter in layer.parameters())


def _arms(model: torch.nn.Module) -> dict[str, Arm]:
    """Who serves each parameter group in each arm."""
    from ep_plugin.integrations.fsdp2 import hooks

    gather = next(iter(hooks.PLACES))
    groups = hooks.groups_of(model)
    places = [(group, place, getattr(group, place)) for group in groups for place in hooks.PLACES]
    hooks.enable(model)
    ours = [(group, place, getattr(group, place)) for group, place, _ in places]
    return {
        STOCK: places,
        GATHER: [mine if mine[1] == gather else stock for mine, stock in zip(ours, places, strict=True)],
        BOTH: ours,
        NONE: [(group, place, _Nothing(comm)) for group, place, comm in places],
    }


class _Nothing:
    """Leaves out what it stands for: outputs hold whatever their memory held."""

    def __init__(self, stock: Any) -> None:
        self.allocate = stock.allocate

    def __call__(self, output_tensor: torch.Tensor, **_: Any) -> None:
        return None


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _train(suite: Fsdp2Suite, model: torch.nn.Module, arm: Arm, device: torch.device) -> list[float]:
    """Losses of the judged steps, means of all ranks. The learning rate rises from step to step, as at the start of a
    training: at all of it at once, differences in a sum's last bit grow to per mille of the loss."""
    optimizer, losses = _optimizer(model), []
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / suite.judged, total_iters=suite.judged)
    for step in range(suite.judged):
        loss = _step(suite, model, arm, optimizer, device, seed=step)()
        warm_up.step()
        dist.all_reduce(loss)
        losses.append(float(loss) / suite.ranks)
    return losses


@contextmanager
def _repeatable() -> Iterator[None]:
    """Operators that have a deterministic variant use it; attention's fused ones would only warn, and not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _allocator_peak(device: torch.device) -> int:
    """The most bytes that PyTorch's allocator had given out; 0 for CPUs, where nothing counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _free_memory(device: torch.device) -> int:
    """Device memory that only PyTorch's allocator could take, or holds; 0 for CPUs."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


def _step(
    suite: Fsdp2Suite,
    model: torch.nn.Module,
    arm: Arm,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    seed: int = 0,
) -> Callable[[], torch.Tensor]:
    """One step through the collectives of `arm`; it returns this rank's loss."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    tokens = torch.randint(WIDTHS[suite.backend]["vocab_size"], (1, suite.tokens), generator=generator).to(device)

    def step() -> torch.Tensor:
        for group, place, comm in arm:
            setattr(group, place, comm)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _calls_of_a_step(
    suite: Fsdp2Suite, model: torch.nn.Module, stock: Arm, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[Call]:
    calls: list[Call] = []
    noted = [(group, attribute, Noted(comm, place, calls)) for place, (group, attribute, comm) in enumerate(stock)]
    _step(suite, model, noted, optimizer, device)()
    return calls


def _judge(losses: dict[str, list[float]]) -> list[str]:
    found = []
    if losses[STOCK_AGAIN] != losses[STOCK]:
        found.append(
            "losses of stock: expected the same from run to run, or no other can be judged, got others "
            + _worst(losses[STOCK_AGAIN], losses[STOCK])
        )
    if losses[GATHER] != losses[STOCK]:
        found.append(
            "losses with our gathers alone: expected stock's, bit for bit, got others "
            + _worst(losses[GATHER], losses[STOCK])
        )
    if not _difference(losses[BOTH], losses[STOCK]) <= LIMIT:
        found.append(
            f"losses with our reductions: expected stock's within {LIMIT} of theirs, got others "
            + _worst(losses[BOTH], losses[STOCK])
        )
    return found


def _differences(ours: list[float], stock: list[float]) -> list[float]:
    return [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours, stock, strict=True)]


def _difference(ours: list[float], stock: list[float]) -> float:
    return max(_differences(ours, stock))


def _worst(ours: list[float], stock: list[float]) -> str:
    """Where they differ most, and by how much."""
    differences = _differences(ours, stock)
    step = differences.index(max(differences))
    return f"by up to {differences[step]:.1e}, in step {step}: {ours[step]} in place of {stock[step]}"
