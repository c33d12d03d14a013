"""The control path of one rank of 128 nodes x 8 ranks: what it computes, and that its tables stay small.

No other rank runs. Shapes: R ranks, N nodes of G ranks, T tokens per rank, K experts per token, E experts in all, S
sources, M segments.
"""

from __future__ import annotations

import contextlib
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
from ep_plugin.moe.high_throughput.sms import KernelSms
from ep_plugin.moe.legs import Leg, num_chunks
from ep_plugin.runtime.streams import Streams
from ep_plugin.transport.topology import NodeMap, RankReport, build_node_map

N, G, LOCAL, T, K = 128, 8, 4, 4096, 8
R, E = N * G, N * G * LOCAL
NODE, INDEX = 77, 5
FIRST_EXPERT_HERE = (NODE * G) * LOCAL  # where ranks are in order
MOST_BYTES = 64 << 20
MOST_SECONDS = 20.0  # of steps that take less than one on an idle core


class _Rails:
    """In place of the rails: the rank on every other node sends `counts(node)` rows, of one expert."""

    def __init__(self, counts: Any) -> None:
        self.nodes = [(NODE + step) % N for step in range(1, N)]
        self._counts, self.sent = counts, {}

    def start(self, sends: Any, receives: Any, what: str) -> None:
        if what == "expert ids":
            for _, tensor in receives:
                tensor.view(torch.int32).fill_(FIRST_EXPERT_HERE)
            return
        self.sent = {node: tensor.view(torch.int64).tolist() for node, tensor in sends}
        for node, tensor in receives:
            words = self.sent[node].copy()
            words[-1] = self._counts(node)
            tensor.view(torch.int64).copy_(torch.tensor(words))

    bytes_sent = bytes_received = 0
    waited_ns: ClassVar[dict[int, int]] = {}

    def wait(self, under_way: None) -> None: ...


def a_map(interleaved: bool = False) -> NodeMap:
    """From what a thousand ranks report. interleaved: neighbouring ranks are on different nodes."""
    hosts = [rank % N if interleaved else rank // G for rank in range(R)]
    return build_node_map([RankReport(rank=rank, host=f"host{hosts[rank]}") for rank in range(R)])


def an_engine(node_map: NodeMap) -> Any:
    """The facts about one rank that Nodes and NodesRouting use."""
    return SimpleNamespace(
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
        meta_layout=_C.meta_layout(G, LOCAL * G),
        state=torch.zeros(_C.state_bytes, dtype=torch.uint8),
        num_totals=_C.num_totals + LOCAL,
        device=torch.device("cpu"),
        config=MoECommunicatorConfig(num_experts=E, hidden_size=64, topk=K, max_tokens_per_rank=T),
        rails=_Rails(lambda node: 3 * node),
        check=lambda: None,
        on_rail=contextlib.nullcontext,
        layout=0,
        comm=_C.Comm(),
        streams=Streams(),
        timeout_s=60.0,
        kernels=SimpleNamespace(pack=lambda args: None),
        dispatch_sms=lambda *sizes: KernelSms(1, 1),
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
    assert max(made.sizes) <= E + 2
    assert time.monotonic() - began < MOST_SECONDS
    assert (nodes.num_nodes, nodes.chunks, nodes.num_segments) == (N, 1, N)
    tables = held_by(nodes)
    assert sorted(len(table) for table in tables) == [R, E + 2, E + 2]
    assert sum(table.nbytes for table in tables) < 128 * E


def test_legs_meet_each_other_node_once_and_no_two_nodes_send_to_one(nodes: Nodes) -> None:
    assert nodes.chunks == num_chunks(N, None) == 1
    assert nodes.legs[0] == Leg(0, NODE + 1, NODE - 1)
    for step, leg in enumerate(nodes.legs, start=1):
        assert ((leg.to - NODE) % N, (NODE - leg.source) % N) == (step, step)


def test_output_order_is_that_of_ranks(nodes: Nodes) -> None:
    node_map, order = nodes.engine.node_map, nodes.order.tolist()
    assert sorted(order) == list(range(R))
    node_of_segment = {0: NODE} | {number: leg.source for number, leg in enumerate(nodes.legs, start=1)}
    ranks = [node_map.node_ranks(node_of_segment[source // G])[source % G] for source in order]
    assert ranks == list(range(R))


def test_expert_tables_name_node_and_place(nodes: Nodes) -> None:
    node_map = nodes.engine.node_map
    ids = torch.arange(-1, E + 1)
    of = [node_map.node_of(expert // LOCAL) for expert in range(E)]
    assert nodes.node_of[nodes.table_index(ids)].tolist() == [N, *of, N]
    mine = [rank * LOCAL + place for rank in node_map.node_ranks(NODE) for place in range(LOCAL)]
    local = [mine.index(expert) if node == NODE else -1 for expert, node in enumerate(of)]
    assert nodes.local_id[nodes.table_index(ids)].tolist() == [-1, *local, G * LOCAL]


def test_one_message_of_counts_goes_to_each_other_node(nodes: Nodes) -> None:
    engine = nodes.engine
    header = _C.Header(**dict.fromkeys(_C.header_fields, 1) | {"num_tokens": T})
    sent, received = nodes.exchange_counts(header, torch.tensor([[2 * node for node in range(N)]]))
    assert sent == [2 * leg.to for leg in nodes.legs]
    assert received == [3 * leg.source for leg in nodes.legs]
    assert engine.rails.sent.keys() == set(range(N)) - {NODE}
    assert {len(words) for words in engine.rails.sent.values()} == {len(_C.header_fields) + 1}


def a_routing(nodes: Nodes, seed: int) -> NodesRouting:
    """An ordinary number of rows: a token needs some 8 of 128 nodes, so a leg has some 250."""
    generator = torch.Generator().manual_seed(seed)
    legs = [torch.randint(200, 300, (N - 1,), generator=generator).tolist() for _ in range(2)]
    ids = torch.zeros(T, K, dtype=torch.int32)
    return NodesRouting.empty(nodes, ids, *legs)


def test_a_handle_stays_small(nodes: Nodes) -> None:
    began = time.monotonic()
    routing = a_routing(nodes, 0)
    routing.make_recv_rows([tokens * 2 for tokens in routing.tokens])
    structs = [routing.struct(number) for number in range(nodes.num_segments)]
    assert time.monotonic() - began < MOST_SECONDS
    words = nodes.words_of(T, K, routing.received)
    assert words == len(routing.plan) == T * N + N * nodes.layout.words + sum(routing.tokens) * (2 * K + G)
    assert nodes.num_totals == _C.num_totals + LOCAL + 2 * (N - 1) + N
    held = held_by(nodes, routing)
    assert sum(tensor.nbytes for tensor in held) < MOST_BYTES
    assert {id(table) for table in held if table.numel() > T * N} == {id(routing.plan), id(routing.recv_rows)}
    assert max(tensor.numel() for tensor in held) < T * R
    assert nodes.layout.words < 2 * R, "meta grows with the node, not with the group"
    ends = routing.plan.data_ptr() + routing.plan.nbytes
    assert [struct.num_tokens for struct in structs] == routing.tokens
    assert structs[-1].pair_pos + 4 * K * structs[-1].num_tokens == ends


def test_a_token_crosses_once_to_each_node_that_it_needs() -> None:
    nodes = Nodes(an_engine(a_map()))
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(0)).topk(K).indices
    ids[5] = -1
    call = DispatchAcrossNodes(nodes, torch.zeros(T, 8), ids, None, None, None, None, [], 0)
    began = time.monotonic()
    with _Made() as made:
        call._row_bytes = 32
        routing = call._route(_C.Header(**dict.fromkeys(_C.header_fields, 1) | {"num_tokens": T}))
        call._take_ids(routing, call._start_ids(routing))
    assert time.monotonic() - began < MOST_SECONDS
    assert max(made.sizes - {len(routing.plan)}) <= (T + 1) * (N + 1) < R * R
    expected = torch.full((T, N), -1)
    row = 0
    needs = [{expert // (G * LOCAL) for expert in token if expert >= 0} for token in ids.tolist()]
    for leg, sent in zip(nodes.legs, routing.sent, strict=True):
        begin = row
        for token in range(T):
            if leg.to in needs[token]:
                expected[token, leg.to] = row
                row += 1
        assert sent == row - begin
    assert routing.rail_rows.equal(expected.int())
    here = ids.where(ids // (G * LOCAL) == NODE, FIRST_EXPERT_HERE - 1) - FIRST_EXPERT_HERE
    assert routing.ids(0).equal(here.int())
    assert not any(routing.ids(number).any() for number in range(1, N))
    assert [len(routing.ids(number)) for number in range(N)] == [T, *(3 * leg.source for leg in nodes.legs)]


def test_the_plan_kernel_counts_the_tokens_of_every_segment(nodes: Nodes) -> None:
    routing, generator = a_routing(nodes, 2), torch.Generator().manual_seed(2)
    comm = _C.Comm(
        rank=INDEX, num_ranks=G, num_experts=G * LOCAL, gate=_C.Step.NONE, state=nodes.engine.state.data_ptr()
    )
    began = time.monotonic()
    for number, tokens in enumerate(routing.tokens):
        ids = torch.rand(tokens, G * LOCAL, generator=generator).topk(K).indices.int()
        ids[torch.rand(tokens, K, generator=generator) < 0.5] = -1  # those of other nodes
        routing.ids(number).copy_(ids)
        args = _C.PlanArgs(comm=comm, routing=routing.struct(number), ids=routing.ids(number).data_ptr(), id_bytes=4)
        _C.cpu.plan(args)
        send_pos, pair_pos = routing._part(number, K, G), routing._part(number, K + G, K)
        chosen = torch.nn.functional.one_hot(ids.long() + 1, G * LOCAL + 1).sum(1)[:, 1:]  # [T_m, E_n], 0 or 1
        needed = chosen.view(tokens, G, LOCAL).amax(2)
        assert routing.ids(number).equal(ids)
        assert send_pos.equal(torch.where(needed > 0, needed.cumsum(0) - 1, -1).int())
        before = (chosen.cumsum(0) - 1).gather(1, ids.long().clamp_min(0))
        assert pair_pos.equal(torch.where(ids < 0, -1, before).int())
        meta, at = routing.metas[number], nodes.layout
        assert meta[at.rank_count :][:G].equal(needed.sum(0).int())
        assert meta[at.expert_count :][: G * LOCAL].equal(chosen.sum(0).int())
    assert time.monotonic() - began < MOST_SECONDS


def test_sizes_with_a_capacity_are_known_before_dispatch(nodes: Nodes) -> None:
    """Legs are as long as the most tokens of a rank, so memory grows with the nodes: a communicator says how much."""
    assert nodes.plan_words(T, K, 1) == T * N + N * nodes.layout.words + N * T * (2 * K + G)
    assert nodes.slots(1) == N * G * T


@pytest.mark.parametrize("alignment", [1, 16])
def test_places_are_those_of_a_plain_count(nodes: Nodes, alignment: int) -> None:
    routing, at = a_routing(nodes, 1), nodes.layout
    generator = torch.Generator().manual_seed(alignment)
    pairs = torch.randint(0, 9, (N, G, LOCAL), generator=generator, dtype=torch.int32)  # of each segment and source
    pairs[3] = 0
    slots = torch.randint(0, 30, (N, G), generator=generator, dtype=torch.int32)
    routing.plan.fill_(-7)
    for number in range(N):
        _write_own_places(routing.metas[number], at, pairs[number], slots[number], alignment)
    began = time.monotonic()
    with _Made() as made:
        routing.place(alignment)
    assert max(made.sizes - {len(routing.plan)}) <= N * G * LOCAL
    assert time.monotonic() - began < MOST_SECONDS

    sources = [divmod(source, G) for source in nodes.order.tolist()]
    base, token_base = torch.zeros_like(pairs), torch.zeros_like(slots)
    offsets, begin = [0], 0
    for expert in range(LOCAL):
        for segment, index in sources:
            base[segment, index, expert] = begin
            begin += int(pairs[segment, index, expert])
        begin = -(-begin // alignment) * alignment
        offsets.append(begin)
    tokens = 0
    for segment, index in sources:
        token_base[segment, index] = tokens
        tokens += int(slots[segment, index])
    for number, meta in enumerate(routing.metas):
        assert meta[at.flat_base :][: G * LOCAL].equal(base[number].view(-1))
        assert meta[at.expert_offset :][: LOCAL + 1].tolist() == offsets
        assert meta[at.expert_rows :][:LOCAL].equal(pairs.sum((0, 1), dtype=torch.int32))
        assert meta[at.token_base :][: G + 1].tolist() == [*token_base[number].tolist(), tokens]
    assert (routing.plan[: T * N] == -7).all(), "place() wrote outside of meta"


def _write_own_places(meta: torch.Tensor, at: Any, pairs: torch.Tensor, slots: torch.Tensor, alignment: int) -> None:
    """What notify writes for a segment by itself. pairs: ``[G, E_l]``; slots: ``[G]``."""
    begin = 0
    for expert in range(LOCAL):
        meta[at.expert_offset + expert] = begin
        for index in range(G):
            meta[at.flat_base + index * LOCAL + expert] = begin
            begin += int(pairs[index, expert])
        meta[at.expert_rows + expert] = pairs[:, expert].sum()
        begin = -(-begin // alignment) * alignment
    meta[at.expert_offset + LOCAL] = begin
    meta[at.recv_offset] = 0
    meta[at.recv_offset + 1 : at.recv_offset + G + 1] = slots.cumsum(0)
