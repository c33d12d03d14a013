"""Load statistics of expert-parallel models in the logs of Hugging Face's Trainer, and so in its trackers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

import ep_plugin
from ep_plugin import LoadStats
from ep_plugin.moe.statistics import skew_of

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class LoadCallback(TrainerCallback):
    """Logs the load of all communicators, over all ranks, since the previous log.

        trainer.add_callback(LoadCallback(trainer))

    Every rank must add one. Whenever Trainer logs during training, its `log` gets these metrics beside the loss:

    - ``moe/expert_skew``: the tokens of a layer's busiest expert divided by the mean of its experts, averaged over
      layers. 1: balanced. The largest possible value is E / K, for E experts and K experts per token.
    - ``moe/worst_expert_skew``, ``moe/worst_layer``: the largest such quotient of any layer, and the number of its
      layer, from 0, in the order in which layers first ran. All code that torch.compile has traced counts as one more
      layer.
    - ``moe/rank_skew``: like ``moe/expert_skew``, for the tokens that ranks receive.
    - ``moe/dropped``: the number of ids that were -1, plus the rows beyond a capacity.
    - ``moe/link_gb``, ``moe/rail_gb``: bytes that all ranks have sent inside nodes, and between nodes, in units of 1e9.
    - ``moe/longest_wait_s``: the longest time in seconds, over all pairs of ranks, that one rank waited for the other.

    Args:
        trainer: the Trainer whose `log` gets the metrics. For each log, its ranks gather the counts of their experts in
            every layer.
        folder: an existing folder. Each rank writes load-RANK.json there at the end of training, for `ep-bench load`.
    """

    def __init__(self, trainer: Trainer, folder: str | None = None) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"folder: expected an existing folder, got {folder}")
        self._trainer, self._folder = trainer, folder
        self._before: dict[str, LoadStats] = {}
        ep_plugin.record_stats()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before = ep_plugin.stats()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_log:
            self._log(control)

    on_epoch_end = on_step_end

    def _log(self, control: TrainerControl) -> None:
        now = ep_plugin.stats()
        changed = {name: _since(self._before.get(name), stats) for name, stats in now.items()}
        self._before = now
        metrics = _metrics(gather_object([_numbers(list(changed.values()))]))
        if metrics:
            self._trainer.log(metrics)
            control.should_log = True  # the loss has not been logged yet

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._folder is not None:
            ep_plugin.write_stats(Path(self._folder, f"load-{args.process_index}.json"))


def _since(before: LoadStats | None, now: LoadStats) -> LoadStats:
    """Returns the difference of `now` and `before`."""
    if before is None:
        return now
    nothing = torch.zeros_like(now.tokens)
    return now._replace(
        tokens=now.tokens - before.tokens,
        layers={name: tokens - before.layers.get(name, nothing) for name, tokens in now.layers.items()},
        dropped_ids=_less(now.dropped_ids, before.dropped_ids),
        dropped_rows=now.dropped_rows - before.dropped_rows,
        link_bytes_sent=_less(now.link_bytes_sent, before.link_bytes_sent),
        rail_bytes_sent=now.rail_bytes_sent - before.rail_bytes_sent,
        waited_ns=now.waited_ns - before.waited_ns,
    )


def _less(now: Any, before: Any) -> Any:
    return None if now is None or before is None else now - before


def _numbers(found: list[LoadStats]) -> dict[str, Any]:
    """Returns this rank's numbers, for `_metrics`.

    "layers" has, for each layer, the number of this rank's first expert and the tokens of each of its experts. After
    the layers come the tokens outside of any layer, by communicator. Other numbers are sums over the communicators that
    know them.
    """
    layers: dict[str, tuple[int, torch.Tensor]] = {}
    outside: dict[str, tuple[int, torch.Tensor]] = {}
    for number, stats in enumerate(found):
        first = stats.rank * stats.tokens.shape[1]
        for name, tokens in stats.layers.items():
            of_this, nothing = tokens.sum(0), (first, torch.zeros_like(tokens[0]))
            if name in layers and (layers[name][0], len(layers[name][1])) != (first, len(of_this)):
                name = f"{name} of communicator {number}"
            layers[name] = first, layers.get(name, nothing)[1] + of_this  # several communicators may serve one layer
        outside[f"communicator {number}"] = first, (stats.tokens - sum(stats.layers.values())).sum(0)
    dropped = [one.dropped_ids + one.dropped_rows for one in found if one.dropped_ids is not None]
    links = [one.link_bytes_sent for one in found if one.link_bytes_sent is not None]
    return {
        "layers": {name: (first, tokens.tolist()) for name, (first, tokens) in (layers | outside).items()},
        "moe/dropped": sum(dropped) if dropped else None,
        "moe/link_gb": sum(links) / 1e9 if links else None,
        "moe/rail_gb": sum(one.rail_bytes_sent for one in found) / 1e9,
        "moe/longest_wait_s": max((int(one.waited_ns.max()) for one in found), default=0) / 1e9,
    }


def _metrics(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the metrics that follow from the numbers of all ranks; none if no tokens were dispatched."""
    expert_skews: dict[int, float] = {}  # the key is the number of the layer
    rank_skews = []
    for number, name in enumerate(dict.fromkeys(name for rank in ranks for name in rank["layers"])):
        rows = [rank["layers"][name] for rank in ranks if name in rank["layers"]]
        of_experts = torch.zeros(max(first + len(tokens) for first, tokens in rows), dtype=torch.int64)
        for first, tokens in rows:  # several ranks may have copies of an expert
            of_experts[first : first + len(tokens)] += torch.tensor(tokens)
        if of_experts.any():
            expert_skews[number] = skew_of(of_experts)
            rank_skews.append(skew_of(torch.tensor([sum(tokens) for _, tokens in rows])))
    if not expert_skews:
        return {}
    worst = max(expert_skews, key=lambda number: expert_skews[number])
    metrics = {
        "moe/expert_skew": sum(expert_skews.values()) / len(expert_skews),
        "moe/worst_expert_skew": expert_skews[worst],
        "moe/worst_layer": float(worst),
        "moe/rank_skew": sum(rank_skews) / len(rank_skews),
    }
    for name in ("moe/dropped", "moe/link_gb", "moe/rail_gb", "moe/longest_wait_s"):
        known = [float(rank[name]) for rank in ranks if rank[name] is not None]
        if known:
            metrics[name] = max(known) if name == "moe/longest_wait_s" else sum(known)
    return metrics
