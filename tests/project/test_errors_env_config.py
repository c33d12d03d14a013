"""Errors, environment and configuration: values accepted, values refused, and what the refusals say."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings

import pytest

from ep_plugin import env
from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
from ep_plugin.env import Launcher, Settings
from ep_plugin.errors import (
    DisagreementError,
    EpPluginError,
    NotSupported,
    PeerAborted,
    PeerTimeout,
    error_of_peer,
    reason_of,
    text_of,
)

SMALL = {"num_experts": 8, "hidden_size": 64, "topk": 2}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(env.os.environ):
        if name.startswith("EP_PLUGIN") or name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(env, "_warned", set())
    env._parsed.cache_clear()


def test_errors_say_what_they_carry_and_travel_between_processes():
    timeout = pickle.loads(pickle.dumps(PeerTimeout("rank 3 is late", rank=3, step="notify")))
    assert (timeout.rank, timeout.step, str(timeout)) == (3, "notify", "rank 3 is late")
    aborted = pickle.loads(pickle.dumps(PeerAborted("rank 1 aborted: disk", rank=1, reason="disk")))
    assert (aborted.rank, aborted.reason, str(aborted)) == (1, "disk", "rank 1 aborted: disk")


@pytest.mark.parametrize(
    ("error", "kind", "at_fault"),
    [
        (ValueError("x"), PeerAborted, 1),
        (PeerTimeout("x", 3, "notify"), PeerTimeout, 3),
        (PeerTimeout("x", 2, "notify"), PeerAborted, 1),  # rank 2 itself is never named
        (PeerAborted("x", 3, "y"), PeerAborted, 3),
        (NotSupported("x"), NotSupported, None),
        (DisagreementError("x"), DisagreementError, None),
    ],
)
def test_a_reason_becomes_the_error_of_a_peer(error, kind, at_fault):
    found = error_of_peer(1, reason_of(error), 2)
    assert type(found) is kind and getattr(found, "rank", None) == at_fault
    assert str(found).endswith("x") and str(found).isprintable()
    plain = error_of_peer(1, text_of(reason_of(error)), 2)
    assert type(plain) is PeerAborted and plain.rank == 1


def test_a_text_can_be_sent_and_is_not_too_long():
    text = text_of("a\0\ud800\x9b\n\tπ" + 10_000 * "b")
    assert text.startswith("a\\x00\\ud800\\x9b\n\tπbb") and len(text.encode()) < 2100
    assert text_of(text) == text[:2000]


def test_errors_can_be_caught_as_what_they_mean():
    assert issubclass(DisagreementError, ValueError) and issubclass(DisagreementError, EpPluginError)
    assert issubclass(NotSupported, NotImplementedError) and issubclass(NotSupported, EpPluginError)


def test_settings_without_variables_are_the_defaults():
    assert env.settings() == Settings()


def test_settings_read_every_variable_afresh(monkeypatch):
    monkeypatch.setenv("EP_PLUGIN_TRANSPORT", "SHM")
    monkeypatch.setenv("EP_PLUGIN_RANKS_PER_NODE", "4")
    monkeypatch.setenv("EP_PLUGIN_CHECK_IDS", "1")
    monkeypatch.setenv("EP_PLUGIN_PLAIN_KERNELS", "true")
    monkeypatch.setenv("EP_PLUGIN_TEST_GATE", "dispatch_send")
    monkeypatch.setenv("EP_PLUGIN_LOG", "on")
    expected = Settings(
        transport="shm", ranks_per_node=4, check_ids=True, plain_kernels=True, test_gate="dispatch_send", log=True
    )
    assert env.settings() == expected
    monkeypatch.setenv("EP_PLUGIN_CHECK_IDS", "0")
    monkeypatch.setenv("EP_PLUGIN_TRANSPORT", "")
    assert (env.settings().check_ids, env.settings().transport) == (False, "auto")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EP_PLUGIN_TRANSPORT", "rdma"),
        ("EP_PLUGIN_RAIL", "nccl"),
        ("EP_PLUGIN_RANKS_PER_NODE", "0"),
        ("EP_PLUGIN_RANKS_PER_NODE", "two"),
        ("EP_PLUGIN_CHECK_IDS", "maybe"),
        ("EP_PLUGIN_PLAIN_KERNELS", "2"),
        ("EP_PLUGIN_TEST_GATE", "later"),
        ("EP_PLUGIN_LOG", "debug"),
        ("EP_PLUGIN_RANGES", "tracy"),
        ("EP_PLUGIN_FALLBACK", "nccl"),
        ("EP_PLUGIN_CHILDREN", "none"),
    ],
)
def test_bad_settings_name_variable_expected_and_actual(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}: expected .*got '{value}'"):
        env.settings()


def test_unknown_variable_warns_once(monkeypatch):
    monkeypatch.setenv("EP_PLUGIN_TRANSPROT", "shm")
    with pytest.warns(UserWarning, match="EP_PLUGIN_TRANSPROT is set but not known"):
        env.settings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.settings()


@pytest.mark.parametrize("name", ["EP_PLUGIN", "EP_PLUGIN_CUDA_ARCHS", "EP_PLUGIN_BUILD_JOBS"])
def test_start_up_and_build_variables_do_not_warn(monkeypatch, name):
    monkeypatch.setenv(name, "anything")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.settings()


def test_launcher_variables(monkeypatch):
    assert env.launcher() == Launcher()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert env.launcher() == Launcher(local_rank=0, local_world_size=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "-1")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE: expected an integer of at least 1, got '-1'"):
        env.launcher()


def test_symmetric_memory_variables_are_set_for_a_while_and_then_as_before(monkeypatch):
    overlapping, no_multicast = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.setenv(overlapping, "0")
    monkeypatch.delenv(no_multicast, raising=False)
    with pytest.raises(KeyError), env.symmetric_memory_variables():
        assert (env.os.environ[overlapping], env.os.environ[no_multicast]) == ("1", "1")
        raise KeyError
    assert env.os.environ[overlapping] == "0"
    assert no_multicast not in env.os.environ


def test_socket_directory_is_the_first_that_is_set(monkeypatch):
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert env.socket_directory() == "/tmp"
    monkeypatch.setenv("TEMP", "/third")
    assert env.socket_directory() == "/third"
    monkeypatch.setenv("TMPDIR", "/first")
    assert env.socket_directory() == "/first"


def test_config_defaults():
    config = MoECommunicatorConfig(**SMALL)
    assert config.mode == "ht"
    assert config.resolved_layout is DispatchLayout.FLAT
    token_major = MoECommunicatorConfig(**SMALL, layout=DispatchLayout.TOKEN_MAJOR)
    assert token_major.resolved_layout is DispatchLayout.TOKEN_MAJOR
    assert MoECommunicatorConfig(**SMALL, layout="token_major") == token_major
    with pytest.raises(AttributeError):
        config.topk = 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_experts": 0}, "num_experts: expected an integer of at least 1, got 0"),
        ({"num_experts": "8"}, "num_experts: expected an integer of at least 1, got '8'"),
        ({"hidden_size": 64.0}, "hidden_size: expected an integer of at least 1, got 64.0"),
        ({"hidden_size": True}, "hidden_size: expected an integer of at least 1, got True"),
        ({"topk": 0}, "topk: expected an integer of at least 1, got 0"),
        ({"topk": 9}, r"topk: expected at most num_experts \(8\), got 9"),
        ({"topk": 129, "num_experts": 256}, "topk: expected at most 128, got 129"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank: expected an integer of at least 1, got 0"),
        ({"max_row_bytes": 100}, "max_row_bytes: expected a multiple of 16, got 100"),
        ({"max_row_bytes": -16}, "max_row_bytes: expected an integer of at least 1, got -16"),
        ({"expert_alignment": 0}, "expert_alignment: expected an integer of at least 1, got 0"),
        ({"expert_alignment": 2**31}, "expert_alignment: expected at most 1048576, got 2147483648"),
        ({"timeout_s": 0}, r"timeout_s: expected a number of seconds above 0, at most 1e\+09, got 0"),
        ({"timeout_s": float("inf")}, "timeout_s: expected .* got inf"),
        ({"timeout_s": float("nan")}, "timeout_s: expected .* got nan"),
        ({"timeout_s": 5e9}, "timeout_s: expected .* at most .* got 5"),
        ({"timeout_s": "1"}, "timeout_s: expected .* got '1'"),
        ({"dispatch_send_sms": 0}, "dispatch_send_sms: expected an integer of at least 1, got 0"),
        ({"dispatch_recv_sms": -1}, "dispatch_recv_sms: expected an integer of at least 0, got -1"),
        ({"combine_send_sms": 2.5}, "combine_send_sms: expected an integer of at least 1, got 2.5"),
        ({"combine_recv_sms": -1}, "combine_recv_sms: expected an integer of at least 0, got -1"),
        ({"mode": "fast"}, "mode: expected one of ht, ll, got 'fast'"),
        ({"layout": "flt"}, "one of flat, token_major, expert_major, or None, got 'flt'"),
        ({"num_experts": 2**31}, "num_experts: expected at most 2147483647, got 2147483648"),
    ],
)
def test_bad_config_says_expected_and_actual(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        MoECommunicatorConfig(**{**SMALL, **change})


def test_largest_topk_is_accepted():
    assert MoECommunicatorConfig(num_experts=128, hidden_size=16, topk=128).topk == 128


LOW_LATENCY = {**SMALL, "mode": "ll", "max_tokens_per_rank": 4096}


def test_each_mode_has_its_layouts():
    assert MoECommunicatorConfig(**SMALL).resolved_layout is DispatchLayout.FLAT
    assert MoECommunicatorConfig(**LOW_LATENCY).resolved_layout is DispatchLayout.EXPERT_MAJOR
    assert MoECommunicatorConfig(**LOW_LATENCY, layout="expert_major").resolved_layout is DispatchLayout.EXPERT_MAJOR
    with pytest.raises(ValueError, match=r'layout: expected FLAT or TOKEN_MAJOR in mode="ht", got EXPERT_MAJOR'):
        MoECommunicatorConfig(**SMALL, layout=DispatchLayout.EXPERT_MAJOR)
    with pytest.raises(ValueError, match=r'layout: expected EXPERT_MAJOR in mode="ll", got FLAT'):
        MoECommunicatorConfig(**LOW_LATENCY, layout=DispatchLayout.FLAT)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_tokens_per_rank": None}, "max_tokens_per_rank: expected 1 to 4096 .* got None"),
        ({"max_tokens_per_rank": 4097}, "max_tokens_per_rank: expected 1 to 4096 .* got 4097"),
        ({"num_experts": 32768}, "num_experts: expected at most 32767 .* got 32768"),
        ({"expert_alignment": 16}, "expert_alignment: expected 1 .* got 16"),
        ({"rail_chunks": 2}, "rail_chunks: expected None .* got 2"),
        ({"combine_recv_sms": 0}, "combine_recv_sms: expected None .* got 0"),
        ({"ids_as_given": True}, "ids_as_given: expected False, or True with layout=TOKEN_MAJOR, got True"),
        ({"mode": "ht", "ids_as_given": 0}, "ids_as_given: expected False, .* got 0"),
        ({"shrink": 1}, "shrink: expected True or False, got 1"),
        ({"mode": "ht", "shrink": True}, 'shrink: expected False in mode="ht", got True'),
    ],
)
def test_bad_config_of_low_latency(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        MoECommunicatorConfig(**{**LOW_LATENCY, **change})


def test_agreement_hash_is_the_same_in_another_process():
    config = MoECommunicatorConfig(**SMALL, max_tokens_per_rank=7)
    code = (
        "from ep_plugin.config import MoECommunicatorConfig as C;"
        "print(C(num_experts=8, hidden_size=64, topk=2, max_tokens_per_rank=7).agreement_hash())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == config.agreement_hash()
    assert 0 <= config.agreement_hash() < 2**63


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 16},
        {"hidden_size": 128},
        {"topk": 1},
        {"max_tokens_per_rank": 5},
        {"layout": DispatchLayout.TOKEN_MAJOR},
        {"max_row_bytes": 256},
        {"expert_alignment": 8},
        {"layout": DispatchLayout.TOKEN_MAJOR, "ids_as_given": True},
    ],
)
def test_agreement_hash_sees_what_ranks_must_agree_on(change):
    base, other = MoECommunicatorConfig(**SMALL), MoECommunicatorConfig(**{**SMALL, **change})
    assert base.agreement_hash() != other.agreement_hash()
    assert base.describe() != other.describe()


@pytest.mark.parametrize(
    "change",
    [
        {"timeout_s": 3.0},
        {"dispatch_send_sms": 8},
        {"dispatch_recv_sms": 8},
        {"combine_send_sms": 8},
        {"combine_recv_sms": 8},
        {"layout": DispatchLayout.FLAT},
    ],
)
def test_agreement_hash_ignores_what_ranks_may_choose(change):
    base, other = MoECommunicatorConfig(**SMALL), MoECommunicatorConfig(**SMALL, **change)
    assert base.agreement_hash() == other.agreement_hash()


def test_describe_names_every_agreed_field():
    text = MoECommunicatorConfig(**SMALL, timeout_s=5).describe()
    assert text == (
        "num_experts=8, hidden_size=64, topk=2, max_tokens_per_rank=None, mode=ht, layout=FLAT, "
        "max_row_bytes=None, expert_alignment=1, ids_as_given=False, rail_chunks=None, max_rows_per_node=None, "
        "shrink=False"
    )


def test_config_and_errors_import_without_torch():
    names = ("config", "env", "transport.topology", "transport.peer", "transport.shm")
    modules = ", ".join(f"ep_plugin.{name}" for name in names)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
