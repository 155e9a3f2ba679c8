# SPDX-License-Identifier: Apache-2.0
"""Namespace: the flat key-value namespace on a device, and the only caller of the driver.

Keys are 16 bytes; values are bytes in any contiguous buffer. Arrays from `ns.buffer()` move
between device and memory without a copy; any other buffer costs one copy through the pool, which
`stats().bounce_bytes` counts. Every method may be called from any thread.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from hifc.device.device import device_uri
from hifc.errors import (
    BackPressure,
    ConfigError,
    HiFCError,
    InvalidRequest,
    NoSpace,
    WaitTimeout,
)
from hifc.namespace import batch
from hifc.namespace.calls import DELAY_MAX_S, DELAY_MIN_S, RETRY_WAIT_S, parts_of
from hifc.namespace.options import OpenOptions, open_opts
from hifc.namespace.reservation import Lease, Reservation
from hifc.namespace.ring import Ring, open_ring
from hifc.namespace.state import State
from hifc.namespace.ticket import Ticket
from hifc.native_lib import layouts, libhifc
from hifc.native_lib.handle import Handle, close_quietly
from hifc.native_lib.layouts import REQUEST, Request
from hifc.native_lib.memory import Buffer, ByteArray, Memory, memory_of
from hifc.native_lib.request import (
    Answer,
    ClassLike,
    KeyArray,
    Keys,
    Op,
    class_of,
    key_bytes,
    keys_array,
    make_requests,
)
from hifc.staging import staging as stagings
from hifc.staging.bar import BarProvider
from hifc.staging.staging import Staging
from hifc.util import checking
from hifc.util.scoped import Scoped
from hifc.util.units import parse_size, shown_size

_LOG = logging.getLogger("hifc")

# A synchronous get of a key whose batch is in flight waits this long for it.
PENDING_WAIT_S = 60.0
# Item assignment replaces a value that another thread puts back meanwhile so often.
SET_TRIES = 8


class Namespace(State, Scoped):
    """An open namespace. Made by `Namespace.open`; a context manager that closes it."""

    def __init__(self, handle: Handle, staging: Staging) -> None:
        super().__init__(handle)
        self.staging = staging  # where bytes wait, and why there
        self._finalizer = weakref.finalize(self, close_quietly, handle)

    # ---- format, open, close

    @staticmethod
    def format(
        uri: str | os.PathLike[str],
        *,
        segment_size: int | str = 0,
        label: str = "",
        force: bool = False,
        check_only: bool = False,
    ) -> None:
        """Lays an empty namespace on the device that uri names.

        uri: a device URI, or the path of a file or block device (see hifc.device.device_uri).
        segment_size: a power of two from 256KiB to 256MiB; 0 lets the device's size decide.
        check_only: makes every check and changes nothing; a file must exist for that.
        A format that fails leaves no file that was not there before.
        FormatError: something is there already and force is False. ConfigError: a bad URI, a
        size that is too small or that the file system has no files of. NoSpace: the file system
        has no room for the file.
        """
        encoded = checking.text("label", label).encode()
        if len(encoded) > 31:
            raise ConfigError(f"label: {label!r} has {len(encoded)} bytes, at most 31 fit")
        opts = layouts.FormatOpts(
            segment_size_bytes=parse_size(segment_size, "segment_size"),
            force=checking.flag("force", force),
            check_only=checking.flag("check_only", check_only),
            label=encoded,
        )
        device = device_uri(uri)
        libhifc.library().hifc_format(device.encode(), ctypes.byref(opts))
        if not check_only:
            _LOG.info("formatted %s", device)

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        read_only: bool = False,
        drive: str = "reactor",
        pool_size: int | str = "64MiB",
        staging: str = "auto",
        staging_size: int | str = "32MiB",
        bar: BarProvider | None = None,
        **options: Unpack[OpenOptions],
    ) -> Namespace:
        """Opens the namespace on the device that uri names, and owns the device until close.

        uri: a device URI, or the path of a file or block device (see hifc.device.device_uri).
        drive: "reactor" (a thread polls) or "inline" (whoever waits polls; no asyncio).
        pool_size: memory for buffers. staging: where bytes wait (hifc.staging), auto, gpu, pinned
        or host; gpu takes staging_size of bar, by default by GDRCopy. FormatError: no namespace
        there. DeviceBusy: another process owns the device. NotPermitted: with the fix.
        NotSupported: a staging that was asked for by name cannot be had.
        """
        uri = device_uri(uri)
        opts = open_opts(read_only, drive, pool_size, options)
        staging_bytes = parse_size(staging_size, "staging_size")
        stagings.check(staging, uri, bar)
        started = time.monotonic()
        handle = Handle(libhifc.library(), uri, opts, reactor=drive == "reactor")
        try:
            namespace = cls(handle, stagings.attach(handle, staging, bar, staging_bytes))
        except BaseException:
            close_quietly(handle)
            raise
        if _LOG.isEnabledFor(logging.INFO):
            stats = namespace.stats()
            _LOG.info(
                "opened %s in %.3f s: %d entries recovered in %.3f s, staging %s",
                uri,
                time.monotonic() - started,
                stats.recovered_entries,
                stats.recovery_ns / 1e9,
                namespace.staging.kind,
            )
        return namespace

    def close(self) -> None:
        """Waits for what is in flight, seals, releases the device. Idempotent.

        Arrays over pool memory stay valid. Does nothing in a child of fork().
        """
        begun, started = self.closed, time.monotonic()
        self._handle.close()
        self._finalizer.detach()
        if not begun:
            _LOG.info("closed %s in %.3f s", self.uri, time.monotonic() - started)

    @property
    def reactor(self) -> bool:
        """True where a thread drives the device, so that requests end while the caller computes."""
        return self._handle.reactor

    @property
    def closed(self) -> bool:
        """True once closed, and in a child of fork()."""
        return self._handle.closed

    def _end(self) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"<Namespace {self.uri} closed>"
        try:
            stats = self.stats()
        except HiFCError:  # closed meanwhile, or detached from its owner's side
            return f"<Namespace {self.uri} closed>"
        return (
            f"<Namespace {self.uri}: {stats.entries} entries, {shown_size(stats.live_bytes)} of "
            f"{shown_size(stats.capacity_bytes)}>"
        )

    def reopen_by(self, advice: str) -> None:
        """What errors say to do once this namespace is closed."""
        self._handle.reopen = advice

    # ---- as a mapping of keys to values

    def __contains__(self, key: Any) -> bool:
        """As `exists`."""
        return self.exists(key)

    def __len__(self) -> int:
        """How many values there are, of both classes."""
        return self.stats().entries

    def __bool__(self) -> bool:
        """True: an empty namespace is one, too."""
        return True

    def __iter__(self) -> Iterator[bytes]:
        """The keys, as `list` gives them: those that change meanwhile may be missed or seen
        twice."""
        return (entry.key for entry in self.list())

    def __getitem__(self, key: Any) -> ByteArray:
        """As `get`. KeyError: there is no such key."""
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __setitem__(self, key: Any, data: Buffer) -> None:
        """Stores data as class reuse; another value of that key goes first, so that there is none
        for a moment. Raises unless it is stored. NoSpace, BackPressure: as Ticket.result.
        HiFCError: admission declined to write it, which `put` answers as REJECTED."""
        name = key_bytes(key)
        memory = memory_of(data)
        doing = f"put of key {name.hex()} on {self.uri}"
        for _ in range(SET_TRIES):
            answer = self.put(name, data)
            if answer == Answer.OK:
                return
            if answer != Answer.EXISTS:
                break
            if self.is_value(name, memory.array(memory.size_bytes)):
                return
            self.delete(name)
        if answer == Answer.NO_SPACE:
            raise NoSpace(
                f"{doing}: nothing that may be evicted is left; delete swap entries, release "
                "leases or use a larger device"
            )
        if answer == Answer.REJECTED:
            raise HiFCError(
                f'{doing}: admission declined to write it; open it with admission="always", or '
                "use put, which answers REJECTED"
            )
        raise BackPressure(f"{doing}: still {answer.name}; try again once other writers are done")

    def __delitem__(self, key: Any) -> None:
        """As `delete`. KeyError: there is no such key."""
        if not self.delete(key):
            raise KeyError(key)

    # ---- memory

    def buffer(self, size_bytes: int) -> ByteArray:
        """A page-aligned uint8 array of shape (size_bytes,) over pool memory.

        The device reads and writes it without a copy, and so do views of it and
        torch.from_numpy(...) of it. Freed when the array and all its views are gone; contents
        start undefined. BufferExhausted: the pool is full.
        """
        size_bytes = checking.whole("size_bytes of a buffer", size_bytes, 1)
        return self._handle.buffer(size_bytes)

    def offset(self, array: Buffer) -> int:
        """Where an array made by `buffer` or `staging.buffer`, or a view of it, stands in its pool,
        0 or `staging.pool`: the buffer_offset of prepared requests. InvalidRequest: it is other
        memory."""
        _, offset = self._handle.locate(memory_of(array), on_page=False)
        if offset < 0:
            raise InvalidRequest("this array does not lie in a pool: make it with ns.buffer(...)")
        return offset

    # ---- request rings

    def ring(
        self,
        arena: ByteArray,
        read_max: int,
        *,
        slots: int = 1024,
        statuses: int = 0,
        poll_us: int = 0,
    ) -> Ring:
        """A ring of descriptors of reads that nobody waits for yet: see hifc.namespace.ring.

        arena: where reads go, a buffer or a view of one that begins on a page; its whole pages
        count, and it is kept while the ring is open. read_max: no read writes more bytes than
        this from its place on. slots: a power of two from 16 to 65536. statuses: status words, 0
        for as many as slots. poll_us: how long a descriptor may stand that nobody kicked, 0 for
        1000.
        InvalidRequest: one of these does not fit. NoSpace: 16 rings are open.
        """
        return open_ring(self._handle, arena, read_max, slots, statuses, poll_us)

    # ---- one value

    def put(self, key: Any, data: Buffer, *, cls: ClassLike = "reuse", parts: int = 1) -> Answer:
        """Stores data under key and waits. See `Answer` for how it can end.

        parts: the value consists of that many equal parts, each verified alone by get_range.
        """
        request = Request(op=Op.PUT, cls=class_of(cls), part_count=parts_of(parts))
        request.key[:] = key_bytes(key)
        return Answer(self._write(request, data))

    def get(self, key: Any, out: Buffer | None = None) -> ByteArray | None:
        """The value as a uint8 array of shape (length,), or None on a miss.

        out: memory to read into, at least as long as the value; the result is then a view of
        it. Without out the result is pool memory, read without a copy and freed with its last
        view, as long as half of the pool stays free; then it is other memory and costs a copy,
        which `stats().bounce_bytes` counts. It stays valid after close; a child of fork() shares it
        and copies what it keeps. A pending key is waited for, at most PENDING_WAIT_S.
        CorruptionError: a swap value that does not match its checksum.
        """
        name = key_bytes(key)
        target = None if out is None else memory_of(out)
        return self._await_known(name, lambda: self._get(name, target))

    def _await_known(self, name: bytes, read: Callable[[], ByteArray | Answer]) -> ByteArray | None:
        """What read finds, None on a miss, once the key is no longer pending."""
        deadline = time.monotonic() + PENDING_WAIT_S
        delay = DELAY_MIN_S
        while True:
            found = read()
            if not isinstance(found, Answer):
                return found
            if found == Answer.MISS:
                return None
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"get of key {name.hex()} on {self.uri}: still {found.name} after "
                    f"{PENDING_WAIT_S:.0f} s; is a reservation neither committed nor aborted?"
                )
            self._handle.pause(delay)
            delay = min(2 * delay, DELAY_MAX_S)

    def _get(self, name: bytes, target: Memory | None) -> ByteArray | Answer:
        if target is not None:
            return self._read(name, target)
        answer, length = self._look(name)
        if answer == Answer.MISS and self._misses(name):
            return Answer.MISS
        if answer != Answer.OK:
            return Answer.PENDING
        try:
            return self._read(name, memory_of(self._result(length)))
        except InvalidRequest as error:
            if error.code != -errno.EMSGSIZE:
                raise
            return Answer.PENDING  # it became longer since the look-up

    def _result(self, length_bytes: int) -> ByteArray:
        """Memory for a result: of the pool where there is enough of it."""
        found = self._handle.result_buffer(length_bytes)
        return np.empty(length_bytes, dtype=np.uint8) if found is None else found

    def get_range(
        self, key: Any, offset_bytes: int, length_bytes: int, out: Buffer | None = None
    ) -> ByteArray | None:
        """Bytes [offset_bytes, offset_bytes + length_bytes) of a value; None on a miss.

        Verified by the parts that the range touches. out: as for `get`. InvalidRequest: it exceeds
        the value.
        """
        length_bytes = checking.whole("this is no range: length_bytes", length_bytes, 1)
        offset_bytes = checking.whole("this is no range: offset_bytes", offset_bytes, 0)
        if not 0 <= offset_bytes <= layouts.VALUE_MAX_BYTES - length_bytes:
            raise InvalidRequest(f"get_range: [{offset_bytes}, +{length_bytes}) is no range")
        name = key_bytes(key)
        target = memory_of(self._result(length_bytes) if out is None else out)
        if target.size_bytes < length_bytes:
            raise InvalidRequest(f"out has {target.size_bytes} bytes, fewer than {length_bytes}")
        return self._await_known(name, lambda: self._read(name, target, offset_bytes, length_bytes))

    def delete(self, key: Any) -> bool:
        """Removes the value. True if there was one. NoSpace: it is still there, as the device has
        no room left to note that a reuse key is gone."""
        request = Request(op=Op.DELETE)
        request.key[:] = key_bytes(key)
        status = self._call(request, again=(Answer.RETRY, Answer.PENDING))
        if status in (Answer.RETRY, Answer.PENDING):
            raise BackPressure(
                f"delete of key {bytes(request.key).hex()} on {self.uri}: still "
                f"{Answer(status).name} after {RETRY_WAIT_S:.0f} s"
            )
        if status == Answer.NO_SPACE:
            raise NoSpace(
                f"delete of key {bytes(request.key).hex()} on {self.uri}: nothing that may be "
                "evicted is left; delete swap entries, release leases or use a larger device"
            )
        return status == Answer.OK

    def exists(self, key: Any) -> bool:
        """True if a get would find the value now. Never blocks."""
        return self._look(key_bytes(key))[0] == Answer.OK

    # ---- many values

    def put_many(
        self, keys: Keys, buffers: Any, *, cls: ClassLike = "reuse", parts: int = 1
    ) -> Ticket:
        """Stores one buffer a key: a sequence, or an array of shape (n, ...) with a row a key.

        The buffers must not change until the ticket is done. Answers per key in
        `ticket.answers`; keys for which pool or queues have no room are answered Retry.
        """
        names = keys_array(keys)
        placement = batch.place(self._handle, buffers, len(names), writable=False)
        batch.copy_in(self._handle, placement)
        requests = make_requests(len(names), Op.PUT)
        requests["key"] = names
        requests["cls"] = class_of(cls)
        requests["part_count"] = parts_of(parts)
        requests["length"] = placement.sizes
        return self._submit_placed(requests, placement)

    def get_many(self, keys: Keys, buffers: Any = None) -> Ticket:
        """Reads whole values into one buffer a key, each at least as long as its value.

        The ticket's `requests["value_length"]` holds the lengths. A miss leaves its buffer as
        it was, a corrupt value leaves zeros, a buffer that is too small is an error of its key.
        Without buffers memory is made as for `get`, and the ticket's `values` are the results; a
        key whose value came, or became longer, during the call is answered Retry. Keys for which
        pool or queues have no room are answered Retry.
        """
        names = keys_array(keys)
        if buffers is None:
            return self._get_values(names)
        return self._get_many(names, buffers)

    def _get_many(
        self,
        names: KeyArray,
        buffers: Any,
        capacities: npt.NDArray[np.uint32] | None = None,
    ) -> Ticket:
        placement = batch.place(self._handle, buffers, len(names), writable=True)
        requests = make_requests(len(names), Op.GET)
        requests["key"] = names
        requests["capacity"] = placement.sizes if capacities is None else capacities
        copy_out = batch.copy_out if capacities is None else _copy_values
        return self._submit_placed(
            requests, placement, functools.partial(copy_out, self._handle, placement)
        )

    def _get_values(self, names: KeyArray) -> Ticket:
        """get_many into memory made here. Keys that look-up does not know are asked for all the
        same, with room for nothing, so that their miss is counted."""
        lengths = np.zeros(len(names), dtype=np.uint32)
        known = self.lookup(names, lengths) == Answer.OK
        lengths[~known] = 0
        nothing = np.empty(1, dtype=np.uint8) if known.all() else self._result(1)
        outs = [self._result(length) if length else nothing for length in lengths.tolist()]
        return self._get_many(names, outs, lengths).give(outs)

    def submit(self, requests: npt.NDArray[np.void]) -> Ticket:
        """Submits prepared requests (`hifc.make_requests`): the hot path, one call a batch.

        The array belongs to libhifc until the ticket is done and may then be submitted again. So do
        the buffers that it names: keep them alive as long.
        """
        if not isinstance(requests, np.ndarray):
            raise InvalidRequest(
                f"submit takes what hifc.make_requests makes, not {type(requests).__name__}"
            )
        if requests.dtype != REQUEST or requests.ndim != 1 or requests.size == 0:
            raise InvalidRequest(
                "submit takes a one-dimensional array of hifc.REQUEST with one element or more, "
                f"not {requests.shape} of {requests.dtype}; see hifc.make_requests"
            )
        flags = requests.flags
        if not (flags.c_contiguous and flags.writeable):
            raise InvalidRequest("the request array is strided or read-only: copy it first")
        return Ticket(self._handle, requests, requests)

    # ---- what stays

    def touch(self, keys: Keys) -> None:
        """Counts an access of each key, so that reclaim keeps it longer."""
        names = keys_array(keys)
        self._inside("hifc_touch", names.ctypes.data, len(names))

    def lease(self, keys: Keys, ttl_s: float = 60.0) -> Lease:
        """Keeps the keys that are there from being evicted for ttl_s seconds or until release."""
        names = keys_array(keys)
        if not 0 < (ttl_s := checking.number("ttl_s", ttl_s)) <= 86400:
            raise InvalidRequest(f"ttl_s is {ttl_s}: use more than 0 and at most 86400 seconds")
        return Lease(self._handle, names, max(1, round(ttl_s * 1000)))

    # ---- two-phase put

    def reserve(
        self, key: Any, length_bytes: int, *, cls: ClassLike = "reuse", parts: int = 1
    ) -> Reservation:
        """Phase one of a two-phase put. False, with its `answer`, where the key exists, is
        pending or was rejected. NoSpace: the device is full."""
        most = layouts.VALUE_MAX_BYTES
        length_bytes = checking.whole("length_bytes of a value", length_bytes, 1, most)
        name = key_bytes(key)
        request = Request(
            op=Op.RESERVE, cls=class_of(cls), length=length_bytes, part_count=parts_of(parts)
        )
        request.key[:] = name
        reservation = Reservation(self, self._handle, request)
        reservation.answer = Answer(self._call(request))
        if reservation.answer == Answer.NO_SPACE:
            raise NoSpace(
                f"reserve {length_bytes} bytes on {self.uri}: nothing that may be evicted is "
                "left; delete swap entries or use a larger device"
            )
        return reservation

    def write(self, reservation: Reservation, offset_bytes: int, data: Buffer) -> None:
        """Writes data at offset_bytes of a reserved value."""
        most = layouts.VALUE_MAX_BYTES
        offset_bytes = checking.whole("offset_bytes of a write", offset_bytes, 0, most)
        handle = self._reserved(reservation)
        request = Request(op=Op.WRITE, handle=handle, value_offset=offset_bytes)
        self._expect_ok(self._write(request, data), "write")

    def commit(self, reservation: Reservation) -> Answer:
        """Phase two: the value becomes visible."""
        return Answer(self._call(Request(op=Op.COMMIT, handle=self._reserved(reservation))))

    def abort(self, reservation: Reservation) -> None:
        """Gives the room of a reservation back, and where writes to it do not end for long, once
        they have."""
        handle = self._reserved(reservation)
        if self._call(Request(op=Op.ABORT, handle=handle)) != Answer.OK:
            self._inside("hifc_reservation_drop", handle)

    def _reserved(self, reservation: Reservation) -> int:
        """The number of a reservation. That of another namespace may be the same number here."""
        if not isinstance(reservation, Reservation):
            raise InvalidRequest(
                f"{type(reservation).__name__} is not a reservation: namespace.reserve makes one"
            )
        return reservation.handle_on(self._handle)


def _copy_values(
    handle: Handle, placement: batch.Placement, requests: npt.NDArray[np.void]
) -> None:
    """After a get into memory of ours. What turned out longer than look-up had said is not an
    error of the caller: it is to be asked for again."""
    status = requests["status"]
    status[status == -errno.EMSGSIZE] = Answer.RETRY
    batch.copy_out(handle, placement, requests)
