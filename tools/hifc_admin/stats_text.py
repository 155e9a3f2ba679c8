# SPDX-License-Identifier: Apache-2.0
"""The counters of a namespace for people. The names are those of struct hifc_stats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hifc.stats import latency_us
from hifc_admin import text
from hifc_admin.rates import QUANTILES


def stats_lines(stats: Mapping[str, Any]) -> list[str]:
    """Sizes with units, the rest as it is, in the order of the struct."""
    return text.pairs((name, _shown(name, value)) for name, value in stats.items())


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
