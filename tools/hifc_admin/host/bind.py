# SPDX-License-Identifier: Apache-2.0
"""bind: checks a drive, then takes it from the kernel and gives it to a driver of user space.

The order is what keeps data safe. The drive's lock first; then every namespace is claimed, which
the kernel grants only while nothing uses it, and keeps so; under these claims everything is checked
and read; they are dropped only when the kernel's driver has let the drive go. Before that it is
written down where the drive came from, for the case that this process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from hifc_admin.host import handover, iommu, records
from hifc_admin.host.bind_checks import (
    Access,
    Options,
    access_of,
    check_memory,
    check_usage,
    warnings,
)
from hifc_admin.host.claims import Claims
from hifc_admin.host.drives import Drive, find_drive
from hifc_admin.host.plan import Plan
from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem, Result, Severity

NODE_WAIT_S = 10.0
UDEV_WAIT_S = 5.0
UNIT = "/etc/systemd/system/hifc-bind@.service"
_MODULES = {iommu.VFIO: ("vfio-pci", "vfio_iommu_type1"), iommu.UIO: ("uio_pci_generic",)}


def bind(
    system: System, bdf: str, options: Options, announce: Callable[[str], None], dry_run: bool
) -> Result:
    """Raises Failure where it was not even checked, or where a step failed and all was undone."""
    find_drive(system, bdf)  # no lock file for what is no drive
    with contextlib.ExitStack() as stack:
        stack.enter_context(records.locked(system, bdf, dry_run))
        claims = Claims(system)
        stack.callback(claims.release)
        drive = find_drive(system, bdf)
        access = access_of(system, options)
        data: dict[str, object] = {"bdf": bdf, "driver": options.driver}
        data["previous_driver"] = drive.driver
        problems: list[Problem] = []
        plan = Plan(bdf)
        if drive.driver != options.driver:
            exit_code, problems = check(system, drive, claims, options, access)
            if exit_code is not None:
                return Result(data, (), problems, exit_code)
            _plan_move(plan, system, drive, claims, options, access)
        else:
            _plan_access(plan, system, drive, access)
        if options.persist:
            _plan_persist(plan, system, drive, options, access)
            if not system.exists(UNIT):
                problems.append(_not_installed(bdf))
        data |= {"steps": plan.lines(), "changed": bool(plan.steps) and not dry_run}
        if dry_run:
            return Result(data, plan.would(), problems)
        plan.run(announce)
        lines = [f"{bdf} is with {options.driver}: spdk://{bdf}?ns=1"]
        return Result(data, lines, problems)


def check(
    system: System, drive: Drive, claims: Claims, options: Options, access: Access
) -> tuple[Exit | None, list[Problem]]:
    """The exit code where the drive must not be bound, and why; else None, and warnings."""
    usage = check_usage(system, drive, claims)
    refusals = [use.problem(drive.bdf) for use in usage.refusals(options.signatures)]
    refusals += iommu.refusals(system, drive, options.driver, options.no_iommu)
    missing = check_memory(system, drive, options, access)
    if refusals:
        return Exit.REFUSED, refusals + missing
    if missing:
        return Exit.PREREQUISITE, missing
    return None, warnings(system, drive, usage, options, access)


# ---- the steps


def _plan_move(
    plan: Plan, system: System, drive: Drive, claims: Claims, options: Options, access: Access
) -> None:
    bdf, driver = drive.bdf, options.driver
    missing = [name for name in _MODULES[driver] if not _is_loaded(system, name)]
    if missing:
        plan.add(f"modprobe {' '.join(missing)}", lambda: load_modules(system, bdf, missing))
    if driver == iommu.VFIO and not iommu.has_iommu(system, drive):
        _plan_unsafe_mode(plan, system)
    before = handover.override_of(system, bdf)
    override = "" if before == driver else before  # left by a bind that was killed
    record = records.make_record(drive, driver, override, access.owner, access.group)
    plan.put(system, records.record_file(bdf), record.text(), "where the drive came from")
    node = _node(system, drive, driver)
    if node is not None and not access.is_root_only:
        _plan_group_file(plan, system, drive, access)
    plan.add(
        f"move {bdf} from {drive.driver} to {driver}",
        lambda: handover.move(system, bdf, driver, claims.release),
        lambda: _move_back(system, drive, override),
    )
    if node is not None:
        _plan_node(plan, system, bdf, node, access)
    done = dataclasses.replace(record, phase=records.BOUND)
    _plan_done(plan, system, done)


def _plan_unsafe_mode(plan: Plan, system: System) -> None:
    """For all drives at once; nothing is to be left of it where this bind fails."""

    def back() -> None:
        # The parameter may be of a module that the step before was to load.
        if system.exists(iommu.UNSAFE_MODE):
            system.write(iommu.UNSAFE_MODE, "N\n")

    if system.attribute(iommu.UNSAFE_MODE) != "Y":
        plan.add(
            f"write Y to {iommu.UNSAFE_MODE}", lambda: system.write(iommu.UNSAFE_MODE, "Y\n"), back
        )


def _plan_access(plan: Plan, system: System, drive: Drive, access: Access) -> None:
    """For a drive that is bound already: perhaps to others."""
    assert drive.driver is not None
    known = records.read_record(system, drive.bdf)
    record = known or dataclasses.replace(
        records.make_record(drive, drive.driver, "", access.owner, access.group), previous=None
    )
    node = _node(system, drive, drive.driver)
    if node is not None:
        if access.is_root_only:
            plan.remove(system, records.group_file(node))
        else:
            _plan_group_file(plan, system, drive, access)
        _plan_node(plan, system, drive.bdf, node, access)
    done = dataclasses.replace(record, owner=access.owner, group=access.group, phase=records.BOUND)
    _plan_done(plan, system, done)


def _plan_group_file(plan: Plan, system: System, drive: Drive, access: Access) -> None:
    assert drive.iommu_group is not None
    text = f"HIFC_OWNER={access.owner}\nHIFC_GROUP={access.group}\nHIFC_MODE={access.mode:04o}\n"
    plan.put(system, records.group_file(drive.iommu_group), text, "for udev's rule")


def _plan_node(plan: Plan, system: System, bdf: str, node: str, access: Access) -> None:
    name = f"/dev/vfio/{node}"
    what = f"give {name} to user {access.owner} and group {access.group}, mode {access.mode:04o}"
    plan.add(what, lambda: _open_node(system, bdf, name, access))


def _plan_done(plan: Plan, system: System, record: records.Record) -> None:
    name = records.record_file(record.bdf)
    if system.exact(name) != record.text():
        # The record of the step before goes back as a whole if this one fails.
        plan.add(f"note in {name} that it is done", lambda: system.put(name, record.text()))


def _plan_persist(
    plan: Plan, system: System, drive: Drive, options: Options, access: Access
) -> None:
    record = records.read_record(system, drive.bdf)
    serial = drive.serial or (record.serial if record else "")
    if not serial:
        detail = "its serial is not known, so the same drive could not be told at the next boot"
        fix = f"hifc-admin unbind {drive.bdf}, then bind it with --persist"
        raise Failure(Exit.FAILED, Problem("no-serial", drive.bdf, detail, fix=fix))
    kept = records.Persisted(
        bdf=drive.bdf,
        serial=serial,
        driver=options.driver,
        owner=access.owner,
        group=access.group,
        signatures=tuple(sorted(options.signatures)),
        no_iommu=options.no_iommu,
    )
    why = f"the same at each boot, while the drive has serial {serial}"
    plan.put(system, records.persisted_file(drive.bdf), kept.text(), why)
    link = records.wants_link(drive.bdf)
    if system.link(link) != UNIT:
        plan.add(f"link {link}", lambda: system.symlink(link, UNIT), lambda: system.remove(link))


def _not_installed(bdf: str) -> Problem:
    detail = "nothing binds drives at boot here yet"
    fix = "hifc-admin install"
    return Problem("not-installed", bdf, detail, f"{UNIT} is missing", fix, Severity.WARNING)


# ---- what they do


def _node(system: System, drive: Drive, driver: str) -> str | None:
    """The name in /dev/vfio that others than root may get; none without an IOMMU."""
    if driver != iommu.VFIO or not iommu.has_iommu(system, drive):
        return None
    return drive.iommu_group


def _is_loaded(system: System, module: str) -> bool:
    if module in iommu.USERSPACE_DRIVERS:
        return system.exists(f"{handover.DRIVERS}/{module}")
    return system.exists(f"/sys/module/{module}")


def load_modules(system: System, subject: str, modules: list[str]) -> None:
    """Raises Failure where one cannot be loaded."""
    for name in modules:
        try:
            system.run("modprobe", name)
        except OSError as error:
            detail = f"the kernel module {name} cannot be loaded"
            fix = "install the kernel's full set of modules (Debian: linux-image-amd64)"
            problem = Problem("no-module", subject, detail, str(error), fix)
            raise Failure(Exit.PREREQUISITE, problem) from error


def _move_back(system: System, drive: Drive, override: str) -> None:
    handover.give_back(system, drive.bdf, drive.driver, override)
    handover.wait_for_namespaces(system, drive.bdf, len(drive.namespaces))


def _open_node(system: System, bdf: str, node: str, access: Access) -> None:
    """Also where no udev runs; where one does, its rule comes to the same."""
    if not handover.wait_until(system, lambda: system.exists(node), NODE_WAIT_S):
        detail = f"{node} did not appear within {NODE_WAIT_S:.0f} s"
        fix = f"look at the kernel's log: dmesg | grep {bdf}"
        raise Failure(Exit.FAILED, Problem("no-group-node", bdf, detail, fix=fix))
    handover.wait_until(system, lambda: not system.exists("/run/udev/queue"), UDEV_WAIT_S)
    system.set_owner(node, access.uid, access.gid, access.mode)
