# SPDX-License-Identifier: Apache-2.0
"""The verb doctor: builds the scene and runs all checks on it."""

from __future__ import annotations

import argparse
import contextlib

from hifc.driver import library
from hifc_admin import (
    doctor,
    doctor_drive,
    doctor_engine,
    doctor_host,
    doctor_measure,
    owner,
    target,
)
from hifc_admin import system as systems
from hifc_admin.accounts import find_user
from hifc_admin.doctor import Engine, Scene
from hifc_admin.drives import all_drives, all_gpus, parse_bdf
from hifc_admin.parsing import Verbs, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result
from hifc_admin.system import System

ALL_CHECKS: doctor.Checks = (
    *doctor_host.CHECKS,
    *doctor_drive.CHECKS,
    *doctor_engine.CHECKS,
)


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "doctor",
        examine,
        "check host, drives and running engines, and say what to do",
        "hifc-admin doctor 'spdk://0000:3b:00.0?ns=1'",
        honours=("sysroot",),
    )
    parser.add_argument(
        "uri", metavar="URI", nargs="?", help="a device (default: everything on this host)"
    )
    parser.add_argument("--user", help="who is to use the drives (default: members of group hifc)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also read the namespace of URI, at rest, for two seconds and compare with what "
        "bench --baseline kept",
    )


def examine(arguments: argparse.Namespace) -> Result:
    uri = arguments.uri
    system = systems.of(arguments)
    if arguments.measure and uri is None:
        problem = Problem("usage", "doctor", "--measure wants a URI", fix="name the device")
        raise Failure(Exit.USAGE, problem)
    if arguments.user is not None:
        find_user(system, arguments.user)
    seen = scene_of(system, uri, arguments.user)
    rows = doctor.run(seen, ALL_CHECKS)
    if arguments.measure:
        checks = [("throughput", lambda _: doctor_measure.measured(uri, rows))]
        rows += doctor.run(seen, checks)
    return doctor.report(uri, rows, arguments.json)


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
