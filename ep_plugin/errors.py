"""The exceptions of ep_plugin. Wrong arguments are plain ``ValueError``; everything else derives from EpPluginError."""

from __future__ import annotations

import re


class EpPluginError(RuntimeError):
    """Base of every error that is not a wrong argument."""


class PeerTimeout(EpPluginError):
    """A deadline passed while this rank waited for others.

    Attributes:
        rank: the rank at fault, within the group. Ranks that gave up waiting themselves are not at fault. The lowest
            rank when several are missing; None when it is not known.
        step: the name of the step that did not finish.
    """

    def __init__(self, message: str, rank: int | None = None, step: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[type[PeerTimeout], tuple[str, int | None, str]]:
        return type(self), (str(self), self.rank, self.step)


class PeerAborted(EpPluginError):
    """Another rank failed and told this one.

    Attributes:
        rank: the rank that failed, within the group.
        reason: its error, as text.
    """

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[PeerAborted], tuple[str, int, str]]:
        return type(self), (str(self), self.rank, self.reason)


class DisagreementError(EpPluginError, ValueError):
    """Ranks passed different values where all must pass the same. The message names the ranks and the values."""


class NotSupported(EpPluginError, NotImplementedError):
    """This release or this machine does not support the feature."""


class CaptureRefused(EpPluginError):
    """An operation cannot be captured in a CUDA graph here. Nothing was enqueued, and the communicator stays usable.

    Either memory is missing: run one step of this shape before the capture. Or only one end of an asynchronous
    operation would be in the graph: wait for the operation on the same side of the capture on which it started.
    """


class CommunicatorClosed(EpPluginError, ValueError):
    """The communicator, or memory that belongs to it, was used after it was closed."""


_NOT_SUPPORTED = "[not supported] "
_FAULT = re.compile(r"\[rank (\d{1,9})(?:, step ([^]]*))?\] ")


def reason_of(error: BaseException) -> str:
    """The text that a rank sends to its group about `error`. It starts with the rank at fault if that is another."""
    if isinstance(error, PeerTimeout) and error.rank is not None:
        return f"[rank {error.rank}, step {error.step}] {error}"
    if isinstance(error, PeerAborted):
        return f"[rank {error.rank}] {error}"
    if isinstance(error, NotSupported):
        return f"{_NOT_SUPPORTED}{error}"
    return str(error) if isinstance(error, EpPluginError) else f"{type(error).__name__}: {error}"


def error_of_peer(rank: int, reason: str, own_rank: int, name: str = "") -> EpPluginError:
    """The error of this rank after `rank` has failed.

    Args:
        rank: the rank that sent `reason`.
        reason: what `reason_of` returned there, or any other text.
        own_rank: this rank, which is not named as the one at fault.
        name: what comes first in the message.

    Returns:
        An error that names the rank at fault: the one in `reason`, if it is another than these two, else `rank`. What
        one rank does not support is NotSupported on all of them.
    """
    if reason.startswith(_NOT_SUPPORTED):
        return NotSupported(f"{name}rank {rank}: {reason.removeprefix(_NOT_SUPPORTED)}")
    fault = _FAULT.match(reason)
    if fault is None:
        return PeerAborted(f"{name}rank {rank} aborted: {reason}", rank, reason)
    text, at_fault = reason[fault.end() :], int(fault[1])
    if at_fault in (rank, own_rank):
        return PeerAborted(f"{name}rank {rank} aborted: {text}", rank, text)
    if fault[2] is None:
        return PeerAborted(f"{name}rank {rank} gave up: {text}", at_fault, text)
    return PeerTimeout(f"{name}rank {rank} gave up: {text}", at_fault, fault[2])
