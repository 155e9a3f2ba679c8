# SPDX-License-Identifier: Apache-2.0
"""Where bytes wait between a device and attention: the memory that a namespace stages in.

`host` is the buffer pool. `pinned` is the same pool, which a GPU's kernels reach as well. `gpu` is
memory of a device behind a PCI BAR, a second pool that the drive reads and writes peer to peer, so
host memory sees none of it; a fixed one, since only registered memory can be reached. `auto` takes
the best that works for a GPU that the process uses already, and says in `reason` what it passed
over; a kind asked for by name is taken or raises. Any thread; numbers as of docs/devices.md.

An exception of a signal handler may come after any call: closing undoes what was begun, and what is
taken of a pool is what arrays are over that live, not what was counted.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hifc.errors import (
    BufferExhausted,
    ClosedError,
    ConfigError,
    HiFCError,
    InvalidRequest,
    NotSupported,
)
from hifc.kernels.backend import Backend, backend
from hifc.native_lib.memory import Buffer, ByteArray, Span, memory_of
from hifc.staging import cuda
from hifc.staging.bar import MAP_BYTES, BarMemory, BarProvider, align_up
from hifc.staging.gdrcopy import GdrCopyProvider
from hifc.util.checking import whole
from hifc.util.units import format_size, page_up

if TYPE_CHECKING:
    from hifc.native_lib.handle import Handle

T = TypeVar("T")

KINDS = ("auto", "gpu", "pinned", "host")
# Schemes of devices whose transfers may go to a BAR: a drive by DMA, memory by the CPU's copy. The
# kernel moves what goes to files and sockets, and refuses or copies memory of a BAR.
REACHES_BAR = ("spdk", "ram")


class Staging:
    """Memory of an open namespace in which bytes wait; of this class where it is `host`."""

    kind = "host"

    def __init__(self, handle: Handle, reason: str) -> None:
        self._handle = handle
        self.reason = reason  # why it is of this kind
        self.pool = 0  # its number, for the `pool` field of prepared requests

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})"

    def buffer(self, size_bytes: int) -> ByteArray:
        """A page-aligned uint8 array of shape (size_bytes,), freed when it and its views died;
        contents start undefined. BufferExhausted: there is no room."""
        size_bytes = whole("size_bytes of a buffer", size_bytes, 1)
        return self._handle.buffer(size_bytes)

    def gpu_address(self, array: Buffer) -> int:
        """Where kernels of the GPU see an array made by buffer, or a view of one. NotSupported:
        no GPU does."""
        raise NotSupported(
            f"staging of {self._handle.uri} is {self}: no GPU sees it; set staging to gpu or pinned"
        )

    def gpu_array(self, array: Buffer, where: Backend | None = None) -> Any:
        """The same memory as a CuPy array, uint8 of shape (bytes,), that keeps `array`: what pack
        writes to, unpack and checksums read, with no copy. where: as elsewhere, by default
        kernels.backend(). NotSupported: no GPU sees it, or the kernels run on the host, which take
        `array` itself."""
        where = where or backend()
        if where.name != "cuda":
            raise NotSupported(f"kernels run on {where.name} ({where.reason}): give them the array")
        size = memory_of(array).size_bytes
        memory = where.xp.cuda.UnownedMemory(self.gpu_address(array), size, array)
        pointer = where.xp.cuda.MemoryPointer(memory, 0)
        return where.xp.ndarray((size,), "uint8", memptr=pointer)

    def flush(self) -> None:
        """Returns once what the drive has written is visible to kernels that start later. Get and
        get_many have called it; to be called once a ticket of prepared requests is done."""

    def _offset(self, array: Buffer) -> int:
        if self._handle.closed:
            raise ClosedError(f"{self._handle.uri} is closed: no GPU sees its staging any more")
        pool, offset = self._handle.locate(memory_of(array), on_page=False)
        if offset < 0 or pool != self.pool:
            raise InvalidRequest(f"this array is not staging memory of {self._handle.uri}")
        return offset


class PinnedStaging(Staging):
    """The buffer pool, registered with a GPU."""

    kind = "pinned"

    def __init__(self, handle: Handle, reason: str, gpu: cuda.Gpu) -> None:
        super().__init__(handle, reason)
        self._gpu: cuda.Gpu | None = gpu
        self._seen_at: int | None = None  # while it is registered
        handle.before_close.append(self._release)  # whatever comes next
        try:
            self._seen_at = gpu.register(handle.pool_base, handle.pool_size_bytes)
        except HiFCError:
            handle.before_close.remove(self._release)
            gpu.close()
            raise

    def gpu_address(self, array: Buffer) -> int:
        """As Staging.gpu_address."""
        offset = self._offset(array)
        if self._seen_at is None:
            return super().gpu_address(array)
        return self._seen_at + offset

    def _release(self) -> None:
        gpu = self._gpu
        if gpu is None:
            return
        try:
            gpu.unregister(self._handle.pool_base)
        except HiFCError:
            if self._seen_at is not None:  # otherwise it may never have been registered
                raise
        finally:
            self._seen_at = self._gpu = None
            gpu.close()


class GpuStaging(Staging):
    """A pool in a device's memory. Arrays outlive the namespace: the mapping then stays as long."""

    kind = "gpu"

    def __init__(self, handle: Handle, reason: str, bar: BarProvider, size_bytes: int) -> None:
        super().__init__(handle, reason)
        self._name = bar.name
        self._lock = threading.Lock()
        # Kept until no device knows it: None once closed; arrays keep it longer.
        self._memory: BarMemory | None = None
        handle.after_close.append(self._release)
        self._memory = memory = bar.map(size_bytes)
        self._extents = Extents(memory.size_bytes)
        try:
            self.pool = handle.add_pool(memory.address, memory.size_bytes, memory.flush)
        except HiFCError as error:
            self._memory = None
            memory.release()
            raise NotSupported(
                f"{handle.uri} cannot reach the memory of {bar.name}: {error}; peer to peer needs "
                "the drive on vfio-pci, behind an IOMMU that is on (hifc-admin doctor), and a "
                "kernel whose VFIO maps memory of other devices (vfio_iommu_type1)"
            ) from error

    def buffer(self, size_bytes: int) -> ByteArray:
        """As Staging.buffer. The CPU reads such memory slowly: leave it to the GPU."""
        size_bytes = whole("size_bytes of a buffer", size_bytes, 1)
        memory = self._memory
        if self._handle.closed or memory is None:
            raise ClosedError(f"{self._handle.uri} is closed: open it again with Namespace.open")
        with self._lock:
            span = self._extents.take(
                page_up(size_bytes),
                lambda offset: Span(memory.address + offset, size_bytes, memory),
            )
        if span is None:
            raise BufferExhausted(
                f"no {size_bytes} contiguous bytes left of {format_size(memory.size_bytes)} of "
                f"staging on {self._name}: drop arrays, or raise swap_buffer_size"
            )
        return span.array()

    def gpu_address(self, array: Buffer) -> int:
        """As Staging.gpu_address."""
        offset, memory = self._offset(array), self._memory
        if memory is None or not memory.gpu_address:
            return super().gpu_address(array)
        return memory.gpu_address + offset

    def flush(self) -> None:
        """As Staging.flush."""
        self._handle.written((self.pool,))

    def _release(self) -> None:
        self._memory = None


class Extents:
    """Ranges of [0, size_bytes), first fit, each taken for as long as what was made over it lives.

    Nothing is given back: a range is free once nobody has its holder, so that none is lost or free
    twice, wherever an exception came.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken: list[_Extent] = []  # by offset

    def take(self, size_bytes: int, make: Callable[[int], T]) -> T | None:
        """What make returns for the offset of a range that was free; None where no range is large
        enough."""
        taken = [extent for extent in self._taken if extent.holder() is not None]
        offset, index = 0, 0
        for extent in taken:
            if extent.offset - offset >= size_bytes:
                break
            offset, index = extent.offset + extent.size_bytes, index + 1
        if self._size_bytes - offset < size_bytes:
            return None
        holder = make(offset)
        taken.insert(index, _Extent(offset, size_bytes, weakref.ref(holder)))
        self._taken = taken
        return holder


class _Extent(NamedTuple):
    offset: int
    size_bytes: int
    holder: weakref.ref[Any]


def check(kind: str, uri: str, bar: BarProvider | None) -> None:
    """What can be said before the device is opened. ConfigError, NotSupported, NotPermitted: a kind
    asked for by name cannot be had, with the fix."""
    if kind not in KINDS:
        raise ConfigError(f"staging: {kind!r} is none of {', '.join(KINDS)}")
    if bar is not None and kind in ("host", "pinned"):
        raise ConfigError(f"staging: a bar was given, but {kind} was asked for; use gpu or auto")
    has_all = callable(getattr(bar, "check", None)) and callable(getattr(bar, "map", None))
    if bar is not None and not (has_all and hasattr(bar, "name")):
        raise ConfigError(
            f"bar: {type(bar).__name__} is no BarProvider, which has name, check and map; use "
            "PciBarProvider or GdrCopyProvider"
        )
    if kind == "gpu":
        _check_bar(uri, bar or GdrCopyProvider())
    if kind == "pinned":
        cuda.gpu().close()


def _check_bar(uri: str, bar: BarProvider) -> None:
    scheme = uri.partition("://")[0]
    if scheme not in REACHES_BAR:
        raise NotSupported(
            f"staging gpu wants a drive that this process drives itself, spdk://BDF, not {scheme}: "
            "the kernel moves its bytes and reaches no memory of another device; use staging "
            "pinned, or bind the drive: hifc-admin bind"
        )
    bar.check()


def attach(handle: Handle, kind: str, bar: BarProvider | None, size_bytes: int) -> Staging:
    """The staging memory of a namespace that has just been opened. Errors as for check."""
    size_bytes = max(MAP_BYTES, align_up(size_bytes, MAP_BYTES))
    if kind == "gpu":
        return GpuStaging(handle, "asked for", bar or GdrCopyProvider(), size_bytes)
    if kind == "pinned":
        return PinnedStaging(handle, "asked for", cuda.gpu())
    if kind == "host":
        return Staging(handle, "asked for")
    return _best(handle, bar, size_bytes)


def _best(handle: Handle, bar: BarProvider | None, size_bytes: int) -> Staging:
    gpu = cuda.running()
    if gpu is None and bar is None:
        return Staging(handle, "auto: this process uses no GPU")
    with contextlib.ExitStack() as held:
        passed = "auto"
        if gpu is not None:
            held.callback(gpu.close)
            bar = bar or GdrCopyProvider(gpu.ordinal)
        assert bar is not None
        try:
            _check_bar(handle.uri, bar)
            return GpuStaging(handle, f"auto: {bar.name}", bar, size_bytes)
        except HiFCError as error:
            passed += f"; not gpu: {error}"
        if gpu is not None:
            held.pop_all()
            try:
                return PinnedStaging(handle, passed, gpu)
            except HiFCError as error:
                passed += f"; not pinned: {error}"
        return Staging(handle, passed)
