# SPDX-License-Identifier: Apache-2.0
"""What must hold before a drive leaves the kernel: nobody uses it, an IOMMU stands before it, and
whoever is to drive it gets the memory for that."""

from __future__ import annotations

from dataclasses import dataclass

from hifc_admin.host import accounts, iommu, memory
from hifc_admin.host.claims import Claims, claimed_usage
from hifc_admin.host.drives import Drive
from hifc_admin.host.system import System
from hifc_admin.host.usage import Usage, Use, not_checked
from hifc_admin.result import Exit, Failure, Problem, Severity


@dataclass(frozen=True)
class Options:
    """Of bind, as the user gave them."""

    driver: str = iommu.VFIO
    user: str | None = None
    group: str | None = None
    signatures: frozenset[str] = frozenset()  # short names of those that may be there
    no_iommu: bool = False
    persist: bool = False


@dataclass(frozen=True)
class Access:
    """Who gets the node of the drive's IOMMU group."""

    user: accounts.User | None
    group: str
    gid: int

    @property
    def owner(self) -> str:
        return self.user.name if self.user else "root"

    @property
    def uid(self) -> int:
        return self.user.uid if self.user else 0

    @property
    def is_root_only(self) -> bool:
        return not self.uid and not self.gid

    @property
    def mode(self) -> int:
        return 0o660 if self.gid else 0o600


def access_of(system: System, options: Options) -> Access:
    """Group hifc unless another one is named, and where there is none, root alone.

    Raises Failure for a user or group that does not exist.
    """
    user = accounts.find_user(system, options.user) if options.user else None
    name = options.group or accounts.HIFC_GROUP
    gid = accounts.find_group(system, name)
    if gid is None and options.group is not None:
        fix = f"groupadd --system {name}; hifc-admin install makes the group hifc"
        detail = "there is no such group"
        raise Failure(Exit.USAGE, Problem("no-such-group", name, detail, "/etc/group", fix))
    if gid is None or (options.driver == iommu.UIO and options.group is None):
        return Access(user, "root", 0)
    return Access(user, name, gid)


def check_usage(system: System, drive: Drive, claims: Claims) -> Usage:
    """What uses the drive and what is on it, the claims taken and kept."""
    usage = claimed_usage(system, drive, claims)
    if drive.driver in (None, *iommu.USERSPACE_DRIVERS):
        usage.uses.append(_left_the_kernel(drive))
    return usage


def check_memory(system: System, drive: Drive, options: Options, access: Access) -> list[Problem]:
    """Prerequisites of whoever is to drive it."""
    problems: list[Problem] = []
    try:
        problems += memory.page_problems(system, drive.bdf)
    except OSError as error:
        detail = "could not check whether there are huge pages"
        problems.append(Problem("not-checked", drive.bdf, detail, str(error), "run it as root"))
    group = access.group if access.gid else None
    if access.user is not None or group is not None:
        problems += memory.locked_problems(system, drive.bdf, access.user, group)
    if options.driver == iommu.UIO and not access.is_root_only:
        detail = f"{iommu.UIO} needs physical addresses, which only root may see"
        fix = "use vfio-pci, or leave --user and --group out"
        problems.append(Problem("uio-needs-root", drive.bdf, detail, fix=fix))
    return problems


def warnings(
    system: System, drive: Drive, usage: Usage, options: Options, access: Access
) -> list[Problem]:
    """What does not stand in the way and should be known."""
    found = []
    named = {use.override for use in usage.uses}
    for name in sorted(options.signatures - named):
        detail = f"--signature {name}: there is no such signature on this drive"
        found.append(Problem("unused-option", drive.bdf, detail))
    others = iommu.bound_otherwise(system, drive, options.driver)
    if others:
        detail = f"{', '.join(others)}: with another driver of user space than {options.driver}"
        fix = "bind all drives that one process uses to vfio-pci"
        found.append(Problem("drivers-mixed", drive.bdf, detail, "/sys/bus/pci/drivers", fix))
    if options.driver == iommu.UIO or not iommu.has_iommu(system, drive):
        detail = "no IOMMU protects this machine's memory from the drive; HiFC will not open it"
        found.append(Problem("unprotected", drive.bdf, detail, fix="for other programs only"))
    elif access.is_root_only:
        detail = "only root may use the drive: there is no group hifc"
        fix = "hifc-admin install, then bind it again"
        found.append(Problem("root-only", drive.bdf, detail, "/etc/group", fix))
    return [Problem(**{**vars(problem), "severity": Severity.WARNING}) for problem in found]


def _left_the_kernel(drive: Drive) -> Use:
    return not_checked(
        drive.bdf,
        "",
        f"its driver is {drive.driver or 'missing'}",
        "the kernel does not have the drive, so what is on it could not be checked",
        f"hifc-admin unbind {drive.bdf}, then bind it",
    )
