"""Runs a script on several ranks as torchrun does, but without the seconds that torchrun itself takes to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist


def run_script(words: Sequence[str | Path], ranks: int, folder: Path, **variables: str) -> None:
    """Runs ``python *words`` in `folder` on `ranks` ranks, and fails unless each ends with the exit status 0.

    The output of each rank is then in ``folder/log.<rank>``. The ranks get the caller's environment without its
    EP_PLUGIN* variables, and `variables`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"} | variables
    logs = [folder / f"log.{rank}" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=folder,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, f"exit status {codes}:\n" + "\n".join(log.read_text()[-3000:] for log in logs)
