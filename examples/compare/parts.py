"""Where a training step's time goes: attention, router, exchange, experts and more, from the profiler's trace.

Every instant of a step belongs to one part, so the parts add up to the step. On CPUs the rank's main thread decides:
the instant belongs to the innermost range around it that names a part. On GPUs the kernels decide. A kernel belongs to
the part whose range launched it, and an instant at which several kernels run to the first of their parts in `PARTS`.

A range is named by the module whose forward it is in. A backward operation belongs to the part of its forward
operation. Both have the same sequence number of autograd.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

STEPS = 3
STEP = "examples.compare step"  # the range around a step
EXCHANGE, WAITING, EXPERTS = "exchange", "waiting for others", "experts"
COPIES, COLLECTIVES, OPTIMIZER = "FSDP2's copies", "FSDP2's collectives", "optimizer"
OTHER, IDLE = "other", "idle"
PARTS = (
    "attention", "router", EXPERTS, "dense MLP", "norms and embedding", "loss", OPTIMIZER, OTHER,
    EXCHANGE, WAITING, COPIES, COLLECTIVES, IDLE,
)  # fmt: skip
"""The model's computation comes first. So communication counts only where nothing is computed at the same time."""

_LABEL = "part: "
_MODULES = {
    "": "loss",  # of the logits, with the projection to them
    "model": "norms and embedding",
    "self_attn": "attention",
    "mlp": "dense MLP",
    "experts": EXPERTS,
    "shared_experts": EXPERTS,
}
"""The part of modules whose names end so. Operations in a module of another name belong to the module around it."""

Part = str
Event = dict[str, Any]  # of the trace: name, ph, cat, ts and dur in microseconds, tid, args
Span = tuple[float, float, Part]  # from, to


class _Range(NamedTuple):
    name: str
    part: Part
    end: float


def part_range(part: Part) -> record_function:
    """Returns a range of this part, a context."""
    return record_function(_LABEL + part)


def label(model: torch.nn.Module) -> None:
    """Puts a range around the forward of modules that are parts. The exchange has one where it is timed (clock.py)."""
    for name, module in model.named_modules():
        part = _MODULES.get(name.rpartition(".")[2])
        if part is not None:
            has_experts = "experts" in module._modules
            module.forward = _in_range("router" if has_experts else part, module.forward)


def _in_range(part: Part, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with part_range(part):
            return forward(*args, **kwargs)

    return run


def measure(
    run: Callable[[int], tuple[float, float]], first: int, take: Callable[[], list[float]], device: torch.device
) -> dict[str, Any]:
    """Runs some more steps under the profiler, the first of them with the number `first`. Collective.

    Args:
        run: runs the step of a number, in a range `STEP`, and returns its loss and seconds.
        take: returns the seconds of each dispatch and combine since its last call, as the `ExchangeClock` does.

    Returns:
        ``step_ms``, of the profiled steps by the host's clock, and ``parts_ms``, by part. Both are the mean of these
        steps and of all ranks. Waiting is what a rank's exchanges take longer than those of the quickest rank.
    """
    seconds, exchanges = [], []
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as profiler:
        for number in range(first, first + 1 + STEPS):  # the first of them is slow, and left out
            seconds.append(run(number)[1])
            exchanges.append(take())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        steps = divide(json.loads(path.read_text())["traceEvents"])
    taken = torch.tensor(exchanges[1:], dtype=torch.float64, device=device)
    quickest = taken.clone()
    if taken.numel():
        dist.all_reduce(quickest, op=dist.ReduceOp.MIN)
    total = sum(steps[1:], Counter())
    total[WAITING] = min(total[EXCHANGE], 1e6 * float((taken - quickest).sum()))
    total[EXCHANGE] -= total[WAITING]
    sums = torch.tensor([1e6 * sum(seconds[1:]), *(total[part] for part in PARTS)], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    step, *parts = (sums / 1e3 / STEPS / dist.get_world_size()).tolist()
    return {"step_ms": step, "parts_ms": dict(zip(PARTS, parts, strict=True))}


def divide(events: Iterable[Event]) -> list[Counter[Part]]:
    """Returns the microseconds of each part in each step, from the events of a trace in the Chrome format."""
    spans = [event for event in events if event.get("ph") == "X"]
    host = _host(spans)
    steps = [event for event in spans if event["name"] == STEP and event["cat"] == "user_annotation"]
    busy = sorted(_kernels(spans, host))
    if not busy:
        line = host[steps[0]["tid"]]
        busy = [(start, end, part) for (start, part), (end, _) in itertools.pairwise(line)]
    steps.sort(key=lambda step: step["ts"])
    return [_divide(busy, step["ts"], step["ts"] + step["dur"]) for step in steps]


def _divide(busy: Iterable[Span], first: float, last: float) -> Counter[Part]:
    """Divides the time from `first` to `last` between the parts that are busy, and IDLE."""
    edges = [(first, 0, IDLE), (last, 0, IDLE)]
    for start, end, part in busy:
        if start < last and end > first:
            edges += [(max(start, first), 1, part), (min(end, last), -1, part)]
    edges.sort(key=lambda edge: edge[0])
    running, shares, before = Counter({IDLE: 1}), Counter(), first
    for time, change, part in edges:
        shares[next(name for name in PARTS if running[name])] += time - before
        running[part] += change
        before = time
    return shares


def _kernels(spans: Iterable[Event], host: dict[int, list[tuple[float, Part]]]) -> Iterator[Span]:
    """Yields kernels and copies of the GPU with the part in which the host launched them."""
    calls = {span["args"].get("correlation"): span for span in spans if span["cat"] in ("cuda_runtime", "cuda_driver")}
    for span in spans:
        if span["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            call = calls.get(span["args"].get("correlation"))
            part = OTHER if call is None else _part_at(host.get(call["tid"], []), call["ts"])
            yield span["ts"], span["ts"] + span["dur"], part


def _part_at(line: list[tuple[float, Part]], time: float) -> Part:
    number = bisect_right(line, time, key=lambda point: point[0])
    return line[number - 1][1] if number else OTHER


def _host(spans: Iterable[Event]) -> dict[int, list[tuple[float, Part]]]:
    """Returns, by thread, the times at which another part begins, and the part."""
    lines: dict[int, list[tuple[float, Part]]] = defaultdict(list)
    stacks: dict[int, list[_Range]] = defaultdict(list)
    forwards: dict[int, Part] = {}  # by sequence number
    ranges = [span for span in spans if span["cat"] in ("cpu_op", "user_annotation")]
    for span in sorted(ranges, key=lambda span: (span["ts"], -span["dur"])):
        stack, line, start, name = stacks[span["tid"]], lines[span["tid"]], span["ts"], span["name"]
        _close(stack, line, start)
        around = stack[-1] if stack else _Range("", OTHER, float("inf"))
        number, is_backward = span["args"].get("Sequence number"), span["args"].get("Fwd thread id", 0) > 0
        part = forwards.get(number) if is_backward else _part_of(name, around)
        if number is not None and not is_backward:
            forwards[number] = part or around.part
        if part is not None:
            stack.append(_Range(name, part, min(start + span["dur"], around.end)))
            line.append((start, part))
    for thread, stack in stacks.items():
        _close(stack, lines[thread], float("inf"))
    return lines


def _close(stack: list[_Range], line: list[tuple[float, Part]], time: float) -> None:
    """Leaves the ranges that have ended at `time`."""
    while stack and stack[-1].end <= time:
        end = stack.pop().end
        line.append((end, stack[-1].part if stack else OTHER))


def _part_of(name: str, around: _Range) -> Part | None:
    """Returns the part of a range of this name; None: that of the range around it."""
    if name == STEP:
        return OTHER
    if name.startswith(_LABEL):
        return name.removeprefix(_LABEL)
    if name.startswith("Optimizer."):
        return OPTIMIZER
    if name.startswith("FSDP::"):
        return COLLECTIVES
    if around.name.startswith("FSDP::"):  # FSDP2 copies by operations of tensors, and gathers and reduces by others
        if name.startswith(("aten::", "fsdp::")):
            return COPIES
        if name.startswith(("c10d::", "_c10d_functional::")):
            return COLLECTIVES
    return None
