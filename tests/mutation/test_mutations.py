"""The committed mutations still apply: each text is found exactly once where it is said to be."""

from __future__ import annotations

import dataclasses

import pytest

from tests.mutation.mutate import ROOT, Mutation, load, mutations_of


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.name)
def test_mutation_applies(mutation: Mutation) -> None:
    mutation.place((ROOT / mutation.file).read_text())
    for test in mutation.tests:
        assert (ROOT / test.split("::")[0]).is_file()


def test_names_differ() -> None:
    names = [mutation.name for mutation in load()]
    assert len(names) >= 24
    assert len(set(names)) == len(names)


def test_each_place_is_a_mutation_of_its_own() -> None:
    shared = {"name": "unchecked", "function": "send", "new": "", "breaks": "bounds", "tests": ["tests/a.py"]}
    places = [
        {"at": "CPUs", "file": "send.cpp", "old": "a < b"},
        {"at": "GPUs", "file": "send.cu", "old": "a < c", "tests": ["tests/b.py"]},
    ]
    on_cpus = Mutation(
        name="unchecked: CPUs",
        file="send.cpp",
        function="send",
        old="a < b",
        new="",
        breaks="bounds",
        tests=("tests/a.py",),
    )
    on_gpus = dataclasses.replace(on_cpus, name="unchecked: GPUs", file="send.cu", old="a < c", tests=("tests/b.py",))
    assert mutations_of(shared | {"places": places}) == [on_cpus, on_gpus]
    assert mutations_of(shared | {"file": "send.cpp", "old": "a < b"}) == [
        dataclasses.replace(on_cpus, name="unchecked")
    ]


def test_a_place_says_where_it_is() -> None:
    with pytest.raises(KeyError, match="at"):
        mutations_of({"name": "unchecked", "tests": [], "places": [{"file": "send.cpp"}]})
