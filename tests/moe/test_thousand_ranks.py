"""The control path of one rank of 128 nodes x 8 ranks: what it computes, and that its tables stay small.

No other rank runs. Shapes: R ranks, N nodes of G ranks, T tokens per rank, K experts per token, E experts in all, C
chunks, M segments.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_plugin import _C, MoECommunicatorConfig
from ep_plugin.moe.across_nodes.dispatch import DispatchAcrossNodes
from ep_plugin.moe.across_nodes.nodes import Nodes
from ep_plugin.moe.across_nodes.routing import NodesRouting
from ep_plugin.moe.across_nodes.tables import places_of_ranks
from ep_plugin.moe.high_throughput.sms import KernelSms
from ep_plugin.moe.legs import Leg, chunk_bounds, num_chunks
from ep_plugin.runtime.streams import Streams
from ep_plugin.transport.topology import NodeMap, RankReport, build_node_map

N, G, LOCAL, T, K = 128, 8, 4, 4096, 8
R, E = N * G, N * G * LOCAL
C, M, ORIGINS = 4, 5, N - 1
HEADER = len(_C.header_fields)
FIRST = _C.message_head_words  # of the counts in a message
NODE, INDEX = 77, 5
ROOM = 64 + 8 * 8 + 8  # of a chunk's tokens for a node: the mean, 8 standard deviations and 8 more
FIRST_EXPERT_HERE = (NODE * G) * LOCAL  # where ranks are in order
MOST_BYTES = 64 << 20
MOST_SECONDS = 20.0  # of steps that take less than one on an idle core


class _Rails:
    """In place of the rails: the rank on every other node sends `counts(node)` rows in each chunk, of one expert."""

    def __init__(self, counts: Any) -> None:
        self.nodes = [(NODE + step) % N for step in range(1, N)]
        self._counts, self.sent = counts, {}

    def start(self, sends: Any, receives: Any, what: str) -> None:
        self.sent = {node: half[begin : begin + size].view(torch.int64).tolist() for node, half, begin, size in sends}
        for node, half, begin, size in receives:
            words = self.sent[node].copy()
            words[FIRST : FIRST + C] = [self._counts(node)] * C
            half[begin : begin + size].view(torch.int64).copy_(torch.tensor(words))

    bytes_sent = bytes_received = 0
    waited_ns: ClassVar[dict[int, int]] = {}

    def wait(self, under_way: None) -> None: ...


def a_map(interleaved: bool = False) -> NodeMap:
    """From what a thousand ranks report. interleaved: neighbouring ranks are on different nodes."""
    hosts = [rank % N if interleaved else rank // G for rank in range(R)]
    return build_node_map([RankReport(rank=rank, host=f"host{hosts[rank]}") for rank in range(R)])


def an_engine(node_map: NodeMap) -> Any:
    """The facts about one rank that Nodes and NodesRouting use. Notify, which needs other ranks, does nothing."""
    state = torch.zeros(_C.state_bytes, dtype=torch.uint8)
    board = torch.zeros(1 << 16, dtype=torch.uint8)  # plan misses the counts of notify there
    comm = _C.Comm(
        rank=INDEX,
        num_ranks=G,
        num_experts=G * LOCAL,
        gate=_C.Step.NONE,
        num_origins=ORIGINS,
        state=state.data_ptr(),
        board=board.data_ptr(),
    )
    kernels = SimpleNamespace(
        layout=_C.cpu.layout,
        plan=_C.cpu.plan,
        positions=_C.cpu.positions,
        place=_C.cpu.place,
        notify=lambda args: None,
        **dict.fromkeys(("dispatch_send", "dispatch_recv", "dispatch", "combine_send", "combine_recv", "combine")),
    )
    owner = type("Owner", (), {})()
    control = _C.HighThroughput(
        owner, {}, torch.device("cpu"), _C.CallLog(owner, {}), "communicator 0.0", board.data_ptr(), -1
    )
    control.set_facts(0, 1, G, G * LOCAL, T, 10**9)
    control.set_comm(comm)
    control.set_kernels(kernels)
    control.set_streams(0, None, None)
    return SimpleNamespace(
        control=control,
        node_map=node_map,
        node=NODE,
        size=R,
        index=INDEX,
        node_ranks=node_map.node_ranks(NODE),
        rank=node_map.node_ranks(NODE)[INDEX],
        name="communicator 0.0",
        node_size=G,
        local_experts=LOCAL,
        node_experts=LOCAL * G,
        meta_layout=_C.meta_layout(G, LOCAL * G, ORIGINS),
        state=state,
        num_totals=_C.num_totals + LOCAL,
        device=torch.device("cpu"),
        config=MoECommunicatorConfig(num_experts=E, hidden_size=64, topk=K, max_tokens_per_rank=T, rail_chunks=C),
        rails=_Rails(lambda node: node),
        check=lambda: None,
        layout=0,
        comm=comm,
        board=board,
        streams=Streams(),
        timeout_s=60.0,
        kernels=kernels,
        wait_totals=lambda ticket, segments: torch.zeros(segments, _C.num_totals + LOCAL, dtype=torch.int64),
        flat=True,
        dispatch_sms=lambda *sizes, **_: KernelSms(1, 1),
        enter=lambda chosen: None,
    )


@pytest.fixture(params=[False, True], ids=["in order", "interleaved"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return Nodes(an_engine(a_map(request.param)))


class _Made(TorchDispatchMode):
    """Notes how many elements the memory of each tensor has that operators return, but for views as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.dtype is not torch.uint8:
                self.sizes.add(each.untyped_storage().nbytes() // each.element_size())
        return result


def held_by(*owners: object) -> list[torch.Tensor]:
    return [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]


def test_tables_are_small_and_quick_to_make() -> None:
    began = time.monotonic()
    with _Made() as made:
        nodes = Nodes(an_engine(a_map()))
    assert max(made.sizes) <= R + N + E
    assert time.monotonic() - began < MOST_SECONDS
    assert (nodes.num_nodes, nodes.chunks, nodes.num_segments) == (N, C, M)
    tables = held_by(nodes)
    assert sorted(len(table) for table in tables) == [_C.waits_head_words + N, R, M * G * ORIGINS]
    assert sum(table.nbytes for table in tables) < 16 * E


def test_legs_meet_each_other_node_once_and_no_two_nodes_send_to_one(nodes: Nodes) -> None:
    assert nodes.chunks == num_chunks(N, nodes.engine.config, "cpu") == C
    assert nodes.legs[0] == Leg(0, NODE + 1, NODE - 1)
    for chunk, of_chunk in enumerate(nodes.of_chunks):
        for step, leg in enumerate(nodes.legs[of_chunk], start=1):
            assert (leg.chunk, (leg.to - NODE) % N, (NODE - leg.source) % N) == (chunk, step, step)


def test_output_order_is_that_of_ranks(nodes: Nodes) -> None:
    node_map, order = nodes.engine.node_map, nodes.order.tolist()
    assert sorted(order) == list(range(M * G * ORIGINS))
    found = []
    for place in order[: G + C * ORIGINS * G]:  # the others have no rows
        sender, origin = divmod(place, ORIGINS)
        segment, index = divmod(sender, G)
        node = NODE if segment == 0 else nodes.legs[origin].source
        found.append((node_map.node_ranks(node)[index], segment))
    assert found == sorted(found) and len(set(found)) == len(found)
    assert {rank for rank, _ in found} == set(range(R))


def test_every_rank_has_a_place(nodes: Nodes) -> None:
    node_map = nodes.engine.node_map
    places = places_of_ranks(node_map, torch.device("cpu")).tolist()
    assert [node_map.node_ranks(place // G)[place % G] for place in places] == list(range(R))


def test_one_message_of_counts_goes_to_each_other_node(nodes: Nodes) -> None:
    engine = nodes.engine
    header = _C.Header(**dict.fromkeys(_C.header_fields, 1) | {"num_tokens": T})
    words = FIRST + C * (1 + G + G * LOCAL)
    messages = nodes.messages()
    assert messages.shape == (2, N, words)
    messages[0] = torch.arange(N * words).view(N, words)
    messages[0, :, HEADER:FIRST] = 0
    messages[0, :, :HEADER] = torch.tensor([*[1] * (HEADER - 1), T])
    messages[0, :, FIRST : FIRST + C] = 2 * torch.arange(N).unsqueeze(1)
    sent, received = nodes.rows_of_legs(header, nodes.exchange_counts(messages, reads=True), padded=False)
    assert sent == [2 * leg.to for leg in nodes.legs]
    assert received == [leg.source for leg in nodes.legs]
    assert engine.rails.sent.keys() == set(range(N)) - {NODE}
    assert {len(words) for words in engine.rails.sent.values()} == {words}
    sources = [leg.source for leg in nodes.legs[:ORIGINS]]
    assert messages[1, sources, FIRST + C :].equal(messages[0, sources, FIRST + C :]), "the stand-in sends it back"
    rows = [ROOM] * len(nodes.legs)
    assert nodes.rows_of_legs(header, nodes.exchange_counts(messages, reads=True), padded=True) == (rows, rows)
    assert nodes.exchange_counts(messages, reads=False) is None


def test_messages_are_those_of_a_plain_count(nodes: Nodes) -> None:
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(3)).topk(K).indices
    ids[7, 2:] = -1
    call = DispatchAcrossNodes(nodes, torch.zeros(T, 8), ids, None, None, None, None, [], 0)
    call._messages, call._block_counts = nodes.messages(), torch.empty(1)
    none = [0] * len(nodes.legs)
    routing = NodesRouting.empty(nodes, torch.empty(T, K, dtype=torch.int32), none, none)
    began = time.monotonic()
    call._new_segments(routing, _C.Header(), False).lay_out(nodes.engine.control)
    assert time.monotonic() - began < MOST_SECONDS
    node_map, rows_at = nodes.engine.node_map, FIRST + C
    for chunk, (first, last) in enumerate(itertools.pairwise(chunk_bounds(T, C))):
        tokens = ids[first:last].tolist()
        for node in (0, NODE, N - 1):
            ranks = node_map.node_ranks(node)
            by_rank = [sum(any(e >= 0 and e // LOCAL == rank for e in token) for token in tokens) for rank in ranks]
            rows = sum(any(e >= 0 and e // LOCAL in ranks for e in token) for token in tokens)
            experts = torch.bincount(ids[first:last].flatten().clamp_min(-1) + 1, minlength=E + 1)[1:].view(R, LOCAL)
            message = call._messages[0, node]
            parts = message[rows_at:].view(C, -1)[chunk].tolist()
            assert message[FIRST + chunk] == rows
            assert parts == [*by_rank, *experts[list(ranks)].flatten().tolist()]


def a_routing(nodes: Nodes, seed: int) -> NodesRouting:
    """An ordinary number of rows: a token needs some 8 of 128 nodes, so a leg of a quarter has some 63."""
    generator = torch.Generator().manual_seed(seed)
    legs = [torch.randint(50, 75, (C * (N - 1),), generator=generator).tolist() for _ in range(2)]
    ids = torch.zeros(T, K, dtype=torch.int32)
    return NodesRouting.empty(nodes, ids, *legs)


def test_plan_has_room_for_each_segment_not_only_for_the_longest(nodes: Nodes) -> None:
    """Fewer tokens can be more blocks."""
    shorter, longer = (_C.block_count_words(tokens, G, G * LOCAL) for tokens in (4000, 4200))
    assert shorter > longer
    assert nodes.block_counts([4200, 0, 4000]).numel() == shorter


def test_a_handle_stays_small(nodes: Nodes) -> None:
    began = time.monotonic()
    routing = a_routing(nodes, 0)
    routing.make_recv_rows([tokens * 2 for tokens in routing.tokens])
    structs = [routing.segment(number) for number in range(nodes.num_segments)]
    assert time.monotonic() - began < MOST_SECONDS
    words = nodes.words_of(T, K, routing.received)
    assert words == len(routing.plan) == T * N + M * nodes.layout.words + sum(routing.tokens) * (2 * K + G)
    assert nodes.num_totals == _C.num_totals + LOCAL + 2 * C * (N - 1) + M
    held = held_by(nodes, routing)
    assert sum(tensor.nbytes for tensor in held) < MOST_BYTES
    assert {id(table) for table in held if table.numel() > T * N} == {id(routing.plan), id(routing.recv_rows)}
    assert max(tensor.numel() for tensor in held) < T * R
    assert M * nodes.layout.words < 16 * E, "meta has a few words for each rank and local expert, in each chunk"
    ends = routing.plan.data_ptr() + routing.plan.nbytes
    assert [struct.num_tokens for struct in structs] == routing.tokens
    assert structs[-1].pair_pos + 4 * K * structs[-1].num_tokens == ends


def of_segment(routing: NodesRouting, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids, send_pos and pair_pos of a segment."""
    struct, T_m = routing.segment(number), routing.tokens[number]
    begin = (struct.topk_ids - routing.plan.data_ptr()) // 4
    parts = routing.plan[begin : begin + T_m * (2 * K + G)].split([T_m * K, T_m * G, T_m * K])
    return parts[0].view(T_m, K), parts[1].view(T_m, G), parts[2].view(T_m, K)


def test_a_token_crosses_once_to_each_node_that_it_needs() -> None:
    nodes = Nodes(an_engine(a_map()))
    engine = nodes.engine
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(0)).topk(K).indices
    ids[5] = -1
    call = DispatchAcrossNodes(nodes, torch.zeros(T, 8), ids, None, None, None, None, [], 0)
    engine.kernels.notify = lambda args: call._begun[T * N :][: M * nodes.layout.words].zero_()  # no rows come
    began = time.monotonic()
    with _Made() as made:
        call._payload = call._make_payload()
        header = _C.Header(**dict.fromkeys(_C.header_fields, 1) | {"num_tokens": T})
        call._row_bytes = 16
        call._route(lambda op, tokens: header)
        routing = call._routing
        landed = routing.tokens[1]
        call._messages[1, :, FIRST + C :] = call._messages[0, :, FIRST + C :]
        of_landed = ids.int().repeat(2, 1)[:landed].contiguous()
        segments = call._segments
        segments.routing, segments.landed_ids = routing.struct, of_landed.data_ptr()
        segments.output, engine.kernels.dispatch_send = _C.DispatchRecvArgs(fresh=1), lambda args: None
        segments.send(engine.control, (1, 1), 1)
    assert time.monotonic() - began < MOST_SECONDS
    assert (
        max(made.sizes - {len(routing.plan), len(call._begun), 2 * N * nodes._message_words})
        <= (T + 1) * (N + 1)
        < R * R
    )
    expected = torch.full((T, N), -1)
    row = 0
    needs = [{expert // (G * LOCAL) for expert in token if expert >= 0} for token in ids.tolist()]
    bounds = chunk_bounds(T, C)
    for leg, sent in zip(nodes.legs, routing.sent, strict=True):
        begin = row
        for token in range(bounds[leg.chunk], bounds[leg.chunk + 1]):
            if leg.to in needs[token]:
                expected[token, leg.to] = row
                row += 1
        assert sent == row - begin
    assert routing.rail_rows.equal(expected.int())
    assert routing.topk_ids.equal(ids.int())
    here = ids.where(ids // (G * LOCAL) == NODE, FIRST_EXPERT_HERE - 1) - FIRST_EXPERT_HERE
    assert of_segment(routing, 0)[0].equal(here.int())
    assert of_segment(routing, 1)[0].equal(here.int().repeat(2, 1)[:landed])
    assert routing.tokens == [T, *[sum(leg.source for leg in nodes.legs) // C] * C]


def test_the_plan_kernel_counts_the_tokens_of_every_segment(nodes: Nodes) -> None:
    routing, generator = a_routing(nodes, 2), torch.Generator().manual_seed(2)
    began = time.monotonic()
    for number, tokens in enumerate(routing.tokens):
        ids = torch.rand(tokens, G * LOCAL, generator=generator).topk(K).indices.int()
        ids[torch.rand(tokens, K, generator=generator) < 0.5] = -1  # those of other nodes
        args = _C.PlanArgs(
            comm=nodes.engine.comm, routing=routing.segment(number), ids=ids.data_ptr(), id_bytes=ids.element_size()
        )
        _C.cpu.plan(args)
        planned, send_pos, pair_pos = of_segment(routing, number)
        chosen = torch.nn.functional.one_hot(ids.long() + 1, G * LOCAL + 1).sum(1)[:, 1:]  # [T_m, E_n], 0 or 1
        needed = chosen.view(tokens, G, LOCAL).amax(2)
        assert planned.equal(ids)
        assert send_pos.equal(torch.where(needed > 0, needed.cumsum(0) - 1, -1).int())
        before = (chosen.cumsum(0) - 1).gather(1, ids.long().clamp_min(0))
        assert pair_pos.equal(torch.where(ids < 0, -1, before).int())
        meta, at = routing.metas[number], nodes.layout
        assert meta[at.rank_count :][:G].equal(needed.sum(0).int())
        assert meta[at.expert_count :][: G * LOCAL].equal(chosen.sum(0).int())
    assert time.monotonic() - began < MOST_SECONDS


def test_sizes_with_a_capacity_are_known_before_dispatch(nodes: Nodes) -> None:
    """All legs together have room for a little more than 2 K rows of each token."""
    rows = T + C * (N - 1) * ROOM
    assert rows < T * (1 + 2.2 * K)
    assert nodes.plan_words(T, K, 1) == T * N + M * nodes.layout.words + rows * (2 * K + G)
    assert nodes.slots(1) == G * rows


@pytest.mark.parametrize("alignment", [1, 16])
def test_places_are_those_of_a_plain_count(nodes: Nodes, alignment: int) -> None:
    routing, at = a_routing(nodes, 1), nodes.layout
    generator = torch.Generator().manual_seed(alignment)
    pairs = torch.randint(0, 9, (M, G, ORIGINS, LOCAL), generator=generator, dtype=torch.int32)  # of each source
    slots = torch.randint(0, 30, (M, G, ORIGINS), generator=generator, dtype=torch.int32)
    pairs[3] = 0
    pairs[0, :, 1:] = slots[0, :, 1:] = 0  # segment 0 has one origin
    routing.plan.fill_(-7)
    for meta, rows, ends in zip(routing.metas, pairs, slots.cumsum(2, dtype=torch.int32), strict=True):
        meta[at.origin_rows : at.send_chunk_end] = rows.flatten()
        meta[at.origin_end : at.origin_rows] = ends.flatten()
    began = time.monotonic()
    rows = torch.full((T, N), -1, dtype=torch.int32)
    args = _C.PlaceArgs(
        comm=nodes.engine.comm,
        nodes=nodes.struct,
        metas=routing.metas.data_ptr(),
        messages=nodes.messages().zero_().data_ptr(),
        rail_rows=rows.data_ptr(),
        num_tokens=T,
        alignment=alignment,
    )
    _C.cpu.place(args)
    assert (rows == -1).all()
    assert time.monotonic() - began < MOST_SECONDS

    sources = [divmod(place, ORIGINS) for place in nodes.order.tolist()]
    base, token_base = torch.zeros_like(pairs), torch.zeros_like(slots)
    offsets, begin = [0], 0
    for expert in range(LOCAL):
        for (segment, index), origin in ((divmod(sender, G), origin) for sender, origin in sources):
            base[segment, index, origin, expert] = begin - int(pairs[segment, index, :origin, expert].sum())
            begin += int(pairs[segment, index, origin, expert])
        begin = -(-begin // alignment) * alignment
        offsets.append(begin)
    tokens = 0
    for (segment, index), origin in ((divmod(sender, G), origin) for sender, origin in sources):
        token_base[segment, index, origin] = tokens - int(slots[segment, index, :origin].sum())
        tokens += int(slots[segment, index, origin])
    for number, meta in enumerate(routing.metas):
        here = slice(1 if number == 0 else ORIGINS)  # segment 0 has one origin
        bases = meta[at.flat_base : at.expert_offset].view(G, ORIGINS, LOCAL)
        assert bases[:, here].equal(base[number][:, here])
        assert meta[at.expert_offset : at.expert_rows].tolist() == offsets
        assert meta[at.expert_rows : at.origin_end].equal(pairs.sum((0, 1, 2), dtype=torch.int32))
        token_bases = meta[at.token_base : at.token_rows].view(G, ORIGINS)
        assert token_bases[:, here].equal(token_base[number][:, here])
        assert meta[at.token_rows] == tokens
    assert (routing.plan[: T * N] == -7).all(), "place wrote outside of meta"
