# SPDX-License-Identifier: Apache-2.0
"""Moves one PCI device from a driver to another one, and back.

Only driver_override, unbind and bind of that device are written to: no new_id, which would take
every device of its kind. The override stands while user space has the device, so that loading the
kernel's module again does not take it back.
"""

from __future__ import annotations

from collections.abc import Callable

from hifc_admin.host.drives import DEVICES, driver_of, read_drive
from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem

DRIVERS = "/sys/bus/pci/drivers"
POLL_S = 0.05
DRIVER_WAIT_S = 10.0
BLOCK_WAIT_S = 30.0
# What driver_override reads where none is set.
_NONE = "(null)"


def override_of(system: System, bdf: str) -> str:
    """What is set, or nothing."""
    text = system.attribute(f"{DEVICES}/{bdf}/driver_override") or ""
    return "" if text == _NONE else text


def move(system: System, bdf: str, driver: str, release: Callable[[], None]) -> None:
    """Gives the device to `driver`, which must be loaded. release: called once it has none, for
    descriptors that were held until then. Raises Failure where the driver did not take it."""
    system.write(f"{DEVICES}/{bdf}/driver_override", f"{driver}\n")
    detach(system, bdf)
    release()
    system.write("/sys/bus/pci/drivers_probe", bdf)
    _wait_for_driver(system, bdf, driver)


def detach(system: System, bdf: str) -> None:
    if driver_of(system, bdf) is not None:
        system.write(f"{DEVICES}/{bdf}/driver/unbind", bdf)


def give_back(system: System, bdf: str, driver: str | None, override: str = "") -> None:
    """Puts it with the driver again (None: with none), from wherever it got to."""
    if driver_of(system, bdf) not in (None, driver):
        detach(system, bdf)
    system.write(f"{DEVICES}/{bdf}/driver_override", f"{override}\n")
    if driver is None:
        detach(system, bdf)
    elif driver_of(system, bdf) != driver:
        system.write(f"{DRIVERS}/{driver}/bind", bdf)
        _wait_for_driver(system, bdf, driver)


def wait_for_namespaces(system: System, bdf: str, count: int | None) -> list[str]:
    """Block devices of a drive that the kernel has again, as soon as there are `count`; None: as
    soon as its driver calls it live and one is there. What there is after BLOCK_WAIT_S."""

    def found() -> list[str]:
        drive = read_drive(system, bdf)
        return [
            namespace.node
            for namespace in drive.namespaces
            if not namespace.is_hidden
            and namespace.size_bytes > 0
            and system.exists(f"/dev/{namespace.node}")
        ]

    wanted = 1 if count is None else count
    wait_until(system, lambda: len(found()) >= wanted, BLOCK_WAIT_S)
    return found()


def wait_until(system: System, done: Callable[[], bool], limit_s: float) -> bool:
    """False where it was not done within limit_s."""
    deadline = system.now_s() + limit_s
    while not done():
        if system.now_s() >= deadline:
            return False
        system.wait_s(POLL_S)
    return True


def _wait_for_driver(system: System, bdf: str, driver: str) -> None:
    if not wait_until(system, lambda: driver_of(system, bdf) == driver, DRIVER_WAIT_S):
        problem = Problem(
            "driver-did-not-take",
            bdf,
            f"{driver} did not take the drive",
            f"{DEVICES}/{bdf}/driver is {driver_of(system, bdf) or 'missing'}",
            f"the kernel's log tells why: dmesg | grep {bdf}",
        )
        raise Failure(Exit.FAILED, problem)
