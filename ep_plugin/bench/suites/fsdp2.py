"""The suite `fsdp2`: a training step of a dense Qwen3 under FSDP2, through its own collectives and through ours.

One model is in memory. The collectives of its parameter groups are exchanged between steps, so that the arms are timed
in turn. First each arm trains from the same weights, with PyTorch's deterministic algorithms. Stock trains twice, to
show that it repeats itself. With our gathers alone every loss must equal stock's, with our reductions too it must be
within 1e-3. `no communication` leaves the collectives out: the other arms expose the time that they take beyond it.
`bytes_wire`: of all collectives of a step, per rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

from ep_plugin.bench.suite import BY_BACKEND, WARMUP, Suite, require_module, require_right, row
from ep_plugin.bench.timing import Run, Timing, clock_of, time_in_turn

STOCK, GATHER, BOTH, NONE = "stock", "ep_plugin, gathers only", "ep_plugin", "no communication"
STOCK_AGAIN = "stock, once more"
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
class Fsdp2Suite(Suite):
    """A training step of a dense Qwen3 under FSDP2: its own collectives, ours, and none."""

    command_name: ClassVar[str] = "fsdp2"
    defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {"ranks": 2, "layers": 4, "tokens": 128},
        "cuda": {"ranks": None, "layers": 36, "tokens": 4096},
    }
    least: ClassVar[dict[str, int]] = Suite.least | {"layers": 2, "tokens": 2, "compared": 1, "unit": 1}

    layers: Annotated[int, typer.Option(help="Decoder layers. Default on cuda: 36.")] = BY_BACKEND
    tokens: Annotated[int, typer.Option(help="Tokens per rank and step. Default on cuda: 4096.")] = BY_BACKEND
    compared: Annotated[int, typer.Option(help="Steps whose losses are compared before anything is timed.")] = 5
    compile: Annotated[bool, typer.Option("--compile", help="Decoder layers by torch.compile.")] = False
    unit: Annotated[int, typer.Option(help="Decoder layers that are gathered and reduced together.")] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_module("transformers", "fsdp2", "whose Qwen3 is trained")

    @property
    def case(self) -> str:
        compiled = ", compiled" if self.compile else ""
        unit = f", {self.unit} in a unit" if self.unit > 1 else ""
        return f"dense Qwen3, {self.layers} layers{compiled}{unit}, {self.tokens} tokens per rank"

    def run(self) -> dict[str, Any]:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products need it from their start
        return super().run()

    def measure(self, device: torch.device) -> dict[str, Any]:
        model, parameters = _build(self, device)
        arms = _arms(model)
        losses, peaks = _compare(self, model, arms, device)
        optimizer = _optimizer(model)
        clock = clock_of(device)
        timings: dict[str, Timing] = {}
        # Without communication the weights become whatever memory held: that arm comes last.
        for names in ((STOCK, GATHER, BOTH), (NONE,)):
            steps: dict[str, Run] = {name: _step(self, model, arms[name], optimizer, device) for name in names}
            timings |= time_in_turn(clock, steps, self.iterations, WARMUP)
        wire = _bytes_wire(self, model, arms[STOCK], optimizer, device)
        medians = {name: timing.median_us for name, timing in timings.items()}
        found = {
            "tokens_per_s": {name: round(1e6 * self.tokens * self.ranks / took) for name, took in medians.items()},
            "exposed_in_stock": round(1 - medians[NONE] / medians[STOCK], 3),
            "losses": losses,
            "max_rel_diff": {name: max(_differences(losses[name], losses[STOCK])) for name in (GATHER, BOTH)},
            "peak_bytes": peaks if device.type == "cuda" else None,
            "parameters": parameters,
            "unit_bytes": _unit_bytes(self, model),
        }
        rows = [row(self.case, name, timing, 0 if name == NONE else wire) for name, timing in timings.items()]
        return {"rows": rows, "notes": notes_of(found), **found}


def notes_of(found: dict[str, Any]) -> list[str]:
    """Sentences on speed, communication, losses and memory."""
    rates, exposed = found["tokens_per_s"], found["exposed_in_stock"]
    others = [f"{name} {rate:,} ({rate / rates[STOCK]:.3f} × stock)" for name, rate in rates.items() if name != STOCK]
    worst = ", ".join(f"{name} {value:.1e}" for name, value in found["max_rel_diff"].items())
    notes = [
        f"tokens/s: {'; '.join([f'{STOCK} {rates[STOCK]:,}', *others])}",
        f"communication: {exposed:.1%} of stock's step is exposed",
        f"losses of {len(found['losses'][STOCK])} steps, largest relative difference from stock's: {worst}",
    ]
    if found["peak_bytes"]:
        peaks = found["peak_bytes"]
        beyond = [f"{name} {(peaks[name] - peaks[STOCK]) / 1e6:,.0f} MB" for name in found["max_rel_diff"]]
        notes.append(
            f"peak memory beyond stock's {peaks[STOCK] / 1e9:,.1f} GB: {', '.join(beyond)}; parameters of a unit: "
            f"{found['unit_bytes'] / 1e6:,.0f} MB"
        )
    return notes


def _compare(
    suite: Fsdp2Suite, model: Any, arms: dict[str, Arm], device: torch.device
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Losses and peak memory of each arm, all from the same weights. Raises WrongResult. Collective."""
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
        # The allocator does not count memory that peers map: that is the device's free memory that stock left.
        peaks[name] = _allocator_peak(device) + max(0, free_after_stock - free)
    require_right(wrong_losses(losses))
    return losses, peaks


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
    for layer in layers if suite.compile else ():
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
    """The collectives of each parameter group in each arm."""
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


class _Counted:
    """Serves a parameter group as `stock` does, and adds up the bytes that peers send, or take from, this rank."""

    def __init__(self, stock: Any, counted: list[int]) -> None:
        self.allocate, self._stock, self._counted = stock.allocate, stock, counted

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **more: Any) -> Any:
        self._counted.append(abs(output_tensor.nbytes - input_tensor.nbytes))
        return self._stock(output_tensor=output_tensor, input_tensor=input_tensor, **more)


def _bytes_wire(
    suite: Fsdp2Suite, model: torch.nn.Module, stock: Arm, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    counted: list[int] = []
    _step(suite, model, [(group, name, _Counted(comm, counted)) for group, name, comm in stock], optimizer, device)()
    return sum(counted)


class _Nothing:
    """A collective that does nothing: its output holds whatever its memory held."""

    def __init__(self, stock: Any) -> None:
        self.allocate = stock.allocate

    def __call__(self, output_tensor: torch.Tensor, **_: Any) -> None:
        return None


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _train(suite: Fsdp2Suite, model: torch.nn.Module, arm: Arm, device: torch.device) -> list[float]:
    """Losses of the compared steps, means over all ranks.

    The learning rate rises from step to step, as at the start of a training. With the whole of it at once, differences
    in a sum's last bit grow to per mille of the loss.
    """
    optimizer, losses = _optimizer(model), []
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / suite.compared, total_iters=suite.compared)
    for step in range(suite.compared):
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
    """The peak of PyTorch's allocator in bytes; 0 for CPUs, which have no such count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _free_memory(device: torch.device) -> int:
    """Bytes of the device that are free, or that PyTorch's allocator holds; 0 for CPUs."""
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


def wrong_losses(losses: dict[str, list[float]]) -> list[str]:
    found = []
    if losses[STOCK_AGAIN] != losses[STOCK]:
        found.append(
            "losses of stock: expected the same from run to run, or no other can be compared, got others "
            + _worst(losses[STOCK_AGAIN], losses[STOCK])
        )
    if losses[GATHER] != losses[STOCK]:
        found.append(
            "losses with our gathers alone: expected stock's, bit for bit, got others "
            + _worst(losses[GATHER], losses[STOCK])
        )
    if not max(_differences(losses[BOTH], losses[STOCK])) <= LIMIT:
        found.append(
            f"losses with our reductions: expected stock's within {LIMIT} of theirs, got others "
            + _worst(losses[BOTH], losses[STOCK])
        )
    return found


def _differences(ours: list[float], stock: list[float]) -> list[float]:
    return [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours, stock, strict=True)]


def _worst(ours: list[float], stock: list[float]) -> str:
    """The step with the largest difference, and the difference."""
    differences = _differences(ours, stock)
    step = differences.index(max(differences))
    return f"by up to {differences[step]:.1e}, in step {step}: {ours[step]} in place of {stock[step]}"
