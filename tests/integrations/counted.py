"""Runs a script as it is and writes how often it exchanged tokens, as torch's profiler saw it: ours and the stock ways.

"fsdp2" counts the gathers and scatters of whole buffers, as FSDP2 calls them where nobody has replaced them.

python -m tests.integrations.counted COUNTS_JSON SCRIPT [ARGUMENTS]. COUNTS_JSON gets the rank's number as a suffix,
and with ".served" after it holds what `status()` says is on.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

OURS = ("ep_plugin::dispatch", "ep_plugin::combine")
STOCK = ("alltoall", "all_to_all")
FSDP2 = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")


def main() -> None:
    import torch

    counts_path, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    torch.set_num_threads(1)
    if "megatron" in Path(script).name:  # it asks CUDA for more than it needs
        from tests.integrations.on_cpus import make_distributed_optimizer_run_here

        make_distributed_optimizer_run_here()
    if "torchtitan" in Path(script).name:  # it asks for an accelerator
        from tests.integrations.on_cpus import make_torchtitan_run_here

        make_torchtitan_run_here()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        runpy.run_path(script, run_name="__main__")
    calls: Counter[str] = Counter()
    assert profile.profiler is not None
    for event in profile.profiler.kineto_results.events():  # profile.events() would take seconds to build a tree
        calls.update([event.name()] if event.name() in OURS else [])
        calls.update(["fsdp2"] if event.name() in FSDP2 else [])
        calls.update(["stock"] if any(name in event.name() for name in STOCK) else [])
    Path(f"{counts_path}.{os.environ['RANK']}").write_text(json.dumps(calls))
    from ep_plugin.integrations import status

    served = {row.name: row.served for row in status() if row.state == "on"}
    Path(f"{counts_path}.{os.environ['RANK']}.served").write_text(json.dumps(served))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo may hold the last collective's tensors while the interpreter is torn down


if __name__ == "__main__":
    main()
