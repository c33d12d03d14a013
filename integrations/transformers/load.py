"""Load statistics of expert-parallel models in the logs of Hugging Face's Trainer, and so in its trackers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

import ep_plugin
from ep_plugin import LoadStats

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class LoadCallback(TrainerCallback):
    """Logs the load of all communicators, over all ranks and layers, since the log before it.

        trainer.add_callback(LoadCallback(trainer))

    Every rank adds one. At each logging step `Trainer.log` gets, beside the loss:

    - ``moe/expert_skew``: tokens of the busiest expert over the mean of all experts. 1: balanced.
    - ``moe/rank_skew``: the same of ranks.
    - ``moe/dropped``: -1s in ids, and rows beyond a capacity.
    - ``moe/link_gb``, ``moe/rail_gb``: 1e9 bytes that all ranks have sent inside nodes, and between nodes.
    - ``moe/longest_wait_s``: the longest time that a rank has waited for another, in seconds. Not on GPUs, but in low
      latency.

    Args:
        trainer: whose `log` gets them. On the logging steps its ranks gather a few numbers.
        folder: an existing one, to which each rank writes load-RANK.json at the end of training, for `ep-bench load`.
    """

    def __init__(self, trainer: Trainer, folder: str | None = None) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"folder: expected an existing folder, got {folder}")
        self._trainer, self._folder = trainer, folder
        self._before: dict[str, LoadStats] = {}
        ep_plugin.record_stats()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not control.should_log:
            return
        now = ep_plugin.stats()
        local = _numbers(self._before, now).to(args.device)
        self._before = now
        metrics = _metrics(self._trainer.accelerator.gather(local.unsqueeze(0)).cpu())
        if metrics:
            self._trainer.log(metrics)
            control.should_log = True  # the loss is still to be logged

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._folder is not None:
            ep_plugin.write_stats(Path(self._folder, f"load-{args.process_index}.json"))


def _numbers(before: dict[str, LoadStats], now: dict[str, LoadStats]) -> torch.Tensor:
    """float64 ``[7]`` of this rank: tokens of its busiest expert, of all of them, how many experts there are, drops,
    link bytes, rail bytes, and the longest wait in nanoseconds, NaN if no communicator knows it."""
    per_expert, waits = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    sums = torch.zeros(3, dtype=torch.float64)
    for name, stats in now.items():
        old = before.get(name)
        per_expert.append((stats.tokens if old is None else stats.tokens - old.tokens).sum(0))
        sums += _sums(stats) if old is None else _sums(stats) - _sums(old)
        if stats.waited_ns is not None:
            waits.append(stats.waited_ns if old is None or old.waited_ns is None else stats.waited_ns - old.waited_ns)
    tokens, waited = torch.cat(per_expert), torch.cat(waits)
    most = int(tokens.max()) if len(tokens) else 0
    longest = float(waited.max()) if len(waited) else math.nan
    return torch.tensor([most, int(tokens.sum()), len(tokens), *sums.tolist(), longest], dtype=torch.float64)


def _sums(stats: LoadStats) -> torch.Tensor:
    """Drops, link bytes and rail bytes; NaN: not known."""
    dropped = math.nan if stats.dropped_ids is None else stats.dropped_ids + stats.dropped_rows
    link_bytes = math.nan if stats.link_bytes_sent is None else stats.link_bytes_sent
    return torch.tensor([dropped, link_bytes, stats.rail_bytes_sent], dtype=torch.float64)


def _metrics(ranks: torch.Tensor) -> dict[str, float]:
    """The metrics of all ranks' numbers ``[ranks, 7]`` that are known; none if no tokens were dispatched."""
    most, tokens, experts, dropped, link_bytes, rail_bytes, waits = ranks.unbind(1)
    if not tokens.any():
        return {}
    metrics = {
        "moe/expert_skew": float(most.max() * experts.sum() / tokens.sum()),
        "moe/rank_skew": float(tokens.max() / tokens.mean()),
        "moe/dropped": float(dropped.sum()),
        "moe/link_gb": float(link_bytes.sum() / 1e9),
        "moe/rail_gb": float(rail_bytes.sum() / 1e9),
        "moe/longest_wait_s": float(waits.max() / 1e9),
    }
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
