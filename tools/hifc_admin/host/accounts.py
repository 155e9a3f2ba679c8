# SPDX-License-Identifier: Apache-2.0
"""Users and groups of the host: by the C library, or from the files below --sysroot."""

from __future__ import annotations

import grp
import pwd
from dataclasses import dataclass

from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem

HIFC_GROUP = "hifc"


@dataclass(frozen=True)
class User:
    name: str
    uid: int
    groups: tuple[str, ...]  # also the primary one


def find_user(system: System, name: str) -> User:
    """Raises Failure where there is none of that name."""
    for entry in _users(system):
        if entry[0] == name:
            groups = [
                group
                for group, gid, members in _groups(system)
                if gid == entry[2] or name in members
            ]
            return User(name, entry[1], tuple(groups))
    problem = Problem(
        "no-such-user", name, "there is no such user", "/etc/passwd", "see: getent passwd"
    )
    raise Failure(Exit.USAGE, problem)


def find_group(system: System, name: str) -> int | None:
    """Its gid, None where there is none."""
    return next((gid for group, gid, _ in _groups(system) if group == name), None)


def _users(system: System) -> list[tuple[str, int, int]]:
    if system.is_real:
        return [(entry.pw_name, entry.pw_uid, entry.pw_gid) for entry in pwd.getpwall()]
    return [(f[0], int(f[2]), int(f[3])) for f in _fields(system, "/etc/passwd", 4)]


def _groups(system: System) -> list[tuple[str, int, list[str]]]:
    if system.is_real:
        return [(entry.gr_name, entry.gr_gid, entry.gr_mem) for entry in grp.getgrall()]
    return [(f[0], int(f[2]), f[3].split(",")) for f in _fields(system, "/etc/group", 4)]


def _fields(system: System, name: str, count: int) -> list[list[str]]:
    lines = (line.split(":") for line in (system.get(name) or "").splitlines())
    return [fields for fields in lines if len(fields) >= count]
