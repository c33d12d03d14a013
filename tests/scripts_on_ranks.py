"""Runs a script on several ranks as torchrun does, but without the seconds that torchrun and imports take.

The ranks are forks of a process that has imported PyTorch, but neither the integrations nor the frameworks.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import start_server


def run_script(words: Sequence[str | Path], ranks: int, folder: Path, **variables: str) -> None:
    """Runs ``python *words`` in `folder` on `ranks` ranks, and fails unless each ends with the exit status 0.

    The output of each rank is then in ``folder/log.<rank>``. The ranks get the caller's environment without its
    EP_PLUGIN* variables, and `variables`.
    """
    codes, logs = run_until_end(words, ranks, folder, **variables)
    assert codes == [0] * ranks, f"exit status {codes}:\n" + "\n".join(log[-3000:] for log in logs)


def run_code(code: str, folder: Path, **variables: str) -> tuple[int | None, str]:
    """The exit status and the output of ``python code.py`` on one rank, without the import of PyTorch."""
    (folder / "code.py").write_text(code)
    (status,), (output,) = run_until_end([folder / "code.py"], 1, folder, **variables)
    return status, output


def run_until_end(
    words: Sequence[str | Path], ranks: int, folder: Path, **variables: str
) -> tuple[list[int | None], list[str]]:
    """The exit status and the output of each rank of `run_script`, however they end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"} | variables
    logs = [folder / f"log.{rank}" for rank in range(ranks)]
    start_server()
    context = multiprocessing.get_context("forkserver")
    processes = []
    try:
        for rank, log in enumerate(logs):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_run, args=([str(word) for word in words], folder, own, log))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(timeout=200)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return codes, [log.read_text() for log in logs]


def _run(words: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    """Does what the interpreter does with its words and its environment."""
    assert not {"transformers", "megatron", "torchtitan", "ep_plugin.integrations.hooks"} & sys.modules.keys()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    as_module = words[0] == "-m"
    sys.path[:0] = [
        str(folder if as_module else Path(words[0]).parent),
        *filter(None, environment.get("PYTHONPATH", "").split(":")),
    ]
    from ep_plugin.integrations import autoload

    autoload.start()  # as at the end of `import torch`
    sys.argv = words[as_module:]
    if as_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
