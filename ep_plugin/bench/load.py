"""Shows the load of a run as tables and a heat map. ep_plugin.write_stats has written a file on each rank.

Shapes: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ep_plugin.bench.report import markdown_table, picture
from ep_plugin.moe.recording import read_stats
from ep_plugin.moe.statistics import LoadStats, skew_of


class Load(NamedTuple):
    """The load of one communicator. `ranks` has the record of each rank that has written a file."""

    name: str
    ranks: dict[int, LoadStats]

    def tokens(self, layer: str | None = None) -> torch.Tensor:
        """Returns float64 ``[R, E]``, tokens by source rank and expert. Experts of ranks without a file have NaN."""
        size, local = next(iter(self.ranks.values())).tokens.shape
        whole = torch.full((size, size, local), torch.nan, dtype=torch.float64)
        for rank, stats in self.ranks.items():
            whole[:, rank] = (stats.tokens if layer is None else stats.layers.get(layer, torch.zeros(()))).double()
        return whole.flatten(1)

    def layers(self) -> dict[str, torch.Tensor]:
        """Returns float64 ``[E]``, tokens for each expert, by layer; {} if no layer is known. NaN is as in `tokens`."""
        names = dict.fromkeys(name for stats in self.ranks.values() for name in stats.layers)
        found = {name: self.tokens(name).sum(0) for name in names}
        outside = self.tokens().sum(0) - sum(found.values())
        return found | {"no layer": outside} if found and outside.nansum() else found


def load(paths: Sequence[Path]) -> list[Load]:
    """Reads the communicators in all files. Raises ValueError for other files, and for files of several runs."""
    found: dict[str, dict[int, LoadStats]] = {}
    for path in paths:
        for name, stats in read_stats(path).items():
            ranks = found.setdefault(name, {})
            if stats.rank in ranks:
                raise ValueError(f"{path}: expected one file for each rank, got a second one for rank {stats.rank}")
            ranks[stats.rank] = stats
            shapes = {tuple(each.tokens.shape) for each in ranks.values()}
            if len(shapes) > 1:
                raise ValueError(f"{path}: expected files of one run, got {name} with tokens of shapes {shapes}")
    if not found:
        raise ValueError("files: expected at least one communicator in them, got none")
    return [Load(name, dict(sorted(ranks.items()))) for name, ranks in found.items()]


def markdown(found: Load) -> str:
    """Returns a line for each rank, a sentence on experts, and a line for each layer that is known."""
    mean = max(sum(int(stats.tokens.sum()) for stats in found.ranks.values()) / len(found.ranks), 1.0)
    lines = []
    for rank, stats in found.ranks.items():
        tokens, longest = int(stats.tokens.sum()), int(stats.waited_ns.argmax())
        sent = {"link MB sent": stats.link_bytes_sent, "rail MB sent": stats.rail_bytes_sent}
        waited = f"rank {longest}: {int(stats.waited_ns[longest]) / 1e9:.3f} s" if stats.waited_ns.any() else ""
        lines.append(
            {
                "rank": str(rank),
                "tokens received": f"{tokens:,}",
                "of the mean": f"{tokens / mean:.2f} ×",
                "skew of its experts": f"{stats.skew:.2f}",
                "dropped": f"{(stats.dropped_ids or 0) + stats.dropped_rows:,}",
                **{name: "" if count is None else f"{count / 1e6:,.1f}" for name, count in sent.items()},
                "waited most for": waited,
            }
        )
    table = markdown_table(lines, ("waited most for",))
    busiest, tokens, skew = _busiest(found.tokens().sum(0))
    experts = sum(stats.tokens.shape[1] for stats in found.ranks.values())
    text = (
        f"### {found.name}\n\n{table}\n\nThe busiest of {experts} experts is {busiest}, with {tokens:,} tokens: "
        f"{skew:.2f} × the mean.\n"
    )
    if layers := found.layers():
        lines = []
        for layer, per_expert in layers.items():
            expert, count, skew = _busiest(per_expert)
            line = {"layer": layer, "tokens": f"{int(per_expert.nansum()):,}", "busiest expert": str(expert)}
            lines.append(line | {"its tokens": f"{count:,}", "of the mean": f"{skew:.2f} ×"})
        text += f"\n{markdown_table(lines, ('layer',))}\n"
    return text


def _busiest(per_expert: torch.Tensor) -> tuple[int, int, float]:
    """Returns the busiest expert, its tokens, and its tokens over the mean of the known experts."""
    busiest = int(per_expert.nan_to_num(-1).argmax())
    return busiest, int(per_expert[busiest]), skew_of(per_expert[~per_expert.isnan()])


def plot(loads: Sequence[Load], path: Path) -> None:
    """Draws a PNG with a heat map per communicator: tokens for each expert, by layer or else by source rank."""
    heights = [2 + 0.25 * len(found.layers() or found.tokens()) for found in loads]
    with picture(path, len(loads), figsize=(10, sum(heights)), height_ratios=heights) as (figure, panels):
        for axes, found in zip(panels, loads, strict=True):
            figure.colorbar(_draw(axes, found), ax=axes, label="tokens")


def _draw(axes: Any, found: Load) -> Any:
    layers, tokens = found.layers(), found.tokens()
    local = tokens.shape[1] // len(tokens)
    if layers:
        tokens = torch.stack(list(layers.values()))
    image = axes.imshow(tokens.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    axes.set(xlabel="expert", ylabel="" if layers else "from rank", title=found.name)
    axes.set_yticks(range(len(tokens)), list(layers) if layers else None)
    for first in range(0, tokens.shape[1], local):
        axes.axvline(first - 0.5, color="white", linewidth=0.5)  # the experts of a rank
    return image
