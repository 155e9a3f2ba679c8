# SPDX-License-Identifier: Apache-2.0
"""What happened between two looks at an owner's counters, as numbers and as the lines of top."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hifc.namespace.stats import latency_us
from hifc_admin import text

Stats = Mapping[str, Any]

PER_SECOND = {
    "device_read_bytes": "device_read_bytes_per_s",
    "device_write_bytes": "device_write_bytes_per_s",
    "device_read_commands": "device_read_commands_per_s",
    "device_write_commands": "device_write_commands_per_s",
    "get_count": "get_per_s",
    "get_bytes": "get_bytes_per_s",
    "put_count": "put_per_s",
    "put_bytes": "put_bytes_per_s",
    "miss_count": "miss_per_s",
    "retry_count": "retry_per_s",
    "no_space_count": "no_space_per_s",
    "evicted_count": "evicted_per_s",
    "reinserted_bytes": "reinserted_bytes_per_s",
}
AS_OF_NOW = [
    "requests_inflight",
    "buffer_used_bytes",
    "buffer_size_bytes",
    "live_bytes",
    "dead_bytes",
    "free_bytes",
    "capacity_bytes",
    "entries",
    "entries_swap",
    "segments",
    "segments_free",
    "segments_damaged",
    "corrupt_count",
    "device_error_count",
    "reservations",
    "leases",
    "write_budget_bytes",
    "write_budget_left_bytes",
]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def between(before: Stats, after: Stats, interval_s: float) -> dict[str, Any]:
    """Rates over the interval; sizes and totals as of its end. None: nothing to tell it from.

    Latency is that of whole batches, right within a factor of two; see latency_us.
    """
    found: dict[str, Any] = {name: after.get(name) for name in ("uri", "pid", "uuid", "label")}
    found["interval_s"] = interval_s
    for name, rate in PER_SECOND.items():
        found[rate] = _delta(before, after, name) / interval_s
    for name in AS_OF_NOW:
        found[name] = after.get(name, 0)
    gets = _delta(before, after, "get_count")
    found["hit_ratio"] = _ratio(gets, gets + _delta(before, after, "miss_count"))
    polls = _delta(before, after, "poll_count")
    found["poll_busy_ratio"] = _ratio(polls - _delta(before, after, "poll_empty_count"), polls)
    found["write_amplification"] = _ratio(after.get("device_write_bytes", 0), after["put_bytes"])
    for name in ("get_latency", "put_latency"):
        buckets = [
            max(0, new - old)
            for old, new in zip(before.get(name, []), after.get(name, []), strict=False)
        ]
        found[f"{name}_us"] = {mark: latency_us(buckets, q) for mark, q in QUANTILES.items()}
    found["engine"] = _engine(before.get("published", {}), after.get("published", {}))
    return found


def _delta(before: Stats, after: Stats, name: str) -> int:
    """Never negative: an engine that was closed and opened again counts from 0."""
    return max(0, int(after.get(name, 0)) - int(before.get(name, 0)))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _engine(before: Stats, after: Stats) -> dict[str, Any] | None:
    """Of what an engine publishes; ratios over the interval, or since its start where that is
    empty: it publishes once a second, so a short interval may see nothing new."""
    if not after:
        return None

    def ratio(part: str, whole: str) -> float | None:
        new = _ratio(_delta(before, after, part), _delta(before, after, whole))
        return _ratio(after.get(part, 0), after.get(whole, 0)) if new is None else new

    return {
        "memory_hit_ratio": ratio("hit", "total_access"),
        "prefetch_hit_ratio": ratio("prefetch_hit", "total_access"),
        "prefetch_accuracy": ratio("prefetch_hit", "prefetch_issued"),
        "hot_ratio": after.get("hot_ratio"),
        "resident_bytes": after.get("resident_bytes"),
        "blocks": after.get("blocks"),
    }


# ---- lines


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """A screen of top."""
    label = f"  {found['label']!r}" if found["label"] else ""
    yield f"{found['uri']}  process {found['pid']}{label}"
    yield ""
    head = ("", "BYTES/S", "PER S", *(f"{mark} us" for mark in QUANTILES))
    rows = [
        _row(found, "device read", "device_read_bytes_per_s", "device_read_commands_per_s"),
        _row(found, "device write", "device_write_bytes_per_s", "device_write_commands_per_s"),
        _row(found, "get", "get_bytes_per_s", "get_per_s", "get_latency_us"),
        _row(found, "put", "put_bytes_per_s", "put_per_s", "put_latency_us"),
    ]
    yield from text.table(head, rows)
    yield ""
    yield from text.pairs(_facts(found))


def _row(
    found: Mapping[str, Any], name: str, size: str, count: str, latency: str = ""
) -> tuple[str, ...]:
    times = found[latency].values() if latency else [None] * len(QUANTILES)
    return (
        name,
        _rate(f"{text.size(int(found[size])):>10}", found[size]),
        _rate(f"{found[count]:>8.0f}", found[count]),
        *(f"{'' if time is None else f'{time:.0f}':>6}" for time in times),
    )


def _rate(written: str, value: float) -> str:
    """Stands out where something happens."""
    return text.paint(written, text.Color.STRONG if value else None)


def _alarm(number: int, what: str) -> str:
    """A count that should be 0."""
    return text.paint(f"{number} {what}", text.Color.BAD if number else None)


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    used = _ratio(found["buffer_used_bytes"], found["buffer_size_bytes"])
    busy = found["poll_busy_ratio"]
    yield (
        "queue",
        f"{found['requests_inflight']} requests in flight, "
        f"{0 if used is None else used:.0%} of a pool of {text.size(found['buffer_size_bytes'])}, "
        f"{'no polls' if busy is None else f'{busy:.0%} of polls found work'}",
    )
    hits = found["hit_ratio"]
    yield (
        "gets",
        f"{'none' if hits is None else f'{hits:.0%} found'}; {found['retry_per_s']:.0f} retries, "
        f"{found['no_space_per_s']:.0f} without space, {found['evicted_per_s']:.0f} evicted a "
        "second",
    )
    yield (
        "space",
        f"{text.size(found['live_bytes'])} live, {text.size(found['dead_bytes'])} dead, "
        f"{text.size(found['free_bytes'])} free of {text.size(found['capacity_bytes'])}; "
        f"{found['entries']} entries, {found['entries_swap']} of them swap",
    )
    yield (
        "segments",
        f"{found['segments_free']} free of {found['segments']}, "
        f"{_alarm(found['segments_damaged'], 'damaged')}",
    )
    yield "wear", _wear(found)
    yield (
        "errors",
        f"{_alarm(found['device_error_count'], 'failed commands')}, "
        f"{_alarm(found['corrupt_count'], 'wrong checksums')}",
    )
    if found["engine"]:
        yield "engine", _engine_text(found["engine"])


def _wear(found: Mapping[str, Any]) -> str:
    amplification = found["write_amplification"]
    shown = "not known yet" if amplification is None else f"{amplification:.2f}"
    if not found["write_budget_bytes"]:
        return f"write amplification {shown}, no write budget"
    left, budget = found["write_budget_left_bytes"], found["write_budget_bytes"]
    return f"write amplification {shown}, {text.size(left)} left of {text.size(budget)} a day"


def _engine_text(engine: Mapping[str, Any]) -> str:
    """Without ratios of what never happened."""
    shares = (
        ("memory_hit_ratio", "loads found in memory"),
        ("prefetch_hit_ratio", "loads found prefetched"),
        ("prefetch_accuracy", "prefetched blocks used"),
        ("hot_ratio", "blocks kept hot"),
    )
    parts = [f"{engine[name]:.0%} of {what}" for name, what in shares if engine[name] is not None]
    if engine["resident_bytes"] is not None:
        parts.append(f"{text.size(int(engine['resident_bytes']))} resident")
    return ", ".join(parts) or "nothing was loaded yet"
