# SPDX-License-Identifier: Apache-2.0
"""hifc-admin on a real kernel: refusals, bind, use without root through udev, unbind, cleanup."""

from __future__ import annotations

import grp
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from admin_shell import Shell
from hifc_admin.result import Exit
from vm.pci import Drive, PciDevice, wait_until

UNKNOWN_UID = 4321
# Everything is loaded before the privileges go, since others than root may not read it there.
USE = """
import ctypes, os, sys
from hifc.native_lib.libhifc import library
from hifc import Namespace
library()
uid, gid, uri = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgroups([gid])
os.setgid(uid)
os.setuid(uid)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is its own again
with Namespace.open(uri) as ns:
    assert ns.put(b"k" * 16, b"v" * 5000).name == "OK"
    assert bytes(ns.get(b"k" * 16)) == b"v" * 5000
print("used")
"""


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def codes(document: dict[str, Any]) -> set[str]:
    return {problem["code"] for problem in document["problems"]}


def refused(admin: Shell, drive: Drive, code: str, *words: str) -> None:
    """bind refuses with that code, and the kernel keeps the drive."""
    exit_code, document = admin.json("bind", drive.pci.bdf, *words)
    assert exit_code == Exit.REFUSED
    assert code in codes(document), document
    assert drive.pci.driver == "nvme"


def partition(drive: Drive) -> Path:
    return Path(f"{drive.pci.block_device()}p1")


# ---- list and refusals


def test_list_knows_the_drives(admin: Shell, used: Drive, free: Drive) -> None:
    code, document = admin.json("list")
    assert code == Exit.DONE
    drives = {drive["bdf"]: drive for drive in document["data"]["drives"]}
    assert len(drives) == 3
    mine = drives[free.pci.bdf]
    assert (mine["serial"], mine["driver"]) == (free.spec.serial, "nvme")
    assert (mine["in_use"], mine["uses"]) == (False, [])
    (namespace,) = mine["namespaces"]
    assert namespace["size_bytes"] == free.spec.size_bytes
    assert (namespace["lba_bytes"], namespace["nsid"]) == (4096, 1)
    assert mine["iommu_group"] == str(free.pci.iommu_group)
    (namespace,) = drives[used.pci.bdf]["namespaces"]
    names = [name for _, name in namespace["signatures"]]
    assert names == ["an MBR partition table", "an ext4 file system"]


def test_signatures_are_refused(admin: Shell, used: Drive) -> None:
    refused(admin, used, "signature")
    refused(admin, used, "signature", "--signature", "ext4")


def test_a_mounted_drive_is_refused(admin: Shell, used: Drive, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "ro", partition(used), tmp_path], check=True)
    try:
        refused(admin, used, "mounted", "--signature", "ext4", "--signature", "mbr")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_mount_of_another_namespace_is_refused(admin: Shell, used: Drive, tmp_path: Path) -> None:
    command = f"mount -o ro {partition(used)} {tmp_path} && echo there && exec sleep 600"
    with subprocess.Popen(["unshare", "-m", "sh", "-c", command], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        refused(admin, used, "mounted", "--signature", "ext4", "--signature", "mbr")
        child.kill()


def test_a_boot_disk_is_refused(admin: Shell, used: Drive) -> None:
    fstab = Path("/etc/fstab")
    before = fstab.read_text() if fstab.exists() else ""
    fstab.write_text(f"{partition(used)} /boot ext4 noauto 0 2\n")
    try:
        refused(admin, used, "boot-disk", "--signature", "ext4", "--signature", "mbr")
    finally:
        fstab.write_text(before)


def test_a_loop_on_it_is_refused(admin: Shell, free: Drive) -> None:
    subprocess.run(["modprobe", "loop"], check=True)
    command = ["losetup", "--find", "--show", free.pci.block_device()]
    loop = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        refused(admin, free, "holder")
    finally:
        subprocess.run(["losetup", "-d", loop], check=True)


def test_a_volume_on_it_is_refused(admin: Shell, free: Drive) -> None:
    subprocess.run(["modprobe", "dm-mod"], check=True)
    table = f"0 2048 linear {free.pci.block_device()} 0"
    create = ["dmsetup", "create", "--noudevsync", "hifc-test", "--table", table]
    subprocess.run(create, check=True)
    try:
        refused(admin, free, "holder")
        _, document = admin.json("bind", free.pci.bdf)
        assert "dm-0 (hifc-test)" in document["problems"][0]["detail"]
    finally:
        subprocess.run(["dmsetup", "remove", "--noudevsync", "hifc-test"], check=True)


def test_swap_is_refused(admin: Shell, small: Drive) -> None:
    node = small.pci.block_device()
    subprocess.run(["mkswap", node], check=True, stdout=subprocess.DEVNULL)
    try:
        refused(admin, small, "signature")
        subprocess.run(["swapon", node], check=True)
        refused(admin, small, "swap", "--signature", "swap")
        subprocess.run(["swapoff", node], check=True)
    finally:
        with node.open("r+b") as file:
            file.write(bytes(8192))
            os.fsync(file.fileno())


def test_a_process_that_holds_it_is_refused(admin: Shell, free: Drive) -> None:
    with free.pci.block_device().open("rb") as node:
        command = ["sleep", "600"]
        with subprocess.Popen(command, stdin=node) as child:
            refused(admin, free, "process")
            child.kill()


def test_a_claim_is_refused(admin: Shell, used: Drive) -> None:
    """Whoever it is: the kernel's own answer counts."""
    fd = os.open(partition(used), os.O_RDONLY | os.O_EXCL)
    try:
        refused(admin, used, "claimed", "--signature", "ext4", "--signature", "mbr")
    finally:
        os.close(fd)


# ---- bind, use, unbind


@pytest.fixture(scope="session")
def udev() -> Iterator[Path]:
    """udevd with Debian's default rules; the path of udevadm."""
    folder = Path(Path("/run/hifc-vm/udev").read_text())
    rules = Path("/usr/lib/udev/rules.d")
    rules.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "lib/udev/rules.d/50-udev-default.rules", rules)
    program = Path("/usr/bin/udevadm")
    shutil.copy(folder / "bin/udevadm", program)
    daemon = Path("/usr/lib/systemd/systemd-udevd")
    daemon.unlink(missing_ok=True)
    daemon.symlink_to(program)
    with subprocess.Popen([daemon], stderr=subprocess.DEVNULL) as child:
        wait_until(lambda: Path("/run/udev/control").exists(), "udevd listening")
        yield program
        child.terminate()


@pytest.fixture(scope="session")
def installed(udev: Path) -> int:
    """hifc-admin install, done; the gid of group hifc."""
    done = subprocess.run(["hifc-admin", "install"], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    return grp.getgrnam("hifc").gr_gid


@pytest.fixture
def given(admin: Shell, installed: int, free: Drive) -> Iterator[Drive]:
    """A drive that hifc-admin bound."""
    assert admin("bind", free.pci.bdf) == Exit.DONE, admin.err
    yield free
    if free.pci.driver == "vfio-pci":
        assert admin("unbind", free.pci.bdf) == Exit.DONE, admin.err


def access(node: Path) -> tuple[int, int, int]:
    status = node.stat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def group_node(device: PciDevice) -> Path:
    return Path(f"/dev/vfio/{device.iommu_group}")


def test_bind_and_unbind(admin: Shell, installed: int, free: Drive) -> None:
    node = free.pci.block_device()
    before = node.open("rb").read(1 << 20)
    code, document = admin.json("bind", free.pci.bdf, "--dry-run")
    assert (code, free.pci.driver) == (Exit.DONE, "nvme")
    planned = document["data"]["steps"]
    code, document = admin.json("bind", free.pci.bdf)
    assert (code, document["problems"]) == (Exit.DONE, [])
    assert document["data"]["steps"] == planned
    assert free.pci.driver == "vfio-pci"
    assert access(group_node(free.pci)) == (0, installed, 0o660)
    code, document = admin.json("list")
    mine = next(d for d in document["data"]["drives"] if d["bdf"] == free.pci.bdf)
    assert (mine["serial"], mine["bound"]) == (free.spec.serial, True)
    code, document = admin.json("unbind", free.pci.bdf)
    assert (code, document["problems"]) == (Exit.DONE, [])
    assert document["data"]["block_devices"] == [str(node)]
    assert node.open("rb").read(1 << 20) == before


def test_udev_opens_the_bound_drives_group_and_no_other_one(
    installed: int, udev: Path, given: Drive, addresses: dict[str, str]
) -> None:
    other = PciDevice(addresses["bar-device"])
    other.bind("vfio-pci")
    try:
        mine, foreign = group_node(given.pci), group_node(other)
        wait_until(foreign.exists, "the other group's node")
        for node in (mine, foreign):
            os.chown(node, 0, 0)
            node.chmod(0o600)
            device = f"/sys/class/vfio/{node.name}"
            subprocess.run([udev, "trigger", "--action=add", device], check=True)
        subprocess.run([udev, "settle", "--timeout=180"], check=True)
        assert access(mine) == (0, installed, 0o660)
        assert access(foreign) == (0, 0, 0o600)
    finally:
        other.release()  # the kernel has no driver of its own for it
        (other.path / "driver_override").write_text("\n")


def use_as(
    uid: int, gid: int, uri: str, locked_bytes: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    """By a process without any privilege, by default with the limit of limits.d/hifc.conf."""

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked_bytes, locked_bytes))

    command = [sys.executable, "-P", "-c", USE, str(uid), str(gid), uri]
    return subprocess.run(
        command, preexec_fn=lift, capture_output=True, text=True, check=False, timeout=600
    )


def test_members_of_the_group_use_it_without_root(
    admin: Shell, installed: int, given: Drive
) -> None:
    confirm = f"{given.spec.serial}/1"
    assert admin("format", given.uri, "--confirm", confirm, "--force") == Exit.DONE, admin.err
    done = use_as(UNKNOWN_UID, installed, given.uri)
    assert (done.returncode, done.stdout) == (0, "used\n"), done.stderr
    done = use_as(UNKNOWN_UID, UNKNOWN_UID, given.uri)
    assert done.returncode != 0
    assert "NotPermitted" in done.stderr
    assert "may not open its group" in done.stderr
    done = use_as(UNKNOWN_UID, installed, given.uri, locked_bytes=64 << 10)
    assert done.returncode != 0
    assert "may lock 65536 bytes" in done.stderr
    assert admin("unbind", given.pci.bdf) == Exit.DONE, admin.err
    # The kernel sees an intact drive, and HiFC's namespace on it through the kernel.
    node = given.pci.block_device()
    code, document = admin.json("info", f"file://{node}")
    assert (code, document["data"]["entries"]) == (Exit.DONE, 1)
    code, document = admin.json("list")
    mine = next(d for d in document["data"]["drives"] if d["bdf"] == given.pci.bdf)
    assert "a HiFC namespace" in mine["namespaces"][0]["hifc"]
    # And that is no obstacle to binding it.
    assert admin("bind", given.pci.bdf) == Exit.DONE, admin.err


def test_a_drive_in_use_is_not_given_back(admin: Shell, given: Drive) -> None:
    with (
        group_node(given.pci).open("r+b", buffering=0) as node,
        subprocess.Popen(["sleep", "600"], stdin=node) as child,
    ):
        code, document = admin.json("unbind", given.pci.bdf)
        assert (code, codes(document)) == (Exit.REFUSED, {"process"})
        child.kill()
    assert given.pci.driver == "vfio-pci"


def test_a_bind_that_was_killed_is_put_right(admin: Shell, given: Drive) -> None:
    record = Path(f"/run/hifc-admin/{given.pci.bdf}.json")
    # As it is between the moments in which the drive has no driver and has the new one.
    record.write_text(json.dumps(json.loads(record.read_text()) | {"phase": "binding"}))
    given.pci.release()
    assert given.pci.driver is None
    assert admin("cleanup") == Exit.DONE, admin.err
    assert given.pci.driver == "nvme"
    given.pci.block_device()
    assert not record.exists()


def test_huge_pages(admin: Shell) -> None:
    name = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    before = int(name.read_text())
    assert admin("hugepages", "--count", str(before + 2)) == Exit.DONE, admin.err
    assert int(name.read_text()) == before + 2
    assert admin("hugepages", "--count", str(before)) == Exit.DONE
