# SPDX-License-Identifier: Apache-2.0
"""What a namespace tells of itself: which keys are there, events, statistics, health, soundness.

As for all of a namespace, every method may be called from any thread.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hifc.errors import InvalidRequest
from hifc.namespace.calls import Calls
from hifc.namespace.stats import (
    CheckResult,
    Health,
    NamespaceStats,
    RepairResult,
    health_of,
    stats_of,
)
from hifc.native_lib import layouts
from hifc.native_lib.layouts import ENTRY, EVENT
from hifc.native_lib.request import Answer, BlockClass, Keys, key_bytes, keys_array
from hifc.util.checking import seconds, whole

_LIST_ENTRIES = 1024
_EVENTS_MAX = 65536


class Entry(NamedTuple):
    """One entry of Namespace.list."""

    key: bytes
    length_bytes: int
    part_count: int
    cls: BlockClass
    heat: int


class Events(NamedTuple):
    """Of Namespace.events: an array of EVENT, oldest first, and how many were lost before it."""

    events: npt.NDArray[np.void]
    dropped: int


class State(Calls):
    """The part of a Namespace that looks at it and keeps it sound."""

    def lookup(
        self, keys: Keys, lengths: npt.NDArray[np.uint32] | None = None
    ) -> npt.NDArray[np.int32]:
        """int32 of shape (n,): OK, MISS or PENDING per key. Does no I/O.

        lengths: uint32 of shape (n,) that is filled with the lengths of the values, in bytes.
        """
        names = keys_array(keys)
        if lengths is not None and (
            not isinstance(lengths, np.ndarray)
            or lengths.dtype != np.uint32
            or lengths.shape != (len(names),)
            or not lengths.flags.c_contiguous
        ):
            raise InvalidRequest(f"lengths is a uint32 array of shape ({len(names)},)")
        return self._lookup(names, lengths)

    def is_value(self, key: Any, data: npt.NDArray[np.uint8]) -> bool:
        """Whether the value of key is these bytes, a contiguous array: by its length and checksum,
        which is computed here. Does no I/O."""
        name = np.frombuffer(key_bytes(key), np.uint8)
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise InvalidRequest("data is no contiguous array of uint8")
        return bool(
            self._inside("hifc_compare", name.ctypes.data, data.ctypes.data, data.size) == Answer.OK
        )

    def longest_prefix(self, keys: Keys) -> int:
        """How many leading keys are there, in one call."""
        names = keys_array(keys)
        return int(self._inside("hifc_longest_prefix", names.ctypes.data, len(names)))

    def list(self) -> Iterator[Entry]:
        """Every entry. Those that change meanwhile may be missed or seen twice."""
        cursor = ctypes.c_uint64()
        entries = np.zeros(_LIST_ENTRIES, dtype=ENTRY)
        while True:
            count = self._inside(
                "hifc_list", ctypes.byref(cursor), entries.ctypes.data, _LIST_ENTRIES
            )
            if count == 0:
                return
            for entry in entries[:count]:
                yield Entry(
                    entry["key"].tobytes(),
                    int(entry["length"]),
                    int(entry["part_count"]),
                    BlockClass(int(entry["cls"])),
                    int(entry["heat"]),
                )

    def events(self, limit: int = _EVENTS_MAX) -> Events:
        """Takes up to limit events (stored, evicted, quarantined) of reuse keys, oldest first."""
        found = np.zeros(min(whole("limit", limit, 1), _EVENTS_MAX), dtype=EVENT)
        dropped = ctypes.c_uint64()
        count = self._inside("hifc_events", found.ctypes.data, len(found), ctypes.byref(dropped))
        return Events(found[:count].copy(), dropped.value)

    def sync(self) -> None:
        """Everything acknowledged before survives a crash once this returns."""
        self._inside("hifc_sync")

    def drain(self, timeout_s: float = 60.0) -> None:
        """Waits until nothing is in flight. WaitTimeout otherwise."""
        self._inside("hifc_drain", max(0, int(seconds("timeout_s", timeout_s) * 1e6)))

    def stats(self) -> NamespaceStats:
        """Counters since open, sizes as of now."""
        raw = layouts.Stats()
        self._inside("hifc_stats", ctypes.byref(raw))
        return stats_of(raw, self._handle.bounce_bytes)

    def publish(self, values: Mapping[str, object]) -> None:
        """Shows values beside the statistics on the owner's socket, until the next call: what
        hifc-admin top reads of the program above. At most 8 KiB as JSON."""
        self._inside("hifc_publish", json.dumps(values).encode())

    def health(self) -> Health:
        """The drive's SMART / health log. NotSupported: the device has none."""
        log = (ctypes.c_uint8 * 512)()
        self._inside("hifc_health", ctypes.addressof(log))
        return health_of(bytes(log))

    def check(self, payload: bool = True) -> CheckResult:
        """Verifies the invariants of docs/format.md, with payload also every value.

        Nothing may be in flight.
        """
        raw = layouts.CheckResult()
        self._inside("hifc_check", 1 | (2 if payload else 0), ctypes.byref(raw))
        return CheckResult(
            raw.entries_checked, raw.problems, raw.first_problem.decode("utf-8", "replace")
        )

    def repair(self) -> RepairResult:
        """Sets damaged segments free; what stood in them is given up. NotPermitted: read-only."""
        raw = layouts.RepairResult()
        self._inside("hifc_repair", ctypes.byref(raw))
        return RepairResult(
            raw.segments_damaged,
            raw.segments_freed,
            raw.first_problem.decode("utf-8", "replace"),
        )
