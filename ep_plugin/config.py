"""The configuration of a MoECommunicator, and the layouts that dispatch can return."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass

MAX_TOPK = 128
MAX_EXPERTS = 2**31 - 1
MAX_ALIGNMENT = 1 << 20
MAX_RAIL_CHUNKS = 6
MAX_LL_TOKENS = 4096
MAX_LL_EXPERTS = 32767
MAX_TIMEOUT_S = 1e9
ROW_ALIGNMENT_BYTES = 16
MODES = ("ht", "ll")

SMS_FIELDS = ("dispatch_send_sms", "dispatch_recv_sms", "combine_send_sms", "combine_recv_sms")
_OVER_NODES = ("rail_chunks", "max_rows_per_node")
LEAST_SMS = {"dispatch_recv_sms": 0, "combine_recv_sms": 0}  # 0: the sending kernel also receives
# Ranks may differ in these fields, which change neither the bytes sent nor their places.
_LOCAL_FIELDS = ("timeout_s", *SMS_FIELDS)


def in_one_kernel(sms: int) -> dict[str, int]:
    """Returns SMS_FIELDS for operations in which one kernel sends and receives, on `sms` SMs."""
    return {"dispatch_send_sms": sms, "dispatch_recv_sms": 0, "combine_send_sms": sms, "combine_recv_sms": 0}


class DispatchLayout(enum.Enum):
    """The order and shape of the rows that dispatch returns.

    Shapes: N rows received, H hidden size, E_l local experts, R ranks, T_max most tokens of a rank.
    """

    FLAT = "flat"
    """``[N, H]``, one row per (token, local expert), grouped by local expert."""
    TOKEN_MAJOR = "token_major"
    """``[N, H]``, one row per token, ordered by (source rank, source token), with its local experts beside it."""
    EXPERT_MAJOR = "expert_major"
    """``[E_l, R * T_max, H]``, a fixed block per local expert, whose first rows are valid. Only for mode="ll"."""


@dataclass(frozen=True, kw_only=True)
class MoECommunicatorConfig:
    """Settings of one MoECommunicator. Construction raises ValueError for wrong values.

    num_experts: experts over all ranks; must be a multiple of the group's size.
    hidden_size: most elements of a row in any dispatch.
    topk: most experts per token in any dispatch; at most 128.
    max_tokens_per_rank: most tokens that any rank dispatches at once. Each pool then has room for that many tokens of
        every rank. None: pools grow when rows do not fit. Each then has room, for every rank, for the most rows that
        one rank sent to another. mode="ll" needs a number, at most 4096; its memory is in proportion to it.
    mode: "ht": high throughput. "ll": low latency, for few tokens per rank; the host never waits.
    layout: the layout of dispatched rows, a DispatchLayout or its value such as "flat". None: the mode's default, FLAT
        for "ht", EXPERT_MAJOR for "ll". "ll" has no other layout.
    max_row_bytes: bytes of the widest row, a multiple of 16. None: room for hidden_size elements of any dtype; in
        mode="ll" of 2 bytes each.
    expert_alignment: each expert's group of FLAT rows is padded to a multiple of this, at most 2**20.
    ids_as_given: only in TOKEN_MAJOR. True: the output's topk_ids have the dtype of the given ones. False: int32.
    rail_chunks: the number of chunks, 1 to 6, into which a rank cuts its tokens if the group spans nodes. The rows of
        one chunk are forwarded inside the other node while the rows of the next chunk cross. More chunks mean more and
        shorter messages, and more kernels. None: 1 to 4, one for each 16 MiB (on CPUs 4 MiB) that crosses for
        max_tokens_per_rank tokens (4096 if that is None) of hidden_size elements of 2 bytes with evenly drawn experts.
        Unused on one node.
    max_rows_per_node: the most tokens of a rank for one other node that a dispatch with ``capacity=`` has room for, an
        equal share of them in each chunk. Its last tokens are left out for a node that has more, and
        ``DispatchOutput.left_out`` says so on all ranks. It bounds the buffers between nodes, and the pools. It needs
        max_tokens_per_rank; the same number leaves no token out. None: in a chunk of t tokens there is room for the
        larger of 2 m and m + 8 sqrt(m) + 8, at most for t, where m = topk * t / nodes. Evenly drawn experts need m or
        less on average. Unused on one node.
    timeout_s: seconds that a rank waits for its peers, at most 1e9. None: the process group's own timeout.
    dispatch_send_sms, dispatch_recv_sms, combine_send_sms, combine_recv_sms: SMs of each kernel. Not in mode="ll".
        None: as many SMs as fill the links with rows of the operation's shape, more for small batches, and no more than
        the operation's other kernel leaves. dispatch_recv_sms=0 or combine_recv_sms=0: one kernel sends and receives;
        use it if SMs are few. A dispatch without capacity= or previous_handle= then sends after the host has the
        totals.
    shrink: only in mode="ll". True: if a peer waits longer than timeout_s for a rank, the rank is masked, and the
        others continue without it. False: they raise PeerTimeout.

    All ranks must agree on everything except the timeout and the SM counts.
    """

    num_experts: int
    hidden_size: int
    topk: int
    max_tokens_per_rank: int | None = None
    mode: str = "ht"
    layout: DispatchLayout | str | None = None
    max_row_bytes: int | None = None
    expert_alignment: int = 1
    ids_as_given: bool = False
    rail_chunks: int | None = None
    max_rows_per_node: int | None = None
    timeout_s: float | None = None
    dispatch_send_sms: int | None = None
    dispatch_recv_sms: int | None = None
    combine_send_sms: int | None = None
    combine_recv_sms: int | None = None
    shrink: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden_size", "topk", "expert_alignment"):
            _check_at_least(1, name, getattr(self, name))
        for name in ("max_tokens_per_rank", "max_row_bytes", *_OVER_NODES, *SMS_FIELDS):
            if getattr(self, name) is not None:
                _check_at_least(LEAST_SMS.get(name, 1), name, getattr(self, name))
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts: expected at most {MAX_EXPERTS}, got {self.num_experts}")
        if self.topk > MAX_TOPK:
            raise ValueError(f"topk: expected at most {MAX_TOPK}, got {self.topk}")
        if self.topk > self.num_experts:
            raise ValueError(f"topk: expected at most num_experts ({self.num_experts}), got {self.topk}")
        if self.max_row_bytes is not None and self.max_row_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(f"max_row_bytes: expected a multiple of {ROW_ALIGNMENT_BYTES}, got {self.max_row_bytes}")
        if self.expert_alignment > MAX_ALIGNMENT:
            raise ValueError(f"expert_alignment: expected at most {MAX_ALIGNMENT}, got {self.expert_alignment}")
        if self.max_rows_per_node is not None and self.max_tokens_per_rank is None:
            raise ValueError(
                f"max_rows_per_node: expected None without max_tokens_per_rank, got {self.max_rows_per_node}"
            )
        if self.rail_chunks is not None and self.rail_chunks > MAX_RAIL_CHUNKS:
            raise ValueError(f"rail_chunks: expected at most {MAX_RAIL_CHUNKS}, got {self.rail_chunks}")
        _check_timeout(self.timeout_s)
        if self.layout in [layout.value for layout in DispatchLayout]:
            object.__setattr__(self, "layout", DispatchLayout(self.layout))
        _check_mode_and_layout(self.mode, self.layout)
        if self.ids_as_given is not False and (
            self.ids_as_given is not True or self.layout is not DispatchLayout.TOKEN_MAJOR
        ):
            raise ValueError(
                f"ids_as_given: expected False, or True with layout=TOKEN_MAJOR, got {self.ids_as_given!r}"
            )
        if self.mode == "ll":
            self._check_low_latency()
        elif self.shrink is not False:
            raise ValueError(f'shrink: expected False in mode="{self.mode}", got {self.shrink!r}')

    @property
    def resolved_layout(self) -> DispatchLayout:
        """The layout that dispatch returns: `layout`, or the mode's default."""
        if self.layout is None:
            return DispatchLayout.FLAT if self.mode == "ht" else DispatchLayout.EXPERT_MAJOR
        return DispatchLayout(self.layout)

    def _check_low_latency(self) -> None:
        if not isinstance(self.shrink, bool):
            raise ValueError(f"shrink: expected True or False, got {self.shrink!r}")
        if self.max_tokens_per_rank is None or self.max_tokens_per_rank > MAX_LL_TOKENS:
            raise ValueError(
                f'max_tokens_per_rank: expected 1 to {MAX_LL_TOKENS} in mode="ll", got {self.max_tokens_per_rank}'
            )
        if self.num_experts > MAX_LL_EXPERTS:
            raise ValueError(f'num_experts: expected at most {MAX_LL_EXPERTS} in mode="ll", got {self.num_experts}')
        if self.expert_alignment != 1:
            raise ValueError(f'expert_alignment: expected 1 in mode="ll", got {self.expert_alignment}')
        for name in (*_OVER_NODES, *SMS_FIELDS):
            if getattr(self, name) is not None:
                raise ValueError(f'{name}: expected None in mode="ll", got {getattr(self, name)}')

    def agreement_hash(self) -> int:
        """Returns a number below 2**63. Two ranks have equal numbers if they agree on every field that must agree."""
        text = json.dumps(self._agreed_fields(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def describe(self) -> str:
        """Returns the fields on which all ranks must agree, on one line, for messages."""
        return ", ".join(f"{name}={value}" for name, value in self._agreed_fields().items())

    def _agreed_fields(self) -> dict[str, int | str | None]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in _LOCAL_FIELDS]
        return {name: self.resolved_layout.name if name == "layout" else getattr(self, name) for name in names}


def _check_at_least(least: int, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")


def _check_timeout(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s: expected a number of seconds above 0, at most {MAX_TIMEOUT_S:g}, got {value!r}")


def _check_mode_and_layout(mode: object, layout: object) -> None:
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if layout is not None and not isinstance(layout, DispatchLayout):
        names = ", ".join(known.value for known in DispatchLayout)
        raise ValueError(f"layout: expected a DispatchLayout, one of {names}, or None, got {layout!r}")
    if layout is not None and (layout is DispatchLayout.EXPERT_MAJOR) != (mode == "ll"):
        served = "EXPERT_MAJOR" if mode == "ll" else "FLAT or TOKEN_MAJOR"
        raise ValueError(f'layout: expected {served} in mode="{mode}", got {layout.name}')
