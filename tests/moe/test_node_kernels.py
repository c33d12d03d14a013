"""The kernels of dispatch and combine over several nodes, against plain torch: quantise, place, pack and combine add.

The emulation of the CUDA kernels and tests/gpu run the same cases. Shapes: T tokens, N nodes, K experts per token.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from ep_plugin import _C, MoECommunicator
from ep_plugin.dtypes import ELEMENTS, QUANTIZABLE, num_scales, weight_dtype
from ep_plugin.moe.across_nodes.tables import places_of_ranks
from ep_plugin.moe.legs import chunk_bounds
from ep_plugin.moe.reference import reference_quantize
from ep_plugin.runtime.streams import current_stream
from ep_plugin.transport.topology import NodeMap
from tests.faults.fault_cases import finish, here, open_communicator
from tests.moe.moe_cases import named, on_ranks, same_bits
from tests.ranks import simt_asked

SMS = 3
POISON = 0xAB
GUARD = 2  # rows behind those that a kernel may write
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _on_plain_cpus() -> bool:
    """Kernels of CPUs take any width and float64. Those of GPUs take rows of a multiple of 16 bytes."""
    return here().type == "cpu" and not simt_asked(os.environ)


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(here())


def _poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=here())
    made.view(torch.uint8).fill_(POISON)
    return made


# -- quantise --------------------------------------------------------------------------------------------------------


def quantizes(rank: int, size: int) -> None:
    """Bits as dispatch makes them, of rows that lie apart, with zeros, infinities and NaN among them."""
    torch.manual_seed(1)
    kernels = open_communicator(size).engine.kernels
    widths = (16, 128, 144, 1040, 7168) + ((1, 130) if _on_plain_cpus() else ())
    for dtype, hidden, num_rows in itertools.product(QUANTIZABLE, widths, (0, 1, 19)):
        scale = 10.0 ** torch.arange(num_rows, device=here()).sub(9).unsqueeze(1)
        wide = (_random(num_rows, hidden + 16) * scale).to(dtype)
        for row, value in enumerate((0.0, torch.inf, torch.nan)):
            wide[row + 2 :, :: 40 + row] = value
        x = wide[:, :hidden]
        rows = _poisoned(num_rows, hidden, dtype=torch.float8_e4m3fn)
        scales = _poisoned(num_rows, int(num_scales(hidden)), dtype=torch.float32)
        kernels.quantize(
            _C.QuantizeArgs(
                x=x.data_ptr(),
                x_stride=wide.stride(0) * wide.element_size(),
                rows=rows.data_ptr(),
                scales=scales.data_ptr(),
                num_rows=num_rows,
                hidden=hidden,
                element=ELEMENTS[dtype],
                stream=current_stream(here()),
            )
        )
        with named(f"{num_rows} rows of {hidden} {dtype}"):
            expected_rows, expected_scales = reference_quantize(x.cpu())
            same_bits("rows", rows.cpu(), expected_rows)
            same_bits("scales", scales.cpu(), expected_scales)
    with pytest.raises(ValueError, match="element: expected float32, bfloat16 or float16, got 3"):
        kernels.quantize(_C.QuantizeArgs(element=_C.Element.FLOAT64))


# -- pack ------------------------------------------------------------------------------------------------------------


def _rail_rows(num_tokens: int, num_nodes: int, own: int | None = None) -> tuple[torch.Tensor, int]:
    """Places ``[T, N]`` in a buffer, node by node in token order, and how many there are. About half are -1."""
    goes = torch.rand(num_nodes, num_tokens) < 0.5
    if own is not None:
        goes[own] = False
    places = torch.where(goes, goes.flatten().cumsum(0).view(num_nodes, num_tokens) - 1, -1)
    return places.t().to(torch.int32).contiguous().to(here()), int(goes.sum())


def _pack(comm: MoECommunicator, places: torch.Tensor, num_rows: int, parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What pack writes for `parts`: x ``[T, ...]``, weights ``[T, ...]``, scales ``[T, ...]``, ids ``[T, K]``."""
    packed = {name: _poisoned(num_rows + GUARD, part.shape[1], dtype=part.dtype) for name, part in parts.items()}
    bytes_of = {name: part.shape[1] * part.element_size() for name, part in parts.items()}
    stride_of = {name: part.stride(0) * part.element_size() for name, part in parts.items()}
    comm.engine.kernels.pack(
        _C.PackArgs(
            comm=comm.engine.comm,
            x=_C.address(parts.get("x")),
            x_stride=stride_of.get("x", 0),
            row_bytes=bytes_of.get("x", 0),
            rows=_C.address(packed.get("x")),
            weights=_C.address(parts.get("weights")),
            weight_bytes=bytes_of.get("weights", 0),
            packed_weights=_C.address(packed.get("weights")),
            scales=_C.address(parts.get("scales")),
            scale_stride=stride_of.get("scales", 0),
            scale_bytes=bytes_of.get("scales", 0),
            packed_scales=_C.address(packed.get("scales")),
            ids=_C.address(parts.get("ids")),
            packed_ids=_C.address(packed.get("ids")),
            rail_rows=places.data_ptr(),
            num_rows=num_rows,
            topk=parts["ids"].shape[1] if "ids" in parts else 0,
            num_tokens=places.shape[0],
            num_nodes=places.shape[1],
            num_sms=SMS,
            stream=current_stream(here()),
        )
    )
    return packed


def _expected_packed(part: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    expected = _poisoned(num_rows + GUARD, part.shape[1], dtype=part.dtype)
    token, node = ((places >= 0) & (places < num_rows)).nonzero(as_tuple=True)
    expected[places[token, node].long()] = part[token]
    return expected


def packs(rank: int, size: int) -> None:
    """Rows of many widths, also where addresses allow no wide loads, with any of their companions, or ids alone."""
    torch.manual_seed(2)
    with open_communicator(size) as comm:
        for num_tokens, num_nodes, width in itertools.product((0, 1, 70), (1, 3, 40), (8, 17, 2100)):
            places, num_rows = _rail_rows(num_tokens, num_nodes)
            for dtype, topk in ((torch.bfloat16, 3), (torch.uint8, 1), (torch.float64, 9)):
                wide = torch.randint(0, 100, (num_tokens, width + 8), device=here()).to(dtype)
                parts = {"x": wide[:, :width], "weights": _random(num_tokens, topk, dtype=weight_dtype(dtype))}
                parts["scales"] = _random(num_tokens, width // 8 + 4)[:, : width // 8]
                parts["ids"] = torch.randint(-1, 64, (num_tokens, topk), dtype=torch.int32, device=here())
                for names in (("x", "weights", "scales", "ids"), ("x",), ("x", "scales"), ("x", "weights"), ("ids",)):
                    given = {name: parts[name] for name in names}
                    with named((num_tokens, num_nodes, width, dtype, names)):
                        for name, packed in _pack(comm, places, num_rows, given).items():
                            same_bits(name, packed, _expected_packed(given[name], places, num_rows))
        finish(comm)


OUTSIDE = (0, 1, 2**30, 2**31 - 1)


def refuses_places_to_pack(rank: int, size: int) -> None:
    """A place outside the buffers is skipped and reported. Later kernels do nothing, nor may CTAs that start later."""
    torch.manual_seed(3)
    for beyond, below in itertools.zip_longest(OUTSIDE, (-2, -(2**31)), fillvalue=-2):
        comm = open_communicator(size)
        x = _random(40, 16)
        places, num_rows = _rail_rows(40, 2)
        places[7] = torch.tensor([min(num_rows + beyond, 2**31 - 1), -1])
        places[9] = torch.tensor([-1, below])
        packed = _pack(comm, places, num_rows, {"x": x})["x"]
        with pytest.raises(ValueError, match=r"handle: .* at step pack \(detail [79]\)"):
            finish(comm)
        expected = _expected_packed(x, places, num_rows)
        if not _on_plain_cpus():
            expected[(packed == _poisoned(16, dtype=x.dtype)).all(dim=1)] = _poisoned(16, dtype=x.dtype)
        same_bits("rows", packed, expected)
        untouched = _pack(comm, places[:5], num_rows, {"x": x[:5]})["x"]
        assert (untouched.view(torch.uint8) == POISON).all()
        comm.close()


# -- combine add -----------------------------------------------------------------------------------------------------


def _combine_add(
    comm: MoECommunicator,
    node: int,
    places: torch.Tensor,
    own: torch.Tensor,
    landed: torch.Tensor,
    bias: torch.Tensor | None = None,
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums, and those of `extra`: values of the own node ``[T, K]``, and those that landed."""
    out = _poisoned(*own.shape, dtype=own.dtype)
    own_extra, landed_extra = extra or (None, None)
    extra_out = None if own_extra is None else _poisoned(*own_extra.shape, dtype=own_extra.dtype)
    comm.engine.kernels.combine_add(
        _C.CombineAddArgs(
            comm=comm.engine.comm,
            own=own.data_ptr(),
            landed=landed.data_ptr(),
            rail_rows=places.data_ptr(),
            bias=_C.address(bias),
            out=out.data_ptr(),
            own_extra=_C.address(own_extra),
            landed_extra=_C.address(landed_extra),
            extra_out=_C.address(extra_out),
            hidden=own.shape[1],
            num_rows=landed.shape[0],
            topk=0 if own_extra is None else own_extra.shape[1],
            element=ELEMENTS[own.dtype],
            num_tokens=places.shape[0],
            num_nodes=places.shape[1],
            node=node,
            num_sms=SMS,
            stream=current_stream(here()),
        )
    )
    return out, extra_out


def _added(
    node: int, places: torch.Tensor, own: torch.Tensor, landed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The oracle: added to the bias node by node, in the type in which weights travel, and rounded once."""
    wide = weight_dtype(own.dtype)
    total = torch.zeros_like(own, dtype=wide) if bias is None else bias.to(wide, copy=True)
    for each in range(places.shape[1]):
        if each == node:
            total += own.to(wide)
            continue
        goes = places[:, each] >= 0
        total[goes] += landed[places[goes, each].long()].to(wide)
    return total.to(own.dtype)


def adds(rank: int, size: int) -> None:
    """All elements, rows of several pieces, more nodes than lanes; with and without a bias and values beside rows."""
    torch.manual_seed(4)
    plain = _on_plain_cpus()
    with open_communicator(size) as comm:
        dtypes = (*FLOATS, torch.float64) if plain else FLOATS
        widths = (8, 1032, 3600) + ((3, 513) if plain else ())
        for dtype, hidden, num_tokens, num_nodes in itertools.product(dtypes, widths, (0, 1, 37), (1, 2, 35)):
            node = num_nodes // 2
            places, num_rows = _rail_rows(num_tokens, num_nodes, node)
            own, landed = _random(num_tokens, hidden, dtype=dtype), _random(num_rows, hidden, dtype=dtype)
            bias = _random(num_tokens, hidden, dtype=dtype) if (num_tokens + num_nodes) % 2 else None
            topk = 1 + num_nodes
            extra = [_random(count, topk, dtype=weight_dtype(dtype)) for count in (num_tokens, num_rows)]
            with named((dtype, hidden, num_tokens, num_nodes)):
                out, nothing = _combine_add(comm, node, places, own, landed, bias)
                same_bits("sums", out, _added(node, places, own, landed, bias))
                assert nothing is None
                out, extra_out = _combine_add(comm, node, places, own, landed, bias, (extra[0], extra[1]))
                same_bits("sums beside values", out, _added(node, places, own, landed, bias))
                same_bits("values", extra_out, _added(node, places, *extra))
        finish(comm)


def refuses_places_to_add(rank: int, size: int) -> None:
    """A place outside the rows that landed is reported, and the outputs hold 0xFF bytes, as after any fault."""
    torch.manual_seed(5)
    for outside in (20, 21, 2**31 - 1, -2, -(2**31)):
        comm = open_communicator(size)
        own, landed = _random(40, 16), _random(20, 16)
        extra = _random(40, 2), _random(20, 2)
        places = torch.full((40, 3), -1, dtype=torch.int32, device=here())
        places[11, 2] = outside
        for _ in range(2):  # the second finds the fault of the first
            for output in _combine_add(comm, 1, places, own, landed, None, extra):
                assert output is not None and (output.view(torch.uint8) == 0xFF).all()
        with pytest.raises(ValueError, match=r"handle: .* at step combine_add \(detail 11\)"):
            finish(comm)
        comm.close()


# -- arguments -------------------------------------------------------------------------------------------------------


def refuses_arguments(rank: int, size: int) -> None:
    """Kernels of GPUs refuse before a launch what they cannot do."""
    with open_communicator(size) as comm:
        kernels, base = comm.engine.kernels, {"comm": comm.engine.comm, "num_sms": 1, "num_nodes": 2, "num_tokens": 1}
        quantize = {"x": 16, "rows": 16, "scales": 4, "num_rows": 1, "hidden": 16, "element": _C.Element.BFLOAT16}
        pack = base | {"x": 1, "row_bytes": 1, "rows": 1, "rail_rows": 4, "num_rows": 1}
        add = base | {"own": 16, "landed": 16, "rail_rows": 4, "out": 16, "hidden": 4, "num_rows": 1}
        wrong: list[tuple[Any, Any, dict[str, Any], dict[str, int]]] = [
            (
                kernels.quantize,
                _C.QuantizeArgs,
                quantize,
                {"x": 8, "rows": 8, "scales": 0, "num_rows": -1, "hidden": 24},
            ),
            (kernels.pack, _C.PackArgs, pack, {"row_bytes": 0, "rows": 0, "rail_rows": 0, "num_tokens": -1}),
            (kernels.pack, _C.PackArgs, pack, {"num_rows": -1, "num_nodes": 0, "num_sms": 0}),
            (kernels.combine_add, _C.CombineAddArgs, add, {"own": 8, "landed": 8, "out": 8, "bias": 8, "hidden": 6}),
            (kernels.combine_add, _C.CombineAddArgs, add, {"node": 2, "own_extra": 4, "rail_rows": 0, "num_rows": -1}),
            (kernels.combine_add, _C.CombineAddArgs, add, {"element": _C.Element.FLOAT64, "num_nodes": 0}),
        ]
        for kernel, args, given, values in wrong:
            for name, value in values.items():
                with named(f"{args.__name__}.{name} = {value}"), pytest.raises(ValueError, match=": expected .*, got "):
                    kernel(args(**(given | {name: value})))
        finish(comm)


# -- place -----------------------------------------------------------------------------------------------------------

# Nodes, ranks of a node, experts of a rank, chunks, tokens.
PLACED = [(2, 1, 1, 1, 1), (2, 2, 3, 4, 0), (3, 2, 2, 3, 1), (3, 1, 4, 6, 2), (4, 2, 2, 5, 3), (2, 2, 2, 6, 5)]
PLACED += [(3, 3, 5, 2, 40), (3, 1, 40, 2, 700)]


def places(rank: int, size: int) -> None:
    """Rows of the rail's buffers, and the places of received rows, for chunks with few tokens or none."""
    comm = open_communicator(size)
    for seed, (sizes, padded) in enumerate(itertools.product(PLACED, (False, True))):
        with named((sizes, padded)):
            _places(comm, *sizes, padded, seed)
    finish(comm)


def _places(comm: MoECommunicator, N: int, G: int, local: int, C: int, T: int, padded: bool, seed: int) -> None:
    generator, alignment, node = torch.Generator().manual_seed(seed), (1, 16)[seed % 2], seed % N
    origins, bounds = N - 1, chunk_bounds(T, C)
    ours = comm.engine.comm.copy()
    ours.num_ranks, ours.num_experts, ours.num_origins = G, G * local, origins
    ranks = torch.randperm(N * G, generator=generator)  # of each node
    node_map = NodeMap(tuple(tuple(sorted(part.tolist())) for part in ranks.split(G)))
    rank_place = places_of_ranks(node_map, here())

    goes = torch.rand(T, N, generator=generator) < 0.7
    goes[:, node] = False
    messages = torch.zeros(2, N, _C.message_words(C, G, G * local), dtype=torch.int64)
    waited = torch.randperm(3 * N, generator=generator)[:N]  # by each node
    messages[1, :, _C.message_head_words - 1] = waited
    came_last = int(waited.argmin())
    numbers, expected, row = torch.full((T, N), -1), torch.full((T, N), -1), 0
    most = max(last - first for first, last in itertools.pairwise(bounds)) + 2
    for chunk, (first, last) in enumerate(itertools.pairwise(bounds)):
        for step in range(1, N):
            to = (node + step) % N
            of_leg = goes[first:last, to]
            place = torch.where(of_leg, of_leg.cumsum(0) - 1, -1)
            numbers[first:last, to] = place
            expected[first:last, to] = torch.where(of_leg, place + row, -1)
            messages[0, to, _C.message_head_words + chunk] = of_leg.sum()
            row += most if padded else int(of_leg.sum())

    at = _C.meta_layout(G, G * local, origins)
    pairs = torch.randint(0, 9, (C + 1, G, origins, local), generator=generator, dtype=torch.int32)
    slots = torch.randint(0, 30, (C + 1, G, origins), generator=generator, dtype=torch.int32)
    pairs[0, :, 1:] = slots[0, :, 1:] = 0  # segment 0 has one origin
    metas = torch.full((C + 1, at.words), -7, dtype=torch.int32)
    metas[1, at.rail_overflow :] = torch.tensor([3, 17], dtype=torch.int32)
    for meta, rows, ends in zip(metas, pairs, slots.cumsum(2, dtype=torch.int32), strict=True):
        meta[at.origin_rows : at.send_chunk_end] = rows.flatten()
        meta[at.origin_end : at.origin_rows] = ends.flatten()
    given, rail_rows, counts = metas.clone().to(here()), numbers.int().to(here()), messages.to(here())
    group = _C.Nodes(
        rank_place=rank_place.data_ptr(), num_ranks=N * G, num_experts=N * G * local, num_chunks=C, node=node
    )
    waits = torch.arange(_C.waits_head_words + N).to(here())
    group.waits = 0 if seed == 3 else waits.data_ptr()
    comm.engine.kernels.place(
        _C.PlaceArgs(
            comm=ours,
            nodes=group,
            metas=given.data_ptr(),
            messages=counts.data_ptr(),
            rail_rows=rail_rows.data_ptr(),
            num_tokens=T,
            padded=most if padded else 0,
            alignment=alignment,
            stream=current_stream(here()),
        )
    )
    same_bits("rail_rows", rail_rows.cpu(), expected.int())
    counted = torch.arange(_C.waits_head_words + N)
    if seed != 3:
        counted[_C.waits_head_words + came_last] += waited[node] - waited[came_last]
    same_bits("waits", waits.cpu(), counted)
    sources = []
    for each in range(N * G):
        source, index = node_map.node_of(each), node_map.local_rank_of(each)
        if source == node:
            sources.append((0, index, 0))
        else:
            sources += [(1 + chunk, index, (node - 1 - source) % N) for chunk in range(C)]
    wanted, starts, begin, tokens = metas.clone(), [0], 0, 0
    for expert in range(local):
        for segment, index, origin in sources:
            base = begin - int(pairs[segment, index, :origin, expert].sum())
            wanted[segment, at.flat_base + (index * origins + origin) * local + expert] = base
            begin += int(pairs[segment, index, origin, expert])
        begin = -(-begin // alignment) * alignment
        starts.append(begin)
    for segment, index, origin in sources:
        base = tokens - int(slots[segment, index, :origin].sum())
        wanted[segment, at.token_base + index * origins + origin] = base
        tokens += int(slots[segment, index, origin])
    wanted[:, at.token_rows] = tokens
    wanted[:, at.rail_overflow :] = metas[1, at.rail_overflow :]
    wanted[:, at.expert_offset : at.expert_rows] = torch.tensor(starts, dtype=torch.int32)
    wanted[:, at.expert_rows : at.origin_end] = pairs.sum((0, 1, 2), dtype=torch.int32)
    found = given.cpu()
    exists = torch.zeros(G, origins, dtype=torch.bool)
    exists[:, 0] = True
    for begin, end, width in ((at.token_base, at.token_rows, 1), (at.flat_base, at.expert_offset, local)):
        missing = ~exists.repeat_interleave(width)  # nobody reads the bases of segment 0's other origins
        found[0, begin:end][missing] = wanted[0, begin:end][missing]
    same_bits("metas", found, wanted)


CASES = (quantizes, packs, refuses_places_to_pack, adds, refuses_places_to_add, places)


@pytest.mark.parametrize("case", CASES)
def test_kernels(case: Any) -> None:
    on_ranks(1, case)
