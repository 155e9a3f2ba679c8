# SPDX-License-Identifier: Apache-2.0
"""A request ring's memory without a namespace behind it: a test is the consumer."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from hifc.namespace.ring import RingStatus
from hifc.native_lib.layouts import DESCRIPTOR, PAGE_BYTES, RingHeader
from hifc.prefetch.issue import Issuer

MAGIC, VERSION = 0x676E695243466948, 1


class RingMemory:
    """What Issuer and kernels see of a hifc.namespace.ring.Ring, laid out as hifc_ring.h tells."""

    def __init__(
        self, slots: int = 16, statuses: int = 16, arena_pages: int = 16, read_max: int = 4096
    ) -> None:
        statuses_offset = PAGE_BYTES + -(-slots * DESCRIPTOR.itemsize // PAGE_BYTES) * PAGE_BYTES
        size = statuses_offset + -(-statuses * 4 // PAGE_BYTES) * PAGE_BYTES
        self._region = mmap.mmap(-1, size)
        self.header = RingHeader.from_buffer(self._region)
        for name, value in {
            "magic": MAGIC,
            "version": VERSION,
            "slots": slots,
            "statuses": statuses,
            "read_max_bytes": read_max,
            "region_bytes": size,
            "slots_offset": PAGE_BYTES,
            "statuses_offset": statuses_offset,
            "arena_bytes": arena_pages * PAGE_BYTES,
        }.items():
            setattr(self.header, name, value)
        self.address = ctypes.addressof(self.header)
        self.descriptors = np.frombuffer(self._region, DESCRIPTOR, slots, PAGE_BYTES)
        self.statuses = np.frombuffer(self._region, np.int32, statuses, statuses_offset)
        self.statuses[:] = RingStatus.IDLE
        self.arena = np.zeros(arena_pages * PAGE_BYTES, np.uint8)
        self.kicks = 0
        self.closed = False

    def kick(self) -> None:
        self.kicks += 1

    def take(self) -> list[np.void]:
        """All descriptors that have come, in order, as the reactor would take them."""
        taken = []
        slots = self.header.slots
        while True:
            found = self.descriptors[self.header.head % slots]
            if found["sequence"] != self.header.head // slots + 1:
                return taken
            assert self.statuses[word_of(found)] == RingStatus.WAITING
            taken.append(found.copy())
            self.header.head += 1


def word_of(descriptor: np.void) -> int:
    """The status word that a descriptor names."""
    return int(descriptor["control"]) & 0xFFFFFF


def item_of(descriptor: np.void) -> tuple[int, int]:
    """Row and block of a key made by keys_for."""
    row, block = np.frombuffer(descriptor["key"].tobytes(), np.uint64)
    return int(row), int(block)


def keys_for(rows: int, blocks: int) -> np.ndarray:
    """Keys uint8 (rows, blocks, 16) that tell row and block."""
    keys = np.zeros((rows, blocks, 2), np.uint64)
    keys[..., 0] = np.arange(rows)[:, None]
    keys[..., 1] = np.arange(blocks)
    return keys.view(np.uint8)


def in_flight(issuer: Issuer) -> np.ndarray:
    """Bits (rows, blocks / 32) of what an issuer holds to be on its way or landed."""
    bits = issuer._in_flight
    return bits if isinstance(bits, np.ndarray) else bits.get()
