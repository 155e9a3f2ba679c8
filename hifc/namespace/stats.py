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


# What each number of NamespaceStats is, as Prometheus shows it.
DESCRIPTIONS: dict[str, str] = {
    "capacity_bytes": "Bytes that values and their metadata can take",
    "live_bytes": "Bytes of values that are there",
    "dead_bytes": "Bytes of values that are gone and not reclaimed yet",
    "free_bytes": "Bytes of free segments and of what is left in open ones",
    "metadata_bytes": "Bytes of headers, checksums and summaries",
    "segment_size_bytes": "Bytes of a segment",
    "segments": "Segments of the device",
    "segments_free": "Segments that nothing stands in",
    "segments_damaged": "Segments whose header cannot be read",
    "direct": "1 where the device is read and written past the page cache",
    "open_epoch": "How often the namespace was opened for writing",
    "entries": "Values that are there",
    "entries_swap": "Values of class swap that are there",
    "index_bytes": "Memory of the index",
    "put_count": "Puts that were accepted",
    "put_bytes": "Bytes of values accepted",
    "get_count": "Gets that found their value",
    "get_bytes": "Bytes of values read",
    "miss_count": "Gets and look-ups that found no value",
    "exists_count": "Puts of a reuse key that was there",
    "rejected_count": "Puts that admission declined",
    "retry_count": "Requests answered RETRY, as a queue or the pool was full",
    "no_space_count": "Requests answered NO_SPACE, as nothing could be evicted",
    "delete_count": "Values deleted",
    "device_write_bytes": "Bytes written to the device",
    "device_read_bytes": "Bytes read from the device",
    "device_write_commands": "Write commands sent to the device",
    "device_read_commands": "Read commands sent to the device",
    "flush_count": "Flush commands sent to the device",
    "bounce_bytes": "Bytes copied between buffers by the CPU",
    "corrupt_count": "Values that did not match their checksum",
    "device_error_count": "Commands that the device failed",
    "reinserted_bytes": "Bytes written again by cleaning to keep entries in use",
    "evicted_count": "Values evicted",
    "evicted_bytes": "Bytes of values evicted",
    "reclaimed_segments": "Segments made free by cleaning",
    "batches": "Batches written",
    "batch_entries": "Values written in batches",
    "poll_count": "Polls of the device's queues",
    "poll_empty_count": "Polls that found nothing",
    "recovery_ns": "Nanoseconds that recovery took at open",
    "recovered_entries": "Values found by recovery at open",
    "recovery_dropped": "Entries that recovery did not accept, torn or damaged",
    "recovery_damaged": "Entries damaged although they had been flushed",
    "requests_inflight": "Requests in flight",
    "buffer_used_bytes": "Bytes of the buffer pool in use",
    "buffer_peak_bytes": "Most bytes of the buffer pool that were in use at a time",
    "buffer_size_bytes": "Bytes of the buffer pool",
    "reservations": "Reservations neither committed nor aborted",
    "leases": "Leases held",
    "write_budget_bytes": "Bytes that may be written a day, 0 for any number",
    "write_budget_left_bytes": "Bytes of the write budget left",
    "get_latency": "Time of batches that begin with a get, from submission to the last completion",
    "put_latency": "Time of batches that begin with a put, from submission to the last completion",
    "prefetch_submitted": "Descriptors taken from request rings",
    "prefetch_completed": "Descriptors whose bytes arrived and were verified",
    "prefetch_failed": "Descriptors answered with a miss or an error",
    "prefetch_duplicates": "Descriptors of reads on their way already",
    "prefetch_cancelled": "Descriptors taken back before their read started",
    "prefetch_bad": "Descriptors that made no sense",
    "prefetch_overflowed": "Descriptors that found their ring full",
    "prefetch_reads": "Reads made of descriptors",
    "prefetch_bytes": "Bytes brought by request rings",
    "write_amplification": "Bytes written over bytes accepted",
}


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
