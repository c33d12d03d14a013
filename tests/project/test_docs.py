"""README and docs: links and anchors resolve, paths exist, and fenced Python and shell blocks run or at least parse.

A comment in the line before a fence says how its Python runs: ``<!-- snippet: ranks=2 files=qwen3_moe -->``, or
``<!-- snippet: parse -->`` for code that needs a GPU, a framework that is not installed, or the reader's own names.
A Python block without such a comment runs in one process. Bash parses shell blocks and those without a language.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scripts_on_ranks import run_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
FENCE = re.compile(r"(?:<!-- snippet: (?P<how>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FOLDERS = ("benchmarks", "docs", "ep_plugin", "examples", "integrations", "requirements", "scripts", "tests")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")


class Snippet(NamedTuple):
    """A fenced block; `line`: where its code starts in `page`, from 1."""

    page: Path
    line: int
    language: str
    how: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets(*languages: str) -> list[Snippet]:
    """The fenced blocks of all pages in these languages; without an argument, in any."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text[: match.start("code")].count("\n") + 1
            found.append(Snippet(page, line, match["language"], match["how"] or "", match["code"]))
    return [snippet for snippet in found if not languages or snippet.language in languages]


@lru_cache
def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def without_code(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "``", FENCE.sub("", page.read_text()))


def qwen3_moe(folder: Path) -> None:
    """A Qwen3-MoE of two small layers, where a snippet loads the published one."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder / "Qwen" / "Qwen3-30B-A3B")


FILES = {"qwen3_moe": qwen3_moe}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_resolve(page: Path) -> None:
    broken = []
    for match in LINK.finditer(without_code(page)):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"https?://", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(match["target"])
    assert not broken, f"{page.name}: links that lead nowhere: {broken}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_the_repository_exist(page: Path) -> None:
    missing = sorted(path for path in set(PATH.findall(page.read_text())) if not (ROOT / path).exists())
    assert not missing, f"{page.name}: paths that do not exist: {missing}"


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_python_parses(snippet: Snippet) -> None:
    compile("\n" * (snippet.line - 1) + snippet.code, str(snippet.page), "exec")


@pytest.mark.parametrize("snippet", snippets("shell", ""), ids=str)
def test_shell_parses(snippet: Snippet) -> None:
    done = subprocess.run(["bash", "-n"], input=snippet.code, text=True, capture_output=True, timeout=30)
    assert done.returncode == 0, f"{snippet}: {done.stderr}"


@pytest.mark.parametrize("snippet", [snippet for snippet in snippets("python") if snippet.how != "parse"], ids=str)
def test_python_runs_as_printed(snippet: Snippet, tmp_path: Path) -> None:
    options = dict(option.split("=", 1) for option in snippet.how.split())
    unknown = options.keys() - {"ranks", "files"}
    assert not unknown, f"{snippet}: expected the options ranks and files, got {sorted(unknown)}"
    if "files" in options:
        FILES[options["files"]](tmp_path)
    script = tmp_path / "snippet.py"
    script.write_text(snippet.code)
    if "ranks" in options:
        run_script([script], int(options["ranks"]), tmp_path)
        return
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{snippet}: exit status {done.returncode}\n{done.stdout}"


def test_fences_name_a_language_that_is_tested() -> None:
    fences = {str(snippet): snippet.language for snippet in snippets()}
    other = {where: language for where, language in fences.items() if language not in ("python", "shell", "text", "")}
    assert not other, f"expected python, shell, text or none, got {other}"
