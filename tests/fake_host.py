# SPDX-License-Identifier: Apache-2.0
"""A host for hifc-admin that is a tree of files, with the part of a kernel that its verbs meet.

`Host` builds the tree; `FakeSystem` is hifc_admin's seam to it, where writing to sysfs moves a
device between drivers. Any change may be made to fail, or to be the moment of a kill: from then on
nothing changes any more. Time passes only when somebody waits.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hifc_admin.host.processes import FIRST_PID_NAMESPACE
from hifc_admin.host.system import System

SIZE_BYTES = 4 << 20
PARTITION_BYTES = 2 << 20
PCI = "/sys/bus/pci"
GROUPS = "/sys/kernel/iommu_groups"
MEMINFO = """HugePages_Total:      64
HugePages_Free:       64
Hugepagesize:       2048 kB
"""


class Killed(BaseException):
    """The process ends here, as by SIGKILL."""


class Host:
    """The tree, and what its kernel does. Starts with a root disk on virtio and huge pages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.system = FakeSystem(self)
        self.claimed: set[str] = set()  # nodes that something claimed: "nvme0n1p1"
        self.ran: list[tuple[str, ...]] = []
        self.owners: dict[str, tuple[int, int, int]] = {}
        self.broken_drivers: set[str] = set()  # do not take any device
        self.broken_programs: set[str] = set()
        self.clock_s = 0.0
        self.on_wait: Callable[[], None] = lambda: None
        self.changes = 0
        self.fail_at: int | None = None  # the number of the change that fails
        self.failure: Callable[[], BaseException] = lambda: OSError(errno.EIO, "made to fail")
        self.is_dead = False
        self._mounts: list[str] = []
        self._numbers = iter(range(1, 1000))
        self._stash: dict[str, Path] = {}
        self._base()

    def _base(self) -> None:
        for driver in ("nvme", "vfio-pci"):
            self.add_driver(driver)
        for name in ("devices", "drivers_probe"):
            self.put(f"{PCI}/{name}", "") if name == "drivers_probe" else self.folder(
                f"{PCI}/{name}"
            )
        self.folder("/sys/module/vfio_iommu_type1")
        self.put("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "N\n")
        self.folder("/dev/vfio")
        self.folder("/run")
        self.put("/proc/cmdline", "root=/dev/vda1 intel_iommu=on quiet\n")
        self.put("/proc/swaps", "Filename\t\t\t\tType\t\tSize\tUsed\tPriority\n")
        self.put("/proc/meminfo", MEMINFO)
        self.put("/proc/locks", "")
        users = ("root:x:0:0::/root:", "kv:x:1000:1000::/:", "ann:x:1001:1001::/:")
        self.put("/etc/passwd", "".join(f"{user}/bin/sh\n" for user in users))
        self.put("/etc/group", "root:x:0:\nkv:x:1000:\nhifc:x:990:kv\n")
        self.put("/etc/security/limits.d/hifc.conf", "@hifc - memlock unlimited\n")
        self.put("/etc/systemd/system/hifc-bind@.service", "")
        self.folder("/run/systemd/system")
        self.put("/run/udev/control", "")
        self.add_process(1, "systemd")
        self.link("/proc/self/ns/mnt", "mnt:[1]")
        self.link("/proc/self/ns/pid", FIRST_PID_NAMESPACE)
        self.mount("/", "/dev/vda1", "254:1", "ext4")
        self.mount("/dev/hugepages", "hugetlbfs", "0:30", "hugetlbfs", "rw,pagesize=2M")
        self.folder("/dev/hugepages")
        for node in ("", "0", "1"):
            where = (
                f"/sys/devices/system/node/node{node}/hugepages"
                if node
                else "/sys/kernel/mm/hugepages"
            )
            for name, count in (("nr", 64), ("free", 64), ("surplus", 0)):
                self.put(f"{where}/hugepages-2048kB/{name}_hugepages", f"{count}\n")

    # ---- building

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def put(self, name: str, text: str) -> None:
        self.folder(name.rpartition("/")[0])
        self.path(name).write_text(text)

    def folder(self, name: str) -> None:
        self.path(name).mkdir(parents=True, exist_ok=True)

    def link(self, name: str, target: str) -> None:
        self.folder(name.rpartition("/")[0])
        self.path(name).unlink(missing_ok=True)
        self.path(name).symlink_to(target)

    def add_driver(self, name: str) -> None:
        for attribute in ("bind", "unbind"):
            self.put(f"{PCI}/drivers/{name}/{attribute}", "")

    def add_device(
        self, bdf: str, kind: str, driver: str | None, group: str | None, vendor: str = "0x1234"
    ) -> None:
        """A PCI function that is no drive."""
        folder = f"/sys/devices/pci0000:00/{bdf}"
        attributes = {
            "class": kind,
            "vendor": vendor,
            "numa_node": "1",
            "driver_override": "(null)",
            "current_link_speed": "8.0 GT/s PCIe",
            "max_link_speed": "16.0 GT/s PCIe",
            "current_link_width": "2",
            "max_link_width": "4",
        }
        for name, text in attributes.items():
            self.put(f"{folder}/{name}", f"{text}\n")
        self.link(f"{PCI}/devices/{bdf}", f"../../../devices/pci0000:00/{bdf}")
        if group is not None:
            self.link(f"{folder}/iommu_group", f"../../../kernel/iommu_groups/{group}")
            self.link(f"{GROUPS}/{group}/devices/{bdf}", f"../../../../devices/pci0000:00/{bdf}")
            self.put(f"{GROUPS}/{group}/type", "DMA\n")
        if driver is not None:
            self.add_driver(driver)
            self._attach(bdf, driver)

    def add_drive(
        self, bdf: str = "0000:3b:00.0", *, partitions: int = 0, group: str | None = "12"
    ) -> str:
        """A drive that the kernel has, with one namespace; the name of its block device."""
        number = len(self._stash)
        folder = f"/sys/devices/pci0000:00/{bdf}/nvme/nvme{number}"
        texts = {"model": "QEMU NVMe Ctrl", "serial": f"S{number}", "firmware_rev": "1.0"}
        for name, text in {**texts, "state": "live"}.items():
            self.put(f"{folder}/{name}", f"{text}  \n")
        node = f"nvme{number}n1"
        self._add_block(f"{folder}/{node}", SIZE_BYTES)
        self.put(f"{folder}/{node}/nsid", "1\n")
        for part in range(1, partitions + 1):
            self._add_block(f"{folder}/{node}/{node}p{part}", PARTITION_BYTES)
            self.put(f"{folder}/{node}/{node}p{part}/partition", f"{part}\n")
        # While another driver has the drive, all of this is put aside.
        stash = self.root.parent / f"{self.root.name}-stash-{number}"
        stash.mkdir()
        self._stash[bdf] = stash
        self.path(f"/sys/devices/pci0000:00/{bdf}/nvme").rename(stash / "nvme")
        for path in self.path("/dev").glob(f"{node}*"):
            path.rename(stash / path.name)
        self.add_device(bdf, "0x010802", "nvme", group)
        return node

    def _add_block(self, folder: str, size_bytes: int) -> None:
        name = folder.rpartition("/")[2]
        self.put(f"{folder}/size", f"{size_bytes // 512}\n")
        self.put(f"{folder}/dev", f"259:{next(self._numbers)}\n")
        self.put(f"{folder}/queue/logical_block_size", "512\n")
        self.folder(f"{folder}/holders")
        self.folder("/dev")
        with self.path(f"/dev/{name}").open("wb") as file:
            file.truncate(size_bytes)

    def add_mapper(self, name: str, mapped: str, below: str) -> None:
        """A device of the device mapper on top of one or of another."""
        folder = f"/sys/devices/virtual/block/{name}"
        self._add_block(folder, PARTITION_BYTES)
        self.put(f"{folder}/dm/name", f"{mapped}\n")
        self.link(f"/sys/class/block/{name}", f"../../devices/virtual/block/{name}")
        self.link(f"/dev/mapper/{mapped}", f"../{name}")
        self.link(f"/sys/class/block/{below}/holders/{name}", f"../../{name}")

    def add_process(self, pid: int, command: str, namespace: str = "mnt:[1]") -> None:
        self.put(f"/proc/{pid}/comm", f"{command}\n")
        self.put(f"/proc/{pid}/stat", f"{pid} ({command}) S 1\n")
        self.put(f"/proc/{pid}/mountinfo", "")
        self.link(f"/proc/{pid}/ns/mnt", namespace)
        self.folder(f"/proc/{pid}/fd")

    def add_holder(self, pid: int, command: str, node: str) -> None:
        self.add_process(pid, command)
        self.link(f"/proc/{pid}/fd/7", f"/dev/{node}")

    def mount(
        self, folder: str, source: str, device: str, kind: str, options: str = "rw", pid: int = 0
    ) -> None:
        """pid: in whose mount namespace; 0 is ours and that of process 1."""
        line = f"30 1 {device} / {folder} rw,relatime shared:1 - {kind} {source} {options}\n"
        for name in (str(pid),) if pid else ("self", "1"):
            file = f"/proc/{name}/mountinfo"
            before = self.path(file).read_text() if self.path(file).exists() else ""
            self.put(file, before + line)

    def number(self, node: str) -> str:
        return self.path(f"/sys/class/block/{node}/dev").read_text().strip()

    def write_at(self, node: str, offset: int, data: bytes) -> None:
        with self.path(f"/dev/{node}").open("r+b") as file:
            file.seek(offset)
            file.write(data)

    # ---- looking

    def driver(self, bdf: str) -> str | None:
        return self.system.target(f"{PCI}/devices/{bdf}/driver")

    def snapshot(self) -> dict[str, Any]:
        """All files by name, to see that nothing changed."""
        found: dict[str, Any] = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_symlink():
                found[name] = str(path.readlink())
            elif path.is_file():
                found[name] = path.read_bytes().rstrip(b"\0"), path.stat().st_mode
            else:
                found[name] = path.stat().st_mode
        return found

    # ---- the kernel

    def change(self) -> None:
        """Called before each change."""
        if self.is_dead:
            raise Killed
        number, self.changes = self.changes, self.changes + 1
        if number == self.fail_at:
            error = self.failure()
            self.is_dead = isinstance(error, Killed)
            raise error

    def revive(self) -> None:
        """Another process, after a kill."""
        self.is_dead = False
        self.fail_at = None

    def written(self, name: str, text: str) -> None:
        parts = name.split("/")
        if name == f"{PCI}/drivers_probe":
            self._probe(text)
        elif parts[-1] == "unbind" and parts[-2] == "driver":
            self._detach(text)
        elif parts[-1] == "bind":
            self._attach(text, parts[-2], by_name=True)
        elif parts[-1] == "driver_override" and text == "\n":
            self.put(name, "(null)\n")

    def _probe(self, bdf: str) -> None:
        override = self.path(f"{PCI}/devices/{bdf}/driver_override").read_text().strip()
        if self.driver(bdf) is None:
            self._attach(bdf, "nvme" if override == "(null)" else override)

    def _attach(self, bdf: str, driver: str, by_name: bool = False) -> None:
        override = self.path(f"{PCI}/devices/{bdf}/driver_override").read_text().strip()
        fits = override in ("(null)", driver) and driver not in self.broken_drivers
        if not fits or not self.path(f"{PCI}/drivers/{driver}").exists():
            if by_name:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            return
        self.link(f"{PCI}/devices/{bdf}/driver", f"../../../bus/pci/drivers/{driver}")
        self.link(f"{PCI}/drivers/{driver}/{bdf}", f"../../devices/{bdf}")
        group = self.system.target(f"{PCI}/devices/{bdf}/iommu_group")
        if driver == "vfio-pci" and group is not None:
            self.put(f"/dev/vfio/{group}", "")
        if driver == "nvme" and bdf in self._stash:
            self._appear(bdf)

    def _detach(self, bdf: str) -> None:
        driver = self.driver(bdf)
        if driver is None:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        self.path(f"{PCI}/devices/{bdf}/driver").unlink()
        self.path(f"{PCI}/drivers/{driver}/{bdf}").unlink()
        group = self.system.target(f"{PCI}/devices/{bdf}/iommu_group")
        if driver == "vfio-pci":
            self.path(f"/dev/vfio/{group}").unlink(missing_ok=True)
        if driver == "nvme" and bdf in self._stash:
            self._disappear(bdf)

    def _appear(self, bdf: str) -> None:
        stash = self._stash[bdf]
        folder = self.path(f"/sys/devices/pci0000:00/{bdf}/nvme")
        (stash / "nvme").rename(folder)
        for path in stash.iterdir():
            path.rename(self.path("/dev") / path.name)
        for path in folder.glob("nvme*/nvme*n*"):
            for block in [path, *path.glob(f"{path.name}p*")]:
                where = block.relative_to(self.root / "sys")
                self.link(f"/sys/class/block/{block.name}", f"../../{where}")

    def _disappear(self, bdf: str) -> None:
        stash = self._stash[bdf]
        folder = self.path(f"/sys/devices/pci0000:00/{bdf}/nvme")
        for path in folder.glob("nvme*/nvme*n*"):
            for name in [path.name, *(p.name for p in path.glob(f"{path.name}p*"))]:
                self.path(f"/sys/class/block/{name}").unlink()
                self.path(f"/dev/{name}").rename(stash / name)
        folder.rename(stash / "nvme")

    def remove(self) -> None:
        for stash in self._stash.values():
            shutil.rmtree(stash)


class FakeSystem(System):
    """hifc-admin's seam, to a Host."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.root)
        self.host = host

    def claim(self, name: str) -> int:
        node = name.rpartition("/")[2]
        # A claim of the whole meets those of its partitions.
        if any(other == node or other.startswith(f"{node}p") for other in self.host.claimed):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
        return super().claim(name)

    def write(self, name: str, text: str) -> None:
        self.host.change()
        super().write(name, text)
        self.host.written(name, text)

    def put(self, name: str, text: str, mode: int = 0o644) -> None:
        self.host.change()
        super().put(name, text, mode)

    def symlink(self, name: str, target: str) -> None:
        self.host.change()
        super().symlink(name, target)

    def remove(self, name: str) -> None:
        self.host.change()
        super().remove(name)

    def remove_tree(self, name: str) -> None:
        self.host.change()
        super().remove_tree(name)

    def set_owner(self, name: str, uid: int, gid: int, mode: int) -> None:
        self.host.change()
        self.stat(name)
        self.host.owners[name] = (uid, gid, mode)

    def mount(self, kind: str, where: str, options: str) -> None:
        self.host.change()
        self.host.folder(where)
        self.host.mount(where, kind, "0:77", kind, options)

    def unmount(self, where: str) -> None:
        self.host.change()
        name = "/proc/self/mountinfo"
        lines = self.read(name).splitlines()
        self.host.put(name, "".join(f"{line}\n" for line in lines if f" {where} " not in line))

    def has_program(self, name: str) -> bool:
        return name not in self.host.broken_programs

    def run(self, *words: str) -> None:
        self.host.change()
        if words[0] in self.host.broken_programs or words[-1] in self.host.broken_programs:
            raise OSError(errno.EIO, "made to fail", " ".join(words))
        self.host.ran.append(words)
        if words[0] == "modprobe":
            self.host.add_driver(words[1])
            self.host.folder(f"/sys/module/{words[1]}")

    def now_s(self) -> float:
        return self.host.clock_s

    def wait_s(self, seconds: float) -> None:
        self.host.clock_s += seconds
        self.host.on_wait()
