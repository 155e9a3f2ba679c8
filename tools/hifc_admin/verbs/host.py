# SPDX-License-Identifier: Apache-2.0
"""The verbs on the host's drives: list, bind, unbind."""

from __future__ import annotations

import argparse

from hifc_admin.host import handover, iommu, records
from hifc_admin.host import system as systems
from hifc_admin.host.bind import bind
from hifc_admin.host.bind_checks import Options
from hifc_admin.host.drives import find_drive, parse_bdf
from hifc_admin.host.listing import list_drives
from hifc_admin.host.system import System
from hifc_admin.host.unbind import unbind
from hifc_admin.parsing import ALL_OPTIONS, Verbs, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result

BDF_HELP = "the PCI address that list shows"
ROOT_FIX = "run it as root: sudo hifc-admin ..., or look at what it would do with --dry-run"


def register(verbs: Verbs) -> None:
    add_verb(
        verbs,
        "list",
        lambda arguments: list_drives(systems.of(arguments)),
        "list NVMe drives, what uses them, and GPUs",
        "hifc-admin list",
        honours=ALL_OPTIONS,
        reads_only=True,
    )

    parser = add_verb(
        verbs,
        "bind",
        bind_drive,
        "take an unused drive from the kernel, for HiFC",
        "hifc-admin bind 0000:3b:00.0 --persist",
        honours=ALL_OPTIONS,
    )
    parser.add_argument("bdf", metavar="BDF", help=BDF_HELP)
    parser.add_argument(
        "--driver", choices=iommu.USERSPACE_DRIVERS, default=iommu.VFIO, help="default: %(default)s"
    )
    parser.add_argument("--user", help="who may use the drive besides root")
    parser.add_argument("--group", help="whose members may use it (default: hifc, if it exists)")
    parser.add_argument(
        "--signature",
        metavar="NAME",
        action="append",
        default=[],
        help="of what may be on the drive although it looks like data: ext4, gpt ...",
    )
    parser.add_argument(
        "--no-iommu",
        action="store_true",
        help="bind it although it could then read and write any memory of this machine",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--persist", action="store_true", help="bind it again at each boot")
    again.add_argument(
        "--persisted", action="store_true", help="with the options noted by --persist (at boot)"
    )

    parser = add_verb(
        verbs,
        "unbind",
        unbind_drive,
        "give a drive back to the kernel, for good",
        "hifc-admin unbind 0000:3b:00.0",
        honours=ALL_OPTIONS,
    )
    parser.add_argument("bdf", metavar="BDF", help=BDF_HELP)


def bind_drive(arguments: argparse.Namespace) -> Result:
    system, bdf = systems.of(arguments), parse_bdf(arguments.bdf)
    require_root(system, arguments)
    if arguments.persisted:
        options = persisted_options(system, bdf)
    else:
        options = Options(
            driver=arguments.driver,
            user=arguments.user,
            group=arguments.group,
            signatures=frozenset(name.lower() for name in arguments.signature),
            no_iommu=arguments.no_iommu,
            persist=arguments.persist,
        )
    return bind(system, bdf, options, arguments.announce, arguments.dry_run)


def unbind_drive(arguments: argparse.Namespace) -> Result:
    system, bdf = systems.of(arguments), parse_bdf(arguments.bdf)
    require_root(system, arguments)
    return unbind(system, bdf, arguments.announce, arguments.dry_run)


def require_root(system: System, arguments: argparse.Namespace) -> None:
    """Raises Failure for a user who could do nothing; a dry run is everybody's."""
    if not arguments.dry_run and not system.may_change:
        detail = "this changes the host, which only root may"
        problem = Problem("not-root", arguments.verb, detail, fix=ROOT_FIX)
        raise Failure(Exit.PREREQUISITE, problem)


def persisted_options(system: System, bdf: str) -> Options:
    """What --persist noted. Raises Failure where another drive sits at that address now."""
    kept = records.read_persisted(system, bdf)
    if kept is None:
        detail = "nothing is noted for this address"
        file = records.persisted_file(bdf)
        problem = Problem("not-persisted", bdf, detail, file, f"hifc-admin bind {bdf} --persist")
        raise Failure(Exit.FAILED, problem)
    drive = find_drive(system, bdf)
    if drive.driver is not None and drive.driver not in iommu.USERSPACE_DRIVERS:
        # At boot the controller may still be on its way.
        handover.wait_until(
            system, lambda: find_drive(system, bdf).state == "live", handover.BLOCK_WAIT_S
        )
        drive = find_drive(system, bdf)
    record = records.read_record(system, bdf)
    serial = drive.serial or (record.serial if record else "")
    if serial != kept.serial:
        detail = f"another drive is at this address now: its serial is {serial or 'unknown'}"
        evidence = f"{records.persisted_file(bdf)} is for serial {kept.serial}"
        fix = f"hifc-admin list; hifc-admin unbind {bdf} forgets it; bind the right one"
        raise Failure(Exit.REFUSED, Problem("another-drive", bdf, detail, evidence, fix))
    return Options(
        driver=kept.driver,
        user=None if kept.owner == "root" else kept.owner,
        group=None if kept.group == "root" else kept.group,
        signatures=frozenset(kept.signatures),
        no_iommu=kept.no_iommu,
    )
