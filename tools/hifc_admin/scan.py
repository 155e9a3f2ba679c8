# SPDX-License-Identifier: Apache-2.0
"""Reads every value of an open namespace through its own reads, which verify and quarantine.

Bounded memory: two buffers of half the pool's room are filled in turn, so that the device works on
one while the other is looked at. A value longer than a buffer is read alone, and so is one again
whose read failed: only what the medium itself has lost counts as lost, since a repair deletes it. A
command that timed out, or a device that went away, says nothing about the value.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hifc.errors import CorruptionError, DeviceError, HiFCError
from hifc.namespace.namespace import Namespace
from hifc.namespace.state import Entry
from hifc.namespace.ticket import Ticket
from hifc.native_lib.memory import ByteArray
from hifc.native_lib.request import Answer, EventKind
from hifc.util.units import page_up

BUFFER_BYTES = 8 << 20
# Enough to look at a namespace and its index, where huge pages are scarce.
LOOK_POOL_BYTES = 8 << 20
NAP_MAX_S = 0.1
SCT_MEDIA = 2
INTERNAL_ERROR = (0, 0x06)  # what the EIO of the kernel becomes, which hides the status


@dataclass
class Totals:
    """What there is to read, from the index alone."""

    entries: int = 0
    size_bytes: int = 0
    longest_bytes: int = 0


@dataclass
class Found:
    """What reading showed."""

    entries_read: int = 0
    bytes_read: int = 0
    corrupt: int = 0
    unreadable: int = 0
    gone: int = 0  # listed, and not there when its turn came
    unclear: int = 0  # could not be read now, and not for the medium's sake
    first_unclear: str = ""  # the error of the first of them
    lost_keys: list[bytes] = field(default_factory=list)  # corrupt and unreadable ones


class Rate:
    """Keeps an average below a number of bytes a second; 0: no limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._start_s = time.monotonic()
        self._done = 0

    def spend(self, amount_bytes: int) -> None:
        """Sleeps until so much more is within the rate."""
        self._done += amount_bytes
        if not self._bytes_per_s:
            return
        due_s = self._start_s + self._done / self._bytes_per_s
        while (left_s := due_s - time.monotonic()) > 0:
            time.sleep(min(left_s, NAP_MAX_S))


def look(uri: str) -> Namespace:
    """Opens it to see what there is, not to read values: with a small pool."""
    return Namespace.open(uri, read_only=True, pool_size=LOOK_POOL_BYTES)


def totals(namespace: Namespace) -> Totals:
    total = Totals()
    for entry in namespace.list():
        total.entries += 1
        total.size_bytes += entry.length_bytes
        total.longest_bytes = max(total.longest_bytes, entry.length_bytes)
    return total


def pool_size(longest_bytes: int) -> int:
    """What `scan` needs of the pool: two buffers, and some for the namespace itself."""
    return 2 * page_up(max(BUFFER_BYTES, longest_bytes)) + (16 << 20)


class _Reader:
    """One pass over a namespace."""

    def __init__(self, namespace: Namespace, rate: Rate, progress: Callable[[int], None]) -> None:
        self._namespace = namespace
        self._rate = rate
        self._progress = progress
        self._quarantined: set[bytes] = set()
        self.found = Found()

    def run(self, size_bytes: int) -> None:
        buffers = [self._namespace.buffer(size_bytes), self._namespace.buffer(size_bytes)]
        before: tuple[Ticket, list[Entry]] | None = None
        for turn, batch in enumerate(_batches(self._namespace, size_bytes)):
            self._rate.spend(sum(entry.length_bytes for entry in batch))
            ticket = self._start(batch, buffers[turn % 2])
            if before is not None:
                self._judge(*before)
            before = ticket, batch
        if before is not None:
            self._judge(*before)

    def _start(self, batch: list[Entry], buffer: ByteArray) -> Ticket:
        pieces = []
        at = 0
        for entry in batch:
            pieces.append(buffer[at : at + entry.length_bytes])
            at += page_up(entry.length_bytes)
        return self._namespace.get_many([entry.key for entry in batch], pieces)

    def _judge(self, ticket: Ticket, batch: list[Entry]) -> None:
        ticket.wait()
        self._collect_quarantined()
        for entry, status in zip(batch, ticket.answers.tolist(), strict=True):
            self._count(entry, status)
        self._progress(self.found.bytes_read)

    def _collect_quarantined(self) -> None:
        """An evicted value is a miss as well: what the library quarantined, it says by event."""
        events = self._namespace.events().events
        for key in events["key"][events["kind"] == EventKind.QUARANTINED]:
            self._quarantined.add(key.tobytes())

    def _count(self, entry: Entry, status: int | None) -> None:
        found = self.found
        found.bytes_read += entry.length_bytes
        if entry.key in self._quarantined:
            status = -errno.EBADMSG
        if status not in (Answer.OK, Answer.MISS, -errno.EBADMSG):
            status = self._again(entry)
        if status == Answer.OK:
            found.entries_read += 1
        elif status == -errno.EBADMSG or entry.key in self._quarantined:
            found.corrupt += 1
            found.lost_keys.append(entry.key)
        elif status == Answer.MISS:
            found.gone += 1
        elif status == -errno.EIO:
            found.unreadable += 1
            found.lost_keys.append(entry.key)

    def _again(self, entry: Entry) -> int | None:
        """Alone, and waiting: its answer; None where it stays unclear, which is counted."""
        try:
            value = self._namespace.get(entry.key)
        except CorruptionError:
            return -errno.EBADMSG
        except HiFCError as error:
            if isinstance(error, DeviceError) and _is_of_the_medium(error):
                return -errno.EIO
            self.found.unclear += 1
            self.found.first_unclear = self.found.first_unclear or str(error)
            return None
        self._collect_quarantined()
        return Answer.MISS if value is None else Answer.OK


def _is_of_the_medium(error: DeviceError) -> bool:
    return error.code == -errno.EIO and (
        error.sct == SCT_MEDIA or (error.sct, error.sc) == INTERNAL_ERROR
    )


def scan(namespace: Namespace, rate: Rate, progress: Callable[[int], None]) -> Found:
    """Reads everything once. progress is called with the bytes read so far."""
    reader = _Reader(namespace, rate, progress)
    reader.run(page_up(max(BUFFER_BYTES, totals(namespace).longest_bytes)))
    return reader.found


def _batches(namespace: Namespace, size_bytes: int) -> Iterator[list[Entry]]:
    """Entries that fit a buffer together, each on a page of its own."""
    batch: list[Entry] = []
    used = 0
    for entry in namespace.list():
        need = page_up(entry.length_bytes)
        if batch and used + need > size_bytes:
            yield batch
            batch, used = [], 0
        batch.append(entry)
        used += need
    if batch:
        yield batch
