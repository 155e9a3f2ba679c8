# SPDX-License-Identifier: Apache-2.0
"""libhifc.so through ctypes: one table of symbols, struct sizes compared at load, a failing call
raises.

Nothing is loaded at import; `library()` loads once for the process. ctypes releases the GIL for
the length of every call. The structs are in hifc/native_lib/layouts.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import hifc
from hifc.errors import Detail, HiFCError, LibraryError, error_of
from hifc.native_lib.layouts import (
    DESCRIPTOR,
    ENTRY,
    EVENT,
    KEY,
    REQUEST,
    SANITIZE_WATCH,
    CheckResult,
    DeviceInfo,
    Error,
    FormatOpts,
    OpenOpts,
    RepairResult,
    Replay,
    RingHeader,
    RingOpts,
    SanitizeStatus,
    Stats,
    TicketInfo,
    Trace,
)

ABI_VERSION = 2

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
    "hifc_shutdown": (c_int, (_NS,), "close"),
    "hifc_drop": (c_int, (POINTER(_NS),), None),
    "hifc_buffer_alloc": (c_int, (_NS, c_uint64, POINTER(c_uint64)), "allocate a buffer"),
    "hifc_buffer_drop": (None, (_NS, POINTER(c_uint64)), None),
    "hifc_pool_lent": (c_uint64, (_NS,), None),
    "hifc_pool_base": (c_void_p, (_NS, c_uint32, POINTER(c_uint64)), None),
    "hifc_pool_register": (
        c_int,
        (_NS, c_void_p, c_uint64, POINTER(c_uint32)),
        "register memory",
    ),
    "hifc_pool_unregister": (c_int, (_NS, c_uint32), "unregister memory"),
    "hifc_submit": (c_int, (_NS, _ARRAY, c_uint32, POINTER(_TICKET)), "submit"),
    "hifc_ticket_wait": (c_int, (_TICKET, c_int64), "wait for a ticket"),
    "hifc_ticket_info": (c_int, (_TICKET, POINTER(TicketInfo)), "read a ticket"),
    "hifc_ticket_fd": (c_int, (_TICKET,), "await a ticket"),
    "hifc_ticket_finish": (
        c_int,
        (POINTER(_TICKET), c_int64, POINTER(TicketInfo)),
        "wait for a ticket",
    ),
    "hifc_ticket_drop": (None, (POINTER(_TICKET), c_int64), None),
    "hifc_execute": (
        c_int,
        (_NS, _ARRAY, c_int64, POINTER(_TICKET), POINTER(TicketInfo)),
        "submit",
    ),
    "hifc_reservation_drop": (None, (_NS, c_uint64), None),
    "hifc_ring_open": (c_int, (_NS, POINTER(RingOpts), POINTER(_RING)), "open a ring"),
    "hifc_ring_base": (c_void_p, (_RING, POINTER(c_uint64)), None),
    "hifc_ring_fd": (c_int, (_RING,), "look at a ring"),
    "hifc_ring_submit": (c_int, (_RING, _ARRAY, c_uint32), "submit to a ring"),
    "hifc_ring_kick": (c_int, (_RING,), "kick a ring"),
    "hifc_ring_wait": (c_int, (_RING, _ARRAY, c_uint32, c_int64), "wait for a ring"),
    "hifc_ring_shutdown": (c_int, (_RING,), "close a ring"),
    "hifc_ring_drop": (c_int, (POINTER(_RING),), None),
    "hifc_lookup": (c_int, (_NS, _ARRAY, c_uint32, _ARRAY, _ARRAY), "look up keys"),
    "hifc_compare": (c_int, (_NS, _ARRAY, _ARRAY, c_uint64), "compare a value"),
    "hifc_longest_prefix": (c_int64, (_NS, _ARRAY, c_uint32), "look up a prefix"),
    "hifc_lease": (
        c_int,
        (_NS, _ARRAY, c_uint32, c_uint32, _ARRAY, POINTER(c_uint64)),
        "lease keys",
    ),
    "hifc_lease_release": (c_int, (_NS, c_uint64), None),  # it may have ended by itself
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
    """Gives memory back to the system: a mapping of a device's memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = (c_void_p, c_size_t)
    if libc.munmap(address, size_bytes) != 0:
        raise OSError(ctypes.get_errno(), "munmap failed")


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
