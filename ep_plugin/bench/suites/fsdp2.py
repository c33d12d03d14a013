"""The suite `fsdp2` times a training step of a dense Qwen3 under FSDP2, through its own collectives and ours.

One model is in memory. The suite replaces the collectives of its parameter groups between steps, so the arms are timed
in turn. First each arm trains from the same weights, with PyTorch's deterministic algorithms. Stock trains twice, to
show that it repeats itself. With our gathers alone every loss must equal stock's. With our reductions too it must be
within 1e-3. `no communication` leaves the collectives out, so the time of another arm beyond it is exposed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel

from ep_plugin import counts
from ep_plugin.bench.suite import BY_BACKEND, Suite, require_module, require_right, row
from ep_plugin.bench.timing import Timing, clock_of, time_in_turn

STOCK, GATHER, BOTH, NONE = "stock", "ep_plugin, gathers only", "ep_plugin", "no communication"
STOCK_AGAIN = "stock, once more"
LIMIT = 1e-3  # the largest relative difference of losses with our reductions
WIDTHS: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64},
    # The sizes of Qwen3-4B.
    "cuda": {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}

# The collectives of every parameter group: (group, attribute, collective).
Arm = list[tuple[Any, str, Any]]


@dataclass(frozen=True, kw_only=True)
class Fsdp2Suite(Suite):
    """Times a training step of a dense Qwen3 under FSDP2 with its own collectives, with ours, and with none."""

    command_name = "fsdp2"
    defaults: ClassVar = {
        "cpu": {"ranks": 2, "layers": 4, "tokens": 128},
        "cuda": {"ranks": None, "layers": 36, "tokens": 4096},
    }
    least: ClassVar = Suite.least | {"layers": 2, "tokens": 2, "compared": 1, "unit": 1}

    layers: Annotated[int, typer.Option(help="Decoder layers. Default on cuda: 36.")] = BY_BACKEND
    tokens: Annotated[int, typer.Option(help="Tokens per rank and step. Default on cuda: 4096.")] = BY_BACKEND
    compared: Annotated[int, typer.Option(help="Steps whose losses are compared before anything is timed.")] = 5
    compile: Annotated[bool, typer.Option("--compile", help="Decoder layers by torch.compile.")] = False
    unit: Annotated[int, typer.Option(help="Decoder layers that are gathered and reduced together.")] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_module("transformers", "fsdp2", "whose Qwen3 is trained")

    def run(self) -> dict[str, Any]:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products need it from their start
        return super().run()

    def measure(self, device: torch.device) -> dict[str, Any]:
        training = _Training(self, device)
        losses, peaks = training.compare()
        optimizer, timings = training.optimizer(), dict[str, Timing]()
        # Without communication the weights become whatever the memory held, so that arm comes last.
        for names in ((STOCK, GATHER, BOTH), (NONE,)):
            steps = {name: training.step(training.arms[name], optimizer) for name in names}
            timings |= time_in_turn(clock_of(device), steps, self.iterations)
        compiled = ", compiled" if self.compile else ""
        unit = f", {self.unit} in a unit" if self.unit > 1 else ""
        case = f"dense Qwen3, {self.layers} layers{compiled}{unit}, {self.tokens} tokens per rank"
        holders = {name: counts.holders("fsdp2") for name in (GATHER, BOTH)}
        rows = [row(case, name, timing, 0, holders=holders.get(name, ())) for name, timing in timings.items()]
        medians = {name: timing.median_us for name, timing in timings.items()}
        notes = notes_of(medians, self.tokens * self.ranks, losses, peaks)
        speeds = {name: round(1e6 * self.tokens * self.ranks / took) for name, took in medians.items()}
        return {"rows": rows, "notes": notes, "losses": losses, "tokens_per_s": speeds}


def notes_of(
    medians: dict[str, float], tokens: int, losses: dict[str, list[float]], peaks: dict[str, int]
) -> list[str]:
    """Returns sentences on speed, communication, losses and memory.

    Args:
        tokens: the tokens of all ranks in a step.
        peaks: the peak memory of each arm; 0 on CPUs.
    """
    rates = {name: 1e6 * tokens / took for name, took in medians.items()}
    said = [f"{name} {rate:,.0f} ({rate / rates[STOCK]:.3f} × stock)" for name, rate in rates.items()]
    worst = [f"{name} {max(_differences(losses[name], losses[STOCK])):.1e}" for name in (GATHER, BOTH)]
    notes = [
        f"tokens/s: {'; '.join(said)}",
        f"communication: {1 - medians[NONE] / medians[STOCK]:.1%} of stock's step is exposed",
        f"losses of {len(losses[STOCK])} steps, largest relative difference from stock's: {', '.join(worst)}",
    ]
    if peaks[STOCK]:
        beyond = [f"{name} {(peaks[name] - peaks[STOCK]) / 1e6:,.0f} MB" for name in (GATHER, BOTH)]
        notes.append(f"peak memory beyond stock's {peaks[STOCK] / 1e9:,.1f} GB: {', '.join(beyond)}")
    return notes


class _Training:
    """The sharded model, its arms, and steps through each arm. Construction is collective."""

    def __init__(self, suite: Fsdp2Suite, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from ep_plugin.integrations.fsdp2 import hooks

        self._suite, self._device = suite, device
        torch.manual_seed(0)
        config = Qwen3Config(**WIDTHS[suite.backend], num_hidden_layers=suite.layers, use_cache=False)
        with device:
            model: Any = Qwen3ForCausalLM(config)
        self._model = model.to(DTYPES[suite.backend]).train()
        layers = list(self._model.model.layers)
        mesh = init_device_mesh(device.type, (suite.ranks,))
        for layer in layers if suite.compile else ():
            layer.compile()
        for first in range(0, len(layers), suite.unit):
            fully_shard(layers[first : first + suite.unit], mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        gather = next(iter(hooks.ADAPTERS))
        groups = [(group, name) for group in hooks.groups_of(self._model) for name in hooks.ADAPTERS]
        stock = [(group, name, getattr(group, name)) for group, name in groups]
        hooks.enable(self._model)
        ours = [(group, name, getattr(group, name)) for group, name in groups]
        self.arms: dict[str, Arm] = {
            STOCK: stock,
            GATHER: [mine if mine[1] == gather else theirs for mine, theirs in zip(ours, stock, strict=True)],
            BOTH: ours,
            NONE: [(group, name, _Nothing(comm)) for group, name, comm in stock],
        }

    def compare(self) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Trains each arm from the same weights. Returns losses and peak memory. Raises WrongResult. Collective."""
        start = [parameter.to_local().detach().clone() for parameter in self._model.parameters()]
        losses, peaks = {}, {}
        torch.use_deterministic_algorithms(True, warn_only=True)
        for name in (STOCK, STOCK_AGAIN, GATHER, BOTH):
            with torch.no_grad():
                for parameter, value in zip(self._model.parameters(), start, strict=True):
                    parameter.to_local().copy_(value)
            _peak_memory(self._device)
            with sdpa_kernel(SDPBackend.MATH):  # fused kernels would warn that they are not deterministic
                losses[name] = self._train(self.arms[STOCK if name == STOCK_AGAIN else name])
            peaks[name] = _peak_memory(self._device)
        torch.use_deterministic_algorithms(False)
        require_right(wrong_losses(losses))
        return losses, peaks

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def step(self, arm: Arm, optimizer: torch.optim.Optimizer, seed: int = 0) -> Callable[[], torch.Tensor]:
        """Returns a step through the collectives of `arm`, which returns this rank's loss."""
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        shape = (1, self._suite.tokens)
        tokens = torch.randint(WIDTHS[self._suite.backend]["vocab_size"], shape, generator=generator).to(self._device)

        def step() -> torch.Tensor:
            for group, attribute, comm in arm:
                setattr(group, attribute, comm)
            loss: torch.Tensor = self._model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def _train(self, arm: Arm) -> list[float]:
        """Returns the losses of the compared steps, as means over all ranks."""
        optimizer, losses, steps = self.optimizer(), [], self._suite.compared
        # With the whole learning rate at once, differences in a sum's last bit grow to per mille of the loss.
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / steps, total_iters=steps)
        for index in range(steps):
            loss = self.step(arm, optimizer, seed=index)()
            warm_up.step()
            dist.all_reduce(loss)
            losses.append(float(loss) / self._suite.ranks)
        return losses


class _Nothing:
    """A collective that does nothing. Its output has whatever its memory had before."""

    def __init__(self, stock: Any) -> None:
        self.allocate = stock.allocate

    def __call__(self, **_: Any) -> None: ...


def _peak_memory(device: torch.device) -> int:
    """Returns the peak of PyTorch's allocator since the last call, plus the memory in use outside it; 0 for CPUs."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device) + total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def wrong_losses(losses: dict[str, list[float]]) -> list[str]:
    """Returns a sentence for each arm whose losses are too far from stock's."""
    stock = losses[STOCK]
    expected = {
        STOCK_AGAIN: (0.0, "losses of stock: expected the same from run to run, or no other can be compared"),
        GATHER: (0.0, "losses with our gathers alone: expected stock's, bit for bit"),
        BOTH: (LIMIT, f"losses with our reductions: expected stock's within {LIMIT} of theirs"),
    }
    found = []
    for name, (limit, sentence) in expected.items():
        wrong = [step for step, by in enumerate(_differences(losses[name], stock)) if not by <= limit]
        for step in wrong[:1]:
            found.append(f"{sentence}, got {losses[name][step]} in place of {stock[step]} in step {step}")
    return found


def _differences(ours: list[float], stock: list[float]) -> list[float]:
    return [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours, stock, strict=True)]
