# SPDX-License-Identifier: Apache-2.0
"""libhifc.so through ctypes: one table of symbols, struct sizes compared at load, a failing call
raises.

Nothing is loaded at import; `library()` loads once for the process. ctypes releases the GIL for
the length of every call. Only `hifc.handle`, `hifc.ticket`, `hifc.namespace`, `hifc.ring` and
`hifc.signature` use this module.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np

import hifc
from hifc.errors import Detail, HiFCError, LibraryError, error_of

ABI_VERSION = 1
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
        ("reserved", c_uint8),
        ("lba", c_uint64),
        ("nlb", c_uint32),
        ("lba_bytes", c_uint32),
        ("message", c_char * 488),
    ]

    def detail(self) -> Detail:
        """The same as a plain value."""
        return Detail(
            code=self.code,
            sct=self.sct,
            sc=self.sc,
            opcode=self.opcode,
            lba=self.lba,
            blocks=self.nlb,
            message=self.message.decode("utf-8", "replace"),
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

# What hifc_sizeof() must say; a struct that it does not know counts as a mismatch.
_SIZES: dict[str, int] = {
    "hifc_key": KEY.itemsize,
    "hifc_req": REQUEST.itemsize,
    "hifc_entry": ENTRY.itemsize,
    "hifc_event": EVENT.itemsize,
    "hifc_descriptor": DESCRIPTOR.itemsize,
    "hifc_ring_header": ctypes.sizeof(RingHeader),
    "hifc_ring_opts": ctypes.sizeof(RingOpts),
    "hifc_error": ctypes.sizeof(Error),
    "hifc_format_opts": ctypes.sizeof(FormatOpts),
    "hifc_open_opts": ctypes.sizeof(OpenOpts),
    "hifc_ticket_info": ctypes.sizeof(TicketInfo),
    "hifc_stats": ctypes.sizeof(Stats),
    "hifc_check_result": ctypes.sizeof(CheckResult),
    "hifc_repair_result": ctypes.sizeof(RepairResult),
    "hifc_sanitize_status": ctypes.sizeof(SanitizeStatus),
    "hifc_device_info": ctypes.sizeof(DeviceInfo),
    "hifc_trace": ctypes.sizeof(Trace),
    "hifc_replay": ctypes.sizeof(Replay),
}

_NS = c_void_p
_TICKET = c_void_p
_RING = c_void_p
_POLICY = c_void_p
_ARRAY = c_void_p  # address of the first element of an array

# name: (result, arguments, what the call does; None where its result is no error code).
# Message texts name the operation, so that an error reads "open on ram://: ...".
_SYMBOLS: dict[str, tuple[Any, tuple[Any, ...], str | None]] = {
    "hifc_abi_version": (c_uint32, (), None),
    "hifc_sizeof": (c_size_t, (c_char_p,), None),
    "hifc_schemes": (c_char_p, (), None),
    "hifc_last_error": (c_int, (POINTER(Error),), None),
    "hifc_crc32c_raw": (c_uint32, (c_void_p, c_size_t), None),
    "hifc_signatures": (
        c_int,
        (c_char_p, c_char_p, c_uint64, c_uint64, c_char_p, c_size_t),
        "look for signatures",
    ),
    "hifc_format": (c_int, (c_char_p, POINTER(FormatOpts)), "format"),
    "hifc_open": (c_int, (c_char_p, POINTER(OpenOpts), POINTER(_NS)), "open"),
    "hifc_close": (c_int, (_NS,), "close"),
    "hifc_buffer_alloc": (c_int, (_NS, c_uint64, POINTER(c_uint64)), "allocate a buffer"),
    "hifc_buffer_free": (c_int, (_NS, c_uint64), "free a buffer"),
    "hifc_pool_base": (c_void_p, (_NS, c_uint32, POINTER(c_uint64)), None),
    "hifc_pool_register": (
        c_int,
        (_NS, c_void_p, c_uint64, POINTER(c_uint32)),
        "register memory",
    ),
    "hifc_pool_unregister": (c_int, (_NS, c_uint32), "unregister memory"),
    "hifc_pool_disown": (c_int, (_NS, POINTER(c_void_p), POINTER(c_uint64)), "keep the pool"),
    "hifc_submit": (c_int, (_NS, _ARRAY, c_uint32, POINTER(_TICKET)), "submit"),
    "hifc_ticket_wait": (c_int, (_TICKET, c_int64), "wait for a ticket"),
    "hifc_ticket_info": (c_int, (_TICKET, POINTER(TicketInfo)), "read a ticket"),
    "hifc_ticket_fd": (c_int, (_TICKET,), "await a ticket"),
    "hifc_ticket_free": (None, (_TICKET,), None),
    "hifc_ring_open": (c_int, (_NS, POINTER(RingOpts), POINTER(_RING)), "open a ring"),
    "hifc_ring_base": (c_void_p, (_RING, POINTER(c_uint64)), None),
    "hifc_ring_fd": (c_int, (_RING,), "look at a ring"),
    "hifc_ring_submit": (c_int, (_RING, _ARRAY, c_uint32), "submit to a ring"),
    "hifc_ring_kick": (c_int, (_RING,), "kick a ring"),
    "hifc_ring_wait": (c_int, (_RING, _ARRAY, c_uint32, c_int64), "wait for a ring"),
    "hifc_ring_close": (c_int, (_RING,), "close a ring"),
    "hifc_lookup": (c_int, (_NS, _ARRAY, c_uint32, _ARRAY, _ARRAY), "look up keys"),
    "hifc_longest_prefix": (c_int64, (_NS, _ARRAY, c_uint32), "look up a prefix"),
    "hifc_lease": (
        c_int,
        (_NS, _ARRAY, c_uint32, c_uint32, _ARRAY, POINTER(c_uint64)),
        "lease keys",
    ),
    "hifc_lease_release": (c_int, (_NS, c_uint64), "release a lease"),
    "hifc_touch": (c_int, (_NS, _ARRAY, c_uint32), "touch keys"),
    "hifc_list": (c_int, (_NS, POINTER(c_uint64), _ARRAY, c_uint32), "list"),
    "hifc_events": (c_int, (_NS, _ARRAY, c_uint32, POINTER(c_uint64)), "take events"),
    "hifc_sync": (c_int, (_NS,), "sync"),
    "hifc_drain": (c_int, (_NS, c_int64), "drain"),
    "hifc_stats": (c_int, (_NS, POINTER(Stats)), "read statistics"),
    "hifc_publish": (c_int, (_NS, c_char_p), "publish"),
    "hifc_health": (c_int, (_NS, _ARRAY), "read the health log"),
    "hifc_check": (c_int, (_NS, c_uint32, POINTER(CheckResult)), "check"),
    "hifc_repair": (c_int, (_NS, POINTER(RepairResult)), "repair"),
    "hifc_device_info": (c_int, (c_char_p, POINTER(DeviceInfo)), "open"),
    "hifc_erase": (c_int, (c_char_p, c_uint32), "open"),
    "hifc_policy_open": (c_int, (c_char_p, c_uint32, c_double, POINTER(_POLICY)), "open a policy"),
    "hifc_policy_close": (None, (_POLICY,), None),
    "hifc_policy_use": (c_int, (_POLICY, c_double, _ARRAY, c_uint32), "use blocks"),
    "hifc_policy_leave": (c_int, (_POLICY, _ARRAY, c_uint32), "let blocks leave"),
    "hifc_policy_forget": (c_int, (_POLICY, _ARRAY, c_uint32), "forget blocks"),
    "hifc_policy_scores": (c_int, (_POLICY, c_double, _ARRAY, c_uint32, _ARRAY), "score blocks"),
    "hifc_policy_replay": (c_int, (_POLICY, POINTER(Trace), POINTER(Replay)), "replay a trace"),
    "hifc_belady_replay": (c_int, (c_uint32, POINTER(Trace), POINTER(Replay)), "replay a trace"),
    "hifc_sanitize": (c_int, (c_char_p, SANITIZE_WATCH, c_void_p), "open"),
}


def last_error(lib: Any) -> Detail:
    """What libhifc says about the last failure on the calling thread."""
    error = Error()
    lib.hifc_last_error(ctypes.byref(error))
    return error.detail()


def _checker(lib: Any, doing: str) -> Callable[[int, Any, Any], int]:
    def check(result: int, _function: Any, _arguments: Any) -> int:
        if result < 0:
            raise failure(lib, result, doing)
        return result

    return check


def failure(lib: Any, code: int, doing: str) -> HiFCError:
    """The exception for a call that returned code, to be made on the thread that called."""
    return error_of(code, last_error(lib), doing=doing)


def unmap(address: int, size_bytes: int) -> None:
    """Gives memory back to the system: what hifc_pool_disown left to this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = (c_void_p, c_size_t)
    if libc.munmap(address, size_bytes) != 0:
        raise OSError(ctypes.get_errno(), "munmap of the buffer pool failed")


def library_path() -> Path:
    """Where libhifc.so is: HIFC_LIBRARY if set, otherwise in the package.

    An editable install has two folders: the sources, and the one that the build installed into.
    """
    override = os.environ.get("HIFC_LIBRARY")
    if override:
        return Path(override)
    candidates = [Path(folder, "libhifc.so") for folder in hifc.__path__]
    return next((path for path in candidates if path.exists()), candidates[0])


def load(path: Path) -> Any:
    """Loads libhifc from path, declares every symbol and compares ABI version and struct sizes.

    Raises LibraryError if the file is missing, cannot be loaded or does not fit this package.
    """
    if not path.exists():
        raise LibraryError(
            f"{path} is missing: build it with `pip install .` in the repository, or set "
            "HIFC_LIBRARY to a libhifc.so"
        )
    try:
        lib: Any = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(
            f"{path} cannot be loaded ({error}): build it again with `pip install .`"
        ) from error
    for name, (result, arguments, doing) in _SYMBOLS.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise LibraryError(
                f"{path} has no {name}: it is older than this package; build it again with "
                "`pip install .`"
            ) from None
        function.restype = result
        function.argtypes = arguments
        if doing is not None:
            function.errcheck = _checker(lib, doing)
    _compare(lib, path)
    return lib


def _compare(lib: Any, path: Path) -> None:
    version = lib.hifc_abi_version()
    if version != ABI_VERSION:
        raise LibraryError(
            f"{path} has ABI version {version}, this package wants {ABI_VERSION}: build both "
            "from one source with `pip install .`"
        )
    for name, expected in _SIZES.items():
        found = lib.hifc_sizeof(name.encode())
        if found != expected:
            raise LibraryError(
                f"struct {name} has {found} bytes in {path} and {expected} in this package: "
                "build both from one source with `pip install .`"
            )


@functools.cache
def library() -> Any:
    """The process's libhifc, loaded at the first call."""
    return load(library_path())
