# SPDX-License-Identifier: Apache-2.0
"""A namespace, its counters and its device for people. --json shows all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hifc.namespace.stats import latency_us
from hifc_admin import text
from hifc_admin.engine.rates import QUANTILES


def stats_lines(stats: Mapping[str, Any]) -> list[str]:
    """Sizes with units, the rest as it is, in the order of struct hifc_stats, whose names these
    are, and those that the program published below them. What never happened is left out."""
    rows = [(name, value) for name, value in stats.items() if name != "published"]
    rows += stats.get("published", {}).items()
    return text.pairs((name, _shown(name, value)) for name, value in rows if _any(value))


def _any(value: object) -> bool:
    return any(value) if isinstance(value, list | tuple) else bool(value)


def namespace_lines(stats: Mapping[str, Any]) -> list[str]:
    """One at rest: what is on it, and what opening it found wrong."""
    return text.pairs(_facts(stats))


def _facts(stats: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if stats["label"]:
        yield "label", stats["label"]
    yield "uuid", stats["uuid"]
    swap = f", {stats['entries_swap']} of them swap" if stats["entries_swap"] else ""
    yield "entries", f"{stats['entries']}{swap}"
    used = ((name, stats[f"{name}_bytes"]) for name in ("live", "dead", "metadata", "free"))
    parts = [f"{text.size(amount)} {name}" for name, amount in used if amount]
    yield "space", f"{', '.join(parts)} of {text.size(stats['capacity_bytes'])}"
    size = text.size(stats["segment_size_bytes"])
    yield "segments", f"{stats['segments']} of {size}, {stats['segments_free']} free"
    if stats["segments_damaged"]:
        yield "damaged", f"{stats['segments_damaged']} segments: see fsck"
    if stats["recovery_damaged"]:
        yield "lost", f"{stats['recovery_damaged']} entries that had been flushed: see fsck"
    if stats["recovery_dropped"]:
        yield "dropped", f"{stats['recovery_dropped']} entries that a crash cut short"
    if not stats["direct"]:
        yield "page cache", "in between: no direct I/O here"


def device_lines(device: Mapping[str, Any]) -> list[str]:
    """What a device says of itself, without what it does not say."""
    rows = [
        (name.removesuffix("_bytes"), _device_text(name, value))
        for name, value in device.items()
        if value and value != "-"
    ]
    return ["device", *(f"  {line}" for line in text.pairs(rows))]


def _device_text(name: str, value: object) -> object:
    if name == "lba_bytes":
        return f"{value} bytes"
    return ", ".join(value) if isinstance(value, list) else _shown(name, value)


def _shown(name: str, value: object) -> object:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{text.size(value)} ({value})" if value >= 1024 else value
    if name.endswith("_latency") and isinstance(value, Sequence):
        times = {mark: latency_us(value, quantile) for mark, quantile in QUANTILES.items()}
        known = [f"{mark} {time:.0f} us" for mark, time in times.items() if time is not None]
        return ", ".join(known) or "none"
    if name.endswith("_ns") and isinstance(value, int):
        return f"{value / 1e6:.3f} ms"
    return value
