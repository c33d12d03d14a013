"""Operations by integration: those that ep_plugin has served, and those that it has left to the framework's own code.

`ep_plugin.integrations.status()` shows them. A replay of a CUDA graph counts nothing.
"""

from __future__ import annotations

from collections import Counter

DISPATCHES, COLLECTIVES, MESSAGES = "dispatches and combines", "gathers and sums", "messages"

num_served: Counter[str] = Counter()
num_left: Counter[str] = Counter()
num_served_of_kind: Counter[tuple[str, str]] = Counter()  # by integration and kind


def served(name: str, n: int = 1, kind: str = "") -> None:
    """Count `n` operations of the integration `name` that ran through ep_plugin. kind: if it has several, in words."""
    num_served[name] += n
    if kind:
        num_served_of_kind[name, kind] += n


def left(name: str, n: int = 1) -> None:
    """Count `n` operations that the integration `name` saw and left to the framework's own code."""
    num_left[name] += n
