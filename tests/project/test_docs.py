"""README and docs: links and anchors resolve, paths exist, and fenced Python and shell blocks run or at least parse.

A comment in the line before a fence says how its Python runs: ``<!-- snippet: ranks=2 files=qwen3_moe -->``, or
``<!-- snippet: parse -->`` for code that needs a GPU, a framework that is not installed, or the reader's own names.
A Python block without such a comment runs in one process. Bash parses shell blocks and those without a language, and
runs those marked ``<!-- snippet: run -->``, which may have ``files``, too.

A text block marked ``<!-- snippet: output -->`` is output of the block before it that runs, and one marked
``<!-- snippet: output=status -->`` is output of that function of OUTPUTS. Its lines must be there in this order. A
number stands for any number. ``columns=2`` compares the first two columns alone, where the left edge of a table is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scripts_on_ranks import run_script, run_until_end

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/notes.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
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


def load_statistics(folder: Path) -> None:
    """The files that the script of docs/statistics.md writes on 2 ranks."""
    (script,) = (one for one in snippets("python") if "write_stats" in one.code)
    run_on_ranks(script, 2, folder)


FILES = {"qwen3_moe": qwen3_moe, "load_statistics": load_statistics}


def status(folder: Path) -> str:
    """What `status()` prints at the end of an example on 2 ranks."""
    pytest.importorskip("transformers")
    example = ROOT / "examples" / "train_qwen3_moe.py"
    (folder / "status.py").write_text(
        f"import runpy\nrunpy.run_path({str(example)!r}, run_name='__main__')\n"
        "import ep_plugin; print(ep_plugin.integrations.status())\n"
    )
    run_script(["status.py"], 2, folder, EP_PLUGIN="transformers,fsdp2", CUDA_VISIBLE_DEVICES="")
    return (folder / "log.0").read_text()


FAILS = """
import datetime, os, time, torch, torch.distributed as dist
from pathlib import Path
from ep_plugin import MoECommunicator, MoECommunicatorConfig

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
comm = MoECommunicator(None, MoECommunicatorConfig(num_experts=8, hidden_size=64, topk=2))
try:
    for step in range(4):
        while step == 3 and dist.get_rank() == 1:
            time.sleep(0.05)
            if len(list(Path().glob("left.*"))) == dist.get_world_size() - 1:
                os._exit(9)
        out, handle = comm.dispatch(torch.randn(4, 64), torch.arange(8).view(4, 2))
        comm.combine(out.tokens, handle)
finally:
    Path(f"left.{dist.get_rank()}").touch()
"""


def fails(folder: Path, ranks: int = 2, **variables: str) -> str:
    """What rank 0 prints of a job in which rank 1 sleeps in the place of its fourth dispatch."""
    (folder / "fails.py").write_text(FAILS)
    codes, logs = run_until_end([folder / "fails.py"], ranks, folder, CUDA_VISIBLE_DEVICES="", **variables)
    assert all(codes), logs
    return logs[0]


def merged(folder: Path) -> str:
    (folder / "dumps").mkdir()
    fails(folder, 4, EP_PLUGIN_DUMP=str(folder / "dumps"))
    command = [sys.executable, "-m", "ep_plugin.doctor", "--merge", "dumps"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout


def idle(folder: Path) -> str:
    """A script that imports FSDP2 and shards nothing."""
    group = f"'gloo', init_method='file://{folder}/store', rank=0, world_size=1"
    code = f"import torch\ntorch.distributed.init_process_group({group})\nimport torch.distributed.fsdp"
    variables = os.environ | {"EP_PLUGIN": "fsdp2"}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120
    ).stderr


def fallback(folder: Path) -> str:
    """A script that shards a model over two nodes, of two ranks and of one."""
    (folder / "shards.py").write_text(
        "import torch\nfrom torch.distributed.fsdp import fully_shard\n"
        "torch.distributed.init_process_group('gloo')\nfully_shard(torch.nn.Linear(8, 8))"
    )
    unequal = {"EP_PLUGIN_RANKS_PER_NODE": "2", "EP_PLUGIN_HOST": "my-host", "CUDA_VISIBLE_DEVICES": ""}
    run_script([folder / "shards.py"], 3, folder, EP_PLUGIN="fsdp2", EP_PLUGIN_FALLBACK="stock", **unequal)
    return re.sub("@[^,]+", "", (folder / "log.0").read_text())  # what tells this machine from others


def doctor_on_ranks(folder: Path) -> str:
    run_script(["-m", "ep_plugin.doctor"], 4, folder, CUDA_VISIBLE_DEVICES="")
    return (folder / "log.0").read_text()


OUTPUTS = {function.__name__: function for function in (status, fails, merged, idle, fallback, doctor_on_ranks)}


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


def options_of(snippet: Snippet, *known: str) -> dict[str, str]:
    """By name, the values of a snippet's options: "" for a name alone."""
    options = {name: value for name, _, value in (option.partition("=") for option in snippet.how.split())}
    unknown = options.keys() - set(known)
    assert not unknown, f"{snippet}: expected the options {', '.join(known)}, got {sorted(unknown)}"
    return options


def runs(snippet: Snippet) -> bool:
    if snippet.language == "python":
        return snippet.how != "parse"
    return snippet.language == "shell" and snippet.how.startswith("run")


def output_of(snippet: Snippet, command: list[str], folder: Path) -> str:
    """What `command` prints on stdout and stderr."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{snippet}: exit status {done.returncode}\n{done.stdout}"
    return done.stdout


def run_on_ranks(snippet: Snippet, ranks: int, folder: Path) -> str:
    """The output of rank 0."""
    (folder / "snippet.py").write_text(snippet.code)
    run_script([folder / "snippet.py"], ranks, folder)
    return (folder / "log.0").read_text()


def outputs_of(snippet: Snippet) -> list[Snippet]:
    """The blocks marked as output of `snippet`: those before the next one that runs."""
    found = []
    for later in snippets():
        if later.page == snippet.page and later.line > snippet.line:
            if runs(later):
                break
            if later.how.split()[:1] == ["output"]:
                found.append(later)
    return found


def entries(text: str, columns: int | None) -> list[str]:
    """The lines of an output, with what wraps to the next ones, and # in place of numbers."""
    lines = re.sub(r"\n +", " ", text).splitlines()
    if columns is not None:
        lines = [" ".join(re.split(r" *\| *| {2,}", line)[:columns]) for line in lines]
    lines = [re.sub(r"\d+([.,]\d+)*", "#", " ".join(line.split())) for line in lines]
    return [re.sub("-+", "-", line) for line in lines if line]  # rules of tables are as wide as their columns


def check_output(snippet: Snippet, printed: str) -> None:
    options = options_of(snippet, "output", "columns")
    columns = int(options["columns"]) if "columns" in options else None
    rest = iter(entries(printed, columns))
    missing = [entry for entry in entries(snippet.code, columns) if entry not in rest]
    assert not missing, f"{snippet}: not printed, or not in this order: {missing[0]}\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [snippet for snippet in snippets("python") if runs(snippet)], ids=str)
def test_python_runs_as_printed(snippet: Snippet, tmp_path: Path) -> None:
    options = options_of(snippet, "ranks", "files")
    if "files" in options:
        FILES[options["files"]](tmp_path)
    if "ranks" in options:
        printed = run_on_ranks(snippet, int(options["ranks"]), tmp_path)
    else:
        (tmp_path / "snippet.py").write_text(snippet.code)
        printed = output_of(snippet, [sys.executable, "snippet.py"], tmp_path)
    for output in outputs_of(snippet):
        check_output(output, printed)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [snippet for snippet in snippets("shell") if runs(snippet)], ids=str)
def test_shell_runs_as_printed(snippet: Snippet, tmp_path: Path) -> None:
    options = options_of(snippet, "run", "files")
    if "files" in options:
        FILES[options["files"]](tmp_path)
    printed = output_of(snippet, ["bash", "-ec", snippet.code], tmp_path)
    for output in outputs_of(snippet):
        check_output(output, printed)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [one for one in snippets("text") if one.how.startswith("output=")], ids=str)
def test_output_is_as_printed(snippet: Snippet, tmp_path: Path) -> None:
    check_output(snippet, OUTPUTS[options_of(snippet, "output", "columns")["output"]](tmp_path))


def test_each_output_is_compared() -> None:
    marked = {str(snippet) for snippet in snippets("text") if snippet.how.split()[:1] == ["output"]}
    compared = [str(output) for snippet in snippets() if runs(snippet) for output in outputs_of(snippet)]
    assert sorted(compared) == sorted(marked)


@pytest.mark.parametrize(
    ("printed", "is_same"),
    [
        ("step 3   done\nmore\n12 sums", True),
        ("step 12 done\n99 sums", True),
        ("step 3\n  done\n12 sums", True),
        ("12 sums\nstep 3 done", False),
        ("step 3 done", False),
        ("step one done\n12 sums", False),
    ],
    ids=["a line between", "other numbers", "wrapped", "other order", "a line less", "no number"],
)
def test_outputs_are_compared(printed: str, is_same: bool) -> None:
    snippet = Snippet(ROOT / "README.md", 1, "text", "output", "step 1 done\n2 sums\n")
    if is_same:
        check_output(snippet, printed)
        return
    with pytest.raises(AssertionError, match="not printed, or not in this order"):
        check_output(snippet, printed)


def test_fences_name_a_language_that_is_tested() -> None:
    fences = {str(snippet): snippet.language for snippet in snippets()}
    other = {where: language for where, language in fences.items() if language not in ("python", "shell", "text", "")}
    assert not other, f"expected python, shell, text or none, got {other}"
