# SPDX-License-Identifier: Apache-2.0
"""What an engine shows beside its counters: values that are read whenever somebody looks.

They are read by the publisher's thread as well, without the engine's lock.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from hifc.errors import ClosedError

if TYPE_CHECKING:
    from hifc.engine import HiFC

_NAMESPACE = {
    "device_write_bytes": "Bytes written to the device",
    "device_read_bytes": "Bytes read from the device",
    "bounce_bytes": "Bytes copied between buffers by the CPU",
    "entries": "Entries of the namespace",
    "free_bytes": "Free bytes of the namespace",
    "write_amplification": "Bytes written over bytes accepted",
    "prefetch_submitted": "Descriptors taken from request rings",
    "prefetch_completed": "Descriptors whose bytes arrived and were verified",
    "prefetch_failed": "Descriptors answered with a miss or an error",
    "prefetch_duplicates": "Descriptors of reads on their way already",
    "prefetch_cancelled": "Descriptors taken back before their read started",
    "prefetch_bad": "Descriptors that made no sense",
    "prefetch_overflowed": "Descriptors that found their ring full",
    "prefetch_reads": "Reads made of descriptors",
    "prefetch_bytes": "Bytes brought by request rings",
}
# Of load or recompute.
_COSTS = {
    "break_even_tokens": "Shortest prefix that is faster loaded, -1: none, or not measured",
    "prefix_load_tokens_per_s": "Tokens a second of loading a prefix",
    "prefix_compute_tokens_per_s": "Tokens a second of computing one",
    "prefix_error": "Median relative error of the time that prompts were expected to take",
}


def register(engine: HiFC) -> None:
    """Adds them to the engine's metrics."""
    gauge = engine.metrics.gauge
    gauge("resident_bytes", "Bytes of resident blocks", lambda: engine.blocks.resident_bytes)
    gauge("host_tier_bytes", "Bytes in the host tier", lambda: engine.tier.used_bytes)
    gauge("blocks", "Blocks known", lambda: len(engine.blocks))
    gauge("hot_ratio", "Share of blocks kept hot", lambda: engine.classifier.hot_ratio)
    gauge("prefetch_landings", "Room for prefetched blocks", lambda: engine.ahead.landings)
    for place, (name, text) in enumerate(_COSTS.items()):
        gauge(name, f"{text} (the model used last)", functools.partial(_cost, engine, place))
    for name, text in _NAMESPACE.items():
        gauge(f"namespace_{name}", text, functools.partial(_stat, engine, name))


def _cost(engine: HiFC, place: int) -> float:
    costs = engine.costs
    if costs is None:
        return -1.0 if place == 0 else 0.0
    return (costs.break_even_tokens(), *costs.tokens_per_s(), costs.error())[place]


def _stat(engine: HiFC, name: str) -> float:
    with contextlib.suppress(ClosedError):
        return float(getattr(engine.namespace.stats(), name))
    return 0.0
