# SPDX-License-Identifier: Apache-2.0
"""The machine itself: what the other tests rely on, without HiFC."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from vm.pci import Drive, PciDevice
from vm.qmp import Qmp

PAGE_BYTES = 4096
VERSION_OFFSET = 8  # of the controller's registers


def page_of(fill: bytes) -> mmap.mmap:
    """An aligned page, as O_DIRECT wants it."""
    page = mmap.mmap(-1, PAGE_BYTES)
    page.write(fill * PAGE_BYTES)
    return page


def write_page(node: Path, fill: bytes) -> None:
    fd = os.open(node, os.O_WRONLY | os.O_DIRECT)
    try:
        assert os.pwrite(fd, page_of(fill), 0) == PAGE_BYTES
    finally:
        os.close(fd)


def read_page(node: Path) -> bytes:
    fd = os.open(node, os.O_RDONLY | os.O_DIRECT)
    try:
        page = page_of(b"\0")
        assert os.preadv(fd, [page], 0) == PAGE_BYTES
        return page[:]
    finally:
        os.close(fd)


def test_each_drive_is_alone_in_its_iommu_group(used: Drive, free: Drive, small: Drive) -> None:
    for drive in (used, free, small):
        assert drive.pci.driver == "nvme"
        assert drive.pci.group_members == [str(drive.pci)]
    assert len({drive.pci.iommu_group for drive in (used, free, small)}) == 3


def test_drives_are_what_they_say(used: Drive, free: Drive, small: Drive) -> None:
    for drive in (used, free, small):
        block = Path("/sys/class/block") / drive.pci.block_device().name
        assert int((block / "size").read_text()) * 512 == drive.spec.size_bytes
        assert int((block / "queue/logical_block_size").read_text()) == drive.spec.lba_bytes
        assert (block / "device/serial").read_text().strip() == drive.spec.serial


def test_the_used_drive_carries_a_file_system(used: Drive, tmp_path: Path) -> None:
    partition = f"{used.pci.block_device()}p1"
    subprocess.run(["mount", "-t", "ext4", partition, tmp_path], check=True)
    try:
        (tmp_path / "file").write_bytes(b"x" * 10000)
        assert (tmp_path / "lost+found").is_dir()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_drive_goes_to_vfio_and_back_intact(free: Drive) -> None:
    node = free.pci.block_device()
    write_page(node, b"\xa5")
    with free.pci.bound("vfio-pci"):
        assert not node.exists()
        assert Path(f"/dev/vfio/{free.pci.iommu_group}").exists()
    assert read_page(free.pci.block_device()) == b"\xa5" * PAGE_BYTES


def test_a_drive_can_be_unplugged_and_plugged_in_again(free: Drive, qmp: Qmp) -> None:
    write_page(free.pci.block_device(), b"\x5a")
    qmp.unplug(free.spec)
    qmp.wait_unplugged(free.spec)
    assert not free.pci.exists
    qmp.plug(free.spec)
    assert read_page(free.pci.block_device()) == b"\x5a" * PAGE_BYTES


def test_a_drive_can_be_cut_off(free: Drive) -> None:
    free.pci.release()
    assert free.pci.register(VERSION_OFFSET) != 0
    with free.pci.cut_off():
        assert free.pci.register(VERSION_OFFSET) == 0
    assert free.pci.register(VERSION_OFFSET) != 0


def test_a_drive_can_be_made_to_fail(small: Drive, qmp: Qmp) -> None:
    node = small.pci.block_device()
    write_page(node, b"\x33")
    qmp.fail_drive(small.spec, True)
    with pytest.raises(OSError) as caught:
        read_page(node)
    assert caught.value.errno in (errno.EIO, errno.ENODATA)
    qmp.fail_drive(small.spec, False)
    assert read_page(node) == b"\x33" * PAGE_BYTES


def test_a_second_device_has_a_bar_of_memory(addresses: dict[str, str]) -> None:
    device = PciDevice(addresses["bar-device"])
    assert (device.path / "resource2").stat().st_size == 16 << 20
