# SPDX-License-Identifier: Apache-2.0
"""list: drives, what uses them, what is on them, and the GPUs that they could feed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from hifc_admin import target, text
from hifc_admin.engine import owner
from hifc_admin.host import iommu, records
from hifc_admin.host.drives import DEVICES, Drive, Link, all_drives, all_gpus, driver_of
from hifc_admin.host.system import System
from hifc_admin.host.unbind import holder_uses
from hifc_admin.host.usage import Usage, find_usage
from hifc_admin.result import Failure, Problem, Result, Severity

_HEAD = ("BDF", "MODEL", "SERIAL", "SIZE", "LBA", "DRIVER", "NUMA", "GROUP", "LINK", "USE")
# What stands in the USE column, by kind of use, the most telling ones first.
_WORDS = {
    "boot-disk": "system disk",
    "mounted": "mounted",
    "swap": "swap",
    "holder": "part of a volume",
    "exported": "exported",
    "process": "a process",
    "not-checked": "not checked",
    "signature": "data",
}


def list_drives(system: System) -> Result:
    """Only reads. What could not be looked at is in the uses of its drive."""
    problems: list[Problem] = []
    owners = {_bdf(said): said for _, said in owner.owners(system.root)}
    drives = []
    for drive in all_drives(system):
        record = None
        try:
            record = records.read_record(system, drive.bdf)
        except Failure as failure:
            problems.append(dataclasses.replace(failure.problem, severity=Severity.WARNING))
        drives.append(_drive_data(system, drive, record, owners.get(drive.bdf)))
    gpus = [dataclasses.asdict(gpu) for gpu in all_gpus(system)]
    return Result({"drives": drives, "gpus": gpus}, _lines(drives, gpus), problems)


def _bdf(said: dict[str, Any]) -> str | None:
    """The address of the drive that an owner says it has."""
    with contextlib.suppress(Failure):
        device = target.parse(str(said.get("uri")))
        if device.scheme == "spdk":
            return device.name.lower()
    return None


def _drive_data(
    system: System, drive: Drive, record: records.Record | None, said: dict[str, Any] | None
) -> dict[str, Any]:
    if drive.driver in iommu.USERSPACE_DRIVERS:
        usage = Usage(uses=holder_uses(system, drive))
    else:
        usage = find_usage(system, drive)
    others = iommu.members(system, drive.bdf)
    return {
        "bdf": drive.bdf,
        "driver": drive.driver,
        "bound": drive.driver in iommu.USERSPACE_DRIVERS,
        "model": drive.model or (record.model if record else ""),
        "serial": drive.serial or (record.serial if record else ""),
        "firmware": drive.firmware,
        "numa_node": drive.numa_node,
        "iommu_group": drive.iommu_group,
        "iommu_group_others": [
            {
                "bdf": bdf,
                "class": system.attribute(f"{DEVICES}/{bdf}/class"),
                "driver": driver_of(system, bdf),
            }
            for bdf in others
        ],
        "link": dataclasses.asdict(drive.link),
        "namespaces": _namespaces(drive, record, usage),
        "in_use": any(use.kind != "signature" for use in usage.uses),
        "uses": [
            {name: getattr(use, name) for name in ("kind", "node", "detail", "evidence", "fix")}
            for use in usage.uses
        ],
        "owner": None if said is None else {"pid": said.get("pid"), "uri": said.get("uri")},
    }


def _namespaces(drive: Drive, record: records.Record | None, usage: Usage) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for namespace in drive.namespaces:
        contents = [item for item in usage.contents if item.node in namespace.nodes]
        found.append(
            {
                "block_device": None if namespace.is_hidden else f"/dev/{namespace.node}",
                "nsid": namespace.nsid,
                "size_bytes": namespace.size_bytes,
                "lba_bytes": namespace.lba_bytes,
                "metadata_bytes": namespace.metadata_bytes,
                "partitions": list(namespace.partitions),
                "signatures": [[item.node, name] for item in contents for name in item.names],
                "hifc": next((item.hifc for item in contents if item.hifc), None),
            }
        )
    if found or record is None:
        return found
    return [
        {"block_device": None, "nsid": nsid, "size_bytes": size_bytes, "lba_bytes": lba_bytes}
        for nsid, size_bytes, lba_bytes in record.namespaces
    ]


# ---- for people


def _lines(drives: list[dict[str, Any]], gpus: list[dict[str, Any]]) -> Iterator[str]:
    if not drives:
        yield "no NVMe drive on PCIe"
    else:
        yield from text.table(_HEAD, [_row(drive) for drive in drives])
    for drive in drives:
        yield from _details(drive)
    if gpus:
        yield ""
        head = ("GPU", "VENDOR", "DRIVER", "NUMA")
        rows = [(g["bdf"], g["vendor"], g["driver"] or "-", _or_dash(g["numa_node"])) for g in gpus]
        yield from text.table(head, rows)


def _row(drive: dict[str, Any]) -> list[object]:
    namespaces = drive["namespaces"]
    sizes = sum(namespace["size_bytes"] for namespace in namespaces)
    return [
        drive["bdf"],
        drive["model"] or "-",
        drive["serial"] or "-",
        text.size(sizes) if namespaces else "-",
        "/".join(sorted({str(namespace["lba_bytes"]) for namespace in namespaces})) or "-",
        drive["driver"] or "none",
        _or_dash(drive["numa_node"]),
        _or_dash(drive["iommu_group"]),
        _link(Link(**drive["link"])),
        _use(drive),
    ]


def _use(drive: dict[str, Any]) -> str:
    if drive["owner"] is not None:
        return f"HiFC, pid {drive['owner']['pid']}"
    kinds = {use["kind"] for use in drive["uses"]}
    words = [word for kind, word in _WORDS.items() if kind in kinds]
    if words:
        return words[0]
    if any(namespace.get("hifc") for namespace in drive["namespaces"]):
        return "HiFC namespace"
    return "free"


def _link(link: Link) -> str:
    if link.width is None or link.speed_gts is None:
        return "-"
    now = f"{link.speed_gts:g} GT/s x{link.width}"
    if (link.width, link.speed_gts) == (link.width_best, link.speed_best_gts):
        return now
    return f"{now} (best {link.speed_best_gts or 0:g} x{link.width_best})"


def _details(drive: dict[str, Any]) -> Iterator[str]:
    lines = [f"{use['detail']}\n    seen: {use['evidence']}" for use in drive["uses"]]
    lines += [
        f"{namespace['block_device']} has {namespace['hifc']}"
        for namespace in drive["namespaces"]
        if namespace.get("hifc")
    ]
    lines += [
        f"in IOMMU group {drive['iommu_group']} as well: {other['bdf']} "
        f"(class {other['class']}, driver {other['driver'] or 'none'})"
        for other in drive["iommu_group_others"]
    ]
    if lines:
        yield ""
        yield f"{drive['bdf']}:"
        for line in lines:
            yield from f"  {line}".splitlines()


def _or_dash(value: object) -> object:
    return "-" if value is None else value
