"""Sentences on what a result of `ep-bench fsdp2` is judged by; older results lack some of it."""

from __future__ import annotations

from typing import Any

_STOCK = "stock"


def fsdp2_notes(result: dict[str, Any]) -> list[str]:
    found = [_speed(result["tokens_per_s"]), _communication(result), _losses(result)]
    return found + ([_memory(result)] if result["peak_bytes"] else [])


def _speed(rates: dict[str, int]) -> str:
    stock = rates[_STOCK]
    others = [f"{name} {rate:,} ({rate / stock:.3f} × stock)" for name, rate in rates.items() if name != _STOCK]
    return f"tokens/s: {'; '.join([f'{_STOCK} {stock:,}', *others])}"


def _communication(result: dict[str, Any]) -> str:
    exposed = f"communication: {result['exposed_in_stock']:.1%} of stock's step is exposed"
    if "collectives_us" not in result:
        return exposed
    alone = ", ".join(f"{name} {took / 1e3:,.1f} ms" for name, took in result["collectives_us"].items())
    return (
        f"{exposed}; a step's collectives by themselves, undisturbed: {alone}; stock's are at least "
        f"{result['collectives_share']:.1%} of its step, and {result['share_when_exposed']:.1%} of one that hid none "
        "of them"
    )


def _losses(result: dict[str, Any]) -> str:
    worst = ", ".join(f"{name} {value:.1e}" for name, value in result["max_rel_diff"].items())
    steps = len(result["losses"][_STOCK])
    return f"losses of {steps} steps, largest relative difference from stock's: {worst}"


def _memory(result: dict[str, Any]) -> str:
    peaks = result["peak_bytes"]
    beyond = [f"{name} {(peaks[name] - peaks[_STOCK]) / 1e6:,.0f} MB" for name in result["max_rel_diff"]]
    unit = f"; parameters of a unit: {result['unit_bytes'] / 1e6:,.0f} MB" if "unit_bytes" in result else ""
    return f"peak memory beyond stock's {peaks[_STOCK] / 1e9:,.1f} GB: {', '.join(beyond)}{unit}"
