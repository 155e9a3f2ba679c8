# SPDX-License-Identifier: Apache-2.0
"""Whether an IOMMU keeps a drive to the memory of the process that drives it."""

from __future__ import annotations

from hifc_admin.host.drives import CLASS_BRIDGE, DEVICES, Drive, driver_of
from hifc_admin.host.system import System
from hifc_admin.result import Problem

VFIO = "vfio-pci"
UIO = "uio_pci_generic"
USERSPACE_DRIVERS = (VFIO, UIO)
# The kernel gives a group away while all its devices are with one of these, or with none.
_VIABLE = (None, VFIO, "pci-stub")
UNSAFE_MODE = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"


def has_iommu(system: System, drive: Drive) -> bool:
    if drive.iommu_group is None:
        return False
    # Without an IOMMU vfio makes groups of its own when it is told to.
    return system.attribute(f"{drive.sysfs}/iommu_group/name") != "vfio-noiommu"


def members(system: System, bdf: str) -> list[str]:
    """The other devices of its group."""
    return [name for name in system.names(f"{DEVICES}/{bdf}/iommu_group/devices") if name != bdf]


def refusals(system: System, drive: Drive, driver: str, consent: bool) -> list[Problem]:
    """Why the drive must not go to a driver of user space. consent: to doing without protection."""
    has = has_iommu(system, drive)
    if not consent and (driver == UIO or not has):
        return [_no_protection(system, drive, driver)]
    if driver == UIO:
        kind = system.attribute(f"{drive.sysfs}/iommu_group/type") if has else None
        return [_translated(drive, kind)] if kind is not None and kind != "identity" else []
    return _foreign(system, drive) if has else []


def bound_otherwise(system: System, drive: Drive, driver: str) -> list[str]:
    """Other drives that have another kind of driver: SPDK cannot address memory for both."""
    other = UIO if driver == VFIO else VFIO
    bound = system.names(f"/sys/bus/pci/drivers/{other}")
    return [name for name in bound if ":" in name and name != drive.bdf]


def _no_protection(system: System, drive: Drive, driver: str) -> Problem:
    arguments = system.attribute("/proc/cmdline") or ""
    settings = [word for word in arguments.split() if "iommu" in word]
    said = f"on the kernel's command line: {' '.join(settings) or 'nothing about it'}"
    if driver == UIO:
        detail = f"with {UIO} the drive can read and write any memory of this machine"
        fix = "use vfio-pci; or add --no-iommu if everything on this machine is yours"
        return Problem("no-iommu", drive.bdf, detail, said, fix)
    detail = "no IOMMU stands before the drive: it could read and write any memory of this machine"
    evidence = f"{drive.sysfs}/iommu_group is missing; {said}"
    fix = (
        "turn it on in the firmware (VT-d, AMD-Vi) and boot with intel_iommu=on; or add --no-iommu "
        "if everything on this machine is yours (HiFC itself then still refuses the drive)"
    )
    return Problem("no-iommu", drive.bdf, detail, evidence, fix)


def _translated(drive: Drive, kind: str) -> Problem:
    return Problem(
        "iommu-blocks-uio",
        drive.bdf,
        f"the IOMMU is on, and {UIO} cannot tell it what the drive may reach",
        f"{drive.sysfs}/iommu_group/type: {kind}",
        "use vfio-pci; or boot with iommu=pt",
    )


def _foreign(system: System, drive: Drive) -> list[Problem]:
    foreign = {}
    for bdf in members(system, drive.bdf):
        is_bridge = (system.attribute(f"{DEVICES}/{bdf}/class") or "").startswith(CLASS_BRIDGE)
        driver = driver_of(system, bdf)
        if not is_bridge and driver not in _VIABLE:
            foreign[bdf] = driver
    if not foreign:
        return []
    listed = ", ".join(f"{bdf} ({driver})" for bdf, driver in foreign.items())
    return [
        Problem(
            "foreign-members",
            drive.bdf,
            f"others in its IOMMU group {drive.iommu_group} would have to go with it: {listed}",
            f"{drive.sysfs}/iommu_group/devices",
            "put the drive into a slot with a group of its own, or turn ACS on in the firmware",
        )
    ]
