# SPDX-License-Identifier: Apache-2.0
"""What owners say on their sockets as Prometheus text, format 0.0.4: no more than line shapes.

Names are those of struct hifc_stats behind hifc_namespace_, counters with _total for _count; what
an engine publishes has the names that hifc.metrics gives it. One family holds all owners, told
apart by uri and uuid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hifc.metrics import gauges
from hifc.metrics.counters import COUNTERS as ENGINE_COUNTERS
from hifc.namespace import stats as statistics

# Of struct hifc_stats, those that only go up. All other numbers are gauges.
COUNTERS = [
    "put_count",
    "put_bytes",
    "get_count",
    "get_bytes",
    "miss_count",
    "exists_count",
    "rejected_count",
    "retry_count",
    "no_space_count",
    "delete_count",
    "device_write_bytes",
    "device_read_bytes",
    "device_write_commands",
    "device_read_commands",
    "flush_count",
    "bounce_bytes",
    "corrupt_count",
    "device_error_count",
    "reinserted_bytes",
    "evicted_count",
    "evicted_bytes",
    "reclaimed_segments",
    "batches",
    "batch_entries",
    "poll_count",
    "poll_empty_count",
    "prefetch_submitted",
    "prefetch_completed",
    "prefetch_failed",
    "prefetch_duplicates",
    "prefetch_cancelled",
    "prefetch_bad",
    "prefetch_overflowed",
    "prefetch_reads",
    "prefetch_bytes",
]
HISTOGRAMS = {"get_latency": "get_elapsed_ns", "put_latency": "put_elapsed_ns"}
DESCRIPTIONS = statistics.DESCRIPTIONS
ENGINE_DESCRIPTIONS = ENGINE_COUNTERS | gauges.DESCRIPTIONS
NOT_NUMBERS = {"uri", "pid", "uuid", "label", "published", *HISTOGRAMS, *HISTOGRAMS.values()}
Stats = Mapping[str, Any]


def text(owners: Sequence[Stats]) -> Iterator[str]:
    """Lines, without their newlines."""
    if not owners:
        return
    for name in (name for name in owners[0] if name not in NOT_NUMBERS):
        is_counter = name in COUNTERS
        family = f"hifc_namespace_{name.removesuffix('_count')}{'_total' if is_counter else ''}"
        yield from _head(family, "counter" if is_counter else "gauge", DESCRIPTIONS, name)
        for stats in owners:
            yield f"{family}{_labels(stats)} {stats.get(name, 0)}"
    for name, total in HISTOGRAMS.items():
        yield from _histogram(owners, name, total)
    yield from _published(owners)


def _histogram(owners: Sequence[Stats], name: str, total: str) -> Iterator[str]:
    family = f"hifc_namespace_{name}_seconds"
    yield from _head(family, "histogram", DESCRIPTIONS, name)
    for stats in owners:
        buckets = stats.get(name, [])
        count = 0
        for index, found in enumerate(buckets):
            count += found
            is_last = index == len(buckets) - 1
            bound = "+Inf" if is_last else f"{(2 << index) * 1024e-9:.9g}"
            yield f"{family}_bucket{_labels(stats, le=bound)} {count}"
        yield f"{family}_sum{_labels(stats)} {stats.get(total, 0) / 1e9:.9g}"
        yield f"{family}_count{_labels(stats)} {count}"


def _published(owners: Sequence[Stats]) -> Iterator[str]:
    """An engine's own counters, where there is an engine."""
    names = dict.fromkeys(name for stats in owners for name in stats.get("published", {}))
    for name in names:
        is_counter = name in ENGINE_COUNTERS
        family = f"hifc_{name}{'_total' if is_counter else ''}"
        yield from _head(family, "counter" if is_counter else "gauge", ENGINE_DESCRIPTIONS, name)
        for stats in owners:
            value = stats.get("published", {}).get(name)
            if isinstance(value, int | float):
                yield f"{family}{_labels(stats)} {value:.15g}"


def _head(family: str, kind: str, texts: Mapping[str, str], name: str) -> Iterator[str]:
    """An owner of another version may say what this one has no words for."""
    if name in texts:
        yield f"# HELP {family} {texts[name]}"
    yield f"# TYPE {family} {kind}"


def _labels(stats: Stats, **more: str) -> str:
    labels = {"uri": str(stats["uri"]), "uuid": str(stats.get("uuid", ""))} | more
    inner = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{inner}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
