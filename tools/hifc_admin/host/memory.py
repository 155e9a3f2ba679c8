# SPDX-License-Identifier: Apache-2.0
"""Huge pages, where they are mounted, and how much memory a user may lock."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass

from hifc_admin.host.accounts import User
from hifc_admin.host.mounts import own_mounts
from hifc_admin.host.services import Service, services_of
from hifc_admin.host.system import System
from hifc_admin.result import Problem
from hifc_admin.text import size

POOLS = "/sys/kernel/mm/hugepages"
NODES = "/sys/devices/system/node"
DEFAULT_MOUNT = "/dev/hugepages"
# The default buffer pool, and four pages for what SPDK itself allocates.
NEEDED_BYTES = (64 + 4 * 2) << 20
# The same for hifc.HiFC, whose default pool has room for its budgets.
SUGGESTED_BYTES = (288 + 4 * 2) << 20
# What the kernel gives a user for whom nothing is configured (since Linux 5.16).
KERNEL_LOCKED_BYTES = 8 << 20
LIMITS = ("/etc/security/limits.conf", "/etc/security/limits.d/*.conf")


@dataclass(frozen=True)
class HugePages:
    """The pages of one size, of the whole host or of one node."""

    size_bytes: int
    node: int | None
    total: int
    free: int
    surplus: int

    @property
    def folder(self) -> str:
        pool = f"hugepages-{self.size_bytes >> 10}kB"
        return (
            f"{POOLS}/{pool}" if self.node is None else f"{NODES}/node{self.node}/hugepages/{pool}"
        )


@dataclass(frozen=True)
class HugeMount:
    folder: str
    size_bytes: int
    uid: int
    gid: int
    mode: int


def huge_pages(system: System) -> list[HugePages]:
    """All sizes, of the host and then of each node."""
    found = _pools(system, POOLS, None)
    for name in system.names(NODES):
        match = re.fullmatch(r"node(\d+)", name)
        if match:
            found += _pools(system, f"{NODES}/{name}/hugepages", int(match[1]))
    return found


def _pools(system: System, folder: str, node: int | None) -> list[HugePages]:
    found = []
    for name in system.names(folder):
        match = re.fullmatch(r"hugepages-(\d+)kB", name)
        if match:
            counts = [
                system.number(f"{folder}/{name}/{kind}_hugepages") or 0
                for kind in ("nr", "free", "surplus")
            ]
            found.append(HugePages(int(match[1]) << 10, node, *counts))
    return sorted(found, key=lambda pages: pages.size_bytes)


def default_size_bytes(system: System) -> int:
    """2 MiB where the kernel does not say: then it has no huge pages at all."""
    return meminfo(system, "Hugepagesize") or 2 << 20


def meminfo(system: System, name: str) -> int | None:
    """Bytes, or a count where /proc/meminfo has no unit."""
    match = re.search(rf"^{name}:\s+(\d+)( kB)?$", system.attribute("/proc/meminfo") or "", re.M)
    return None if match is None else int(match[1]) << (10 if match[2] else 0)


def huge_mounts(system: System) -> list[HugeMount]:
    """Raises OSError where mounts cannot be read."""
    found = []
    for mount in own_mounts(system):
        if mount.kind != "hugetlbfs":
            continue
        option = re.search(r"pagesize=(\d+)([KMG])", mount.options)
        shift = {"K": 10, "M": 20, "G": 30}
        bytes_ = int(option[1]) << shift[option[2]] if option else default_size_bytes(system)
        status = system.stat(mount.folder)
        found.append(
            HugeMount(
                mount.folder, bytes_, status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)
            )
        )
    return found


def page_problems(system: System, subject: str) -> list[Problem]:
    """Why a HiFC process would not get its huge pages."""
    problems = []
    default = default_size_bytes(system)
    pools = [pages for pages in huge_pages(system) if pages.node is None]
    free_bytes = sum(pages.free * default for pages in pools if pages.size_bytes == default)
    needed = -(-NEEDED_BYTES // default)
    suggested = -(-SUGGESTED_BYTES // default)
    total = sum(pages.total for pages in pools if pages.size_bytes == default)
    # One number in both fixes: the command mounts a hugetlbfs as well.
    count = max(total, needed)
    if free_bytes < NEEDED_BYTES:
        count = max(total + needed, suggested)
        others = [pages for pages in pools if pages.size_bytes != default and pages.free]
        wrong = "".join(
            f"; {pages.free} of {size(pages.size_bytes)} do not count" for pages in others
        )
        problems.append(
            Problem(
                "huge-pages",
                subject,
                f"at least {needed} free huge pages of {size(default)} are needed",
                f"{free_bytes // default} of {total} are free{wrong}",
                f"hifc-admin hugepages --count {count}",
            )
        )
    if not any(mount.size_bytes == default for mount in huge_mounts(system)):
        problems.append(
            Problem(
                "hugetlbfs",
                subject,
                f"no hugetlbfs for pages of {size(default)} is mounted",
                "/proc/self/mountinfo",
                f"hifc-admin hugepages --count {count}",
            )
        )
    return problems


def locked_limit(system: System, user: User | None, group: str | None) -> tuple[int | None, str]:
    """(bytes or None for no limit, where that is written) of a login of a user or of a member of
    a group. A service has its own: LimitMEMLOCK= in its unit."""
    names = [f"@{name}" for name in (user.groups if user else (group,) if group else ())]
    ranks: list[list[str]] = [[user.name] if user else [], names, ["*"]]
    found: dict[int, tuple[int | None, str]] = {}
    for name in [name for pattern in LIMITS for name in system.glob(pattern)]:
        for line in (system.attribute(name) or "").splitlines():
            fields = line.partition("#")[0].split()
            if len(fields) != 4 or fields[2] != "memlock" or fields[1] not in ("-", "soft"):
                continue
            for rank, domains in enumerate(ranks):
                if fields[0] in domains:
                    found[rank] = _limit(fields[3]), f"{name}: {' '.join(fields)}"
    if found:
        return found[min(found)]
    return KERNEL_LOCKED_BYTES, f"nothing about memlock in {' and '.join(LIMITS)}"


def _limit(text: str) -> int | None:
    return int(text) << 10 if text.isdigit() else None  # unlimited, infinity, -1


def locked_problems(
    system: System, subject: str, user: User | None, group: str | None
) -> list[Problem]:
    """Why a HiFC process of that user, or of a member of that group, could not register memory:
    its services, or where it has none, a login."""
    if user is not None and user.uid == 0:
        return []
    services = services_of(system, user, group)
    if services:
        return [_short_service(subject, found) for found in services if _is_short(found)]
    limit, where = locked_limit(system, user, group)
    if limit is None or limit >= NEEDED_BYTES:
        return []
    who = f"user {user.name}" if user else f"a member of group {group}"
    return [
        Problem(
            "locked-memory",
            subject,
            f"{who} may lock {size(limit)} of memory; all that the drive is to reach counts, and "
            f"{size(NEEDED_BYTES)} is the least",
            where,
            "hifc-admin install lifts it for members of group hifc; for another user write "
            f"'{user.name if user else '@' + str(group)} - memlock unlimited' into "
            "/etc/security/limits.d/hifc.conf and log in anew",
        )
    ]


def _is_short(service: Service) -> bool:
    return service.locked_bytes is not None and service.locked_bytes < NEEDED_BYTES


def _short_service(subject: str, service: Service) -> Problem:
    return Problem(
        "locked-memory",
        subject,
        f"{service.name} runs as {service.user} and may lock {size(service.locked_bytes or 0)} of "
        f"memory; all that the drive is to reach counts, and {size(NEEDED_BYTES)} is the least",
        service.evidence,
        f"hifc-admin install --service {service.name}, then restart it",
    )
