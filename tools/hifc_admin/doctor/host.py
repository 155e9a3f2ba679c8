# SPDX-License-Identifier: Apache-2.0
"""doctor's checks of the host: memory, the IOMMU, what killed processes left."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hifc_admin.doctor.checks import (
    Checks,
    Finding,
    Scene,
    Status,
    failed,
    of_problem,
    passed,
    warned,
)
from hifc_admin.host import accounts, iommu, leftovers, memory
from hifc_admin.host.drives import CLASS_NVME
from hifc_admin.host.services import services_of
from hifc_admin.text import size

IOMMU_GROUPS = "/sys/kernel/iommu_groups"
# Tables in which the firmware describes its IOMMU: Intel's and AMD's.
FIRMWARE_TABLES = ("/sys/firmware/acpi/tables/DMAR", "/sys/firmware/acpi/tables/IVRS")
DMA_LIMIT = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
DMA_ENTRIES_DEFAULT = 65535
PAGE_2M_BYTES = 2 << 20
CLEANUP = "hifc-admin cleanup"
NAMED_MAX = 4


def huge_pages(scene: Scene) -> Iterator[Finding]:
    if not scene.wants_spdk:
        return
    problems = memory.page_problems(scene.system, "")
    for problem in problems:
        yield of_problem(problem)
    if not problems:
        default = memory.default_size_bytes(scene.system)
        pools = memory.huge_pages(scene.system)
        free = sum(pool.free for pool in pools if pool.node is None and pool.size_bytes == default)
        yield passed(f"{free} pages of {size(default)} are free, and hugetlbfs is mounted")


def page_size(scene: Scene) -> Iterator[Finding]:
    default = memory.default_size_bytes(scene.system)
    pools = [pool for pool in memory.huge_pages(scene.system) if pool.node is None and pool.total]
    wrong = [pool for pool in pools if pool.size_bytes != default]
    if not scene.wants_spdk or not wrong:
        return
    listed = ", ".join(f"{pool.total} of {size(pool.size_bytes)}" for pool in wrong)
    yield warned(
        f"huge pages are reserved in a size that is not the default, {size(default)}",
        f"{listed}; HiFC takes pages of the default size",
        f"reserve the default size: hifc-admin hugepages --size {size(default).replace(' ', '')}; "
        "or boot with default_hugepagesz=",
    )


def mount_access(scene: Scene) -> Iterator[Finding]:
    """DPDK keeps HiFC's pages in memory, without files; other programs on SPDK make files."""
    if not scene.wants_spdk:
        return
    for mount in memory.huge_mounts(scene.system):
        if not os.access(scene.system.path(mount.folder), os.W_OK):
            yield warned(
                f"this user may not write to {mount.folder}; HiFC does not, other programs on SPDK "
                "do",
                f"mode {mount.mode:04o}, uid {mount.uid}, gid {mount.gid}",
                f"chgrp hifc {mount.folder}; chmod 1770 {mount.folder}",
                mount.folder,
            )


def left_behind(scene: Scene) -> Iterator[Finding]:
    if not scene.wants_spdk:
        return
    found, unclear = leftovers.find_leftovers(scene.system)
    halves, unread = leftovers.half_binds(scene.system)
    yield from (of_problem(problem, Status.WARN) for problem in (*unclear, *unread))
    pages = [item for item in found if item.kind == "huge pages"]
    if pages:
        amount = size(sum(item.size_bytes for item in pages))
        yield failed(f"dead processes hold {amount} of huge pages", _named(pages), CLEANUP)
    others = [item for item in found if item.kind != "huge pages"]
    if others:
        yield warned("dead processes left files and locks", _named(others), CLEANUP)
    if halves:
        drives = ", ".join(record.bdf for record in halves)
        yield failed("a bind was killed half-way", drives, CLEANUP)


def _named(items: list[leftovers.Leftover]) -> str:
    names = [f"{item.name} ({item.evidence})" for item in items[:NAMED_MAX]]
    return ", ".join(names) + (" ..." if len(items) > NAMED_MAX else "")


def iommu_on(scene: Scene) -> Iterator[Finding]:
    system = scene.system
    if not scene.wants_pcie:
        return
    groups = system.names(IOMMU_GROUPS)
    if groups:
        yield passed(f"the IOMMU is on: {len(groups)} groups")
        return
    arguments = [w for w in (system.attribute("/proc/cmdline") or "").split() if "iommu" in w]
    off = [word for word in arguments if word.endswith("=off") or word == "iommu=soft"]
    evidence = f"{IOMMU_GROUPS} is empty; kernel arguments: {' '.join(arguments) or 'none for it'}"
    if off:
        fix = f"take {' '.join(off)} off the kernel's command line and reboot"
    elif any(system.exists(name) for name in FIRMWARE_TABLES):
        fix = "boot with intel_iommu=on (Intel) or amd_iommu=on (AMD)"
    else:
        fix = "turn VT-d or AMD-Vi on in the firmware, and boot with intel_iommu=on on Intel"
        evidence += "; the firmware has no DMAR or IVRS table"
    yield failed("no IOMMU: vfio-pci cannot have a drive", evidence, fix)


def gds_conflict(scene: Scene) -> Iterator[Finding]:
    """Guides for GPUDirect Storage say to turn the IOMMU off, which takes HiFC its drive."""
    system = scene.system
    if not scene.wants_pcie or not system.exists("/sys/module/nvidia_fs"):
        return
    if system.names(IOMMU_GROUPS):
        yield warned(
            "GPUDirect Storage is loaded, whose guides turn the IOMMU off; HiFC needs it on",
            "/sys/module/nvidia_fs",
            "leave the IOMMU on; for GPUDirect Storage on the same machine boot with iommu=pt",
        )
    else:
        yield failed(
            "the IOMMU is off, as guides for GPUDirect Storage want it, and HiFC needs it on",
            "/sys/module/nvidia_fs is loaded",
            "boot with iommu=pt intel_iommu=on, which both can live with",
        )


def type1(scene: Scene) -> Iterator[Finding]:
    if not any(drive.driver == iommu.VFIO for drive in scene.bound):
        return
    if scene.system.exists("/sys/module/vfio_iommu_type1"):
        yield passed("vfio_iommu_type1 is loaded")
    else:
        yield failed(
            "vfio-pci has a drive, but no process can map memory for it",
            "/sys/module/vfio_iommu_type1 is missing",
            "modprobe vfio_iommu_type1; hifc-admin install loads it at boot",
        )


def locked_memory(scene: Scene) -> Iterator[Finding]:
    """Of the user or group that is to use drives, not of root who asks."""
    if not scene.wants_pcie:
        return
    system = scene.system
    if scene.user is not None:
        user = accounts.find_user(system, scene.user)
        group = None
    elif accounts.find_group(system, accounts.HIFC_GROUP) is not None:
        user, group = None, accounts.HIFC_GROUP
    else:
        return
    problems = memory.locked_problems(system, "", user, group)
    yield from map(of_problem, problems)
    services = services_of(system, user, group)
    if services and not problems:
        names = ", ".join(service.name for service in services)
        yield passed(f"{names} may lock enough memory", services[0].evidence)
    elif not problems:
        who = f"user {user.name}" if user else f"group {group}"
        limit, where = memory.locked_limit(system, user, group)
        amount = "any amount" if limit is None else size(limit)
        yield passed(f"{who} may lock {amount} of memory", where)


def mappings(scene: Scene) -> Iterator[Finding]:
    """One mapping a huge page: 65,535 of 2 MiB are 128 GiB."""
    limit = scene.system.number(DMA_LIMIT) or DMA_ENTRIES_DEFAULT
    most = limit * PAGE_2M_BYTES
    for engine in scene.engines:
        wanted = int(engine.stats.get("buffer_size_bytes", 0))
        if engine.uri.startswith("spdk://") and wanted > most:
            yield failed(
                f"its pool of {size(wanted)} takes more mappings than vfio allows",
                f"{DMA_LIMIT}: {limit} of 2 MiB are {size(most)}",
                "use huge pages of 1 GiB, a smaller pool, or raise dma_entry_limit",
                engine.uri,
            )
    for pool in memory.huge_pages(scene.system):
        if pool.node is None and pool.size_bytes == PAGE_2M_BYTES and pool.total > limit:
            yield warned(
                f"{pool.total} huge pages of 2 MiB cannot all be registered",
                f"{DMA_LIMIT}: {limit}",
                "reserve huge pages of 1 GiB for more",
            )


def any_drive(scene: Scene) -> Iterator[Finding]:
    if scene.uri is not None:
        return
    if scene.all_drives:
        yield passed(f"{len(scene.all_drives)} NVMe drives on PCIe")
        return
    yield warned(
        "there is no NVMe drive on PCIe",
        f"no device of class {CLASS_NVME} in /sys/bus/pci/devices",
        "check the slot and the firmware (VMD and RAID modes hide drives); a file or NVMe over TCP "
        "works without one",
    )


CHECKS: Checks = (
    ("drives", any_drive),
    ("huge pages", huge_pages),
    ("huge page size", page_size),
    ("hugetlbfs access", mount_access),
    ("leftovers", left_behind),
    ("iommu", iommu_on),
    ("gpudirect storage", gds_conflict),
    ("vfio_iommu_type1", type1),
    ("locked memory", locked_memory),
    ("dma mappings", mappings),
)
