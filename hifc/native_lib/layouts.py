# SPDX-License-Identifier: Apache-2.0
"""The structs and constants of hifc.h as ctypes and numpy types: data alone, nothing is loaded.

libhifc.py compares their sizes with the library's when it loads one.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_double,
    c_int,
    c_int32,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

import numpy as np

from hifc.errors import Detail

KEY_BYTES = 16
PAGE_BYTES = 4096
VALUE_MAX_BYTES = (1 << 29) - 1
PARTS_MAX = 65535
LATENCY_BUCKETS = 24

# struct hifc_key and the structs that come in arrays, as numpy types.
KEY = np.dtype((np.uint8, (KEY_BYTES,)))
REQUEST = np.dtype(
    [
        ("op", "u1"),
        ("cls", "u1"),
        ("flags", "<u2"),
        ("status", "<i4"),
        ("key", "u1", (KEY_BYTES,)),
        ("pool", "<u4"),
        ("part_count", "<u4"),
        ("buffer_offset", "<u8"),
        ("length", "<u4"),
        ("value_offset", "<u4"),
        ("piece_bytes", "<u4"),
        ("value_length", "<u4"),
        ("piece_stride", "<u8"),
        ("checksum_offset", "<u8"),
        ("handle", "<u8"),
        ("user", "<u8"),
        ("capacity", "<u8"),
    ]
)
ENTRY = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("length", "<u4"),
        ("part_count", "<u4"),
        ("cls", "u1"),
        ("heat", "u1"),
        ("reserved", "u1", (6,)),
    ]
)
DESCRIPTOR = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("place", "<u4"),
        ("first_part", "<u2"),
        ("part_count", "<u2"),
        ("control", "<u4"),
        ("sequence", "<u4"),
    ]
)
EVENT = np.dtype([("key", "u1", (KEY_BYTES,)), ("kind", "<u4"), ("length", "<u4")])


class Request(Structure):
    """struct hifc_req for calls with a single request."""

    _fields_ = [
        ("op", c_uint8),
        ("cls", c_uint8),
        ("flags", c_uint16),
        ("status", c_int32),
        ("key", c_uint8 * KEY_BYTES),
        ("pool", c_uint32),
        ("part_count", c_uint32),
        ("buffer_offset", c_uint64),
        ("length", c_uint32),
        ("value_offset", c_uint32),
        ("piece_bytes", c_uint32),
        ("value_length", c_uint32),
        ("piece_stride", c_uint64),
        ("checksum_offset", c_uint64),
        ("handle", c_uint64),
        ("user", c_uint64),
        ("capacity", c_uint64),
    ]


class Error(Structure):
    """struct hifc_error."""

    _fields_ = [
        ("code", c_int32),
        ("sct", c_uint8),
        ("sc", c_uint8),
        ("opcode", c_uint8),
        ("checksums", c_uint8),
        ("lba", c_uint64),
        ("nlb", c_uint32),
        ("lba_bytes", c_uint32),
        ("expected", c_uint32),
        ("found", c_uint32),
        ("fix_at", c_uint32),
        ("holder_count", c_uint32),
        ("holders", c_int32 * 8),
        ("message", c_char * 480),
    ]

    def detail(self) -> Detail:
        """The same as a plain value."""
        message: bytes = self.message
        return Detail(
            code=self.code,
            sct=self.sct,
            sc=self.sc,
            opcode=self.opcode,
            lba=self.lba,
            blocks=self.nlb,
            checksums=(self.expected, self.found) if self.checksums else None,
            message=message.decode("utf-8", "replace"),
            fix=message[self.fix_at :].decode("utf-8", "replace") if self.fix_at else "",
            holders=tuple(self.holders[: self.holder_count]),
        )


class FormatOpts(Structure):
    """struct hifc_format_opts."""

    _fields_ = [
        ("segment_size_bytes", c_uint64),
        ("force", c_uint32),
        ("check_only", c_uint32),
        ("label", c_char * 32),
    ]


class OpenOpts(Structure):
    """struct hifc_open_opts."""

    _fields_ = [
        ("read_only", c_uint32),
        ("drive", c_uint32),
        ("pool_size_bytes", c_uint64),
        ("queue_depth", c_uint32),
        ("requests_max", c_uint32),
        ("batch_inflight", c_uint32),
        ("batch_size_max_bytes", c_uint32),
        ("reservations_max", c_uint32),
        ("reservation_timeout_ms", c_uint32),
        ("leases_max", c_uint32),
        ("events_max", c_uint32),
        ("index_entries_max", c_uint64),
        ("admission", c_uint32),
        ("reinsert_percent_plus1", c_uint32),
        ("write_budget_bytes_per_day", c_uint64),
        ("command_timeout_ms", c_uint32),
        ("spin_us", c_uint32),
        ("no_owner_socket", c_uint32),
        ("prefetch_inflight", c_uint32),
    ]


class TicketInfo(Structure):
    """struct hifc_ticket_info."""

    _fields_ = [
        ("requests", c_uint32),
        ("completed", c_uint32),
        ("failed", c_uint32),
        ("other", c_uint32),
        ("bytes", c_uint64),
        ("elapsed_ns", c_uint64),
        ("first_error", Error),
    ]


def _counters(names: str) -> list[tuple[str, Any]]:
    return [(name, c_uint64) for name in names.split()]


class Stats(Structure):
    """struct hifc_stats."""

    _fields_ = [
        ("uuid", c_uint8 * 16),
        ("label", c_char * 32),
        *_counters(
            "capacity_bytes live_bytes dead_bytes free_bytes metadata_bytes segment_size_bytes"
        ),
        ("segments", c_uint32),
        ("segments_free", c_uint32),
        ("segments_damaged", c_uint32),
        ("direct", c_uint32),
        *_counters(
            "open_epoch entries entries_swap index_bytes put_count put_bytes get_count get_bytes "
            "miss_count exists_count rejected_count retry_count no_space_count delete_count "
            "device_write_bytes device_read_bytes device_write_commands device_read_commands "
            "flush_count bounce_bytes corrupt_count device_error_count reinserted_bytes "
            "evicted_count evicted_bytes reclaimed_segments batches batch_entries poll_count "
            "poll_empty_count recovery_ns recovered_entries recovery_dropped recovery_damaged "
            "requests_inflight buffer_used_bytes buffer_peak_bytes buffer_size_bytes "
            "reservations leases write_budget_bytes write_budget_left_bytes get_elapsed_ns "
            "put_elapsed_ns"
        ),
        ("get_latency", c_uint64 * LATENCY_BUCKETS),
        ("put_latency", c_uint64 * LATENCY_BUCKETS),
        *_counters(
            "prefetch_submitted prefetch_completed prefetch_failed prefetch_duplicates "
            "prefetch_cancelled prefetch_bad prefetch_overflowed prefetch_reads prefetch_bytes"
        ),
    ]


class RingHeader(Structure):
    """struct hifc_ring_header: where a request ring begins."""

    _fields_ = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("slots", c_uint32),
        ("statuses", c_uint32),
        ("read_max_bytes", c_uint32),
        ("region_bytes", c_uint64),
        ("slots_offset", c_uint64),
        ("statuses_offset", c_uint64),
        ("arena_bytes", c_uint64),
        ("reserved", c_uint64),
        ("head", c_uint64),
        ("answers", c_uint32),
        ("state", c_uint32),
        ("reserved_consumer", c_uint8 * 48),
        ("tail", c_uint64),
        ("overflowed", c_uint64),
        ("reserved_producer", c_uint8 * 112),
    ]


class RingOpts(Structure):
    """struct hifc_ring_opts."""

    _fields_ = [
        ("slots", c_uint32),
        ("statuses", c_uint32),
        ("pool", c_uint32),
        ("read_max_bytes", c_uint32),
        ("arena_offset", c_uint64),
        ("arena_bytes", c_uint64),
        ("poll_us", c_uint32),
        ("reserved", c_uint32),
    ]


class CheckResult(Structure):
    """struct hifc_check_result."""

    _fields_ = [
        ("entries_checked", c_uint64),
        ("problems", c_uint64),
        ("first_problem", c_char * 240),
    ]


class RepairResult(Structure):
    """struct hifc_repair_result."""

    _fields_ = [
        ("segments_damaged", c_uint32),
        ("segments_freed", c_uint32),
        ("first_problem", c_char * 240),
    ]


class Trace(Structure):
    """struct hifc_trace."""

    _fields_ = [
        ("times_s", c_void_p),
        ("offsets", c_void_p),
        ("ids", c_void_p),
        ("answers", c_void_p),
        ("request_count", c_uint32),
        ("id_count", c_uint32),
    ]


class Replay(Structure):
    """struct hifc_replay."""

    _fields_ = [
        ("admission", c_uint32),
        ("reserved", c_uint32),
        ("budget_blocks", c_double),
        ("access_count", c_uint64),
        ("hit_count", c_uint64),
        ("written_count", c_uint64),
    ]


class SanitizeStatus(Structure):
    """struct hifc_sanitize_status."""

    _fields_ = [
        ("state", c_uint32),
        ("action", c_uint32),
        ("progress", c_uint32),
        ("restricted", c_uint32),
        ("estimate_s", c_uint32),
    ]


class DeviceInfo(Structure):
    """struct hifc_device_info."""

    _fields_ = [
        ("size_bytes", c_uint64),
        ("lba_bytes", c_uint32),
        ("flags", c_uint32),
        ("nsid", c_uint32),
        ("namespaces", c_uint32),
        ("eui64", c_uint8 * 8),
        ("nguid", c_uint8 * 16),
        ("model", c_char * 48),
        ("serial", c_char * 24),
        ("firmware", c_char * 16),
        ("signature", c_char * 96),
        ("health_problem", c_char * 240),
        ("health", c_uint8 * 512),
        ("sanitize", SanitizeStatus),
    ]


# hifc_sanitize_watch
SANITIZE_WATCH = ctypes.CFUNCTYPE(c_int, POINTER(SanitizeStatus), c_void_p)
