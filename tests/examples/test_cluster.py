"""examples/cluster without a cluster: SLURM's commands are stand-ins, and torchrun's parser reads the Job's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from ep_plugin.testing.nodes import held_port

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
# scontrol prints hosts one by one. A reader that stops after the first line would end it by SIGPIPE.
# srun starts its command once on each of two nodes. When one fails, it ends the other, as it has been asked to.
STAND_INS = {
    "scontrol": "#!/bin/sh\necho localhost; sleep 0.1; echo another-host\n",
    "srun": """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && shift || exit 9
for node in 0 1; do EP_PLUGIN_HOST=node$node "$@" & pids+=($!); done
for _ in "${pids[@]}"; do wait -n || { status=$?; kill "${pids[@]}"; wait; exit $status; }; done
""",
}
SCRIPT = """
import sys, torch, torch.distributed as dist
from ep_plugin import MoECommunicator, MoECommunicatorConfig

dist.init_process_group("gloo")
if sys.argv[1:] == ["fail"] and dist.get_rank() == 3:
    raise SystemExit(7)
comm = MoECommunicator(None, MoECommunicatorConfig(num_experts=8, hidden_size=128, topk=8), device="cpu")
comm.dispatch(torch.randn(16, 128), torch.arange(8).repeat(16, 1))
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {comm.rail_bytes_sent > 0}\\n", end="", flush=True)
comm.close()
"""


def _sbatch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name, content in STAND_INS.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    (folder / "train.py").write_text(SCRIPT)
    job = {"SLURM_JOB_NODELIST": "hosts", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "17"}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(CLUSTER / "slurm.sh"), str(folder / "train.py"), *arguments]
    with held_port() as port:
        environment = os.environ | job | {"PATH": path, "PORT": str(port), "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_slurm_starts_one_job_on_all_nodes(tmp_path: Path) -> None:
    done = _sbatch(tmp_path)
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"^rank .*", done.stdout, re.MULTILINE))
    assert said == [f"rank {rank} of 4: True" for rank in range(4)]


@pytest.mark.slow
def test_slurm_ends_with_the_status_of_a_node_that_failed(tmp_path: Path) -> None:
    assert _sbatch(tmp_path, "fail").returncode != 0


def test_the_pods_of_the_job_find_each_other() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, *words = container["command"]
    chosen = get_args_parser().parse_args(words)
    assert program == "torchrun" and chosen.training_script == "train.py"
    assert int(chosen.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(chosen.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    host, _ = chosen.rdzv_endpoint.split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    (variable,) = container["env"]
    assert variable == {"name": "EP_PLUGIN_DUMP", "value": mounts["dumps"]}


def test_the_image_takes_any_base_and_has_extras_that_exist() -> None:
    text = (CLUSTER / "Dockerfile").read_text()
    assert "ARG BASE\nFROM ${BASE}\n" in text
    (extras,) = re.findall(r"/opt/ep_plugin\[([\w,]+)\]", text)
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)
