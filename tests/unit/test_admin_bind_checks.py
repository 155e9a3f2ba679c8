# SPDX-License-Identifier: Apache-2.0
"""The checks before bind, one by one where switching a single one off would go unseen otherwise.

What is in use and how that shows is in test_admin_bind.py; here are the edges of each check.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from admin_shell import Shell, code_of
from fake_host import GROUPS, FakeSystem, Host
from hifc_admin.result import Exit

BDF = "0000:3b:00.0"
ZFS_NAME, ZFS_LABEL = 16 << 10, 128 << 10


def codes(document: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in document["problems"]]


def refuse(
    monkeypatch: pytest.MonkeyPatch, method: str, name: str, error: int = errno.EACCES
) -> None:
    """Looking at that name fails from now on."""
    real = getattr(FakeSystem, method)

    def refusing(system: FakeSystem, looked_at: str, *more: Any) -> Any:
        if looked_at == name:
            raise OSError(error, os.strerror(error), name)
        return real(system, looked_at, *more)

    monkeypatch.setattr(FakeSystem, method, refusing)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


# ---- claims


def test_the_partition_that_is_claimed_is_named(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=2)
    host.claimed.add(f"{node}p1")
    _, document = on_host.json("bind", BDF)
    assert code_of(document) == "claimed"
    assert f"/dev/{node}p1 " in document["problems"][0]["detail"]


def test_a_claim_of_the_whole_names_the_whole(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.claimed.add(node)
    _, document = on_host.json("bind", BDF)
    assert code_of(document) == "claimed"
    assert f"/dev/{node} " in document["problems"][0]["detail"]


def test_what_is_mounted_is_told_once(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.mount("/srv", f"/dev/{node}p1", host.number(f"{node}p1"), "ext4")
    host.claimed.add(f"{node}p1")
    assert codes(on_host.json("bind", BDF)[1]) == ["mounted"]


def test_a_signature_hides_no_claim(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.write_at(f"{node}p1", 0, b"XFSB")
    host.claimed.add(f"{node}p1")
    _, document = on_host.json("bind", BDF, "--signature", "xfs")
    assert code_of(document) == "claimed"


def test_a_refusal_leaves_no_descriptor_open(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=2)
    host.claimed.add(f"{node}p1")
    before = descriptors()
    for _ in range(3):
        on_host("bind", BDF)
    assert descriptors() == before


def test_what_is_claimed_is_read_through_the_claim(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = host.add_drive(BDF)
    real = FakeSystem.open

    def once(system: FakeSystem, name: str, flags: int) -> int:
        if name == f"/dev/{node}" and not flags & os.O_EXCL:
            raise OSError(errno.EBUSY, "a second descriptor is not the one that was claimed")
        return real(system, name, flags)

    monkeypatch.setattr(FakeSystem, "open", once)
    assert on_host("bind", BDF) == Exit.DONE


def test_a_hidden_namespace_is_told_as_that(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.put(f"/sys/class/block/{node}/hidden", "1\n")
    host.path(f"/dev/{node}").unlink()
    assert codes(on_host.json("bind", BDF)[1]) == ["not-checked"]


def test_a_drive_of_another_driver_of_user_space_cannot_be_checked(
    host: Host, on_host: Shell
) -> None:
    host.add_drive(BDF)
    host.put(f"{GROUPS}/12/type", "identity\n")
    uio = ("--driver", "uio_pci_generic", "--no-iommu")
    assert on_host("bind", BDF, *uio) == Exit.DONE
    code, document = on_host.json("bind", BDF)
    assert (code, set(codes(document))) == (Exit.REFUSED, {"not-checked"})
    assert f"hifc-admin unbind {BDF}, then bind it" in [p["fix"] for p in document["problems"]]
    assert host.driver(BDF) == "uio_pci_generic"


def test_a_drive_without_its_controller_cannot_be_checked(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.path(f"/sys/devices/pci0000:00/{BDF}/nvme").rename(host.root.parent / "gone")
    host.path(f"/sys/class/block/{node}").unlink()
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-checked")


# ---- contents


@pytest.mark.parametrize(("named", "left"), [("gpt", "xfs"), ("xfs", "GPT")])
def test_every_signature_of_a_node_is_to_be_named(
    host: Host, on_host: Shell, named: str, left: str
) -> None:
    node = host.add_drive(BDF)
    host.write_at(node, 512, b"EFI PART")
    host.write_at(node, 0, b"XFSB")
    code, document = on_host.json("bind", BDF, "--signature", named)
    assert (code, code_of(document)) == (Exit.REFUSED, "signature")
    assert f" {left} " in document["problems"][0]["detail"]


def test_the_end_of_a_node_is_looked_at(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    size = host.path(f"/dev/{node}").stat().st_size
    host.write_at(node, size - 512, b"EFI PART")
    assert codes(on_host.json("bind", BDF)[1]) == ["signature"]


@pytest.mark.parametrize(
    "name", [b"", (300).to_bytes(4, "big") + b"x" * 300], ids=["none", "too long"]
)
def test_a_pool_whose_name_cannot_be_told_may_be_any_imported_one(
    host: Host, on_host: Shell, name: bytes
) -> None:
    node = host.add_drive(BDF, partitions=1)
    if name:
        host.write_at(f"{node}p1", ZFS_NAME, b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01" + name)
    host.write_at(f"{node}p1", ZFS_LABEL, b"\x0c\xb1\xba\0\0\0\0\0")
    words = ("bind", BDF, "--signature", "zfs")
    host.put("/proc/spl/kstat/zfs/dbgmsg", "")  # a file, not a pool
    assert on_host(*words, "--dry-run") == Exit.DONE
    host.put("/proc/spl/kstat/zfs/tank/state", "ONLINE\n")
    code, document = on_host.json(*words)
    assert (code, code_of(document)) == (Exit.REFUSED, "mounted")


# ---- mounts and swap


def test_a_mount_by_number_alone(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.mount("/srv", "/dev/root", host.number(f"{node}p1"), "ext4")
    assert "mounted" in codes(on_host.json("bind", BDF)[1])


def test_a_source_with_a_space(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.link("/dev/disk/by-label/my disk", f"../../{node}p1")
    host.mount("/srv", "/dev/disk/by-label/my\\040disk", "0:55", "btrfs")
    assert "mounted" in codes(on_host.json("bind", BDF)[1])


def test_the_first_of_several_devices_of_one_mount(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.mount("/srv", f"/dev/{node}p1:/dev/sdz", "0:55", "bcachefs")
    assert "mounted" in codes(on_host.json("bind", BDF)[1])


def test_the_root_of_a_container_is_no_boot_disk(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.add_process(77, "podman", namespace="mnt:[9]")
    host.mount("/", f"/dev/{node}p1", host.number(f"{node}p1"), "xfs", pid=77)
    found = codes(on_host.json("bind", BDF)[1])
    assert "mounted" in found
    assert "boot-disk" not in found


def test_the_root_of_process_1_is_one_also_from_a_namespace_of_ours(
    host: Host, on_host: Shell
) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.link("/proc/self/ns/mnt", "mnt:[5]")
    host.mount("/", f"/dev/{node}p1", host.number(f"{node}p1"), "xfs", pid=1)
    assert "boot-disk" in codes(on_host.json("bind", BDF)[1])


def test_mounts_of_another_namespace_that_may_not_be_read(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.add_drive(BDF)
    host.add_process(77, "secret", namespace="mnt:[9]")
    refuse(monkeypatch, "read", "/proc/77/mountinfo")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-checked")
    assert "process 77" in document["problems"][0]["evidence"]


def ended(host: Host) -> None:
    host.path("/proc/77/mountinfo").unlink()


def is_a_zombie(host: Host) -> None:
    host.put("/proc/77/stat", "77 (a) S (b) Z 1\n")


@pytest.mark.parametrize("how", [ended, is_a_zombie], ids=lambda how: how.__name__)
def test_a_process_that_ends_meanwhile_has_no_mounts(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch, how: Callable[[Host], None]
) -> None:
    host.add_drive(BDF)
    host.add_process(77, "a) S (b", namespace="mnt:[9]")
    how(host)
    if how is is_a_zombie:
        refuse(monkeypatch, "read", "/proc/77/mountinfo", errno.EINVAL)
    assert on_host("bind", BDF) == Exit.DONE


def test_a_namespace_that_was_seen_need_not_be_read_again(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.add_drive(BDF)
    host.add_process(77, "secret", namespace="mnt:[1]")
    refuse(monkeypatch, "read", "/proc/77/mountinfo")
    assert on_host("bind", BDF) == Exit.DONE


def test_the_second_swap_and_one_with_a_space(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.add_mapper("dm-0", "my swap", f"{node}p1")
    with host.path("/proc/swaps").open("a") as file:
        file.write("/dev/vda2 partition 1024 0 -2\n/dev/mapper/my\\040swap partition 9 0 -3\n")
    assert "swap" in codes(on_host.json("bind", BDF)[1])


# ---- the IOMMU


@pytest.mark.parametrize(
    ("driver", "code"), [("pci-stub", Exit.DONE), ("uio_pci_generic", Exit.REFUSED)]
)
def test_drivers_that_a_group_may_have(host: Host, on_host: Shell, driver: str, code: Exit) -> None:
    host.add_drive(BDF)
    host.add_device("0000:3b:00.1", "0x020000", driver, "12")
    assert on_host("bind", BDF) == code


def test_a_driver_without_drives_is_not_mixed(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.add_driver("uio_pci_generic")
    code, document = on_host.json("bind", BDF)
    assert (code, document["problems"]) == (Exit.DONE, [])


# ---- memory


def test_hugetlbfs_of_another_size_is_none(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    for name in ("self", "1"):
        file = host.path(f"/proc/{name}/mountinfo")
        file.write_text(file.read_text().replace("pagesize=2M", "pagesize=1024M"))
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "hugetlbfs")


def test_pages_that_cannot_be_looked_at_are_not_there(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.path("/dev/hugepages").rmdir()
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "not-checked")


def test_a_user_has_the_limits_of_his_groups(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF, "--user", "kv") == Exit.DONE  # he is in group hifc


def test_a_remark_after_a_limit_is_none_of_it(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.put("/etc/security/limits.d/hifc.conf", "@hifc - memlock unlimited # for KV\n")
    assert on_host("bind", BDF) == Exit.DONE


def test_root_has_no_limit(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.path("/etc/security/limits.d/hifc.conf").unlink()
    assert on_host("bind", BDF, "--user", "root") == Exit.DONE


# ---- who gets it


def test_a_group_that_does_not_exist(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    code, document = on_host.json("bind", BDF, "--group", "nosuch")
    assert (code, code_of(document)) == (Exit.USAGE, "no-such-group")
    assert host.driver(BDF) == "nvme"


def test_without_the_group_hifc_it_is_roots_alone(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.put("/etc/group", "root:x:0:\n")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.DONE, "root-only")
    assert host.owners == {"/dev/vfio/12": (0, 0, 0o600)}
