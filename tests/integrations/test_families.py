"""Which families of transformers ep_plugin serves: losses, and gradients of a step, are those of its own exchange.

``python -m tests.integrations.test_families --write`` writes the table in docs/transformers.md.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.families import compare, families
from tests.ranks import run_ranks, values

transformers = pytest.importorskip("transformers", minversion="5.23")

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- made by python -m tests.integrations.test_families --write -->\n\n", "\n<!-- end -->\n"
LIMIT = 3e-4  # of a gradient; some are sums that almost cancel
MOST_USED = [
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe",
    "hunyuan_v1_moe", "jamba", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe",
    "qwen3_moe", "qwen3_next",
]  # fmt: skip
LONG = bool(os.environ.get("EP_TEST_LONG"))
TRIED, STEPS = ([name for name, has_plan in families().items() if has_plan], 10) if LONG else (MOST_USED, 2)


def found_on_ranks(*names: str) -> list[dict[str, Any]]:
    limit_s = 1200 if LONG else 280
    with tempfile.TemporaryDirectory() as folder:
        given = names, Path(folder), STEPS
        return values(run_ranks(2, compare, *given, timeout_s=limit_s, env={"HF_HUB_OFFLINE": "1"}))


def check(results: list[dict[str, Any]], name: str) -> None:
    """A step is that of transformers' own exchange, unless that fails."""
    assert "not built" not in results[0][name], f"{name}: {results[0][name]}"
    of_ranks = [one[name] for one in results if "error" not in one[name]]
    assert not of_ranks or max(found["gradient"] for found in of_ranks) > 1e-5, f"{name}: experts have no gradients"
    for rank, found in enumerate(of_ranks):
        assert found["dispatches"] > 0 and found["loss"] <= 1e-6 and found["losses"] <= 1e-4, (name, found)
        assert found["difference"] <= LIMIT, f"{name}, rank {rank}: {found['tensor']} differs by {found['difference']}"


def table(results: list[dict[str, Any]]) -> str:
    """A row for those that are served, and for each reason why others are not."""
    rows: dict[str, list[str]] = {"served": []}
    for name, has_plan in families().items():
        title = "refused: transformers has no plan that dispatches their experts"
        if has_plan:
            check(results, name)
            found = results[0][name]
            said = textwrap.shorten(found.get("with FSDP", ""), 60)
            title = f"served with `tp_size=ep_size`; with FSDP transformers fails: {said}" if said else "served"
            if "error" in found:
                title = f"refused: transformers fails: {said}"
        rows.setdefault(title, []).append(f"`{name}`")
    titles = sorted(rows, key=lambda title: (title.startswith("refused"), title))
    lines = [f"| | families of transformers {transformers.__version__} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {title} | {', '.join(rows[title])} |" for title in titles), ""])


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return found_on_ranks(*TRIED, "llama4")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_a_step_is_that_of_the_built_in_exchange(results: list[dict[str, Any]], name: str) -> None:
    check(results, name)
    assert name not in MOST_USED or "with FSDP" not in results[0][name], results[0][name]


@pytest.mark.slow
def test_transformers_refuses_a_family_without_a_plan(results: list[dict[str, Any]]) -> None:
    assert not families()["llama4"]
    for found in results:
        assert re.match("ValueError: `ep_size=2` was requested, but .* has no `ep_plan`", found["llama4"]["with FSDP"])


@pytest.mark.slow
def test_the_table_lists_every_family(results: list[dict[str, Any]]) -> None:
    present = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    if f"transformers {transformers.__version__} |" not in present:
        pytest.skip(f"the table is of another version than {transformers.__version__}")
    listed = [name for line in present.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split(" | ")[1])]
    assert sorted(listed) == list(families())
    if len(TRIED) > len(MOST_USED):
        assert present == table(results)


def main() -> None:
    made = table(found_on_ranks(*(name for name, has_plan in families().items() if has_plan)))
    if sys.argv[1:] == ["--write"]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + END + rest.partition(END)[2])
    else:
        print(made)


if __name__ == "__main__":
    main()
