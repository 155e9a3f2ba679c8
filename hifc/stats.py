# SPDX-License-Identifier: Apache-2.0
"""What a namespace tells about itself: counters, health log, the result of a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NamespaceStats:
    """struct hifc_stats. Bytes, counts, nanoseconds as the names say.

    `bounce_bytes` is one figure: copies made by libhifc and copies made by Python.
    """

    uuid: str
    label: str
    capacity_bytes: int
    live_bytes: int
    dead_bytes: int
    free_bytes: int
    metadata_bytes: int
    segment_size_bytes: int
    segments: int
    segments_free: int
    segments_damaged: int
    direct: bool
    open_epoch: int
    entries: int
    entries_swap: int
    index_bytes: int
    put_count: int
    put_bytes: int
    get_count: int
    get_bytes: int
    miss_count: int
    exists_count: int
    rejected_count: int
    retry_count: int
    no_space_count: int
    delete_count: int
    device_write_bytes: int
    device_read_bytes: int
    device_write_commands: int
    device_read_commands: int
    flush_count: int
    bounce_bytes: int
    corrupt_count: int
    device_error_count: int
    reinserted_bytes: int
    evicted_count: int
    evicted_bytes: int
    reclaimed_segments: int
    batches: int
    batch_entries: int
    poll_count: int
    poll_empty_count: int
    recovery_ns: int
    recovered_entries: int
    recovery_dropped: int
    recovery_damaged: int
    requests_inflight: int
    buffer_used_bytes: int
    buffer_peak_bytes: int
    buffer_size_bytes: int
    reservations: int
    leases: int
    write_budget_bytes: int  # a day; 0: none
    write_budget_left_bytes: int
    get_elapsed_ns: int  # of the tickets in the histograms
    put_elapsed_ns: int
    prefetch_submitted: int  # descriptors of request rings: see hifc.h
    prefetch_completed: int
    prefetch_failed: int
    prefetch_duplicates: int
    prefetch_cancelled: int
    prefetch_bad: int
    prefetch_overflowed: int
    prefetch_reads: int
    prefetch_bytes: int
    get_latency: tuple[int, ...]  # tickets by time: see hifc.h, and latency_us below
    put_latency: tuple[int, ...]

    @property
    def write_amplification(self) -> float:
        """All bytes written to the device over bytes of accepted puts; 0.0 before the first."""
        return self.device_write_bytes / self.put_bytes if self.put_bytes else 0.0


def latency_us(buckets: Sequence[int], quantile: float) -> float | None:
    """The quantile (0 to 1) of a histogram such as NamespaceStats.get_latency, in microseconds.

    Buckets are powers of two wide, so it is right within a factor of two at worst; within its
    bucket it is interpolated. None: nothing was counted.
    """
    total = sum(buckets)
    if total == 0:
        return None
    wanted = quantile * total
    for index, count in enumerate(buckets):
        if count and wanted <= count:
            low = 0.0 if index == 0 else float(1 << index)
            return (low + (float(2 << index) - low) * wanted / count) * 1.024
        wanted -= count
    return float(1 << len(buckets)) * 1.024


def stats_of(raw: Any, bounce_bytes: int) -> NamespaceStats:
    """From a layouts.Stats, plus the bytes that Python copied."""
    values: dict[str, Any] = {
        field.name: getattr(raw, field.name) for field in dataclasses.fields(NamespaceStats)
    }
    values["uuid"] = bytes(raw.uuid).hex()
    values["label"] = raw.label.decode("utf-8", "replace")
    values["direct"] = bool(raw.direct)
    values["get_latency"] = tuple(raw.get_latency)
    values["put_latency"] = tuple(raw.put_latency)
    values["bounce_bytes"] += bounce_bytes
    return NamespaceStats(**values)


@dataclass(frozen=True)
class Health:
    """The NVMe SMART / health information log page (NVM Express base specification, 02h)."""

    critical_warning: int
    temperature_kelvin: int
    available_spare_percent: int
    available_spare_threshold_percent: int
    percentage_used: int
    data_units_read: int  # thousands of 512 bytes
    data_units_written: int
    host_read_commands: int
    host_write_commands: int
    controller_busy_minutes: int
    power_cycles: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int
    error_log_entries: int
    raw: bytes

    @property
    def ok(self) -> bool:
        """No critical warning and spare above its threshold."""
        return self.critical_warning == 0 and (
            self.available_spare_percent >= self.available_spare_threshold_percent
        )


def health_of(log: bytes) -> Health:
    """From the 512 bytes of the log page."""
    wide = [int.from_bytes(log[at : at + 16], "little") for at in range(32, 192, 16)]
    return Health(
        critical_warning=log[0],
        temperature_kelvin=int.from_bytes(log[1:3], "little"),
        available_spare_percent=log[3],
        available_spare_threshold_percent=log[4],
        percentage_used=log[5],
        data_units_read=wide[0],
        data_units_written=wide[1],
        host_read_commands=wide[2],
        host_write_commands=wide[3],
        controller_busy_minutes=wide[4],
        power_cycles=wide[5],
        power_on_hours=wide[6],
        unsafe_shutdowns=wide[7],
        media_errors=wide[8],
        error_log_entries=wide[9],
        raw=log,
    )


@dataclass(frozen=True)
class RepairResult:
    """Of Namespace.repair: damaged segments found, and how many of them are free again."""

    segments_damaged: int
    segments_freed: int
    first_problem: str  # why one is not; "" if none


@dataclass(frozen=True)
class CheckResult:
    """Of Namespace.check: how many entries were verified and what was wrong with them."""

    entries_checked: int
    problems: int
    first_problem: str

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return self.problems == 0
