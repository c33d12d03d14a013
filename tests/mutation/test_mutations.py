"""The committed mutations still apply: each text is found exactly once where it is said to be."""

from __future__ import annotations

import pytest

from tests.mutation.mutate import ROOT, Mutation, load


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.name)
def test_mutation_applies(mutation: Mutation) -> None:
    mutation.place((ROOT / mutation.file).read_text())
    for test in mutation.tests:
        assert (ROOT / test.split("::")[0]).is_file()


def test_names_differ() -> None:
    names = [mutation.name for mutation in load()]
    assert len(names) >= 24
    assert len(set(names)) == len(names)
