"""The stub says what the extension has, and constants that Python holds itself are those of csrc."""

from __future__ import annotations

import ast
import ctypes
import enum
from pathlib import Path

import pytest

from ep_plugin import _C, config, env
from tests.kernel_arguments import AllGatherArgs, Arguments, Comm, ReduceScatterArgs, SmallExchangeArgs

STUB = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
NO_STRUCTS = (
    enum.Enum,
    _C.MessageQueue,
    _C.NcclRail,
    _C.Messages,
    _C.StartedMessages,
    _C.LowLatency,
    _C.StartedOperation,
    _C.HighThroughput,
    _C.HighThroughputOperation,
    _C.Expected,
    _C.CollectiveNode,
    _C.KnownCollective,
    _C.Ways,
    _C.StreamOrder,
    _C.StreamSwitch,
    _C.SmBudget,
    _C.Call,
    _C.CallLog,
)
STRUCTS = [name for name in CLASSES if hasattr(_C, name) and not issubclass(getattr(_C, name), NO_STRUCTS)]
ENUMS = [name for name, value in vars(_C).items() if isinstance(value, type) and issubclass(value, enum.Enum)]


def test_every_public_name_is_in_the_stub() -> None:
    functions = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    values = {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}
    present = {name for name in vars(_C) if not name.startswith("__")}
    only_with_cuda = {"WireArgs", "HoldArgs", "wire", "hold", "cuda", "register_host", "unregister_host"}
    only_with_cuda |= {"order_streams", "stream_capture", "cuda_archs", "cuda_version"}
    known = functions | values | {name for name in CLASSES if not name.startswith("_")}
    assert present | only_with_cuda == known


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_of_a_struct(name: str) -> None:
    fields = {node.target.id: node.value for node in CLASSES[name].body if isinstance(node, ast.AnnAssign)}
    assert CLASSES[name].bases[0].id == "_Struct"
    assert all(fields.values()), "a field that is not given is 0"
    kind = getattr(_C, name)
    assert fields.keys() == {field for field, value in vars(kind).items() if isinstance(value, property)}
    kind(**{field: getattr(kind(), field) for field in fields})
    with pytest.raises(AttributeError):
        kind(no_such_field=1)


# The caller's shards are anywhere, so these have an address for each rank.
LISTS = AllGatherArgs, ReduceScatterArgs, SmallExchangeArgs


@pytest.mark.parametrize("name", [name for name in STRUCTS if name.endswith("Args")])
def test_arguments_of_a_kernel_do_not_grow_with_the_ranks(name: str) -> None:
    assert getattr(_C, name).nbytes < 400 < 8 * _C.max_ranks


@pytest.mark.parametrize("kind", LISTS)
def test_arguments_of_collectives_have_one_address_for_each_rank(kind: type[Arguments]) -> None:
    assert ctypes.sizeof(Comm) == _C.Comm.nbytes
    assert ctypes.sizeof(kind) - 8 * _C.max_ranks < 400


@pytest.mark.parametrize("name", ENUMS)
def test_members_of_an_enum(name: str) -> None:
    members = [node.targets[0].id for node in CLASSES[name].body if isinstance(node, ast.Assign)]
    assert members == list(getattr(_C, name).__members__)


def test_fields_of_a_header_have_their_names() -> None:
    header = _C.Header(**{name: index for index, name in enumerate(_C.header_fields)})
    assert [getattr(header, name) for name in _C.header_fields] == list(range(len(_C.header_fields)))


def test_constants_that_the_configuration_knows_without_loading_the_kernels() -> None:
    assert (_C.max_topk, _C.row_align) == (config.MAX_TOPK, config.ROW_ALIGNMENT_BYTES)
    assert {gate.upper() for gate in env.TEST_GATES} < set(_C.Step.__members__)
    assert {_C.Total(index).name for index in range(_C.num_totals)} == set(_C.Total.__members__)
    assert set(_C.Layout.__members__) < set(config.DispatchLayout.__members__)
