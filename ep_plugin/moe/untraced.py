"""Keeps torch.compile out of what it cannot trace: locks, peer memory, kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which torch.compile calls as it is between two graphs; with fullgraph=True it says that it cannot.

    torch.compiler.disable would load the compiler here, which takes seconds, and cost every call a microsecond.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call
