# SPDX-License-Identifier: Apache-2.0
"""Memory of another PCI device, mapped through its BAR so that a drive can read and write it.

A provider maps it: `PciBarProvider` any memory BAR by sysfs, `gdrcopy.GdrCopyProvider` that of
an NVIDIA GPU. What it maps begins at a multiple of 2 MiB and is whole pieces of 2 MiB, which is how
SPDK registers memory. A mapping lives until the last array over it is gone; a child of fork()
leaves it alone. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hifc.errors import ConfigError, HiFCError, NotPermitted, NotSupported
from hifc.native_lib import libhifc
from hifc.util.units import format_size

MAP_BYTES = 2 << 20  # SPDK registers memory in pieces of this size, at multiples of it
PCI_DEVICES = Path("/sys/bus/pci/devices")

_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RESOURCE = re.compile(r"resource([0-5])(_wc)?")
_IORESOURCE_MEM = 0x200
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class BarMemory:
    """size_bytes of a device's memory at `address`, for the CPU and, behind an IOMMU, for a drive.

    gpu_address: the same byte as kernels of the GPU see it; 0 where there is no GPU. flush makes
    what a drive has written visible to kernels that start afterwards. release undoes the mapping,
    once: when called, or when this object and all arrays that keep it are gone.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        release: Callable[[], None],
        *,
        gpu_address: int = 0,
        flush: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.gpu_address = gpu_address
        self.flush = flush
        self.release = weakref.finalize(self, _release, os.getpid(), release)


def _release(pid: int, release: Callable[[], None]) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(HiFCError, OSError):  # the device is gone: nothing is left to undo
            release()


class BarProvider(Protocol):
    """Where memory of a device comes from."""

    @property
    def name(self) -> str:
        """Names the device in messages."""

    def check(self) -> None:
        """Raises NotSupported, NotPermitted or ConfigError, naming the fix, where map could not
        work. Maps nothing."""

    def map(self, size_bytes: int) -> BarMemory:
        """size_bytes, a multiple of MAP_BYTES, of the device's memory. Errors as for check."""


class PciBarProvider:
    """A memory BAR of the PCI device bdf ("0000:01:00.0"), which no driver may have.

    resource: the file in sysfs: resource0 to resource5, with _wc (resource2_wc) for a mapping that
    combines writes, where the BAR is prefetchable. Takes the first bytes of the BAR and root.
    """

    def __init__(self, bdf: str, resource: str, *, devices: Path = PCI_DEVICES) -> None:
        if not isinstance(bdf, str) or not _BDF.fullmatch(bdf):
            raise ConfigError(f"{bdf!r} is no PCI address; write all of it, as in 0000:3b:00.0")
        if not isinstance(resource, str) or not _RESOURCE.fullmatch(resource):
            raise ConfigError(
                f"{resource!r} is no BAR: use resource0 to resource5, or resource0_wc"
            )
        self.bdf = bdf
        self._device = devices / bdf
        self._file = self._device / resource
        self._bar = int(resource[len("resource")])

    @property
    def name(self) -> str:
        """Device and BAR."""
        return f"{self.bdf} {self._file.name}"

    def check(self) -> None:
        """As BarProvider.check."""
        if not self._device.is_dir():
            raise NotSupported(f"{self.bdf}: there is no such PCI device; lspci -D lists them")
        if not self._flags() & _IORESOURCE_MEM or not self._file.exists():
            raise NotSupported(
                f"{self.name}: no memory BAR; lspci -vs {self.bdf} lists its regions"
            )
        owner = self._device / "driver"
        if owner.is_symlink():
            raise NotSupported(
                f"{self.bdf}: {owner.readlink().name} has it, and its memory; unbind it first: "
                f"echo {self.bdf} > {owner}/unbind"
            )

    def _flags(self) -> int:
        lines = (self._device / "resource").read_text(encoding="ascii").splitlines()
        return int(lines[self._bar].split()[2], 16)

    def map(self, size_bytes: int) -> BarMemory:
        """As BarProvider.map."""
        self.check()
        usable = self._file.stat().st_size // MAP_BYTES * MAP_BYTES
        if size_bytes > usable:
            raise NotSupported(
                f"{self.name}: {format_size(size_bytes)} of staging are wanted, the BAR has "
                f"{format_size(usable)} in whole pieces of 2 MiB; use a smaller staging_size"
            )
        self._enable(True)
        try:
            address = self._map(size_bytes)
        except BaseException:
            self._enable(False)
            raise

        def release() -> None:
            libhifc.unmap(address, size_bytes)
            self._enable(False)

        return BarMemory(address, size_bytes, release)

    def _enable(self, on: bool) -> None:
        """The kernel counts who enabled it, so this nests with others."""
        try:
            (self._device / "enable").write_text(f"{int(on)}\n", encoding="ascii")
        except OSError as error:
            raise self._refused(error, "enabled" if on else "disabled") from error

    def _map(self, size_bytes: int) -> int:
        try:
            fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
            try:
                return map_aligned(fd, size_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._refused(error, "mapped") from error

    def _refused(self, error: OSError, what: str) -> HiFCError:
        text = f"{self.name} cannot be {what}: {error.strerror}"
        if error.errno in (errno.EPERM, errno.EACCES):
            fix = "run as root, on a kernel that is not locked down (secure boot)"
            return NotPermitted(f"{text}; {fix}", fix=fix)
        return NotSupported(f"{text}; is a driver using the device? lspci -ks {self.bdf}")


def map_aligned(fd: int, size_bytes: int) -> int:
    """Maps the first size_bytes of fd, shared, at a multiple of MAP_BYTES, which the kernel alone
    does not promise. OSError otherwise."""
    room_bytes = size_bytes + MAP_BYTES
    room = _mmap(None, room_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = align_up(room, MAP_BYTES)
    try:
        _mmap(
            address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd
        )
    except OSError:
        libhifc.unmap(room, room_bytes)
        raise
    if address > room:
        libhifc.unmap(room, address - room)
    libhifc.unmap(address + size_bytes, room + MAP_BYTES - address)
    return address


def align_up(value: int, alignment: int) -> int:
    """The multiple of alignment at or above value."""
    return -(-value // alignment) * alignment


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    found = libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
