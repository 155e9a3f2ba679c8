# SPDX-License-Identifier: Apache-2.0
"""The verb doctor: builds the scene and runs all checks on it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence

from hifc.native_lib.libhifc import library
from hifc_admin import target
from hifc_admin.doctor import checks as doctor
from hifc_admin.doctor import drive as doctor_drive
from hifc_admin.doctor import engine as doctor_engine
from hifc_admin.doctor import file as doctor_file
from hifc_admin.doctor import host as doctor_host
from hifc_admin.doctor import measure as doctor_measure
from hifc_admin.doctor.checks import Engine, Scene, Status
from hifc_admin.engine import owner
from hifc_admin.host import system as systems
from hifc_admin.host.accounts import find_user
from hifc_admin.host.drives import all_drives, all_gpus, parse_bdf
from hifc_admin.host.system import System
from hifc_admin.parsing import Verbs, add_uri, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result

ALL_CHECKS: doctor.Checks = (
    *doctor_host.CHECKS,
    *doctor_drive.CHECKS,
    *doctor_file.CHECKS,
    *doctor_engine.CHECKS,
)

# Checks of the host and its drives that keep SPDK from a drive on PCIe.
PCIE_CHECKS = frozenset(
    {"iommu", "gpudirect storage", "vfio_iommu_type1", "locked memory", "iommu group", "group node"}
)


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "doctor",
        examine,
        "check host, drives and running engines, and say what to do",
        "hifc-admin doctor 'spdk://0000:3b:00.0?ns=1'",
        honours=("sysroot",),
        reads_only=True,
    )
    add_uri(parser, "default: everything on this host", nargs="?")
    parser.add_argument("--user", help="who is to use the drives (default: members of group hifc)")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="a checkpoint: whether the segments of URI are long enough for its blocks",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also read the namespace of URI, at rest, for two seconds and compare with what "
        "bench --baseline kept",
    )


def examine(arguments: argparse.Namespace) -> Result:
    uri = arguments.uri
    system = systems.of(arguments)
    for option in ("measure", "model"):
        if getattr(arguments, option) and uri is None:
            problem = Problem("usage", "doctor", f"--{option} wants a URI", fix="name the device")
            raise Failure(Exit.USAGE, problem)
    if arguments.user is not None:
        find_user(system, arguments.user)
    if arguments.model is not None:
        doctor_file.model_shape(arguments.model)
    seen = dataclasses.replace(scene_of(system, uri, arguments.user), model=arguments.model)
    found = doctor.run(seen, ALL_CHECKS)
    rows = doctor.weighed(seen, found)
    if arguments.measure:
        checks = [("throughput", lambda _: doctor_measure.measured(uri, rows))]
        rows += doctor.run(seen, checks)
    if uri is None:
        summary = doctor.summary_of_host(rows, _reasons(seen, found))
    else:
        summary = doctor.summary_of_device(uri, rows)
    return doctor.report(uri, rows, summary, arguments.json)


def _reasons(seen: Scene, rows: Sequence[doctor.Row]) -> dict[str, list[str]]:
    """The kinds of devices that there are, each with why it cannot be used on this host: nothing
    where it can."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.finding.status is Status.FAIL:
            failed.setdefault(row.check, []).append(row.finding.detail)
    pages = failed.get("huge pages", [])
    drives = [reason for name, why in failed.items() if name in PCIE_CHECKS for reason in why]
    if not seen.all_drives:
        drives.append("there is no NVMe drive on PCIe")
    elif not seen.bound:
        drives.append("no drive is bound, see hifc-admin bind")
    reasons = {
        "file": failed.get("io_uring", []),
        "ram": [],
        "spdk": drives + pages,
        "spdk+tcp": pages,
    }
    if seen.system.is_real:
        for kind in set(reasons) - set(doctor_file.schemes()):
            reasons[kind] = ["this libhifc was built without SPDK"]
    return reasons


def scene_of(system: System, uri: str | None, user: str | None) -> Scene:
    """Raises Failure for a URI that names nothing."""
    bdf = None
    medium = None if uri is None else target.parse(uri)
    if medium is not None:
        _expect_known(medium, system)
    if medium is not None and medium.scheme == "spdk":
        bdf = parse_bdf(medium.name)
    drives = all_drives(system)
    about = [drive for drive in drives if uri is None or drive.bdf == bdf]
    return Scene(
        system=system,
        uri=uri,
        wanted_bdf=bdf,
        all_drives=tuple(drives),
        drives=tuple(about),
        gpus=tuple(all_gpus(system)),
        engines=tuple(_engines(system, uri)),
        user=user,
    )


def _expect_known(medium: target.Target, system: System) -> None:
    """Nothing applies to another one, which must not look like a clean bill."""
    known = library().hifc_schemes().decode().split()
    if not medium.scheme.startswith("spdk") and medium.scheme.split("+")[-1] not in known:
        detail, fix = f"unknown scheme {medium.scheme!r}", f"this build knows {', '.join(known)}"
        raise Failure(Exit.USAGE, Problem("bad-uri", medium.uri, detail, fix=fix))
    if medium.scheme == "file" and not system.exists(medium.name):
        fix = "format it first, giving its size, or check the path"
        problem = Problem("not-found", medium.uri, f"{medium.name}: no such file", fix=fix)
        raise Failure(Exit.FAILED, problem)


def _engines(system: System, uri: str | None) -> list[Engine]:
    """Those that may be asked: all of them, or the owner of the device."""
    wanted = None if uri is None else owner.find(uri, system.root)
    found = []
    for path, said in owner.owners(system.root):
        if uri is not None and path != wanted:
            continue
        # It ended just now, or what answers there is no engine.
        with contextlib.suppress(OSError, Failure, KeyError, TypeError, ValueError):
            stats = owner.ask(path, "stats")
            found.append(Engine(str(path), str(said["uri"]), int(said["pid"]), stats))
    return found
