"""The suite `wire`: the rates of the links and of the SMs, without any exchange around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ep_plugin.bench.links import CPU_CHUNKS, Copy, CpuWire, GpuWire, copies_on_gpus, time_copies
from ep_plugin.bench.suite import Suite, row


@dataclass(frozen=True, kw_only=True)
class WireSuite(Suite):
    """Rates of the links and the SMs: stores, loads, TMA and copy engines, by SMs and chunk."""

    command_name: ClassVar[str] = "wire"

    def measure(self, device: torch.device) -> dict[str, Any]:
        wire: GpuWire | CpuWire
        if device.type == "cuda":
            wire = GpuWire(device)
            copies = copies_on_gpus(wire.present)
        else:
            wire, copies = CpuWire(), [Copy(kind="copy", chunk=chunk) for chunk in CPU_CHUNKS]
        try:
            timings = time_copies(wire, device, copies, self.iterations)
        finally:
            wire.close()
        rows = [row(copy.name, "wire", timing, wire.moved(), copy.sms) for copy, timing in timings.items()]
        return {"rows": rows, "notes": []}
