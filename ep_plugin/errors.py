"""The exceptions of ep_plugin. Wrong arguments are plain ``ValueError``; everything else derives from EpPluginError."""

from __future__ import annotations


class EpPluginError(RuntimeError):
    """Base of every error that is not a wrong argument."""


class PeerTimeout(EpPluginError):
    """A deadline passed while this rank waited for others.

    ``rank``: the rank (within the group) that was waited for, the lowest one when several are missing, None when it
    is not known; where that one has given up waiting itself, one that has not told so. ``step``: the name of the step
    that did not finish.
    """

    def __init__(self, message: str, rank: int | None = None, step: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[type[PeerTimeout], tuple[str, int | None, str]]:
        return type(self), (str(self), self.rank, self.step)


class PeerAborted(EpPluginError):
    """Another rank failed and said so. ``rank``: which one (within the group); ``reason``: what it said."""

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[PeerAborted], tuple[str, int, str]]:
        return type(self), (str(self), self.rank, self.reason)


class DisagreementError(EpPluginError, ValueError):
    """Ranks passed different values where all must pass the same; the message names the ranks and the values."""


class NotSupported(EpPluginError, NotImplementedError):
    """A feature that exists by name but that this release or machine does not serve."""


class CaptureRefused(EpPluginError):
    """A CUDA graph's capture needs memory that is not there yet, or would have one end of an operation without the
    other. Nothing was enqueued, and the communicator is well: run one step of this shape before capturing, and wait for
    what was begun before it."""


class CommunicatorClosed(EpPluginError, ValueError):
    """The communicator, or memory that belongs to it, was used after it was closed."""
