"""Types of the extension: csrc/common/api.h documents each argument. Fields that are not given are 0.

Addresses and streams are integers. Enums are those of csrc/common/layout.h and api.h."""

from collections.abc import Sequence
from enum import IntEnum

max_ranks: int
max_topk: int
max_row_bytes: int
max_tokens: int
max_keys: int
row_align: int
num_totals: int
scale_block: int
state_bytes: int
waited_offset: int
collective_control_bytes: int
device_control_bytes: int
staging_block: int
max_ctas: int
max_channels: int
small_bytes: int
stream_words_bytes: int
stream_words_shape: tuple[int, int, int]
fault_offset: int
max_blocks: int
requests_bytes: int
call_ring_bytes: int
piece_fields: tuple[str, ...]
"""Names of PieceHeader's first words, by the index that a fault gives."""
header_fields: tuple[str, ...]
"""Names of Header's words, by the index that a fault gives."""

class Op(IntEnum):
    DISPATCH = ...
    CACHED_DISPATCH = ...
    COMBINE = ...

class Layout(IntEnum):
    FLAT = ...
    TOKEN_MAJOR = ...

class Pool(IntEnum):
    DISPATCH = ...
    COMBINE = ...

class Step(IntEnum):
    NONE = ...
    PLAN = ...
    NOTIFY = ...
    DISPATCH_SEND = ...
    DISPATCH_RECV = ...
    COMBINE_SEND = ...
    COMBINE_RECV = ...
    PACK = ...
    COMBINE_ADD = ...
    ALL_GATHER = ...
    REDUCE_SCATTER = ...
    LL_DISPATCH_SEND = ...
    LL_DISPATCH_RECV = ...
    LL_COMBINE_SEND = ...
    LL_COMBINE_RECV = ...
    SEND = ...
    RECEIVE = ...

class FaultCode(IntEnum):
    NONE = ...
    TIMEOUT = ...
    ABORTED = ...
    DISAGREE = ...
    BAD_IDS = ...
    BAD_DATA = ...
    TOO_SMALL = ...
    BAD_HANDLE = ...
    MASKED = ...

class Total(IntEnum):
    SLOTS = ...
    ROWS = ...
    MAX_ROWS = ...
    MAX_SENT = ...

class Element(IntEnum):
    FLOAT32 = ...
    BFLOAT16 = ...
    FLOAT16 = ...
    FLOAT64 = ...

def control_bytes(ranks: int, experts: int) -> int: ...
def meta_layout(ranks: int, experts: int) -> MetaLayout: ...
def block_count_words(num_tokens: int, ranks: int, experts: int) -> int: ...
def slot_bytes(row_bytes: int, scale_bytes: int, weight_bytes: int, topk: int) -> int: ...
def sent_slot_bytes(row_bytes: int, scale_bytes: int, weight_bytes: int, topk: int) -> int: ...
def partial_bytes(row_bytes: int, weight_bytes: int, topk: int) -> int: ...
def e4m3(magnitude: float, scale: float) -> int:
    """The seven bits that stand for magnitude / scale, by the arithmetic of GPUs; for tests."""

class MetaLayout:
    """The first int32 word of each part of a handle's routing metadata, and how many words there are in all."""

    rank_prefix: int
    rank_count: int
    expert_count: int
    send_base: int
    combine_base: int
    recv_offset: int
    src_tokens: int
    token_base: int
    flat_base: int
    expert_offset: int
    expert_rows: int
    send_chunk_end: int
    recv_chunk_end: int
    max_rows: int
    words: int
    def __init__(
        self,
        *,
        rank_prefix: int = ...,
        rank_count: int = ...,
        expert_count: int = ...,
        send_base: int = ...,
        combine_base: int = ...,
        recv_offset: int = ...,
        src_tokens: int = ...,
        token_base: int = ...,
        flat_base: int = ...,
        expert_offset: int = ...,
        expert_rows: int = ...,
        send_chunk_end: int = ...,
        recv_chunk_end: int = ...,
        max_rows: int = ...,
        words: int = ...,
    ) -> None: ...

class Comm:
    rank: int
    num_ranks: int
    num_experts: int
    gate: int
    plain: int
    timeout_ns: int
    state: int
    board: int
    def __init__(
        self,
        *,
        rank: int = ...,
        num_ranks: int = ...,
        num_experts: int = ...,
        gate: int = ...,
        plain: int = ...,
        timeout_ns: int = ...,
        state: int = ...,
        board: int = ...,
    ) -> None: ...
    def set_control(self, ranks: Sequence[int]) -> None: ...
    def set_pool(self, pool: int, ranks: Sequence[int], nbytes: int) -> None: ...

class Routing:
    num_tokens: int
    topk: int
    layout: int
    alignment: int
    topk_ids: int
    send_pos: int
    pair_pos: int
    meta: int
    recv_rows: int
    slots: int
    def __init__(
        self,
        *,
        num_tokens: int = ...,
        topk: int = ...,
        layout: int = ...,
        alignment: int = ...,
        topk_ids: int = ...,
        send_pos: int = ...,
        pair_pos: int = ...,
        meta: int = ...,
        recv_rows: int = ...,
        slots: int = ...,
    ) -> None: ...
    def lies_at(self, topk_ids: int, plan: int, recv_rows: int) -> bool: ...

class Header:
    op: int
    row_bytes: int
    scale_bytes: int
    weight_bytes: int
    topk: int
    dtype: int
    layout: int
    config_hash: int
    num_tokens: int
    def __init__(
        self,
        *,
        op: int = ...,
        row_bytes: int = ...,
        scale_bytes: int = ...,
        weight_bytes: int = ...,
        topk: int = ...,
        dtype: int = ...,
        layout: int = ...,
        config_hash: int = ...,
        num_tokens: int = ...,
    ) -> None: ...

class PlanArgs:
    comm: Comm
    routing: Routing
    ids: int
    block_counts: int
    id_bytes: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        routing: Routing = ...,
        ids: int = ...,
        block_counts: int = ...,
        id_bytes: int = ...,
        stream: int = ...,
    ) -> None: ...

class NotifyArgs:
    comm: Comm
    routing: Routing
    header: Header
    block_counts: int
    ticket: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        routing: Routing = ...,
        header: Header = ...,
        block_counts: int = ...,
        ticket: int = ...,
        stream: int = ...,
    ) -> None: ...

class DispatchSendArgs:
    comm: Comm
    routing: Routing
    header: Header
    x: int
    x_stride: int
    scales: int
    scale_stride: int
    weights: int
    num_sms: int
    optimistic: int
    quantize: int
    element: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        routing: Routing = ...,
        header: Header = ...,
        x: int = ...,
        x_stride: int = ...,
        scales: int = ...,
        scale_stride: int = ...,
        weights: int = ...,
        num_sms: int = ...,
        optimistic: int = ...,
        quantize: int = ...,
        element: int = ...,
        stream: int = ...,
    ) -> None: ...

class WaitForSenderArgs:
    comm: Comm
    step: int
    fresh: int
    stream: int
    def __init__(self, *, comm: Comm = ..., step: int = ..., fresh: int = ..., stream: int = ...) -> None: ...

class DispatchRecvArgs:
    comm: Comm
    routing: Routing
    header: Header
    tokens: int
    scales: int
    weights: int
    topk_ids: int
    row_expert_ids: int
    expert_count: int
    expert_offset: int
    overflow: int
    capacity: int
    num_sms: int
    fresh: int
    optimistic: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        routing: Routing = ...,
        header: Header = ...,
        tokens: int = ...,
        scales: int = ...,
        weights: int = ...,
        topk_ids: int = ...,
        row_expert_ids: int = ...,
        expert_count: int = ...,
        expert_offset: int = ...,
        overflow: int = ...,
        capacity: int = ...,
        num_sms: int = ...,
        fresh: int = ...,
        optimistic: int = ...,
        stream: int = ...,
    ) -> None: ...

class CombineSendArgs:
    comm: Comm
    routing: Routing
    header: Header
    y: int
    rows: int
    weights: int
    extra: int
    hidden: int
    element: int
    num_sms: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        routing: Routing = ...,
        header: Header = ...,
        y: int = ...,
        rows: int = ...,
        weights: int = ...,
        extra: int = ...,
        hidden: int = ...,
        element: int = ...,
        num_sms: int = ...,
        stream: int = ...,
    ) -> None: ...

class CombineRecvArgs:
    comm: Comm
    routing: Routing
    header: Header
    out: int
    bias: int
    extra: int
    hidden: int
    element: int
    num_sms: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        routing: Routing = ...,
        header: Header = ...,
        out: int = ...,
        bias: int = ...,
        extra: int = ...,
        hidden: int = ...,
        element: int = ...,
        num_sms: int = ...,
        stream: int = ...,
    ) -> None: ...

class WeightGradArgs:
    y: int
    rows: int
    factors: int
    dots: int
    num_rows: int
    hidden: int
    element: int
    stream: int
    def __init__(
        self,
        *,
        y: int = ...,
        rows: int = ...,
        factors: int = ...,
        dots: int = ...,
        num_rows: int = ...,
        hidden: int = ...,
        element: int = ...,
        stream: int = ...,
    ) -> None: ...

class QuantizeArgs:
    x: int
    x_stride: int
    rows: int
    scales: int
    num_rows: int
    hidden: int
    element: int
    stream: int
    def __init__(
        self,
        *,
        x: int = ...,
        x_stride: int = ...,
        rows: int = ...,
        scales: int = ...,
        num_rows: int = ...,
        hidden: int = ...,
        element: int = ...,
        stream: int = ...,
    ) -> None: ...

class PackArgs:
    comm: Comm
    x: int
    x_stride: int
    row_bytes: int
    rows: int
    weights: int
    weight_bytes: int
    packed_weights: int
    scales: int
    scale_stride: int
    scale_bytes: int
    packed_scales: int
    ids: int
    packed_ids: int
    rail_rows: int
    num_rows: int
    topk: int
    num_tokens: int
    num_nodes: int
    num_sms: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        x: int = ...,
        x_stride: int = ...,
        row_bytes: int = ...,
        rows: int = ...,
        weights: int = ...,
        weight_bytes: int = ...,
        packed_weights: int = ...,
        scales: int = ...,
        scale_stride: int = ...,
        scale_bytes: int = ...,
        packed_scales: int = ...,
        ids: int = ...,
        packed_ids: int = ...,
        rail_rows: int = ...,
        num_rows: int = ...,
        topk: int = ...,
        num_tokens: int = ...,
        num_nodes: int = ...,
        num_sms: int = ...,
        stream: int = ...,
    ) -> None: ...

class CombineAddArgs:
    comm: Comm
    own: int
    landed: int
    rail_rows: int
    bias: int
    out: int
    own_extra: int
    landed_extra: int
    extra_out: int
    hidden: int
    num_rows: int
    topk: int
    element: int
    num_tokens: int
    num_nodes: int
    node: int
    num_sms: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        own: int = ...,
        landed: int = ...,
        rail_rows: int = ...,
        bias: int = ...,
        out: int = ...,
        own_extra: int = ...,
        landed_extra: int = ...,
        extra_out: int = ...,
        hidden: int = ...,
        num_rows: int = ...,
        topk: int = ...,
        element: int = ...,
        num_tokens: int = ...,
        num_nodes: int = ...,
        node: int = ...,
        num_sms: int = ...,
        stream: int = ...,
    ) -> None: ...

class AddCountsArgs:
    sums: int
    counts: int
    row_stride: int
    num_rows: int
    num_columns: int
    stream: int
    def __init__(
        self,
        *,
        sums: int = ...,
        counts: int = ...,
        row_stride: int = ...,
        num_rows: int = ...,
        num_columns: int = ...,
        stream: int = ...,
    ) -> None: ...

class CollectiveOp(IntEnum):
    ALL_GATHER = ...
    REDUCE_SCATTER = ...

class Piece:
    """csrc/common/collectives.h, as the two classes that follow."""

    bytes: int
    block: int
    num_blocks: int
    blocks: int
    block_bytes: int
    def __init__(
        self,
        *,
        bytes: int = ...,
        block: int = ...,
        num_blocks: int = ...,
        blocks: int = ...,
        block_bytes: int = ...,
    ) -> None: ...
    def set_offset(self, ranks: Sequence[int]) -> None: ...

class CpuAllGatherArgs:
    comm: Comm
    piece: Piece
    input: int
    def __init__(self, *, comm: Comm = ..., piece: Piece = ..., input: int = ...) -> None: ...
    def set_outputs(self, ranks: Sequence[int]) -> None: ...

max_message_channels: int
lane_bytes: int

def message_memory_bytes(num_ranks: int, num_channels: int) -> int: ...

class Message:
    peer: int
    channel: int
    receives: int
    data: int
    bytes: int
    dtype: int
    def __init__(
        self,
        *,
        peer: int = ...,
        channel: int = ...,
        receives: int = ...,
        data: int = ...,
        bytes: int = ...,
        dtype: int = ...,
    ) -> None: ...

def device_message_memory_bytes(num_ranks: int, num_channels: int) -> int: ...

class DeviceMessageArgs:
    comm: Comm
    message: Message
    stream: int
    def __init__(self, *, comm: Comm = ..., message: Message = ..., stream: int = ...) -> None: ...

class CpuMessages:
    def __init__(self, comm: Comm, memory: Sequence[int], num_channels: int) -> None: ...
    def post(self, message: Message) -> int: ...
    def is_over(self, ticket: int) -> bool: ...
    def is_done(self, ticket: int) -> bool: ...
    def wait(self, tickets: Sequence[int], limit_ns: int, timeout_ns: int) -> int:
        """0: all are done. 1: one has failed. 3: the limit has passed."""

    def wait_for_sends(self, timeout_ns: int) -> int: ...
    def close(self) -> None: ...

class CpuReduceScatterArgs:
    comm: Comm
    piece: Piece
    output: int
    scale: float
    element: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        piece: Piece = ...,
        output: int = ...,
        scale: float = ...,
        element: int = ...,
    ) -> None: ...
    def set_inputs(self, ranks: Sequence[int]) -> None: ...

class AllGatherArgs:
    comm: Comm
    input: int
    bytes: int
    staging: int
    place: int
    block: int
    num_ctas: int
    captured: int
    number: int
    begun: int
    finished: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        input: int = ...,
        bytes: int = ...,
        staging: int = ...,
        place: int = ...,
        block: int = ...,
        num_ctas: int = ...,
        captured: int = ...,
        number: int = ...,
        begun: int = ...,
        finished: int = ...,
        stream: int = ...,
    ) -> None: ...
    def set_targets(self, ranks: Sequence[int]) -> None: ...
    def set_stream_words(self, ranks: Sequence[int]) -> None: ...
    def set_outputs(self, ranks: Sequence[int]) -> None: ...

class ReduceScatterArgs:
    comm: Comm
    output: int
    bytes: int
    scale: float
    element: int
    num_ctas: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        output: int = ...,
        bytes: int = ...,
        scale: float = ...,
        element: int = ...,
        num_ctas: int = ...,
        stream: int = ...,
    ) -> None: ...
    def set_inputs(self, ranks: Sequence[int]) -> None: ...
    def set_slots(self, ranks: Sequence[int]) -> None: ...

class SmallExchangeArgs:
    comm: Comm
    bytes: int
    scale: float
    element: int
    num_ctas: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        bytes: int = ...,
        scale: float = ...,
        element: int = ...,
        num_ctas: int = ...,
        stream: int = ...,
    ) -> None: ...
    def set_words(self, ranks: Sequence[int]) -> None: ...
    def set_inputs(self, ranks: Sequence[int]) -> None: ...
    def set_outputs(self, ranks: Sequence[int]) -> None: ...

def small_words_bytes(ranks: int) -> int: ...
def channel_slots_bytes(ranks: int, channels: int) -> int: ...

ll_max_tokens: int
ll_max_experts: int
ll_few_pairs: int
ll_logfmt_group: int
ll_state_bytes: int
ll_mask_offset: int
ll_epoch_offset: int
ll_unsignalled_offset: int
ll_header_fields: tuple[str, ...]

class LlPhase(IntEnum):
    SEND = ...
    RECEIVE = ...

class LlFormat(IntEnum):
    PLAIN = ...
    E4M3 = ...
    E4M3_POW2 = ...
    E4M3_UE8M0 = ...
    LOGFMT = ...

class LlShape:
    max_tokens: int
    max_topk: int
    slot_bytes: int
    def __init__(
        self,
        *,
        max_tokens: int = ...,
        max_topk: int = ...,
        slot_bytes: int = ...,
    ) -> None: ...

class LlHeader:
    row_bytes: int
    scale_bytes: int
    topk: int
    dtype: int
    format: int
    max_tokens: int
    weight_bytes: int
    config_hash: int
    num_tokens: int
    def __init__(
        self,
        *,
        row_bytes: int = ...,
        scale_bytes: int = ...,
        topk: int = ...,
        dtype: int = ...,
        format: int = ...,
        max_tokens: int = ...,
        weight_bytes: int = ...,
        config_hash: int = ...,
        num_tokens: int = ...,
    ) -> None: ...

class LlOperation:
    comm: Comm
    shape: LlShape
    header: LlHeader
    phases: int
    slot: int
    shrink: int
    num_sms: int
    state: int
    wait_cost: int
    stream: int
    def __init__(
        self,
        *,
        comm: Comm = ...,
        shape: LlShape = ...,
        header: LlHeader = ...,
        phases: int = ...,
        slot: int = ...,
        shrink: int = ...,
        num_sms: int = ...,
        state: int = ...,
        wait_cost: int = ...,
        stream: int = ...,
    ) -> None: ...

class LlDispatchArgs:
    op: LlOperation
    x: int
    x_stride: int
    ids: int
    topk_ids: int
    id_bytes: int
    element: int
    tokens: int
    scales: int
    plan: int
    expert_count: int
    expert_offset: int
    cumulative: int
    def __init__(
        self,
        *,
        op: LlOperation = ...,
        x: int = ...,
        x_stride: int = ...,
        ids: int = ...,
        topk_ids: int = ...,
        id_bytes: int = ...,
        element: int = ...,
        tokens: int = ...,
        scales: int = ...,
        plan: int = ...,
        expert_count: int = ...,
        expert_offset: int = ...,
        cumulative: int = ...,
    ) -> None: ...

class LlCombineArgs:
    op: LlOperation
    y: int
    ids: int
    weights: int
    plan: int
    hidden: int
    id_bytes: int
    element: int
    out: int
    bias: int
    def __init__(
        self,
        *,
        op: LlOperation = ...,
        y: int = ...,
        ids: int = ...,
        weights: int = ...,
        plan: int = ...,
        hidden: int = ...,
        id_bytes: int = ...,
        element: int = ...,
        out: int = ...,
        bias: int = ...,
    ) -> None: ...

class LlPlanLayout:
    layout_range: int
    src_tokens: int
    src_info: int
    rows: int
    words: int
    def __init__(
        self,
        *,
        layout_range: int = ...,
        src_tokens: int = ...,
        src_info: int = ...,
        rows: int = ...,
        words: int = ...,
    ) -> None: ...

def ll_slot_bytes(max_row_bytes: int, hidden: int, max_topk: int, /) -> int: ...
def ll_block_bytes(ranks: int, shape: LlShape, /) -> int: ...
def ll_plan_layout(ranks: int, local_experts: int, max_tokens: int, topk: int, /) -> LlPlanLayout: ...

class _Kernels:
    """A device's kernel table; CPU kernels run to their end, CUDA kernels are enqueued."""

    def plan(self, args: PlanArgs) -> None: ...
    def notify(self, args: NotifyArgs) -> None: ...
    def dispatch_send(self, args: DispatchSendArgs) -> None: ...
    def wait_for_sender(self, args: WaitForSenderArgs) -> None: ...
    def dispatch_recv(self, args: DispatchRecvArgs) -> None: ...
    def combine_send(self, args: CombineSendArgs) -> None: ...
    def combine_recv(self, args: CombineRecvArgs) -> None: ...
    def dispatch(self, send: DispatchSendArgs, recv: DispatchRecvArgs) -> None: ...
    def combine(self, send: CombineSendArgs, recv: CombineRecvArgs) -> None: ...
    def weight_grad(self, args: WeightGradArgs) -> None: ...
    def quantize(self, args: QuantizeArgs) -> None: ...
    def pack(self, args: PackArgs) -> None: ...
    def combine_add(self, args: CombineAddArgs) -> None: ...
    def add_counts(self, args: AddCountsArgs) -> None: ...
    def ll_dispatch(self, args: LlDispatchArgs) -> None: ...
    def ll_combine(self, args: LlCombineArgs) -> None: ...
    def all_gather(self, args: AllGatherArgs | CpuAllGatherArgs) -> None: ...
    def reduce_scatter(self, args: ReduceScatterArgs | CpuReduceScatterArgs) -> None: ...
    def small_exchange(self, args: SmallExchangeArgs) -> None:
        """On GPUs only."""

    def send_message(self, args: DeviceMessageArgs) -> None:
        """On GPUs only, as are the next two."""

    def receive_message(self, args: DeviceMessageArgs) -> None: ...
    def load_message_kernels(self) -> None: ...

cpu: _Kernels
cuda: _Kernels
"""Absent from a build without CUDA, as are the next two."""
cuda_archs: list[int]
"""The compute capabilities that the kernels were compiled for, such as 80 and 90."""
cuda_version: int
"""Of the compiler, such as 13000."""

class WireArgs:
    """csrc/common/wire.h. This class and the next, and their functions: absent from a build without CUDA."""

    kind: int
    num_sms: int
    keep: int
    seed: int
    chunk_bytes: int
    bytes: int
    failed: int
    stream: int
    def __init__(
        self,
        *,
        kind: int = ...,
        num_sms: int = ...,
        keep: int = ...,
        seed: int = ...,
        chunk_bytes: int = ...,
        bytes: int = ...,
        failed: int = ...,
        stream: int = ...,
    ) -> None: ...
    def set_pairs(self, sources: Sequence[int], destinations: Sequence[int]) -> None: ...

class HoldArgs:
    nanoseconds: int
    num_sms: int
    stop: int
    stream: int
    def __init__(
        self,
        *,
        nanoseconds: int = ...,
        num_sms: int = ...,
        stop: int = ...,
        stream: int = ...,
    ) -> None: ...

def wire(args: WireArgs) -> None: ...
def hold(args: HoldArgs) -> None: ...
def board_bytes(local_experts: int) -> int: ...
def board_fault(address: int) -> tuple[int, int, int, int, int, int] | None: ...
def board_abort(address: int) -> tuple[int, str] | None: ...
def abort_board(address: int, rank: int, reason: str) -> None: ...
def list_board(address: int) -> None: ...
def unlist_board(address: int) -> None: ...
def announce(text: str) -> None: ...
def board_activity(address: int) -> str: ...
def wait_ticket(address: int, ticket: int, timeout_ns: int) -> int: ...
def place_word(block: int, offset: int) -> int: ...
def fault_board(address: int, code: int, step: int, peer: int, expected: int, seen: int) -> None: ...
def post_request(requests: int, number: int, nbytes: int, uses: int) -> None:
    """uses: address of uint64 ``[max_blocks]``, how often each block has been handed out."""

def release_block(requests: int, block: int, uses: int) -> None: ...
def dlpack_bytes(address: int, bytes: int, device: int, owner: object) -> object: ...
def release_dead_block(requests: int, block: int, uses: int, process: int, reference: object) -> None: ...
def read_request(requests: int, number: int) -> tuple[int, int]:
    """Bytes, and a bit for each free block."""

def were_free(
    requests: Sequence[int], block: int, uses: int, number: int, board: int, timeout_ns: int
) -> tuple[bool, int]:
    """Whether all ranks with these requests had the block free at that number; the first that did not say, or -1."""

def post_call(
    rings: int, num_ranks: int, rank: int, number: int, nbytes: int, element: int, place: int
) -> tuple[int, int, int, int] | None:
    """Posts this rank's call; how a peer's differs: (peer, field, mine, theirs). rings: int64 ``[num_ranks]``."""

def wait_requests(requests: Sequence[int], number: int, board: int, timeout_ns: int) -> int: ...
def board_totals(address: int, local_experts: int, copy: int, expert_counts: int) -> list[int]: ...
def board_quiet(address: int) -> bool: ...
def set_reserved_pools(address: int, count: int) -> None: ...
def reserved_pools(address: int) -> int: ...
def gate_reached(address: int) -> int: ...
def open_gate(address: int) -> None: ...
def find_bad_id(
    ids: int, id_bytes: int, num_tokens: int, topk: int, num_experts: int
) -> tuple[int, int, int, bool] | None: ...
def register_host(address: int, nbytes: int, device: int) -> int: ...
def unregister_host(address: int) -> None: ...
def order_streams(later: int, earlier: int, device: int) -> None: ...
def make_stream(device: int) -> int: ...
def drop_stream(stream: int) -> None: ...
def stream_capture(stream: int, device: int) -> int: ...
