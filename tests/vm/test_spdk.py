# SPDX-License-Identifier: Apache-2.0
"""Namespaces on a drive behind an IOMMU, through SPDK and PCIe: values, health, faults, owners."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from busy import LINE_TIMEOUT_S, SEGMENT, assert_synced, under_load

from hifc import DeviceBusy, DeviceError, HiFC, HiFCError, Namespace
from hifc.namespace.ticket import Ticket
from hifc.staging.bar import PciBarProvider
from vm.pci import Drive, PciDevice, wait_until
from vm.qmp import Qmp

# From a fault to the error it takes up to 13 s: the command timeout of 5 s and a reset in vain. The
# rest is for hosts that are busy.
FAULT_TIMEOUT_S = 180.0
HOST_PATHING_ERROR = (3, 0x70)
LENGTHS = (1, 511, 4096, 4097, 131072, 1 << 20)


def value(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def store(ns: Namespace) -> None:
    for length in LENGTHS:
        assert ns.put(key(length), value(length)).name == "OK"


def assert_stored(ns: Namespace) -> None:
    for length in LENGTHS:
        found = ns.get(key(length))
        assert found is not None
        assert (found == value(length)).all()


# ---- values


def test_values_over_pcie(bound: Drive) -> None:
    Namespace.format(bound.uri, segment_size=SEGMENT, force=True)
    with Namespace.open(bound.uri) as ns:
        store(ns)
        assert_stored(ns)
    with Namespace.open(bound.uri) as ns:
        assert_stored(ns)
        assert ns.check().problems == 0


def test_the_kernel_finds_the_drive_intact_afterwards(free: Drive) -> None:
    with free.pci.bound("vfio-pci"):
        Namespace.format(free.uri, segment_size=SEGMENT, force=True)
        with Namespace.open(free.uri) as ns:
            store(ns)
    node = free.pci.block_device()
    with Namespace.open(f"file://{node}") as ns:
        assert_stored(ns)
    with free.pci.bound("vfio-pci"), Namespace.open(free.uri) as ns:
        assert_stored(ns)


def test_blocks_of_512_bytes(small: Drive) -> None:
    with small.pci.bound("vfio-pci"):
        Namespace.format(small.uri, segment_size=SEGMENT, force=True)
        with Namespace.open(small.uri, drive="inline") as ns:
            store(ns)
            assert_stored(ns)


def test_health_over_the_admin_queue(bound: Drive) -> None:
    Namespace.format(bound.uri, segment_size=SEGMENT, force=True)
    with Namespace.open(bound.uri) as ns:
        before = ns.health()
        store(ns)
        after = ns.health()
    assert before.ok
    assert 273 < before.temperature_kelvin < 373
    assert after.host_write_commands > before.host_write_commands


@pytest.fixture
def bar(addresses: dict[str, str]) -> PciDevice:
    """A second PCI device with a BAR of memory; it stands in for a GPU."""
    return PciDevice(addresses["bar-device"])


def assert_done(ticket: Ticket) -> None:
    assert ticket.wait(LINE_TIMEOUT_S)
    assert (ticket.answers == 0).all()


def seen_by_others(device: PciDevice) -> np.ndarray:
    """The BAR's memory through a mapping of its own, which neither HiFC nor SPDK knows of."""
    with (device.path / "resource2").open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)


def test_values_move_between_the_drive_and_a_bar(bound: Drive, bar: PciDevice) -> None:
    count, length = 8, 512 << 10
    data = np.stack([value(length + number)[:length] for number in range(count)])
    keys = [key(number) for number in range(count)]
    Namespace.format(bound.uri, segment_size=SEGMENT, force=True)
    provider = PciBarProvider(bar.bdf, "resource2")
    with Namespace.open(bound.uri, staging="gpu", staging_size="8MiB", bar=provider) as ns:
        seen = seen_by_others(bar)
        source = ns.staging.buffer(count * length).reshape(count, length)
        at = ns.offset(source)
        seen[at : at + source.size] = data.reshape(-1)
        assert_done(ns.put_many(keys, source, parts=4))
        seen[:] = 0
        back = ns.buffer(count * length).reshape(count, length)
        assert_done(ns.get_many(keys, back))
        assert (back == data).all()  # so the drive had read the BAR

        target = ns.staging.buffer(count * length // 2).reshape(count // 2, length)
        at = ns.offset(target)
        assert_done(ns.get_many(keys[:4], target))
        assert (seen[at : at + target.size] == data[:4].reshape(-1)).all()
        part = ns.staging.buffer(length // 4)
        assert ns.get_range(keys[7], length // 2, length // 4, out=part) is not None
        at = ns.offset(part)
        assert (seen[at : at + part.size] == data[7, length // 2 : length * 3 // 4]).all()
        assert ns.stats().bounce_bytes == 0  # no byte was copied in memory on any of these ways
        del source, target, part
    assert bar.read("enable") == "0"


def test_auto_staging_takes_the_bar_where_the_drive_reaches_it(
    bound: Drive, bar: PciDevice
) -> None:
    config = {"device": bound.uri, "format": "always", "memory_budget": "4MiB"}
    config |= {"swap_buffer_size": "2MiB", "pool_size": "8MiB", "segment_size": SEGMENT}
    with HiFC(config, bar=PciBarProvider(bar.bdf, "resource2_wc")) as engine:
        assert engine.namespace.staging.kind == "gpu"
        memory = engine.namespace.staging.buffer(4097)
        memory[:] = value(4097)
        engine.namespace.put(key(1), memory)
        assert (engine.namespace.get(key(1)) == value(4097)).all()


# ---- what is refused


def test_a_drive_of_the_kernel_is_refused(used: Drive) -> None:
    before = used.pci.driver
    with pytest.raises(HiFCError, match="vfio-pci"):
        Namespace.format(used.uri, segment_size=SEGMENT, force=True)
    assert used.pci.driver == before


def test_a_second_process_is_refused(bound: Drive) -> None:
    with under_load(bound) as child:
        with pytest.raises(DeviceBusy) as caught:
            Namespace.open(bound.uri)
        assert child.process.pid in caught.value.holders


# ---- faults


def test_a_drive_that_the_kernel_has_locked_is_waited_for(bound: Drive) -> None:
    """As it is for a moment after it was plugged in. A reset through sysfs holds the lock, too."""
    Namespace.format(bound.uri, segment_size=SEGMENT, force=True)
    reset = subprocess.Popen(["dd", f"of={bound.pci.path}/reset", "status=none"], stdin=PIPE)
    assert reset.stdin is not None
    reset.stdin.write(b"1")
    reset.stdin.close()
    state = Path(f"/proc/{reset.pid}/stat")
    wait_until(lambda: state.read_text().split()[2] in "DZ", "a reset that sleeps with the lock")
    with Namespace.open(bound.uri) as ns:
        # VFIO gives nobody a drive that is locked: the write has returned, or is about to.
        assert reset.wait(timeout=180) == 0
        store(ns)
        assert_stored(ns)


def test_a_failing_drive_is_a_device_error(small: Drive, qmp: Qmp) -> None:
    with small.pci.bound("vfio-pci"):
        Namespace.format(small.uri, segment_size=SEGMENT, force=True)
        with Namespace.open(small.uri) as ns:
            store(ns)
            qmp.fail_drive(small.spec, True)
            with pytest.raises(DeviceError) as caught:
                ns.get(key(131072))
            assert (caught.value.sct, caught.value.sc) == (2, 0x81)  # Unrecovered Read Error
            assert caught.value.command == "read"
            qmp.fail_drive(small.spec, False)
            assert_stored(ns)


def test_a_failed_write_loses_nothing_else(small: Drive, qmp: Qmp) -> None:
    with small.pci.bound("vfio-pci"):
        Namespace.format(small.uri, segment_size=SEGMENT, force=True)
        with Namespace.open(small.uri) as ns:
            store(ns)
            qmp.fail_drive(small.spec, True)
            with pytest.raises(DeviceError) as caught:
                ns.put(key(7), value(4096))
            assert (caught.value.sct, caught.value.sc) == (2, 0x80)  # Write Fault
            assert caught.value.command == "write"
            qmp.fail_drive(small.spec, False)
            assert ns.get(key(7)) is None
            assert ns.put(key(7), value(4096)).name == "OK"
        with Namespace.open(small.uri) as ns:
            assert_stored(ns)
            assert (ns.get(key(7)) == value(4096)).all()


def test_unplugged_under_load(bound: Drive, qmp: Qmp) -> None:
    with under_load(bound) as child:
        qmp.unplug(bound.spec)
        error = child.error(FAULT_TIMEOUT_S)
        assert error["type"] == "DeviceError", error
        # Refused by us: what the drive had already, it finished.
        assert (error["sct"], error["sc"]) in ((0, 0), HOST_PATHING_ERROR), error
        assert "then open it again" in error["text"]
        child.wait_for("closed")
        qmp.wait_unplugged(bound.spec)
    qmp.plug(bound.spec)
    bound.pci.wait_until_there()
    with bound.pci.bound("vfio-pci"), Namespace.open(bound.uri) as ns:
        assert_synced(ns)


def test_torn_out_under_load(bound: Drive) -> None:
    with under_load(bound) as child:
        with bound.pci.cut_off():
            error = child.error(FAULT_TIMEOUT_S)
            assert error["type"] == "DeviceError", error
            child.wait_for("closed")
        assert child.process.wait(timeout=FAULT_TIMEOUT_S) == 0
    bound.pci.unbind()
    bound.pci.bind("vfio-pci")
    with Namespace.open(bound.uri) as ns:
        assert_synced(ns)


def test_killed_under_load(bound: Drive) -> None:
    with under_load(bound) as child:
        held = huge_pages_of(child.process.pid)
        assert held > 0
        free_pages = huge_pages_free()
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
    wait_until(lambda: huge_pages_free() >= free_pages + held, f"the dead process's {held} pages")
    assert not list(Path("/dev/hugepages").iterdir())
    assert bound.pci.driver == "vfio-pci"
    with Namespace.open(bound.uri) as ns:
        assert_synced(ns)
        assert ns.check().problems == 0


def huge_pages_free() -> int:
    return field("/proc/meminfo", "HugePages_Free")


def huge_pages_of(pid: int) -> int:
    """Pages of 2 MiB that the process has."""
    return field(f"/proc/{pid}/status", "HugetlbPages") // 2048


def field(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
