"""Emulated nodes: real launches, on network namespaces where this machine allows them and on the loopback device."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ep_plugin.testing import nodes
from ep_plugin.testing.nodes import Cluster, parse_rate, variables_of
from tests.moe.test_across_nodes import ONE_NODE_CASES, SHAPES

RANKS = str(Path(__file__).parents[1] / "node_ranks.py")
LAUNCHER = [sys.executable, "-m", "ep_plugin.testing.nodes", "--device", "cpu"]


def launch(*options: str, run: str, timeout_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [*LAUNCHER, *options, "--", sys.executable, RANKS, run]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout_s)


def results(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def why_no_namespaces() -> str:
    """Empty where this machine allows them."""
    done = subprocess.run([*LAUNCHER, "--network", "namespaces", "--", "true"], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture(params=["namespaces", "loopback"])
def network(request: pytest.FixtureRequest) -> tuple[str, str]:
    if request.param == "namespaces" and why_no_namespaces():
        pytest.skip(why_no_namespaces())
    return "--network", request.param


def test_ranks_know_their_places(network) -> None:
    ranks = sorted(results(launch("--nodes", "3", "--ranks", "2", *network, run="where")), key=lambda r: int(r["RANK"]))
    assert [rank["RANK"] for rank in ranks] == list("012345")
    assert [rank["LOCAL_RANK"] for rank in ranks] == list("010101")
    assert [rank["EP_PLUGIN_HOST"] for rank in ranks] == [f"node{rank // 2}" for rank in range(6)]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks} == {("6", "2")}
    assert len({rank["MASTER_ADDR"] for rank in ranks}) == 1
    networks = [rank["network"] for rank in ranks]
    if network[1] == "namespaces":
        assert len(set(networks)) == 3 and networks[0::2] == networks[1::2]
    else:
        assert set(networks) == {os.readlink("/proc/self/ns/net")}


@pytest.mark.slow
def test_memory_of_peers_ends_at_the_node(network) -> None:
    for rank in results(launch(*network, run="topology")):
        assert rank["nodes"] == [[0, 1], [2, 3]]
        assert rank["reached"] == 2
        assert len(rank["refused"]) == 2
        assert all("node0@" in refusal and "node1@" in refusal for refusal in rank["refused"])


@pytest.mark.skipif("EP_TEST_LONG" not in os.environ, reason="takes minutes: EP_TEST_LONG=1 runs it")
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_nodes", "per_node"), SHAPES)
def test_the_cases_of_one_node_between_namespaces(num_nodes: int, per_node: int) -> None:
    given = ("--network", "namespaces", "--nodes", str(num_nodes), "--ranks", str(per_node))
    root = str(Path(__file__).parents[2])
    for rank in results(launch(*given, run="dispatch_and_combine", timeout_s=880, PYTHONPATH=root)):
        assert rank["passed"] == len(ONE_NODE_CASES)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_the_rate_bounds_the_link_and_only_the_link() -> None:
    times = {}
    for rank in results(launch("--network", "namespaces", "--rate", "20mbit", run="broadcast_times")):
        times |= rank
    least_s = (2**21 - 2**18) * 8 / 20e6  # what is not in the buckets of the two ends
    assert least_s < times["across"] < 20 * least_s
    assert times["inside"] < least_s


@pytest.mark.parametrize(("how", "status"), [("7", 7), ("killed", 137)])
def test_a_rank_that_fails_ends_the_run(network, how: str, status: int) -> None:
    done = launch("--grace", "0.1", *network, run="fail", VICTIM="2", HOW=how)
    assert done.returncode == status
    assert "nodes: rank 2 " in done.stderr


@pytest.mark.deadline
def test_the_others_have_time_to_find_out(network) -> None:
    done = launch("--grace", "60", *network, run="fail_by_itself_later")
    assert done.returncode == 137
    assert sorted(json.loads(line)["raised"] for line in done.stdout.splitlines()) == [0, 2, 3]


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=["terminated", "interrupted", "killed"],
)
def test_nothing_is_left_of_a_launcher_that_is_ended(network, signum: int, status: int) -> None:
    command = [*LAUNCHER, *network, "--", sys.executable, RANKS, "wait_for_ever"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        ranks = [json.loads(run.stdout.readline()) for _ in range(4)]
        networks = {rank["network"] for rank in ranks} - {os.readlink("/proc/self/ns/net")}
        assert len(networks) == (2 if network[1] == "namespaces" else 0)
        assert networks <= _networks_in_use()
        run.send_signal(signum)
        assert run.wait(timeout=60) == status
        run.stdout.read()  # ends when the last rank has closed its end
    deadline = time.monotonic() + 30
    while networks & _networks_in_use() or any(_is_running(rank["pid"]) for rank in ranks):
        assert time.monotonic() < deadline, "ranks or namespaces are left"
    assert not any(text in Path("/proc/mounts").read_text() for text in networks)


def test_without_iproute2_the_loopback_is_used_and_said(tmp_path: Path) -> None:
    done = launch("--nodes", "2", "--ranks", "1", run="where", PATH=str(tmp_path))
    assert len(results(done)) == 2
    assert "the ranks share the loopback device" in done.stderr and "'ip' is not installed" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network", "loopback", "--rate", "1gbit"], "expected network namespaces, whose links can be bounded"),
        (["--rate", "fast"], "expected a number and kbit, mbit or gbit, such as 1gbit, got 'fast'"),
        (["--nodes", "0"], "--nodes: expected 1 to 64, got 0"),
        (["--ranks", "65"], "--ranks: expected 1 to 64, got 65"),
        (["--grace", "-1"], "--grace: expected 0 or more seconds, got -1"),
        (["--grace", "inf"], "--grace: expected 0 or more seconds, got inf"),
        (["--device", "cuda"], "device: expected at least one GPU for cuda, found none"),
    ],
    ids=["rate-without-namespaces", "rate", "nodes", "ranks", "grace", "endless-grace", "gpus"],
)
def test_what_cannot_be_is_refused_before_anything_starts(options: list[str], message: str) -> None:
    done = launch(*options, run="where", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert message in done.stderr and not done.stdout


def test_a_command_that_is_not_there(network) -> None:
    done = subprocess.run([*LAUNCHER, *network, "--", "no-such-program"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 127
    assert "no-such-program" in done.stderr


def _bench(suite: str, *options: str, out: Path) -> subprocess.CompletedProcess[str]:
    arguments = [suite, "--backend", "cpu", *options, "--iterations", "1", "--out", str(out)]
    command = [*LAUNCHER, "--network", "loopback", "--", sys.executable, "-m", "ep_plugin.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_bench_runs_on_the_ranks_of_its_launcher(tmp_path: Path) -> None:
    done = _bench("allgather", "--ranks", "4", "--nodes", "2", "--size", "64", out=tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("emulated: 2 nodes of 2 ranks on the loopback device") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["suite"] == "allgather_2_nodes"
    assert found["emulation"] == "2 nodes of 2 ranks on the loopback device"
    assert found["command"] == (
        "python -m ep_plugin.testing.nodes --device cpu --network loopback -- "
        "ep-bench allgather --backend cpu --ranks 4 --iterations 1 --nodes 2 --size 64 --dtype float32"
    )
    assert {row["bytes_wire"] for row in found["rows"]} == {16}
    assert {row["impl"] for row in found["rows"]} == {"ep_plugin", "ep_plugin, foreign output", "gloo"}


@pytest.mark.slow
def test_a_bench_of_dispatch_and_combine_over_nodes(tmp_path: Path) -> None:
    sizes = "--ranks 4 --nodes 2 --tokens 24 --hidden 64 --topk 6 --experts 16 --dtype bfloat16 --layout flat"
    done = _bench("moe", *sizes.split(), out=tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["suite"] == "moe_ht_2_nodes"
    cases = {row["case"]: {} for row in found["rows"]}
    for row in found["rows"]:
        cases[row["case"]][row["impl"]] = row["bytes_wire"]
    for case, wire in cases.items():
        assert list(wire) == ["ep_plugin", "gloo_all_to_all", "gloo_row_per_rank", "gloo_rail"], case
        assert 0 < wire["ep_plugin"] == wire["gloo_rail"] < wire["gloo_row_per_rank"] < wire["gloo_all_to_all"], case
    assert cases["roundtrip_flat_bf16"]["ep_plugin"] == 2 * cases["combine_flat_bf16"]["ep_plugin"]


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["allgather", "moe"])
def test_a_bench_refuses_other_nodes(suite: str, tmp_path: Path) -> None:
    done = _bench(suite, "--ranks", "4", "--nodes", "1", out=tmp_path / "found.json")
    assert done.returncode == 2
    assert "nodes: expected 2, which" in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "found.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["allgather", "moe"])
def test_a_bench_refuses_another_number_of_ranks(suite: str, tmp_path: Path) -> None:
    """The command of one of four ranks, which refuses before it meets the others."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from ep_plugin.bench.cli import main

    launched = variables_of(0, Cluster(nodes=2, ranks=2, launched_by="python -m ep_plugin.testing.nodes"), 1234)
    arguments = [suite, "--backend", "cpu", "--ranks", "2", "--nodes", "2", "--out", str(tmp_path / "found.json")]
    done = CliRunner(env=launched).invoke(main, arguments)
    assert done.exit_code == 2
    assert "ranks: expected 4, which the launcher has started, got 2" in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize(
    ("arguments", "command", "words"),
    [
        (["--rate", "1gbit", "--", "ep-bench", "x"], ["ep-bench", "x"], " --rate 1gbit"),
        (["--nodes", "3", "true"], ["true"], " --nodes 3"),
        (["--", "true"], ["true"], ""),
    ],
    ids=["after-dashes", "without-dashes", "no-options"],
)
def test_ranks_are_told_how_they_were_launched(arguments: list[str], command: list[str], words: str) -> None:
    launched_by = nodes._words(arguments, command)
    assert launched_by == f"python -m ep_plugin.testing.nodes{words}"
    variables = variables_of(0, Cluster(nodes=2, ranks=2, launched_by=launched_by), 1234)
    assert variables["EP_PLUGIN_LAUNCHED_BY"] == launched_by


def test_nodes_with_gpus_are_hosts_that_only_sockets_join() -> None:
    cluster = Cluster(nodes=2, ranks=2, gpus=["4", "5", "6", "7"])
    ranks = [variables_of(rank, cluster, 1234) for rank in range(4)]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["4,5", "4,5", "6,7", "6,7"]
    assert [rank["NCCL_HOSTID"] for rank in ranks] == ["node0", "node0", "node1", "node1"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert {(rank["NCCL_NET"], rank["NCCL_SOCKET_IFNAME"]) for rank in ranks} == {("Socket", "lo")}


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl() -> None:
    cluster = Cluster(nodes=2, ranks=2, gpus=["5"])
    ranks = [variables_of(rank, cluster, 1234) for rank in range(4)]
    assert [rank["NCCL_HOSTID"] for rank in ranks] == ["rank0", "rank1", "rank2", "rank3"]
    assert [rank["EP_PLUGIN_HOST"] for rank in ranks] == ["node0", "node0", "node1", "node1"]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    settings = {
        "CUDA_VISIBLE_DEVICES": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4",
        "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "EP_PLUGIN_EMULATION": "2 nodes of 2 ranks on the loopback device, which share 1 GPU(s)",
    }  # fmt: skip
    assert all(settings.items() <= rank.items() for rank in ranks)


def test_ranks_share_gpus_as_evenly_as_they_can() -> None:
    cluster = Cluster(nodes=2, ranks=4, gpus=["a", "b", "c"])
    assert [variables_of(rank, cluster, 1)["CUDA_VISIBLE_DEVICES"] for rank in range(8)] == list("aaabbbcc")


@pytest.mark.parametrize(("gpus", "shared"), [(1, True), (3, True), (4, False), (8, False)])
def test_ranks_share_gpus_where_there_are_fewer(gpus: int, shared: bool, monkeypatch, capfd) -> None:
    monkeypatch.setattr(nodes, "_visible_gpus", lambda: [str(gpu) for gpu in range(gpus)])
    options, rate = nodes._parse(["--nodes", "2", "--ranks", "2", "true"])
    assert nodes._choose(options, rate, "").shares_gpus is shared
    assert (f"which share {gpus} GPU(s); each sees one as its LOCAL_RANK 0" in capfd.readouterr().err) is shared
    with pytest.raises(ValueError, match="rate: expected none with GPUs"):
        nodes._choose(options, 10**9, "")


def test_a_held_port_is_free_for_the_ranks_store_alone() -> None:
    with nodes.held_port() as port:
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        assert dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port


def test_rates() -> None:
    assert [parse_rate(text) for text in ("100mbit", "1gbit", "2.5Gbit")] == [10**8, 10**9, 25 * 10**8]


def _networks_in_use() -> set[str]:
    """The network namespaces that processes are in, or hold open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns/net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for link in links:
            try:
                found.add(os.readlink(link))
            except OSError:
                continue
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
