# SPDX-License-Identifier: Apache-2.0
"""What tests in the virtual machine share: its drives, and QEMU's monitor.

These tests bind, unplug and overwrite drives, so they run only in the machine of tools/vm/run.
tests/conftest.py leaves this folder out elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vm import drives
from vm.drives import DriveSpec
from vm.pci import Drive, PciDevice
from vm.qmp import Qmp


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # tools/lib/report.py fails CI unless a test with this property passed.
        if item.path.is_relative_to(Path(__file__).parent):  # it gets those of every folder
            item.user_properties.append(("needs", "vm"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tells of a failure at once: a machine that hangs later is killed before the summary."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext}", flush=True)


@pytest.fixture(scope="session")
def qmp() -> Iterator[Qmp]:
    """QEMU's monitor."""
    monitor = Qmp()
    yield monitor
    monitor.close()


@pytest.fixture(scope="session")
def addresses(qmp: Qmp) -> dict[str, str]:
    """The bdf of each drive by its name, as QEMU knows it."""
    return qmp.addresses()


@pytest.fixture
def used(addresses: dict[str, str]) -> Drive:
    """The drive with a partition that holds an ext4 file system. Not to be written to."""
    return Drive(drives.USED, PciDevice(addresses[drives.USED.name]))


def lent(spec: DriveSpec, addresses: dict[str, str], qmp: Qmp) -> Iterator[Drive]:
    """A drive that the test may do anything with; afterwards the kernel has it again."""
    drive = Drive(spec, PciDevice(addresses[spec.name]))
    yield drive
    if spec.can_fail:
        qmp.fail_drive(spec, False)
    if not drive.pci.exists:
        qmp.plug(spec)
    drive.pci.wait_until_there()
    if drive.pci.driver != "nvme":
        drive.pci.unbind()
    drive.pci.block_device()


@pytest.fixture
def free(addresses: dict[str, str], qmp: Qmp) -> Iterator[Drive]:
    """A drive of 1 GiB with blocks of 4 KiB, with the kernel's driver."""
    yield from lent(drives.FREE, addresses, qmp)


@pytest.fixture
def small(addresses: dict[str, str], qmp: Qmp) -> Iterator[Drive]:
    """A drive of 128 MiB with blocks of 512 bytes that can be made to fail (Qmp.fail_drive)."""
    yield from lent(drives.SMALL, addresses, qmp)


@pytest.fixture
def bound(free: Drive) -> Iterator[Drive]:
    """The free drive, bound to vfio-pci."""
    with free.pci.bound("vfio-pci"):
        yield free
