# SPDX-License-Identifier: Apache-2.0
"""How much memory systemd lets the services of a user lock.

systemd does not read /etc/security/limits.d: a service gets LimitMEMLOCK of its unit or of a
drop-in, else of DefaultLimitMEMLOCK, else what the kernel gives everybody. Only files are read, so
this works below --sysroot and for services that do not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hifc_admin.host.accounts import User
from hifc_admin.host.system import System

# The first folder that has a name hides it in the others.
FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")
DEFAULTS = ("/usr/lib/systemd/system.conf", "/etc/systemd/system.conf")
DEFAULT_LOCKED_BYTES = 8 << 20
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class Service:
    """A service with a user of its own, and how much memory it may lock; None: no limit."""

    name: str
    user: str
    groups: tuple[str, ...]
    locked_bytes: int | None
    evidence: str


def services_of(system: System, user: User | None, group: str | None) -> list[Service]:
    """Those that run as the user, or else as a member of the group. Not those of root, which
    nothing limits."""
    if user is not None:
        return [service for service in _all(system) if service.user == user.name]
    return [service for service in _all(system) if group in service.groups]


def _all(system: System) -> Iterator[Service]:
    files: dict[str, str] = {}
    for folder in FOLDERS:
        for path in system.glob(f"{folder}/*.service"):
            files.setdefault(path.rpartition("/")[2], path)
    default = _default(system)
    for name, path in sorted(files.items()):
        user, groups, (limit, evidence) = "", [], default
        for source in (path, *_drop_ins(system, name)):
            for key, value in _settings(system, source):
                if key == "User":
                    user = value
                elif key in ("Group", "SupplementaryGroups"):
                    groups += value.split()
                elif key == "LimitMEMLOCK":
                    limit, evidence = _bytes(value, default[0]), f"{source}: {key}={value}"
        if user not in ("", "root", "0"):
            yield Service(name, user, tuple(groups), limit, evidence)


def _drop_ins(system: System, name: str) -> list[str]:
    """Of the unit and of each prefix of its name that ends in a dash, in the order of application:
    by file name, whatever the folder."""
    stem = name.removesuffix(".service")
    prefixes = [stem[: match.end()] for match in re.finditer("-", stem)]
    found: dict[str, str] = {}
    for unit in [*prefixes, stem]:
        for folder in reversed(FOLDERS):
            for path in system.glob(f"{folder}/{unit}.service.d/*.conf"):
                found[path.rpartition("/")[2]] = path
    return [path for _, path in sorted(found.items())]


def _default(system: System) -> tuple[int | None, str]:
    found: tuple[int | None, str] = DEFAULT_LOCKED_BYTES, "systemd's default"
    drop_ins = [name for base in DEFAULTS for name in system.glob(f"{base}.d/*.conf")]
    for source in (*DEFAULTS, *drop_ins):
        for key, value in _settings(system, source):
            if key == "DefaultLimitMEMLOCK":
                found = _bytes(value, DEFAULT_LOCKED_BYTES), f"{source}: {key}={value}"
    return found


def _settings(system: System, name: str) -> Iterator[tuple[str, str]]:
    for line in (system.attribute(name) or "").splitlines():
        key, is_setting, value = line.strip().partition("=")
        if is_setting and not key.startswith(("#", ";")):
            yield key.strip(), value.strip()


def _bytes(value: str, default: int | None) -> int | None:
    """The soft limit of "SOFT:HARD" or of one number, with K, M, G or T (of 1024); the default
    where nothing is set."""
    soft = value.partition(":")[0]
    match = re.fullmatch(r"(\d+)([KMGT]?)", soft)
    if match is not None:
        return int(match[1]) << _SHIFTS[match[2]]
    return None if soft == "infinity" else default
