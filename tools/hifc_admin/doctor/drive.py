# SPDX-License-Identifier: Apache-2.0
"""doctor's checks of drives: who has them, their link, their place, their health."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hifc.errors import HiFCError
from hifc_admin import smart_log
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
from hifc_admin.engine.owner import FOLDERS
from hifc_admin.host import iommu, memory, records
from hifc_admin.host.drives import DEVICES, Drive
from hifc_admin.host.processes import lock_holders
from hifc_admin.host.usage import find_usage
from hifc_admin.result import Failure, Severity
from hifc_admin.verbs import device as device_verbs

KERNEL_DRIVER = "nvme"
# Where SPDK's own programs lock a drive; HiFC locks its namespaces as in FOLDERS.
SPDK_LOCKS = ("/var/tmp/spdk_pci_lock_{}", "/tmp/spdk_pci_lock_{}")
HOT_CELSIUS = 70


def present(scene: Scene) -> Iterator[Finding]:
    if scene.wanted_bdf is not None and not scene.drives:
        known = ", ".join(drive.bdf for drive in scene.all_drives)
        yield failed(
            "there is no such NVMe drive",
            f"{DEVICES}/{scene.wanted_bdf}",
            f"NVMe drives here: {known or 'none'}; a drive that was unplugged shows again after: "
            "echo 1 > /sys/bus/pci/rescan",
            scene.wanted_bdf,
        )


def driver(scene: Scene) -> Iterator[Finding]:
    """Where the user thinks that HiFC has it: by the URI, or by what bind wrote down."""
    for drive in scene.drives:
        record = records.read_record(scene.system, drive.bdf)
        kept = records.read_persisted(scene.system, drive.bdf)
        if drive.driver in iommu.USERSPACE_DRIVERS:
            yield passed(f"{drive.driver} has it", subject=drive.bdf)
        elif scene.wanted_bdf == drive.bdf or record is not None or kept is not None:
            why = "it was bound before" if record or kept else "the URI asks for it"
            yield failed(
                f"{drive.driver or 'no driver'} has it, not vfio-pci, although {why}",
                f"{drive.sysfs}/driver",
                f"hifc-admin bind {drive.bdf}",
                drive.bdf,
            )


def only_system_disks(scene: Scene) -> Iterator[Finding]:
    """Nothing for HiFC where every drive is in use by the system."""
    if scene.uri is not None or scene.bound or not scene.drives:
        return
    boot = []
    for drive in scene.drives:
        uses = find_usage(scene.system, drive).uses
        boot += [use for use in uses if use.kind == "boot-disk"][:1]
    if len(boot) == len(scene.drives):
        yield warned(
            "every NVMe drive is a disk of the system itself: none is left for HiFC",
            boot[0].evidence,
            "add a drive; or use a file on this one: file:///PATH?size=SIZE",
        )


def group_viable(scene: Scene) -> Iterator[Finding]:
    for drive in scene.bound:
        found = iommu.refusals(scene.system, drive, iommu.VFIO, consent=False)
        yield from map(of_problem, found)
        if not found:
            yield passed(f"IOMMU group {drive.iommu_group} is its own", subject=drive.bdf)


def drivers_mixed(scene: Scene) -> Iterator[Finding]:
    for drive in scene.bound:
        others = iommu.bound_otherwise(scene.system, drive, drive.driver or "")
        if others:
            yield failed(
                f"{drive.driver} has this drive and the other kind has {', '.join(others)}: one "
                "process cannot use both",
                "/sys/bus/pci/drivers",
                f"hifc-admin unbind {others[0]}; hifc-admin bind {others[0]}",
                drive.bdf,
            )


def group_node(scene: Scene) -> Iterator[Finding]:
    for drive in scene.bound:
        node = f"/dev/vfio/{drive.iommu_group}"
        if drive.driver != iommu.VFIO or drive.iommu_group is None:
            continue
        if not scene.system.exists(node):
            yield failed(
                f"{node} is missing: this looks like a container that was not given it",
                f"{drive.bdf} is in IOMMU group {drive.iommu_group}",
                f"start the container with --device /dev/vfio/vfio --device {node}",
                drive.bdf,
            )
        elif not os.access(scene.system.path(node), os.R_OK | os.W_OK):
            status = scene.system.stat(node)
            yield failed(
                f"this user may not open {node}",
                f"mode {status.st_mode & 0o777:04o}, uid {status.st_uid}, gid {status.st_gid}",
                f"join its group and log in anew, or: hifc-admin bind {drive.bdf} --user NAME",
                drive.bdf,
            )
        else:
            yield passed(f"{node} can be opened", subject=drive.bdf)


def locks(scene: Scene) -> Iterator[Finding]:
    """Held by a living process that is none of the engines: what a dead one left is a leftover."""
    for drive in scene.drives:
        yield from _spdk_lock(scene, drive)
        for folder in FOLDERS:
            for name in scene.system.glob(f"/{folder}/{drive.bdf.replace(':', '_')}-ns*.lock"):
                pids = lock_holders(scene.system, name)
                owned = {engine.pid for engine in scene.engines}
                if pids and not owned.issuperset(pids):
                    who = ", ".join(map(str, pids))
                    yield warned(
                        f"process {who} has it and does not answer on an owner's socket",
                        f"{name} is locked",
                        f"stop it, or run doctor as its user: kill {pids[0]}",
                        drive.bdf,
                    )


def _spdk_lock(scene: Scene, drive: Drive) -> Iterator[Finding]:
    for name in (pattern.format(drive.bdf) for pattern in SPDK_LOCKS):
        if not scene.system.exists(name):
            continue
        ours = any(engine.uri.startswith(f"spdk://{drive.bdf}") for engine in scene.engines)
        if scene.system.is_record_locked(name) and not ours:
            yield warned(
                "another program on SPDK has it",
                f"{name} is locked",
                f"stop it: fuser {name} names it",
                drive.bdf,
            )


def link(scene: Scene) -> Iterator[Finding]:
    for drive in scene.drives:
        found = drive.link
        if None in (found.width, found.width_best, found.speed_gts, found.speed_best_gts):
            continue
        now = f"{found.speed_gts:g} GT/s x{found.width}"
        best = f"{found.speed_best_gts:g} GT/s x{found.width_best}"
        if (found.width, found.speed_gts) == (found.width_best, found.speed_best_gts):
            yield passed(now, subject=drive.bdf)
            continue
        share = _lanes(found.width, found.speed_gts) / _lanes(
            found.width_best, found.speed_best_gts
        )
        yield warned(
            f"the link runs at {now} where {best} fits: {share:.0%} of the bandwidth",
            f"{drive.sysfs}/current_link_width and current_link_speed",
            "seat the drive anew, or use a slot with more lanes; a slower link at rest may be "
            "power saving: look again under load",
            drive.bdf,
        )


def _lanes(width: int | None, speed_gts: float | None) -> float:
    return float(width or 0) * float(speed_gts or 0)


def numa(scene: Scene) -> Iterator[Finding]:
    placed = [gpu for gpu in scene.gpus if gpu.numa_node is not None]
    for drive in scene.drives:
        if drive.numa_node is None:
            continue
        far = [gpu for gpu in placed if gpu.numa_node != drive.numa_node]
        if placed and len(far) == len(placed):
            yield warned(
                f"it is on NUMA node {drive.numa_node}, every GPU on another: data crosses the "
                "sockets",
                ", ".join(f"GPU {gpu.bdf} on node {gpu.numa_node}" for gpu in far),
                "put drive and GPU into slots of one socket",
                drive.bdf,
            )
        yield from _pages_near(scene, drive)


def _pages_near(scene: Scene, drive: Drive) -> Iterator[Finding]:
    default = memory.default_size_bytes(scene.system)
    pools = [pool for pool in memory.huge_pages(scene.system) if pool.size_bytes == default]
    by_node = {pool.node: pool for pool in pools if pool.node is not None}
    near = by_node.get(-1 if drive.numa_node is None else drive.numa_node)
    if len(by_node) < 2 or near is None or drive.driver == KERNEL_DRIVER:
        return
    if near.free * default < memory.NEEDED_BYTES:
        others = ", ".join(f"{p.free} on node {n}" for n, p in by_node.items() if p is not near)
        yield warned(
            f"node {drive.numa_node}, where the drive is, has {near.free} free huge pages",
            others,
            f"hifc-admin hugepages --node {drive.numa_node} --count {near.total + 64}",
            drive.bdf,
        )


def health(scene: Scene) -> Iterator[Finding]:
    """Of the device that is asked about, and of those that engines own."""
    uris = {engine.uri for engine in scene.engines if engine.uri.startswith("spdk")}
    if scene.uri is not None and scene.system.is_real:
        uris |= {scene.uri} if scene.uri.startswith(("spdk", "file:///dev/")) else set()
    for uri in sorted(uris):
        try:
            log = smart_log.decode(device_verbs.health_log(uri))
        except (OSError, HiFCError, Failure) as error:
            yield warned("could not check", str(error), "run it as root on the host itself", uri)
            continue
        found = list(_health(uri, log))
        yield from found
        if not found:
            yield passed(
                f"{log.temperature_celsius} C, {log.percentage_used} % used, spare "
                f"{log.available_spare_percent} %",
                subject=uri,
            )


def _health(uri: str, log: smart_log.SmartLog) -> Iterator[Finding]:
    for problem in smart_log.problems(uri, log):
        is_error = problem.severity is Severity.ERROR
        yield of_problem(problem, Status.FAIL if is_error else Status.WARN)
    if log.temperature_celsius >= HOT_CELSIUS:
        slowed = log.throttled_light_seconds + log.throttled_heavy_seconds
        yield warned(
            f"the drive is at {log.temperature_celsius} C",
            f"it has slowed down for {slowed} s in its life to cool",
            "more airflow, a heat sink, or a lower write budget",
            uri,
        )


CHECKS: Checks = (
    ("drive", present),
    ("driver", driver),
    ("system disks", only_system_disks),
    ("iommu group", group_viable),
    ("uio and vfio", drivers_mixed),
    ("group node", group_node),
    ("locks", locks),
    ("pcie link", link),
    ("numa", numa),
    ("health", health),
)
