# SPDX-License-Identifier: Apache-2.0
"""unbind: gives a drive back to the kernel's driver and waits for its block devices.

The kernel lets a process that unbinds a drive in use wait without an end, so it is checked first
that none has it. If the kernel's driver does not take the drive, it goes back to where it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from hifc_admin.engine.owner import FOLDERS
from hifc_admin.host import handover, iommu, records
from hifc_admin.host.bind import load_modules
from hifc_admin.host.drives import Drive, find_drive
from hifc_admin.host.plan import Plan
from hifc_admin.host.processes import holders_of, lock_holders
from hifc_admin.host.system import System
from hifc_admin.host.usage import Use, not_checked, process_use
from hifc_admin.result import Exit, Problem, Result

KERNEL_DRIVER = "nvme"


def unbind(system: System, bdf: str, announce: Callable[[str], None], dry_run: bool) -> Result:
    """Also forgets what --persist noted. Raises Failure where it failed and all was undone."""
    find_drive(system, bdf)  # no lock file for what is no drive
    with contextlib.ExitStack() as stack:
        stack.enter_context(records.locked(system, bdf, dry_run))
        drive = find_drive(system, bdf)
        record = records.read_record(system, bdf)
        data: dict[str, object] = {"bdf": bdf, "previous_driver": drive.driver}
        plan = Plan(bdf)
        moves = drive.driver in (None, *iommu.USERSPACE_DRIVERS)
        if moves:
            uses = [*engine_uses(system, bdf, stack), *holder_uses(system, drive)]
            if uses:
                return Result(data, (), [use.problem(bdf) for use in uses], Exit.REFUSED)
            driver = (record.previous if record else None) or KERNEL_DRIVER
            _plan_move(plan, system, drive, driver, record)
        elif handover.override_of(system, bdf) in iommu.USERSPACE_DRIVERS:
            # A bind was killed before it moved the drive.
            name = f"{drive.sysfs}/driver_override"
            plan.add(f"clear {name}", lambda: system.write(name, "\n"))
        _plan_forget(plan, system, drive, record)
        data |= {"steps": plan.lines(), "changed": bool(plan.steps) and not dry_run}
        if dry_run:
            return Result(data, plan.would())
        plan.run(announce)
        if not moves:
            return Result(data, [f"{bdf} is with {drive.driver} already"])
        return _waited(system, bdf, record, data)


def engine_uses(system: System, bdf: str, stack: contextlib.ExitStack) -> Iterator[Use]:
    """Locks that engines hold on its namespaces. Those that are free are kept meanwhile, so that
    none starts."""
    for folder in FOLDERS:
        for name in system.glob(f"/{folder}/{bdf.replace(':', '_')}-ns*.lock"):
            try:
                fd = system.lock(name)
            except OSError as error:
                yield not_checked(bdf, f"whether {name} is held", str(error))
                continue
            if fd is not None:
                stack.callback(os.close, fd)
                continue
            pids = lock_holders(system, name)
            who = ", ".join(f"process {pid}" for pid in pids) or "a process"
            fix = f"stop it: kill {' '.join(map(str, pids))}" if pids else "stop it"
            yield Use("process", bdf, f"{who} runs an engine on it", f"{name} is locked", fix)


def holder_uses(system: System, drive: Drive) -> list[Use]:
    """Processes that have the drive's node of user space open."""
    nodes = {f"uio{name[3:]}" for name in system.names(f"{drive.sysfs}/uio")}
    nodes |= {f"vfio/devices/{name}" for name in system.names(f"{drive.sysfs}/vfio-dev")}
    if drive.iommu_group is not None:
        nodes |= {f"vfio/{drive.iommu_group}", f"vfio/noiommu-{drive.iommu_group}"}
    numbers = {number for node in nodes if (number := system.device_number(f"/dev/{node}"))}
    try:
        holders = holders_of(system, nodes, numbers)
    except OSError as error:
        return [not_checked(drive.bdf, "which processes hold it", str(error))]
    return [process_use(holder) for holder in holders]


def _plan_move(
    plan: Plan, system: System, drive: Drive, driver: str, record: records.Record | None
) -> None:
    bdf, before = drive.bdf, drive.driver
    if not system.exists(f"{handover.DRIVERS}/{driver}"):
        plan.add(f"modprobe {driver}", lambda: load_modules(system, bdf, [driver]))
    override = record.override if record else ""

    def back() -> None:
        if before is not None:
            handover.move(system, bdf, before, lambda: None)

    plan.add(
        f"move {bdf} from {before or 'no driver'} to {driver}",
        lambda: handover.give_back(system, bdf, driver, override),
        back,
    )


def _plan_forget(plan: Plan, system: System, drive: Drive, record: records.Record | None) -> None:
    group = (record.iommu_group if record else None) or drive.iommu_group
    others = [r for r in records.all_records(system) if r.bdf != drive.bdf]
    if group is not None and not any(other.iommu_group == group for other in others):
        plan.remove(system, records.group_file(group))
    plan.remove(system, records.wants_link(drive.bdf))
    plan.remove(system, records.persisted_file(drive.bdf))
    plan.remove(system, records.record_file(drive.bdf))


def _waited(
    system: System, bdf: str, record: records.Record | None, data: dict[str, object]
) -> Result:
    count = len(record.namespaces) if record else None
    nodes = handover.wait_for_namespaces(system, bdf, count)
    drive = find_drive(system, bdf)
    data |= {"driver": drive.driver, "block_devices": [f"/dev/{node}" for node in nodes]}
    listed = ", ".join(f"/dev/{node}" for node in nodes) or "no block device"
    result = Result(data, [f"{bdf} is with {drive.driver}: {listed}"])
    if len(nodes) < (1 if count is None else count):
        wanted = "at least one" if count is None else f"{count}, as before it was bound,"
        problem = Problem(
            "no-block-device",
            bdf,
            f"{drive.driver} has the drive, but of its block devices {wanted} should be there",
            f"after {handover.BLOCK_WAIT_S:.0f} s: {listed}",
            f"look at the kernel's log: dmesg | grep {drive.controller or bdf}",
        )
        result.problems.append(problem)
        result.exit = Exit.PARTLY
    return result
