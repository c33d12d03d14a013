"""deep_ep.utils against plain torch, and the process group that its tests begin with."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from ep_plugin import deep_ep
from ep_plugin.deep_ep.utils import check_nvlink_connections, envs, math, testing
from ep_plugin.deep_ep.utils.envs import init_dist
from ep_plugin.errors import NotSupported
from ep_plugin.testing.nodes import held_port
from ep_plugin.transport import topology
from tests.moe.test_across_nodes import on_nodes
from tests.ranks import run_ranks, values


def test_calc_diff() -> None:
    x = torch.tensor([0.0, 1.0])
    assert math.calc_diff(x, x) == 0.0
    assert math.calc_diff(x, torch.tensor([1.0, 1.0])) == pytest.approx(1 - 2 * 6 / (5 + 8))
    assert math.calc_diff(x[:0], x[:0]) == 0.0


def test_the_version_is_that_of_the_interface() -> None:
    import ep_plugin.deep_ep as deep_ep

    assert deep_ep.__version__.startswith("1.2.1+")
    assert not hasattr(deep_ep, "HybridEPBuffer")  # Megatron asks at every import: no warning


def test_callers_that_look_for_1_2_1_find_it() -> None:
    import ep_plugin.deep_ep as deep_ep

    assert Version("1.2.1") <= Version(deep_ep.__version__) < Version("1.2.2")
    assert [int(part) for part in deep_ep.__version__.partition("+")[0].split(".")] == [1, 2, 1]
    names = ["dispatch", "combine", "internode_dispatch", "internode_combine", "get_dispatch_layout", "capture"]
    names += ["set_num_sms", "get_dispatch_config", "get_combine_config", "is_sm90_compiled", "get_comm_stream"]
    names += ["low_latency_dispatch", "low_latency_combine", "get_low_latency_rdma_size_hint"]
    names += ["clean_low_latency_buffer", "get_next_low_latency_combine_buffer"]
    names += [f"low_latency_{verb}_mask_buffer" for verb in ("update", "query", "clean")]
    assert [name for name in names if not hasattr(deep_ep.Buffer, name)] == []


def test_numbers() -> None:
    assert (math.ceil_div(9, 4), math.ceil_div(8, 4), math.align(9, 4), math.align(0, 4)) == (3, 2, 12, 0)
    assert (math.safe_div(3, 2), math.safe_div(0, 0)) == (1.5, 0)
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)


@pytest.mark.parametrize("hidden", [128, 200, 640])
def test_casts_to_fp8_and_back(hidden: int) -> None:
    x = torch.randn((5, hidden)).bfloat16()
    x[1], x[2, :128] = 0, 1e-6
    rows, scales = math.per_token_cast_to_fp8(x)
    assert rows.dtype is torch.float8_e4m3fn and rows.shape == x.shape and rows.is_contiguous()
    assert scales.shape == (5, -(-hidden // 128)) and scales.dtype is torch.float32
    blocks = torch.nn.functional.pad(x.float(), (0, -hidden % 128)).view(5, -1, 128).abs().amax(2)
    torch.testing.assert_close(scales, blocks.clamp(min=1e-4) / 448)
    back = math.per_token_cast_back(rows, scales)
    assert back.dtype is torch.bfloat16
    torch.testing.assert_close(back.float(), x.float(), rtol=0.07, atol=float(scales.max()) * 2**-9)
    assert math.per_token_cast_back(rows[:0], scales[:0]).shape == (0, hidden)


@pytest.mark.parametrize("hidden", [512, 640])
def test_packed_scales(hidden: int) -> None:
    groups = hidden // 128
    exponents = torch.randint(120, 134, (3, groups), dtype=torch.uint8)
    padded = torch.nn.functional.pad(exponents, (0, -groups % 4))
    rows = torch.randn((3, hidden)).to(torch.float8_e4m3fn)
    expected = rows.float() * (exponents.float() - 127).exp2().repeat_interleave(128, dim=1)
    back = math.per_token_cast_back(rows, padded.view(torch.int32))
    assert torch.equal(back, expected.bfloat16())


def test_inplace_unique() -> None:
    x = torch.tensor([[3, 1, 3, -1], [0, 0, 0, 0], [-1, -1, -1, -1]])
    math.inplace_unique(x, 4)
    assert x.tolist() == [[3, 1, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]]
    wide = torch.tensor([[1, 0, 1, 0]])
    math.inplace_unique(wide, 2)
    assert wide.tolist() == [[1, 0, -1, -1]]


def test_grouped_scores() -> None:
    scores = torch.arange(1.0, 13.0).view(2, 6)
    kept = math.create_grouped_scores(scores, torch.tensor([[0, 2], [1, 1]]), 3)
    assert kept.tolist() == [[1, 2, 0, 0, 5, 6], [0, 0, 9, 10, 0, 0]]


def test_hashes_and_bytes() -> None:
    x = torch.randn((3, 5))
    assert math.hash_tensor(x) == math.hash_tensor(x.t().contiguous().t()) == math.hash_tensor(x.clone())
    assert math.hash_tensor(x) != math.hash_tensor(x + 1)
    assert math.hash_tensor(torch.tensor([True, True, False])) == 2
    assert math.hash_tensors(x, (x, None)) == 0 and math.hash_tensors(x) == math.hash_tensor(x)
    assert math.count_bytes(x, [x.half(), None]) == 90


def test_buffers_where_deepep_2_has_them() -> None:
    from ep_plugin import deep_ep
    from ep_plugin.deep_ep.buffers import elastic, legacy

    assert elastic.ElasticBuffer is deep_ep.ElasticBuffer and elastic.EPHandle is deep_ep.EPHandle
    assert legacy.Buffer is deep_ep.Buffer


def _checks_links(rank: int) -> None:
    check_nvlink_connections(dist.group.WORLD)  # no GPUs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs, "resolve_device", lambda group, device: torch.device("cuda", rank))
        patch.setattr(topology, "_gpu_identity", lambda device: (f"gpu {device.index}", ()))
        check_nvlink_connections(dist.group.WORLD)
        unreachable = ("gpu 1",) if rank == 0 else ()
        patch.setattr(topology, "_gpu_identity", lambda device: (f"gpu {device.index}", unreachable))
        with pytest.raises(NotSupported, match="rank 0 on cuda:0 .* cannot reach the memory of rank 1"):
            check_nvlink_connections(dist.group.WORLD)


def test_gpus_without_links_are_named() -> None:
    values(run_ranks(2, _checks_links))


def test_bench_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = iter(range(1000))
    monkeypatch.setattr(testing.time, "perf_counter", lambda: next(clock) ** 2)
    calls = []
    mean, least, most = testing.bench(
        lambda: calls.append("call"), num_warmups=2, num_tests=4, post_fn=lambda: calls.append("post")
    )
    assert calls == ["call"] * 2 + ["call", "post"] * 4
    assert (mean, least, most) == (9.0, 5, 13)  # runs take 1, 5, 9 and 13; the first is left out
    with pytest.raises(NotSupported, match="bench_kineto.*: expected a GPU"):
        testing.bench_kineto(lambda: None, "dispatch")


def test_kernels_of_a_profile() -> None:
    kernels = [
        testing.Kernel("ep::ep_ll_dispatch", 30.0, 2.0),
        testing.Kernel("ep::ep_ll_dispatch", 10.0, 4.0),
        testing.Kernel("ep::ep_ll_combine", 20.0, 7.0),
        testing.Kernel("ep::ep_ll_dispatch", 40.0, 8.0),
        testing.Kernel("ep::ep_ll_dispatch", 15.0, 6.0),
    ]
    assert testing.mean_durations(kernels, "combine", 1) == pytest.approx(7e-6)
    assert testing.mean_durations(kernels, "dispatch", 2) == pytest.approx([3e-6, 7e-6])
    with pytest.raises(ValueError, match=r"expected one kernel with 'ep_' in its name, got \['ep::ep_ll_c"):
        testing.mean_durations(kernels, "ep_", 1)
    with pytest.raises(ValueError, match="expected a divisor of the 4 launches of 'dispatch', got 3"):
        testing.mean_durations(kernels, "dispatch", 3)


def test_output_is_silenced(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with testing._silenced():
        os.write(1, b"hidden\n")
        os.write(2, b"hidden\n")
    os.write(1, b"after\n")
    assert capfd.readouterr() == ("before\nafter\n", "")


def test_an_event_calls_its_hook_once_and_is_dropped_when_asked() -> None:
    event, called = deep_ep.EventOverlap(deep_ep.EventHandle()), []
    event.register_hook_after_wait(lambda: called.append("hook"))
    with pytest.raises(ValueError, match="hook_after_wait: expected no hook"):
        event.register_hook_after_wait(print)
    event.current_stream_wait()
    event.current_stream_wait()
    assert called == ["hook"] and event.event is not None
    with event(release_handle=True) as entered:
        assert entered is event and event.event is not None
    assert event.event is None
    event.event = deep_ep.EventHandle()
    with event:  # the call counts for one block
        pass
    assert event.event is not None
    event.current_stream_wait(release_handle=True)
    assert event.event is None


def test_the_rate_of_an_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert envs.get_rdma_gbs("no such adapter") == 0
    (tmp_path / "mlx5_7/ports/1").mkdir(parents=True)
    (tmp_path / "mlx5_7/ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(envs, "Path", lambda _, *parts: tmp_path.joinpath(*parts))
    assert envs.get_rdma_gbs("mlx5_7") == 50


def _prints(rank: int, size: int) -> list[str]:
    envs.init_seed(7)
    assert (envs.get_global_seed(), envs.get_local_seed()) == (7, 7 + rank)
    assert torch.initial_seed() == 7 + rank
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        envs.dist_print("once", once_in_node=True)
        envs.dist_print(f"rank {rank}")
        envs.dist_print()
    return said.getvalue().splitlines()


def test_each_node_prints_once() -> None:
    assert on_nodes(2, 2, _prints) == [["once"] * (rank % 2 == 0) + [f"rank {rank}", ""] for rank in range(4)]


def _init(number: int, port: int, results: multiprocessing.Queue) -> None:
    node, local_rank = divmod(number, 2)
    os.environ |= {"MASTER_PORT": str(port), "RANK": str(node), "WORLD_SIZE": "2"}
    rank, size, group = init_dist(local_rank, 2, seed=3)
    results.put((rank, size, group.size(), torch.empty(1).dtype is torch.bfloat16, torch.initial_seed()))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="makes a group of CPU processes")
def test_init_dist_on_two_nodes() -> None:
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    with held_port() as port:
        ranks = [context.Process(target=_init, args=(number, port, results), daemon=True) for number in range(4)]
        for one in ranks:
            one.start()
        found = sorted(results.get(timeout=120) for _ in ranks)
        for one in ranks:
            one.join(60)
    assert found == [(rank, 4, 4, True, 3 + rank) for rank in range(4)]
