# SPDX-License-Identifier: Apache-2.0
"""PCI devices of this machine as sysfs shows them: which driver has one, and another one for it.

Plain sysfs, with none of hifc-admin's checks: tests that are about something else bind with this.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vm.drives import DriveSpec

DEVICES = Path("/sys/bus/pci/devices")
CLASS_NVME = "0x010802"
WAIT_TIMEOUT_S = 180.0  # bounds a hang
POLL_S = 0.02

COMMAND_OFFSET = 4
COMMAND_MEMORY = 0x2


class PciError(RuntimeError):
    """The kernel did not do it."""


class PciDevice:
    """One function, by its address ("0000:01:00.0"). It may come and go."""

    def __init__(self, bdf: str) -> None:
        self.bdf = bdf

    def __str__(self) -> str:
        return self.bdf

    @property
    def path(self) -> Path:
        return DEVICES / self.bdf

    @property
    def exists(self) -> bool:
        return self.path.exists()

    @property
    def driver(self) -> str | None:
        try:
            return (self.path / "driver").readlink().name
        except FileNotFoundError:
            return None

    @property
    def iommu_group(self) -> int:
        return int((self.path / "iommu_group").readlink().name)

    @property
    def group_members(self) -> list[str]:
        return sorted(p.name for p in (self.path / "iommu_group/devices").iterdir())

    @property
    def port(self) -> PciDevice:
        """The root port that it sits behind."""
        return PciDevice(self.path.resolve().parent.name)

    def read(self, attribute: str) -> str:
        return (self.path / attribute).read_text().strip()

    def bind(self, driver: str) -> None:
        """Gives it to the driver, whichever has it now. The driver must be loaded."""
        if self.driver == driver:
            return
        (self.path / "driver_override").write_text(f"{driver}\n")
        if self.driver is not None:
            (self.path / "driver/unbind").write_text(self.bdf)
        (DEVICES.parent / "drivers_probe").write_text(self.bdf)
        wait_until(lambda: self.driver == driver, f"{self} taken by {driver}")

    def unbind(self) -> None:
        """Gives it back to the kernel's own driver for it."""
        (self.path / "driver_override").write_text("\n")
        if self.driver is not None:
            (self.path / "driver/unbind").write_text(self.bdf)
        (DEVICES.parent / "drivers_probe").write_text(self.bdf)
        wait_until(lambda: self.driver is not None, f"{self} taken by its own driver")
        if self.driver == "nvme":
            # It is taken before it is brought up; to take it away meanwhile fails half of that.
            self.block_device()

    @contextlib.contextmanager
    def bound(self, driver: str) -> Iterator[PciDevice]:
        """With that driver for the length of a with statement, then with the kernel's own."""
        self.bind(driver)
        try:
            yield self
        finally:
            if self.exists:
                self.unbind()

    def block_device(self, nsid: int = 1) -> Path:
        """/dev node of a namespace of a drive that the kernel's driver has; waits for it."""

        def find() -> Path | None:
            for path in self.path.glob(f"nvme/nvme*/nvme*n{nsid}"):
                node = Path("/dev") / path.name
                if node.is_block_device() and int((path / "size").read_text()) > 0:
                    return node
            return None

        wait_until(lambda: find() is not None, f"a block device of {self}")
        node = find()
        assert node is not None
        return node

    def wait_until_there(self) -> None:
        """Until the kernel knows it."""
        wait_until(lambda: self.exists, f"{self} there")

    def enable(self, on: bool) -> None:
        """Lets it answer at its BARs. Only while no driver has it."""
        (self.path / "enable").write_text("1" if on else "0")

    def register(self, offset: int) -> int:
        """32 bits of BAR 0. Only while no driver has it."""
        self.enable(True)
        try:
            fd = os.open(self.path / "resource0", os.O_RDWR | os.O_SYNC | os.O_CLOEXEC)
            try:
                with mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as bar:
                    return int.from_bytes(bar[offset : offset + 4], "little")
            finally:
                os.close(fd)
        finally:
            self.enable(False)

    def release(self) -> None:
        """Takes it from its driver and leaves it without one."""
        if self.driver is not None:
            (self.path / "driver/unbind").write_text(self.bdf)

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """What a torn out or dead drive looks like: its port passes no access on, and its driver
        gets no message. Its registers read as zeroes, where hardware gives all ones: QEMU's answer
        for addresses at which nothing is. What it has in hand already it still finishes: QEMU 7.2
        was seen to crash where its DMA was cut off as well."""
        config = self.port.path / "config"
        fd = os.open(config, os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.pread(fd, 2, COMMAND_OFFSET)
            (command,) = struct.unpack("<H", before)
            os.pwrite(fd, struct.pack("<H", command & ~COMMAND_MEMORY), COMMAND_OFFSET)
            try:
                yield
            finally:
                os.pwrite(fd, before, COMMAND_OFFSET)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Drive:
    """One of the machine's drives: how it was made, and its PCI function."""

    spec: DriveSpec
    pci: PciDevice

    @property
    def uri(self) -> str:
        return f"spdk://{self.pci}?ns=1"


def nvme_drives() -> list[PciDevice]:
    found = [PciDevice(path.name) for path in sorted(DEVICES.iterdir())]
    return [device for device in found if device.read("class") == CLASS_NVME]


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Calls done() until it is true. PciError where it never was."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise PciError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)
