"""The suites, each a command of `ep-bench`."""

from __future__ import annotations

from ep_plugin.bench.suite import Suite
from ep_plugin.bench.suites.collectives import AllGatherSuite, ReduceScatterSuite
from ep_plugin.bench.suites.fsdp2 import Fsdp2Suite
from ep_plugin.bench.suites.layers import LayersSuite
from ep_plugin.bench.suites.moe import MoeSuite
from ep_plugin.bench.suites.overlap import OverlapSuite
from ep_plugin.bench.suites.wire import WireSuite

SUITES: list[type[Suite]] = [
    MoeSuite,
    AllGatherSuite,
    ReduceScatterSuite,
    OverlapSuite,
    LayersSuite,
    Fsdp2Suite,
    WireSuite,
]
