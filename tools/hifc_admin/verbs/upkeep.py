# SPDX-License-Identifier: Apache-2.0
"""status and cleanup: what HiFC has of this host, and what dead processes left on it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import stat
from collections.abc import Iterator
from typing import Any

from hifc_admin import text
from hifc_admin.engine import owner
from hifc_admin.host import accounts, handover, hugepages, iommu, memory, records
from hifc_admin.host import system as systems
from hifc_admin.host.drives import all_drives
from hifc_admin.host.leftovers import Leftover, find_leftovers, half_binds
from hifc_admin.host.plan import Plan
from hifc_admin.host.system import System
from hifc_admin.host.unbind import unbind
from hifc_admin.parsing import ALL_OPTIONS, Verbs, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result

_MODULES = ("vfio_pci", "vfio_iommu_type1", "uio_pci_generic", "nvme")


def register(verbs: Verbs) -> None:
    add_verb(
        verbs,
        "status",
        status,
        "show what HiFC has of this host: drives, processes, huge pages, leftovers",
        "hifc-admin status",
        honours=ALL_OPTIONS,
        reads_only=True,
    )
    add_verb(
        verbs,
        "cleanup",
        cleanup,
        "remove what dead processes left: huge pages, locks, sockets, half a bind",
        "hifc-admin cleanup --dry-run",
        honours=ALL_OPTIONS,
    )


# ---- status


def status(arguments: argparse.Namespace) -> Result:
    """Only reads."""
    system = systems.of(arguments)
    leftovers, problems = find_leftovers(system)
    halves, unread = half_binds(system)
    limit, where = memory.locked_limit(system, None, accounts.HIFC_GROUP)
    data: dict[str, Any] = {
        "drives": list(_bound_drives(system)),
        "processes": [
            {"socket": str(path), "pid": said.get("pid"), "uri": said.get("uri")}
            for path, said in owner.owners(system.root)
        ],
        "huge_pages": [dataclasses.asdict(pages) for pages in memory.huge_pages(system)],
        "hugetlbfs": [dataclasses.asdict(mount) for mount in memory.huge_mounts(system)],
        "modules": {name: _is_loaded(system, name) for name in _MODULES},
        "iommu_groups": len(system.names("/sys/kernel/iommu_groups")),
        "group": {
            "name": accounts.HIFC_GROUP,
            "gid": accounts.find_group(system, accounts.HIFC_GROUP),
            "locked_memory_bytes": limit,
            "evidence": where,
        },
        "leftovers": [_leftover(item) for item in leftovers]
        + [{"name": record.bdf, "kind": "half a bind"} for record in halves],
    }
    return Result(data, _status_lines(system, data), problems + unread)


def _bound_drives(system: System) -> Iterator[dict[str, Any]]:
    for drive in all_drives(system):
        if drive.driver not in iommu.USERSPACE_DRIVERS:
            continue
        record = None
        with contextlib.suppress(Failure):  # list tells of a record that cannot be read
            record = records.read_record(system, drive.bdf)
        node = f"/dev/vfio/{drive.iommu_group}"
        found = system.stat(node) if drive.iommu_group and system.exists(node) else None
        yield {
            "bdf": drive.bdf,
            "driver": drive.driver,
            "serial": record.serial if record else "",
            "node": node if found else None,
            "uid": found.st_uid if found else None,
            "gid": found.st_gid if found else None,
            "mode": f"{stat.S_IMODE(found.st_mode):04o}" if found else None,
            "persisted": system.exists(records.persisted_file(drive.bdf)),
        }


def _is_loaded(system: System, module: str) -> bool:
    return system.exists(f"/sys/module/{module}") or system.exists(f"{handover.DRIVERS}/{module}")


def _leftover(item: Leftover) -> dict[str, Any]:
    return {name: getattr(item, name) for name in ("name", "kind", "size_bytes", "evidence")}


def _status_lines(system: System, data: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            drive["bdf"],
            drive["driver"],
            drive["serial"] or "-",
            drive["node"] or "-",
            "-" if drive["node"] is None else f"{drive['uid']}:{drive['gid']} {drive['mode']}",
            "yes" if drive["persisted"] else "no",
        )
        for drive in data["drives"]
    ]
    if rows:
        yield from text.table(("BOUND", "DRIVER", "SERIAL", "NODE", "OWNER", "AT BOOT"), rows)
    else:
        yield "no drive is bound"
    for process in data["processes"]:
        yield f"process {process['pid']} has {process['uri']} open ({process['socket']})"
    yield ""
    yield from hugepages.lines(memory.huge_pages(system), memory.huge_mounts(system))
    yield ""
    loaded = [name for name, is_loaded in data["modules"].items() if is_loaded]
    group = data["group"]
    limit = group["locked_memory_bytes"]
    yield from text.pairs(
        [
            ("kernel modules", ", ".join(loaded) or "none of vfio, uio and nvme"),
            ("IOMMU groups", data["iommu_groups"] or "none: the IOMMU is off"),
            ("group hifc", "missing" if group["gid"] is None else f"gid {group['gid']}"),
            ("its locked memory", "no limit" if limit is None else text.size(limit)),
            ("leftovers", f"{len(data['leftovers'])}; see hifc-admin cleanup --dry-run"),
        ]
    )


# ---- cleanup


def cleanup(arguments: argparse.Namespace) -> Result:
    """What this user may not remove is told, and the rest is removed."""
    system = systems.of(arguments)
    leftovers, problems = find_leftovers(system)
    halves, unread = half_binds(system)
    problems += unread
    plan = Plan("cleanup")
    refused: list[Problem] = []
    for record in halves:
        driver = record.previous or "no driver"
        plan.add(
            f"give {record.bdf} back to {driver}: a bind of it was killed",
            functools.partial(_give_back, system, record.bdf, refused),
        )
    for item in leftovers:
        size = f", {text.size(item.size_bytes)}" if item.size_bytes else ""
        what = f"remove {item.name} ({item.kind}{size}): {item.evidence}"
        plan.add(what, functools.partial(_remove, item, refused))
    data: dict[str, Any] = {
        "leftovers": [_leftover(item) for item in leftovers],
        "half_binds": [record.bdf for record in halves],
        "freed_bytes": 0,
        "steps": plan.lines(),
        "changed": bool(plan.steps) and not arguments.dry_run,
    }
    if arguments.dry_run:
        return Result(data, plan.would(), problems)
    plan.run(arguments.announce)
    gone = [item for item in leftovers if not system.exists(item.name)]
    data["freed_bytes"] = sum(item.size_bytes for item in gone)
    done = len(plan.steps) - len(refused)
    lines = [f"put right: {done}"] if plan.steps else ["nothing was left"]
    return Result(data, lines, problems + refused, Exit.PARTLY if refused else Exit.DONE)


def _give_back(system: System, bdf: str, refused: list[Problem]) -> None:
    try:
        refused += unbind(system, bdf, lambda line: None, dry_run=False).problems
    except Failure as failure:
        refused.append(failure.problem)


def _remove(item: Leftover, refused: list[Problem]) -> None:
    try:
        item.remove()
    except OSError as error:
        problem = Problem("not-removed", item.name, "could not be removed", str(error), "as root")
        refused.append(problem)
