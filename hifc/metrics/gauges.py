# SPDX-License-Identifier: Apache-2.0
"""What an engine shows beside its counters: values that are read whenever somebody looks.

They are read by the publisher's thread as well, without the engine's lock.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from hifc.errors import ClosedError
from hifc.namespace import stats

if TYPE_CHECKING:
    from hifc.engine import HiFC

# Of the namespace's statistics, those that an engine shows.
_NAMESPACE = (
    "device_write_bytes",
    "device_read_bytes",
    "bounce_bytes",
    "entries",
    "free_bytes",
    "write_amplification",
    "prefetch_submitted",
    "prefetch_completed",
    "prefetch_failed",
    "prefetch_duplicates",
    "prefetch_cancelled",
    "prefetch_bad",
    "prefetch_overflowed",
    "prefetch_reads",
    "prefetch_bytes",
)
_MEMORY = {
    "resident_bytes": "Bytes of resident blocks",
    "host_tier_bytes": "Bytes in the host tier",
    "blocks": "Blocks known",
    "hot_ratio": "Share of blocks kept hot",
    "prefetch_landings": "Room for prefetched blocks",
}
# Of load or recompute.
_COSTS = {
    "break_even_tokens": "Shortest prefix that is faster loaded; left out while none is known",
    "prefix_load_tokens_per_s": "Tokens a second of loading a prefix",
    "prefix_compute_tokens_per_s": "Tokens a second of computing one",
    "prefix_error": "Median relative error of the time that prompts were expected to take",
}
# What each gauge is that an engine publishes.
DESCRIPTIONS: dict[str, str] = _MEMORY | {
    name: f"{text} (the model used last)" for name, text in _COSTS.items()
}


def register(engine: HiFC) -> None:
    """Adds them to the engine's metrics."""
    gauge = engine.metrics.gauge
    reads: dict[str, Callable[[], float]] = {
        "resident_bytes": lambda: engine.blocks.resident_bytes,
        "host_tier_bytes": lambda: engine.tier.used_bytes,
        "blocks": lambda: len(engine.blocks),
        "hot_ratio": lambda: engine.classifier.hot_ratio,
        "prefetch_landings": lambda: engine.ahead.landings,
    }
    for name, text in _MEMORY.items():
        gauge(name, text, reads[name])
    for place, name in enumerate(_COSTS):
        gauge(name, DESCRIPTIONS[name], functools.partial(_cost, engine, place))
    for name in _NAMESPACE:
        text = stats.DESCRIPTIONS[name]
        gauge(f"namespace_{name}", text, functools.partial(_stat, engine, name))


def _cost(engine: HiFC, place: int) -> float:
    costs = engine.costs
    if place == 0:
        tokens = -1 if costs is None else costs.break_even_tokens()
        return tokens if tokens >= 0 else math.nan
    if costs is None:
        return math.nan
    return (*costs.tokens_per_s(), costs.error())[place - 1]


def _stat(engine: HiFC, name: str) -> float:
    with contextlib.suppress(ClosedError):
        return float(getattr(engine.namespace.stats(), name))
    return 0.0
