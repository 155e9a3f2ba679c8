# SPDX-License-Identifier: Apache-2.0
"""What attention makes expected comes ahead of its use: kernels decide and write descriptors into a
request ring, the reactor reads, and a load finds the verified bytes where they landed.

No call is made for a block between the decision and the NVMe command. The arena, its landings and
the ring are made at the first use and made anew, which waits for reads in flight, only where blocks
become longer or more of them are named.

Invariants:
- A name finds a landing only while that landing was taken for that name and nothing has replaced
  the block since: `_look` runs between any two of issue, settle and a change of the keys.
- A landing that nobody may use any more (`drop`) keeps its place until its read has ended.
- The bit of a column in `_kept` is set where its block needs no prefetch: it is here, a landing
  holds it, or the column names no block.

Not thread-safe: the engine calls it under its lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hifc.blocks.keys import BlockTable, KVBlock
from hifc.errors import BufferExhausted, ConfigError
from hifc.metrics.counters import Metrics
from hifc.namespace.namespace import Namespace
from hifc.namespace.ring import Ring, RingStatus
from hifc.native_lib.layouts import KEY_BYTES
from hifc.native_lib.memory import ByteArray
from hifc.native_lib.request import KeyArray
from hifc.prefetch.issue import Issuer
from hifc.prefetch.trend import HiFCPrefetcher
from hifc.util.units import page_up

# Landings: as many steps as may pass until the oldest unused one makes room, and the fewest.
LANDINGS_OF_DEGREE = 8
LANDINGS_MIN = 16
# A load waits so long for its prefetch, which gives way to all other reads; then it reads itself.
LANDING_WAIT_S = 0.25
_COLUMNS_MIN = 1024
# Counters of the engine by those of the issuer.
_COUNTERS = {
    "issued": "prefetch_issued",
    "overflowed": "prefetch_lost",
    "no_landing": "prefetch_lost",
    "failed": "prefetch_failed",
    "skipped": "prefetch_skipped",
}


class Ahead:
    """The prefetches that attention starts, `degree` a step, for the blocks of one engine.

    room_bytes: how large an arena may be. is_here: whether a block needs no prefetch.
    """

    def __init__(
        self,
        namespace: Namespace,
        degree: int,
        metrics: Metrics,
        room_bytes: Callable[[], int],
        is_here: Callable[[bytes], bool],
    ) -> None:
        self.degree = degree
        self._namespace = namespace
        self._metrics = metrics
        self._room_bytes = room_bytes
        self._is_here = is_here
        self._raw = b""  # the keys by column
        self._keys: KeyArray = np.zeros((0, KEY_BYTES), np.uint8)
        self._columns: dict[bytes, int] = {}
        self._kept = np.zeros(0, np.uint32)  # bits
        self._need_bytes = 0  # of the longest block that was named
        self._ring: Ring | None = None
        self._issuer: Issuer | None = None
        self._clear()

    def _clear(self) -> None:
        self._unseen = False  # landings were taken or freed since the last look
        self._items = np.zeros(0, np.int64)  # by landing, as of the last look
        self._names: dict[int, bytes] = {}  # by landing, the oldest first
        self._landings: dict[bytes, int] = {}
        self._arrived: set[int] = set()
        self._totals: dict[str, int] = {}

    def __contains__(self, name: bytes) -> bool:
        self._look()
        return name in self._landings

    @property
    def landings(self) -> int:
        """Blocks that may be on their way or wait for their use at a time."""
        issuer = self._issuer  # another thread may look
        return 0 if issuer is None else issuer.landings

    @property
    def arena_bytes(self) -> int:
        """Pool memory that landings take."""
        return 0 if self._ring is None else self._ring.arena.size

    # ---- a step

    def observe(
        self, prefetcher: HiFCPrefetcher, weights: Any, keys: KeyArray, table: BlockTable
    ) -> int:
        """Feeds the prefetcher with one step, which asks for what it makes expected. Returns for
        how many blocks. On a GPU this waits for the stream.

        keys: uint8 (n, 16), of the columns of weights; columns beyond are no blocks. ConfigError:
        inline, nothing drives reads while the caller computes.
        """
        if self.degree and not self._namespace.reactor:
            raise ConfigError(
                "drive: inline reads nothing while attention computes: use drive: reactor, or "
                "prefetch_degree: 0"
            )
        columns = max(len(keys), weights.shape[-1])
        self._follow(prefetcher, keys, columns, table)
        prefetcher.issuer = None  # nothing keeps an arena that is given back
        self._open(columns)
        issuer = prefetcher.issuer = self._issuer
        if issuer is None:
            prefetcher.update(weights)
            return 0
        self._settle()
        self._make_room()
        issuer.resident[0] = issuer.where.xp.asarray(self._kept)
        self._unseen = True
        prefetcher.update(weights)
        return self._count()["issued"]

    def _follow(
        self, prefetcher: HiFCPrefetcher, keys: KeyArray, columns: int, table: BlockTable
    ) -> None:
        """The columns are those keys from now on."""
        raw = keys.tobytes()
        if raw == self._raw and columns <= 32 * self._kept.size:
            return
        self._look()  # by the keys so far
        if not (raw.startswith(self._raw) or self._raw.startswith(raw)):
            prefetcher.reset()
        first = len(self._raw) // KEY_BYTES
        if not raw.startswith(self._raw) or columns > 32 * self._kept.size:
            first = 0
            self._columns.clear()
            words = max(self._kept.size, _COLUMNS_MIN // 32)
            while columns > 32 * words:
                words *= 2
            self._kept = np.full(words, 0xFFFFFFFF, np.uint32)
        self._raw, self._keys = raw, np.frombuffer(raw, np.uint8).reshape(-1, KEY_BYTES)
        if self._issuer is not None and columns <= self._issuer.blocks:
            self._write_keys(self._issuer, first)
        self._name_columns(first, table)

    def _write_keys(self, issuer: Issuer, first: int) -> None:
        issuer.keys[0, first : len(self._keys)] = issuer.where.xp.asarray(self._keys[first:])

    def _name_columns(self, first: int, table: BlockTable) -> None:
        unknown: list[bytes] = []
        for column in range(first, len(self._keys)):
            name = self._raw[column * KEY_BYTES : (column + 1) * KEY_BYTES]
            if name in self._columns:
                continue  # named twice: asked for by its first column
            self._columns[name] = column
            self._mark(name)
            block = table.get(name)
            if block is None:
                unknown.append(name)
            else:
                self._need_bytes = max(self._need_bytes, block.held_bytes)
        if unknown:
            lengths = np.zeros(len(unknown), np.uint32)
            self._namespace.lookup(unknown, lengths)
            self._need_bytes = max(self._need_bytes, page_up(int(lengths.max())))

    def _mark(self, name: bytes) -> None:
        column = self._columns.get(name)
        if column is not None:
            bit = np.uint32(1 << column % 32)
            if self._is_here(name) or name in self._landings:
                self._kept[column // 32] |= bit
            else:
                self._kept[column // 32] &= ~bit

    def changed(self, block: KVBlock) -> None:
        """A block came into memory, left it, or is on its way by other means."""
        if block.key in self._columns:
            self._need_bytes = max(self._need_bytes, block.held_bytes)
            self._mark(block.key)

    def _fits(self, columns: int) -> bool:
        issuer, ring = self._issuer, self._ring
        if issuer is None or ring is None:
            return False
        return ring.header.read_max_bytes >= self._need_bytes and issuer.blocks >= columns

    def _open(self, columns: int) -> None:
        """Ring, arena and issuer, as large as they have to be now."""
        if self._fits(columns):
            return
        self.close()
        if not (self.degree and self._need_bytes):
            return
        wanted = max(LANDINGS_MIN, LANDINGS_OF_DEGREE * self.degree)
        arena = self._arena(min(wanted, self._room_bytes() // self._need_bytes))
        if arena is None:
            return
        landings = arena.size // self._need_bytes
        slots = 1 << (max(LANDINGS_MIN, 2 * landings) - 1).bit_length()
        with contextlib.ExitStack() as undo:
            made = self._namespace.ring(arena, self._need_bytes, slots=slots, statuses=landings)
            undo.callback(made.close)
            keys = np.zeros((32 * self._kept.size, KEY_BYTES), np.uint8)
            self._issuer = Issuer(made, keys, rows=1)
            self._ring = made
            undo.pop_all()
        self._items = np.full(landings, -1, np.int64)
        self._totals = self._issuer.totals
        self._write_keys(self._issuer, 0)

    def _arena(self, landings: int) -> ByteArray | None:
        """Pool memory for so many landings, or as many as the pool has room for."""
        while landings > 0:
            try:
                return self._namespace.buffer(landings * self._need_bytes)
            except BufferExhausted:
                landings //= 2
        return None

    # ---- landings

    def _look(self) -> None:
        """Learns which landings were taken, and for whom, and which were freed."""
        issuer = self._issuer
        if issuer is None or not self._unseen:
            return
        self._unseen = False
        items = issuer.held()
        for landing in np.flatnonzero(items != self._items).tolist():
            self._forget(landing)
            if items[landing] >= 0:
                name = self._keys[items[landing]].tobytes()
                self._names[landing] = name
                self._landings[name] = landing
        self._items = items

    def _forget(self, landing: int) -> None:
        self._arrived.discard(landing)
        self._let_go(landing)

    def _let_go(self, landing: int) -> None:
        name = self._names.pop(landing, None)
        if name is not None:
            del self._landings[name]
            self._mark(name)

    def _settle(self) -> None:
        """Counts what has landed, frees what failed or was dropped."""
        issuer = self._issuer
        assert issuer is not None
        self._look()
        landed = issuer.settle().landings.tolist()
        self._unseen = True
        self._look()
        for landing in landed:
            self._arrive(landing)
        self._release([landing for landing in landed if landing not in self._names])

    def _arrive(self, landing: int) -> None:
        if landing not in self._arrived:
            self._arrived.add(landing)
            self._metrics.add("prefetch_landed")

    def _make_room(self) -> None:
        """The oldest that were not used give their landings to those of this step."""
        free = int((self._items < 0).sum())
        unused = [landing for landing in self._names if landing in self._arrived]
        self._release(unused[: max(0, self.degree - free)])

    def _release(self, landings: list[int], *, used: bool = False) -> None:
        issuer = self._issuer
        if issuer is None or not landings:
            return
        issuer.release(np.array(landings, np.uint32))
        for landing in landings:
            if landing in self._arrived and not used:
                self._metrics.add("prefetch_wasted")
            self._items[landing] = -1
            self._forget(landing)

    def _count(self) -> dict[str, int]:
        """Adds to the engine's counters what the issuer has counted since the last time."""
        issuer = self._issuer
        assert issuer is not None
        before, self._totals = self._totals, issuer.totals
        new = {name: total - before[name] for name, total in self._totals.items()}
        for name, amount in new.items():
            self._metrics.add(_COUNTERS[name], amount)
        return new

    # ---- use

    def find(self, block: KVBlock) -> ByteArray | None:
        """The verified bytes of a block that landed, until `use` or `drop`. Waits for those that
        are on their way, at most LANDING_WAIT_S. None: read the block."""
        issuer, ring = self._issuer, self._ring
        if issuer is None or ring is None:
            return None
        self._look()
        landing = self._landings.get(block.key)
        if landing is None:
            return None
        there = ring.wait([landing], LANDING_WAIT_S) and ring.statuses[landing] == RingStatus.OK
        if there:
            self._arrive(landing)
            found = issuer.bytes_of(landing)[: block.size_bytes]
            # By other means it may have been replaced since it was read.
            if self._namespace.is_value(block.key, found):
                return found
        self.drop(block.key)
        return None

    def use(self, name: bytes) -> None:
        """What `find` found has been copied to its place."""
        self._release([self._landings[name]], used=True)

    def drop(self, name: bytes) -> None:
        """The block is replaced or gone: what was asked for is not it any more."""
        ring, issuer = self._ring, self._issuer
        if ring is None or issuer is None:
            return
        self._look()
        landing = self._landings.get(name)
        if landing is None:
            return
        status = ring.statuses[landing]
        if status == RingStatus.OK:
            self._release([landing])
            return
        self._let_go(landing)  # `_settle` frees it
        if status == RingStatus.WAITING and issuer.where.name == "host":
            ring.cancel([landing])  # a GPU is the only producer of its ring

    def reset(self) -> None:
        """Forgets the keys as well, whatever an exception left. Raises what `close` raises."""
        self._clear()
        self._columns = {}
        self._raw, self._keys = b"", np.zeros((0, KEY_BYTES), np.uint8)
        self._kept = np.zeros(0, np.uint32)
        self._need_bytes = 0
        self.close()

    def close(self) -> None:
        """Takes back what has not started and waits for what has. It may be used again.

        WaitTimeout: a read did not end in twice the command timeout.
        """
        if self._issuer is not None:
            self._issuer.close()
        if self._ring is not None:
            self._ring.close()
        self._issuer = self._ring = None
        self._metrics.add("prefetch_wasted", len(self._arrived))
        names = list(self._landings)
        self._clear()
        for name in names:
            self._mark(name)
