"""The exceptions of ep_plugin. Wrong arguments are plain ``ValueError``; everything else derives from EpPluginError."""

from __future__ import annotations

import re


class EpPluginError(RuntimeError):
    """Base of every error that is not a wrong argument."""


class PeerTimeout(EpPluginError):
    """A deadline passed while this rank waited for others.

    Attributes:
        rank: the rank at fault, within the group. If several ranks are missing, the lowest of them. None: unknown.
            Ranks that gave up waiting themselves are not at fault.
        step: the name of the step that did not finish.
    """

    def __init__(self, message: str, rank: int | None = None, step: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[type[PeerTimeout], tuple[str, int | None, str]]:
        return type(self), (str(self), self.rank, self.step)


class PeerAborted(EpPluginError):
    """Another rank failed and reported its failure to this rank.

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

    There are two causes:

    - Memory is missing. Run one step of this shape before the capture.
    - Only the start or only the end of an asynchronous operation would be in the graph. Start the operation and wait
      for it inside the capture, or do both outside.
    """


class CommunicatorClosed(EpPluginError, ValueError):
    """The communicator, or memory that belongs to it, was used after it was closed."""


_LONGEST_TEXT = 2000  # characters: one value of a store carries the texts of all ranks
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# The head of a reason, between two characters that `text_of` escapes. No text of a user is read as one.
_HEAD = re.compile("\x1f(not supported|disagree|rank (\\d{1,9})(?:, step ([^\x1f]*))?)\x1f")


def text_of(given: object) -> str:
    """Returns ``str(given)`` in a form that every peer, file and terminal can take. It never raises.

    Control characters but tab and newline, and surrogates, which UTF-8 cannot encode, become backslash escapes. The
    text ends after 2000 characters.
    """
    try:
        text = str(given)[:_LONGEST_TEXT]
    except Exception as error:
        text = f"its __str__ raises {type(error).__name__}"
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def type_and_text(error: BaseException) -> str:
    """Returns the type and the text of `error`, as `text_of` does."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def reason_of(error: BaseException) -> str:
    """Returns the reason that a rank sends to its group after `error`.

    It is `type_and_text(error)`, or the text of an error of ours, behind a head that `error_of_peer` reads.
    """
    if isinstance(error, PeerTimeout) and error.rank is not None:
        return f"\x1frank {error.rank}, step {text_of(error.step)}\x1f{text_of(error)}"
    if isinstance(error, PeerAborted):
        return f"\x1frank {error.rank}\x1f{text_of(error)}"
    if isinstance(error, NotSupported):
        return f"\x1fnot supported\x1f{text_of(error)}"
    if isinstance(error, DisagreementError):
        return f"\x1fdisagree\x1f{text_of(error)}"
    return text_of(error) if isinstance(error, EpPluginError) else type_and_text(error)


def error_of_peer(rank: int, reason: str, own_rank: int, name: str = "") -> EpPluginError:
    """Returns the error of this rank after `rank` has failed.

    Args:
        rank: the rank that sent `reason`.
        reason: what `reason_of` or `text_of` returned there. Any other text is read as text.
        own_rank: this rank. The error never blames it.
        name: what comes first in the message.

    Returns:
        An error that names the rank at fault: the one in `reason`, if it is another than these two, else `rank`. If
        one rank raises NotSupported or DisagreementError, all ranks do.
    """
    head = _HEAD.match(reason)
    if head is None:
        return PeerAborted(f"{name}rank {rank} aborted: {reason}", rank, reason)
    text = reason[head.end() :]
    if head[1] == "not supported":
        return NotSupported(f"{name}rank {rank}: {text}")
    if head[1] == "disagree":
        return DisagreementError(text)
    at_fault = int(head[2])
    if at_fault in (rank, own_rank):
        return PeerAborted(f"{name}rank {rank} aborted: {text}", rank, text)
    if head[3] is None:
        return PeerAborted(f"{name}rank {rank} gave up: {text}", at_fault, text)
    return PeerTimeout(f"{name}rank {rank} gave up: {text}", at_fault, head[3])
