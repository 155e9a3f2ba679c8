# SPDX-License-Identifier: Apache-2.0
"""The machine's emulated drives, and what is on them when it boots. Shared by host and guest.

Each sits behind a root port of its own, so that it can be unplugged and has an IOMMU group of its
own.
"""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
SECTOR_BYTES = 512
PARTITION_START_BYTES = MIB
PARTITION_TYPE_LINUX = 0x83


@dataclass(frozen=True)
class DriveSpec:
    """One drive with one namespace. `name` is its id in QEMU."""

    name: str
    serial: str
    size_bytes: int
    lba_bytes: int = 512
    is_used: bool = False  # carries a partition with a file system
    can_fail: bool = False  # its blocks can be made to fail: see Qmp.fail_drive


USED = DriveSpec("used", "HIFCVM-USED", 64 * MIB, is_used=True)
FREE = DriveSpec("free", "HIFCVM-FREE", 1024 * MIB, lba_bytes=4096)
SMALL = DriveSpec("small", "HIFCVM-SMALL", 128 * MIB, can_fail=True)
DRIVES = (USED, FREE, SMALL)


def create(spec: DriveSpec, path: Path) -> None:
    """Makes the drive's backing file, sparse."""
    with path.open("wb") as file:
        file.truncate(spec.size_bytes)
        if spec.is_used:
            file.write(partition_table(spec))
    if spec.is_used:
        size_kib = (spec.size_bytes - PARTITION_START_BYTES) >> 10
        subprocess.run(
            ["/sbin/mkfs.ext4", "-q", "-F", "-L", "hifc-used",
             "-E", f"offset={PARTITION_START_BYTES}", path, f"{size_kib}k"],
            check=True,
        )  # fmt: skip


def partition_table(spec: DriveSpec) -> bytes:
    """A master boot record with one primary partition, over all but the first MiB."""
    start = PARTITION_START_BYTES // SECTOR_BYTES
    count = spec.size_bytes // SECTOR_BYTES - start
    # Status, CHS of the first sector, type, CHS of the last, LBA, count: CHS says "use the LBA".
    chs = b"\xfe\xff\xff"
    partition = struct.pack("<B3sB3sII", 0, chs, PARTITION_TYPE_LINUX, chs, start, count)
    return bytes(446) + partition + bytes(48) + b"\x55\xaa"
