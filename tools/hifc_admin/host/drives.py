# SPDX-License-Identifier: Apache-2.0
"""The NVMe drives and GPUs of a host as sysfs shows them. Only reads, and judges nothing.

A drive is a PCI function of the NVMe class, whichever driver has it. What only the kernel's driver
can tell (model, serial, namespaces) is empty while another driver has it; hifc_admin.records keeps
what it was when it was bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem

DEVICES = "/sys/bus/pci/devices"
BLOCK = "/sys/class/block"
CLASS_NVME = "0x0108"
CLASS_BRIDGE = "0x06"
SECTOR_BYTES = 512  # the unit of sysfs for sizes, whatever the logical blocks are
# Display and 3D controllers, and accelerators, of vendors whose memory could be a staging pool.
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}

_BDF = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
# nvme0n1, and the hidden nvme0c1n1 of a path of it.
_NAMESPACE = re.compile(r"nvme(\d+)(?:c\d+)?n(\d+)")
_GENERIC = re.compile(r"ng(\d+)(?:c\d+)?n(\d+)")


@dataclass(frozen=True)
class Namespace:
    """One namespace that the kernel's driver has."""

    node: str  # nvme0n1
    nsid: int | None
    size_bytes: int
    lba_bytes: int
    metadata_bytes: int
    partitions: tuple[str, ...]
    is_hidden: bool  # the kernel gives it no block device: nothing on it can be checked

    @property
    def nodes(self) -> tuple[str, ...]:
        """The block device and its partitions."""
        return (self.node, *self.partitions)


@dataclass(frozen=True)
class Link:
    """A PCIe link now and at the best the device can; None where sysfs does not say."""

    speed_gts: float | None
    speed_best_gts: float | None
    width: int | None
    width_best: int | None


@dataclass(frozen=True)
class Drive:
    """One NVMe controller on PCIe."""

    bdf: str
    driver: str | None
    model: str
    serial: str
    firmware: str
    numa_node: int | None
    iommu_group: str | None
    link: Link
    controller: str | None  # nvme0
    state: str  # what the kernel's driver says of it: "live"
    namespaces: tuple[Namespace, ...]
    generic_nodes: tuple[str, ...]  # ng0n1: the same namespaces as character devices

    @property
    def sysfs(self) -> str:
        return f"{DEVICES}/{self.bdf}"


@dataclass(frozen=True)
class Gpu:
    bdf: str
    vendor: str
    driver: str | None
    numa_node: int | None


def parse_bdf(written: str) -> str:
    """ "3B:00.0" -> "0000:3b:00.0". Raises Failure (usage)."""
    match = _BDF.fullmatch(written)
    if match is None:
        detail = f"{written!r} is no PCI address"
        problem = Problem(
            "usage", written, detail, fix="write it as 0000:3b:00.0; see hifc-admin list"
        )
        raise Failure(Exit.USAGE, problem)
    return f"{(match[1] or '0000').lower()}:{match[2].lower()}"


def all_drives(system: System) -> list[Drive]:
    return [read_drive(system, bdf) for bdf in _of_class(system, CLASS_NVME)]


def find_drive(system: System, bdf: str) -> Drive:
    """Raises Failure where there is no such device, or it is no NVMe drive."""
    kind = system.attribute(f"{DEVICES}/{bdf}/class")
    if kind is None or not kind.startswith(CLASS_NVME):
        known = _of_class(system, CLASS_NVME)
        detail = "there is no such PCI device" if kind is None else "this is no NVMe drive"
        problem = Problem(
            "no-such-drive",
            bdf,
            detail,
            evidence=f"class {kind}" if kind else f"{DEVICES}/{bdf} is missing",
            fix=f"NVMe drives here: {', '.join(known) or 'none'}",
        )
        raise Failure(Exit.FAILED, problem)
    return read_drive(system, bdf)


def all_gpus(system: System) -> list[Gpu]:
    found = []
    for bdf in (bdf for kind in _GPU_CLASSES for bdf in _of_class(system, kind)):
        vendor = _GPU_VENDORS.get(system.attribute(f"{DEVICES}/{bdf}/vendor") or "")
        if vendor is not None:
            driver = system.target(f"{DEVICES}/{bdf}/driver")
            found.append(Gpu(bdf, vendor, driver, _node(system, bdf)))
    return found


def driver_of(system: System, bdf: str) -> str | None:
    return system.target(f"{DEVICES}/{bdf}/driver")


def group_of(system: System, bdf: str) -> str | None:
    """The number of its IOMMU group."""
    return system.target(f"{DEVICES}/{bdf}/iommu_group")


def read_drive(system: System, bdf: str) -> Drive:
    folder = f"{DEVICES}/{bdf}"
    names = system.names(f"{folder}/nvme")
    controller = names[0] if names else None
    inside = f"{folder}/nvme/{controller}" if controller else f"{folder}/nvme"
    children = system.names(inside)
    nodes = sorted({f"nvme{m[1]}n{m[2]}" for m in map(_NAMESPACE.fullmatch, children) if m})
    generic = {f"ng{m[1]}n{m[2]}" for m in map(_GENERIC.fullmatch, children) if m}
    # A shared namespace has one node for all its paths; its character device hangs elsewhere.
    generic |= {node.replace("nvme", "ng", 1) for node in nodes}
    hidden = [name for name in sorted(generic) if name.replace("ng", "nvme", 1) not in nodes]
    namespaces = [read_namespace(system, node) for node in nodes]
    namespaces += [read_namespace(system, name.replace("ng", "nvme", 1)) for name in hidden]
    return Drive(
        bdf=bdf,
        driver=driver_of(system, bdf),
        model=system.attribute(f"{inside}/model") or "",
        serial=system.attribute(f"{inside}/serial") or "",
        firmware=system.attribute(f"{inside}/firmware_rev") or "",
        numa_node=_node(system, bdf),
        iommu_group=group_of(system, bdf),
        link=_link(system, folder),
        controller=controller,
        state=system.attribute(f"{inside}/state") or "",
        namespaces=tuple(namespaces),
        generic_nodes=tuple(sorted(generic)),
    )


def read_namespace(system: System, node: str) -> Namespace:
    folder = f"{BLOCK}/{node}"
    return Namespace(
        node=node,
        nsid=system.number(f"{folder}/nsid"),
        size_bytes=(system.number(f"{folder}/size") or 0) * SECTOR_BYTES,
        lba_bytes=system.number(f"{folder}/queue/logical_block_size") or SECTOR_BYTES,
        metadata_bytes=system.number(f"{folder}/metadata_bytes") or 0,
        partitions=tuple(partitions_of(system, node)),
        is_hidden=not system.exists(folder) or system.attribute(f"{folder}/hidden") == "1",
    )


def of_block_device(system: System, node: str) -> Drive:
    """A block device of any kind as a drive with that one namespace: for checking its use alone."""
    generic = node.replace("nvme", "ng", 1)
    return Drive(
        bdf=f"/dev/{node}",
        driver=None,
        model="",
        serial="",
        firmware="",
        numa_node=None,
        iommu_group=None,
        link=Link(None, None, None, None),
        controller=None,
        state="",
        namespaces=(read_namespace(system, node),),
        generic_nodes=(generic,) if _GENERIC.fullmatch(generic) else (),
    )


def partitions_of(system: System, node: str) -> list[str]:
    folder = f"{BLOCK}/{node}"
    return [name for name in system.names(folder) if system.exists(f"{folder}/{name}/partition")]


def size_of(system: System, node: str) -> int:
    """Bytes of a block device or partition. Raises OSError."""
    return int(system.read(f"{BLOCK}/{node}/size")) * SECTOR_BYTES


def _of_class(system: System, kind: str) -> list[str]:
    found = []
    for bdf in system.names(DEVICES):
        if (system.attribute(f"{DEVICES}/{bdf}/class") or "").startswith(kind):
            found.append(bdf)
    return found


def _node(system: System, bdf: str) -> int | None:
    node = system.number(f"{DEVICES}/{bdf}/numa_node")
    return None if node is None or node < 0 else node


def _link(system: System, folder: str) -> Link:
    return Link(
        speed_gts=_speed(system.attribute(f"{folder}/current_link_speed")),
        speed_best_gts=_speed(system.attribute(f"{folder}/max_link_speed")),
        width=_width(system.number(f"{folder}/current_link_width")),
        width_best=_width(system.number(f"{folder}/max_link_width")),
    )


def _speed(text: str | None) -> float | None:
    """ "8.0 GT/s PCIe" -> 8.0"""
    match = re.match(r"([0-9.]+) GT/s", text or "")
    return float(match[1]) if match else None


def _width(lanes: int | None) -> int | None:
    return lanes if lanes else None  # 0: a device that has no link
