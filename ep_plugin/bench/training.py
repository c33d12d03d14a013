"""Results of training that `python -m examples.compare` wrote: a model trained twice, with ep_plugin and without it."""

from __future__ import annotations

from typing import Any

from ep_plugin.bench.suite import OURS

KEYS = {"model", "device", "world_size", "steps", "compare", "tokens_per_s", "step_ms", "losses", "options", "versions"}
_SIZES = {"30b-a3b": "Qwen3-30B-A3B", "v3": "DeepSeek-V3", "4b": "Qwen3-4B"}  # whose widths a preset has
_DENSE = "megatron_dense"


def is_training(result: Any) -> bool:
    """Whether this is the content of such a file."""
    return isinstance(result, dict) and result.keys() >= KEYS


def hardware(result: dict[str, Any]) -> str:
    """The number and the kind of the devices that trained the model."""
    ranks, device = result["world_size"], result["device"]
    return f"{ranks} ranks on CPUs" if device == "cpu" else f"{ranks} x {device}"


def name(result: dict[str, Any]) -> str:
    """The model and the framework in words, on two lines."""
    options = result["options"]
    size, layers, model = options["preset"], options["layers"], options["model"] or ""
    if options.get("checkpoint") or size not in _SIZES:
        return str(result["model"])
    shape = f"{layers} layer{'s' if layers != 1 else ''}{', no experts' if model == _DENSE else ''}"
    framework = "Megatron-core" if model.startswith("megatron") else "transformers"
    return f"{_SIZES[size]}'s widths, {shape}\n{framework}{', FSDP2' if options.get('fsdp2') else ''}"


def markdown(result: dict[str, Any]) -> str:
    """Title, a line for each arm, its parts, the difference of the losses, and versions and commit."""
    speeds, reference = result["tokens_per_s"], result["compare"]["reference"]
    lines = ["| through | loss, first and last | tokens/s | ms per step | |", "|---|---|--:|--:|--:|"]
    for arm, losses in result["losses"].items():
        ratio = f"{speeds[arm] / speeds[reference]:.2f} ×" if arm == OURS else ""
        cells = arm, f"{losses[0]:.4f}, {losses[-1]:.4f}", f"{speeds[arm]:,.0f}", f"{result['step_ms'][arm]:.1f}", ratio
        lines.append(f"| {' | '.join(cells)} |")
    steps, difference = result["steps"], result["compare"]["max_rel_diff"]
    versions = [f"{package} {version}" for package, version in result["versions"].items() if version]
    commit = [f"commit {result['commit']}"] if result.get("commit") else []
    blocks = [f"### training of {result['model']} on {hardware(result)}, {steps} steps", "\n".join(lines)]
    blocks += [parts_table(result)] if "profiled" in result else []
    blocks.append(f"- losses differ by at most {difference:.1e} of their value")
    return "\n\n".join([*blocks, " · ".join([", ".join(versions), *commit])]) + "\n"


def parts_table(result: dict[str, Any]) -> str:
    """The parts of a profiled step, the largest of the built-in arm first, as a markdown table."""
    arms = {arm: {"step": found["step_ms"], **found["parts_ms"]} for arm, found in result["profiled"].items()}
    built_in = arms[result["compare"]["reference"]]
    lines = [f"| ms of a profiled step | {' | '.join(arms)} |", f"|---|{'--:|' * len(arms)}"]
    for part in sorted(built_in, key=built_in.__getitem__, reverse=True):
        values = [parts[part] for parts in arms.values()]
        if any(values):
            lines.append(f"| {part} | {' | '.join(f'{value:.1f}' for value in values)} |")
    return "\n".join(lines)
