# SPDX-License-Identifier: Apache-2.0
"""hifc-admin bind and unbind on a pretended host: each refusal, success, and what goes wrong."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from admin_shell import Shell, code_of
from fake_host import GROUPS, PCI, Host, Killed
from hifc_admin import target
from hifc_admin.result import Exit, Failure

BDF = "0000:3b:00.0"
OTHER = "0000:3c:00.0"
RECORD = f"/run/hifc-admin/{BDF}.json"
BASE_CHANGES = ("devices", "dev", "run", "etc", "proc")


def codes(document: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in document["problems"]]


def is_with_the_kernel(host: Host, node: str, bdf: str = BDF) -> bool:
    """Also that nothing keeps the kernel from taking it again."""
    override = host.system.attribute(f"{PCI}/devices/{bdf}/driver_override")
    has_node = host.path(f"/dev/{node}").exists()
    return host.driver(bdf) == "nvme" and override == "(null)" and has_node


# ---- success


def test_bind_moves_the_drive_and_opens_its_group_to_hifc(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    code, document = on_host.json("bind", "3B:00.0")
    assert (code, document["problems"]) == (Exit.DONE, [])
    assert document["schema"] == "hifc-admin.bind.1"
    assert document["data"]["previous_driver"] == "nvme"
    assert host.driver(BDF) == "vfio-pci"
    assert not host.path(f"/dev/{node}").exists()
    assert host.owners == {"/dev/vfio/12": (0, 990, 0o660)}
    allowed = host.path("/run/hifc-admin/groups/12").read_text()
    assert allowed == "HIFC_OWNER=root\nHIFC_GROUP=hifc\nHIFC_MODE=0660\n"
    record = json.loads(host.path(RECORD).read_text())
    assert (record["phase"], record["previous"], record["serial"]) == ("bound", "nvme", "S0")


def test_unbind_gives_it_back_and_forgets_it(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    before = host.snapshot()
    assert on_host("bind", BDF, "--persist") == Exit.DONE
    code, document = on_host.json("unbind", BDF)
    assert code == Exit.DONE
    assert document["data"]["block_devices"] == [f"/dev/{node}"]
    assert is_with_the_kernel(host, node)
    after = host.snapshot()
    # Folders stay; attributes of sysfs were written to.
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert not {n for n in changed if host.path(n).is_file() and not n.startswith("sys/bus/pci")}


def test_only_the_named_drive_moves(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    other = host.add_drive(OTHER, group="13")
    assert on_host("bind", BDF) == Exit.DONE
    assert is_with_the_kernel(host, other, OTHER)
    assert not host.path("/dev/vfio/13").exists()
    assert set(host.owners) == {"/dev/vfio/12"}


def test_a_user_and_a_group_of_ones_own(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF, "--user", "ann", "--group", "kv") == Exit.PREREQUISITE
    host.put("/etc/security/limits.conf", "ann - memlock 1000000\n")
    assert on_host("bind", BDF, "--user", "ann", "--group", "kv") == Exit.DONE
    assert host.owners == {"/dev/vfio/12": (1001, 1000, 0o660)}


def test_binding_again_changes_who_may_use_it(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.put("/etc/security/limits.conf", "@kv - memlock unlimited\n")
    assert on_host("bind", BDF) == Exit.DONE
    assert on_host("bind", BDF, "--group", "kv") == Exit.DONE
    assert host.owners == {"/dev/vfio/12": (0, 1000, 0o660)}
    assert json.loads(host.path(RECORD).read_text())["previous"] == "nvme"
    assert on_host("unbind", BDF) == Exit.DONE


def test_modules_are_loaded_when_they_are_missing(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    for name in ("bind", "unbind"):
        host.path(f"{PCI}/drivers/vfio-pci/{name}").unlink()
    host.path(f"{PCI}/drivers/vfio-pci").rmdir()
    assert on_host("bind", BDF) == Exit.DONE
    assert host.ran == [("modprobe", "vfio-pci")]


def test_a_module_that_cannot_be_loaded(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.path("/sys/module/vfio_iommu_type1").rmdir()
    host.broken_programs.add("vfio_iommu_type1")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "no-module")
    assert is_with_the_kernel(host, node)


def test_a_hifc_namespace_is_no_obstacle(host: Host, on_host: Shell, hifc_image: bytes) -> None:
    node = host.add_drive(BDF)
    host.path(f"/dev/{node}").write_bytes(hifc_image)
    host.put(f"/sys/class/block/{node}/size", f"{len(hifc_image) // 512}\n")
    assert on_host("bind", BDF) == Exit.DONE


@pytest.fixture
def hifc_image(tmp_path: Any) -> bytes:
    from hifc import Namespace

    path = tmp_path / "image"
    Namespace.format(f"file://{path}?size=16MiB", segment_size="256KiB")
    return bytes(path.read_bytes())


# ---- in use: each refusal names what was seen and what to do, and nothing moves


def in_mount(host: Host, node: str) -> None:
    host.mount(
        "/srv/my data".replace(" ", "\\040"), f"/dev/{node}p1", host.number(f"{node}p1"), "ext4"
    )


def in_mount_by_source(host: Host, node: str) -> None:
    host.mount("/srv", f"/dev/{node}p1", "0:55", "btrfs")


def in_mount_by_link(host: Host, node: str) -> None:
    host.link("/dev/disk/by-uuid/12ab", f"../../{node}p1")
    host.mount("/srv", "/dev/disk/by-uuid/12ab", "0:55", "btrfs")


def in_several_devices_of_one_mount(host: Host, node: str) -> None:
    host.mount("/srv", f"/dev/sdz:/dev/{node}p1", "0:55", "bcachefs")


def in_btrfs(host: Host, node: str) -> None:
    host.link(f"/sys/fs/btrfs/1234/devices/{node}p1", f"../../../../class/block/{node}p1")


def in_container(host: Host, node: str) -> None:
    host.add_process(77, "podman", namespace="mnt:[9]")
    host.mount("/data", f"/dev/{node}p1", host.number(f"{node}p1"), "xfs", pid=77)


def in_mapper(host: Host, node: str) -> None:
    host.add_mapper("dm-0", "crypt", f"{node}p1")


def in_deep_mount(host: Host, node: str) -> None:
    host.add_mapper("dm-0", "crypt", f"{node}p1")
    host.add_mapper("dm-1", "vg-kv", "dm-0")
    host.mount("/srv", "/dev/mapper/vg-kv", host.number("dm-1"), "xfs")


def in_loop(host: Host, node: str) -> None:
    host.put("/sys/class/block/loop0/loop/backing_file", f"/dev/{node}p1\n")


def in_swap(host: Host, node: str) -> None:
    with host.path("/proc/swaps").open("a") as file:
        file.write(f"/dev/{node}p1 partition 1024 0 -2\n")


def in_deep_swap(host: Host, node: str) -> None:
    host.add_mapper("dm-0", "swap", f"{node}p1")
    with host.path("/proc/swaps").open("a") as file:
        file.write("/dev/dm-0 partition 1024 0 -2\n")


def in_zfs(host: Host, node: str) -> None:
    write_zfs_label(host, f"{node}p1", "tank")
    host.put("/proc/spl/kstat/zfs/tank/state", "ONLINE\n")


def in_mounted_zfs(host: Host, node: str) -> None:
    write_zfs_label(host, f"{node}p1", "tank")
    host.mount("/tank", "tank/data", "0:60", "zfs")


def write_zfs_label(host: Host, node: str, pool: str) -> None:
    name = pool.encode()
    pair = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01" + len(name).to_bytes(4, "big") + name
    host.write_at(node, (16 << 10) + 100, pair)
    host.write_at(node, 128 << 10, b"\x0c\xb1\xba\0\0\0\0\0")


def in_process(host: Host, node: str) -> None:
    host.add_holder(42, "fio", f"{node}p1")


def in_process_by_controller(host: Host, node: str) -> None:
    host.add_holder(42, "smartd", "nvme0")


def in_process_by_generic_node(host: Host, node: str) -> None:
    host.add_holder(42, "qemu", node.replace("nvme", "ng"))


def in_export(host: Host, node: str) -> None:
    folder = "/sys/kernel/config/nvmet/subsystems/nqn.x/namespaces/1"
    host.put(f"{folder}/device_path", f"/dev/{node}\n")


def in_claim(host: Host, node: str) -> None:
    host.claimed.add(f"{node}p1")


def as_root(host: Host, node: str) -> None:
    host.mount("/", f"/dev/{node}p1", host.number(f"{node}p1"), "ext4")


def as_boot(host: Host, node: str) -> None:
    host.mount("/boot/efi", f"/dev/{node}p1", host.number(f"{node}p1"), "vfat")


def as_deep_root(host: Host, node: str) -> None:
    host.add_mapper("dm-0", "vg-root", f"{node}p1")
    host.mount("/", "/dev/mapper/vg-root", host.number("dm-0"), "ext4")


def as_root_of_the_command_line(host: Host, node: str) -> None:
    host.link("/dev/disk/by-partuuid/77", f"../../{node}p1")
    host.put("/proc/cmdline", "root=PARTUUID=77 ro\n")


def as_boot_of_fstab(host: Host, node: str) -> None:
    host.put("/etc/fstab", f"# /dev/x / y\n/dev/{node}p1 /boot/efi vfat noauto 0 2\n")


def as_boot_of_the_loader(host: Host, node: str) -> None:
    host.link("/dev/disk/by-partuuid/ab-cd", f"../../{node}p1")
    name = "LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
    host.folder("/sys/firmware/efi/efivars")
    value = b"\x06\0\0\0" + "AB-CD\0".encode("utf-16-le")
    host.path(f"/sys/firmware/efi/efivars/{name}").write_bytes(value)


def as_zfs_root(host: Host, node: str) -> None:
    write_zfs_label(host, f"{node}p1", "rpool")
    host.put("/proc/cmdline", "root=ZFS=rpool/ROOT/debian\n")


def with_hidden_namespace(host: Host, node: str) -> None:
    host.put(f"/sys/class/block/{node}/hidden", "1\n")


def with_dead_controller(host: Host, node: str) -> None:
    host.put(f"{PCI}/devices/{BDF}/nvme/nvme0/state", "dead\n")


def in_a_container_ourselves(host: Host, node: str) -> None:
    host.link("/proc/self/ns/pid", "pid:[4026532999]")


def without_mounts(host: Host, node: str) -> None:
    host.path("/proc/self/mountinfo").unlink()


def with_unreadable_node(host: Host, node: str) -> None:
    host.path(f"/dev/{node}p1").unlink()


def with_a_short_node(host: Host, node: str) -> None:
    os.truncate(host.path(f"/dev/{node}"), 1 << 20)


USES: list[tuple[Callable[[Host, str], None], str]] = [
    (in_mount, "mounted"),
    (in_mount_by_source, "mounted"),
    (in_mount_by_link, "mounted"),
    (in_several_devices_of_one_mount, "mounted"),
    (in_btrfs, "mounted"),
    (in_container, "mounted"),
    (in_mapper, "holder"),
    (in_deep_mount, "mounted"),
    (in_loop, "holder"),
    (in_swap, "swap"),
    (in_deep_swap, "swap"),
    (in_zfs, "mounted"),
    (in_mounted_zfs, "mounted"),
    (in_process, "process"),
    (in_process_by_controller, "process"),
    (in_process_by_generic_node, "process"),
    (in_export, "exported"),
    (in_claim, "claimed"),
    (as_root, "boot-disk"),
    (as_boot, "boot-disk"),
    (as_deep_root, "boot-disk"),
    (as_root_of_the_command_line, "boot-disk"),
    (as_boot_of_fstab, "boot-disk"),
    (as_boot_of_the_loader, "boot-disk"),
    (as_zfs_root, "boot-disk"),
    (with_hidden_namespace, "not-checked"),
    (with_dead_controller, "not-checked"),
    (in_a_container_ourselves, "not-checked"),
    (without_mounts, "not-checked"),
    (with_unreadable_node, "not-checked"),
    (with_a_short_node, "not-checked"),
]


@pytest.mark.parametrize(("use", "code"), USES, ids=[use.__name__ for use, _ in USES])
def test_a_drive_in_use_stays(
    host: Host,
    on_host: Shell,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Host, str], None],
    code: str,
) -> None:
    node = host.add_drive(BDF, partitions=2)
    use(host, node)
    # Every signature may be there: what uses the drive is not overridden by that.
    names = ["zfs", "hifc", "ext4", "gpt"]
    words = [word for name in names for word in ("--signature", name)]
    exit_code, document = on_host.json("bind", BDF, *words)
    assert exit_code == Exit.REFUSED
    assert code in codes(document)
    for problem in document["problems"]:
        assert problem["subject"] == BDF
        assert problem["evidence"], problem
        assert problem["fix"], problem
    assert host.driver(BDF) == "nvme"
    assert not host.path(RECORD).exists()
    # And list sees the same, except what only a claim tells.
    if code != "claimed":
        _, listed = on_host.json("list")
        (drive,) = listed["data"]["drives"]
        assert drive["in_use"], drive
        assert code in [use["kind"] for use in drive["uses"]]
    # And so do format and erase, which leave the drive to the kernel's driver.
    if use in (in_process_by_controller, with_dead_controller):
        return
    monkeypatch.setattr(target.Target, "is_block_device", True)
    with pytest.raises(Failure) as caught:
        target.refuse_if_in_use(target.parse(f"file:///dev/{node}"), host.system)
    assert caught.value.exit is Exit.REFUSED
    assert code in [problem.code for problem in caught.value.result().problems]


def test_a_mount_is_told_with_its_folder(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=2)
    in_mount(host, node)
    _, document = on_host.json("bind", BDF)
    (problem,) = document["problems"]
    assert problem["detail"] == f"{node}p1 is mounted on /srv/my data"
    assert problem["fix"] == "umount /srv/my data"


def test_a_deep_holder_is_told_with_its_way(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    in_deep_mount(host, node)
    _, document = on_host.json("bind", BDF)
    detail = document["problems"][0]["detail"]
    assert detail == f"{node}p1 > dm-0 (crypt) > dm-1 (vg-kv) is mounted on /srv"


def test_a_process_that_only_passes_by_is_no_use(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.add_holder(42, "udev-worker", node)
    host.on_wait = lambda: host.path("/proc/42/fd/7").unlink(missing_ok=True)
    assert on_host("bind", BDF) == Exit.DONE


def test_a_process_that_may_not_be_looked_at(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.add_drive(BDF)
    host.add_process(42, "secret")
    names = type(host.system).names

    def refusing(system: Any, name: str) -> list[str]:
        if name == "/proc/42/fd":
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return list(names(system, name))

    monkeypatch.setattr(type(host.system), "names", refusing)
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-checked")
    assert "process 42" in document["problems"][0]["evidence"]


# ---- signatures


def test_signatures_are_refused_until_each_is_named(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.write_at(node, 512, b"EFI PART")
    host.write_at(f"{node}p1", 0, b"XFSB")
    code, document = on_host.json("bind", BDF)
    assert code == Exit.REFUSED
    assert codes(document) == ["signature", "signature"]
    assert document["problems"][0]["detail"] == f"{node} has a GPT partition table on it"
    assert document["problems"][1]["fix"].endswith("--signature xfs")
    code, document = on_host.json("bind", BDF, "--signature", "gpt")
    assert (code, code_of(document)) == (Exit.REFUSED, "signature")
    assert on_host("bind", BDF, "--signature", "GPT", "--signature", "xfs") == Exit.DONE


def test_a_signature_named_in_vain_is_a_warning(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    code, document = on_host.json("bind", BDF, "--signature", "ext4")
    assert (code, code_of(document)) == (Exit.DONE, "unused-option")
    assert document["problems"][0]["severity"] == "warning"


# ---- the IOMMU


def test_a_group_with_foreign_members_is_refused(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.add_device("0000:3b:00.1", "0x020000", "e1000e", "12")
    host.add_device("0000:3a:00.0", "0x060400", "pcieport", "12")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.REFUSED, "foreign-members")
    assert "0000:3b:00.1 (e1000e)" in document["problems"][0]["detail"]
    assert "0000:3a:00.0" not in document["problems"][0]["detail"]
    assert is_with_the_kernel(host, node)


def test_a_group_with_bridges_and_devices_nobody_has_is_fine(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.add_device("0000:3a:00.0", "0x060400", "pcieport", "12")
    host.add_device("0000:3b:00.1", "0x020000", None, "12")
    host.add_device("0000:3b:00.2", "0x020000", "vfio-pci", "12")
    assert on_host("bind", BDF) == Exit.DONE


def test_no_iommu_needs_consent(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, group=None)
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.REFUSED, "no-iommu")
    assert "intel_iommu=on" in document["problems"][0]["evidence"]
    assert is_with_the_kernel(host, node)
    code, document = on_host.json("bind", BDF, "--no-iommu")
    assert (code, code_of(document)) == (Exit.DONE, "unprotected")
    unsafe = host.path("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode")
    assert unsafe.read_text() == "Y\n"
    assert host.owners == {}


def test_unsafe_mode_does_not_outlive_a_bind_that_failed(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, group=None)
    host.broken_drivers.add("vfio-pci")
    assert on_host("bind", BDF, "--no-iommu") == Exit.FAILED
    assert is_with_the_kernel(host, node)
    unsafe = host.path("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode")
    assert unsafe.read_text() == "N\n"


def test_a_group_of_vfios_own_is_no_iommu(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.put(f"{GROUPS}/12/name", "vfio-noiommu\n")
    assert on_host.json("bind", BDF)[1]["problems"][0]["code"] == "no-iommu"


def test_uio_needs_consent_and_an_iommu_that_is_off(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    words = ("bind", BDF, "--driver", "uio_pci_generic")
    assert codes(on_host.json(*words)[1]) == ["no-iommu"]
    code, document = on_host.json(*words, "--no-iommu")
    assert (code, code_of(document)) == (Exit.REFUSED, "iommu-blocks-uio")
    host.put(f"{GROUPS}/12/type", "identity\n")
    code, document = on_host.json(*words, "--no-iommu", "--group", "hifc")
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "uio-needs-root")
    code, document = on_host.json(*words, "--no-iommu")
    assert (code, code_of(document)) == (Exit.DONE, "unprotected")
    assert host.driver(BDF) == "uio_pci_generic"
    assert on_host("unbind", BDF) == Exit.DONE


def test_mixed_drivers_are_a_warning(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.add_device(OTHER, "0x010802", "uio_pci_generic", "13")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.DONE, "drivers-mixed")
    assert OTHER in document["problems"][0]["detail"]


# ---- memory


def test_too_few_huge_pages(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.put("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "35\n")
    host.put("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "4\n")
    host.put("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "4\n")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "huge-pages")
    assert document["problems"][0]["evidence"] == "35 of 64 are free; 4 of 1 GiB do not count"
    assert document["problems"][0]["fix"] == "hifc-admin hugepages --count 148"
    assert is_with_the_kernel(host, node)


def test_no_hugetlbfs(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.put("/proc/self/mountinfo", "30 1 254:1 / / rw - ext4 /dev/vda1 rw\n")
    assert codes(on_host.json("bind", BDF)[1]) == ["hugetlbfs"]


@pytest.mark.parametrize(
    ("limits", "words", "expected"),
    [
        ("", [], Exit.PREREQUISITE),
        ("* - memlock unlimited\n", [], Exit.DONE),
        ("* - memlock unlimited\n@hifc soft memlock 64\n", [], Exit.PREREQUISITE),
        ("@hifc - memlock 8192\n@hifc - memlock 80000\n", [], Exit.DONE),
        ("@hifc hard memlock unlimited\n", [], Exit.PREREQUISITE),
        ("@hifc - memlock 64 # no\n", ["--user", "kv"], Exit.PREREQUISITE),
        ("@hifc - memlock 64\nkv - memlock unlimited\n", ["--user", "kv"], Exit.DONE),
        ("# @hifc - memlock unlimited\n", ["--user", "kv"], Exit.PREREQUISITE),
    ],
)
def test_locked_memory_of_whom_it_is_for(
    host: Host, on_host: Shell, limits: str, words: list[str], expected: Exit
) -> None:
    host.add_drive(BDF)
    host.put("/etc/security/limits.d/hifc.conf", limits)
    code, document = on_host.json("bind", BDF, *words)
    assert code == expected
    assert codes(document) == ([] if expected == Exit.DONE else ["locked-memory"])


@pytest.mark.parametrize(
    ("unit", "drop_in", "expected"),
    [
        ("[Service]\nUser=kv\n", "", Exit.PREREQUISITE),
        ("[Service]\nUser=kv\nLimitMEMLOCK=64M\n", "", Exit.PREREQUISITE),
        ("[Service]\nUser=kv\nLimitMEMLOCK=1G\n", "", Exit.DONE),
        ("[Service]\nUser=kv\n", "[Service]\nLimitMEMLOCK=infinity\n", Exit.DONE),
        ("[Service]\nUser=kv\nLimitMEMLOCK=infinity\n", "#LimitMEMLOCK=8M\n", Exit.DONE),
        (
            "[Service]\nUser=kv\nLimitMEMLOCK=infinity\n",
            "[Service]\nLimitMEMLOCK=8M:infinity\n",
            Exit.PREREQUISITE,
        ),
        ("[Service]\nUser=root\nLimitMEMLOCK=8M\n", "", Exit.DONE),
        ("[Service]\nUser=ann\nLimitMEMLOCK=8M\n", "", Exit.DONE),
    ],
)
def test_locked_memory_of_the_service_of_a_user(
    host: Host, on_host: Shell, unit: str, drop_in: str, expected: Exit
) -> None:
    """What a login of the user may lock says nothing about its service."""
    host.add_drive(BDF)
    host.put("/usr/lib/systemd/system/kv-server.service", unit)
    if drop_in:
        host.put("/etc/systemd/system/kv-.service.d/50-limit.conf", drop_in)
    code, document = on_host.json("bind", BDF, "--user", "kv")
    assert code == expected
    assert codes(document) == ([] if expected == Exit.DONE else ["locked-memory"])
    if expected == Exit.PREREQUISITE:
        (problem,) = document["problems"]
        assert "kv-server.service" in problem["detail"]
        assert problem["fix"].startswith("hifc-admin install --service kv-server.service")


def test_locked_memory_of_a_service_of_the_group(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    unit = "[Service]\nUser=ann\nSupplementaryGroups=video hifc\n"
    host.put("/etc/systemd/system/other.service", unit)
    code, document = on_host.json("bind", BDF)
    assert (code, codes(document)) == (Exit.PREREQUISITE, ["locked-memory"])
    # A unit of the administrator hides the vendor's of the same name.
    host.put("/usr/lib/systemd/system/other.service", f"{unit}LimitMEMLOCK=infinity\n")
    assert on_host("bind", BDF) == Exit.PREREQUISITE
    host.put("/etc/systemd/system.conf", "[Manager]\nDefaultLimitMEMLOCK=infinity\n")
    assert on_host("bind", BDF) == Exit.DONE


def test_without_the_group_hifc_root_alone_gets_it(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.put("/etc/group", "root:x:0:\n")
    host.put("/etc/security/limits.d/hifc.conf", "")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.DONE, "root-only")
    assert host.owners == {"/dev/vfio/12": (0, 0, 0o600)}
    assert not host.path("/run/hifc-admin/groups/12").exists()


# ---- usage


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        (["bind", "nvme0"], Exit.USAGE, "usage"),
        (["bind", "0000:99:00.0"], Exit.FAILED, "no-such-drive"),
        (["bind", "0000:00:02.0"], Exit.FAILED, "no-such-drive"),
        (["bind", BDF, "--group", "nobody-there"], Exit.USAGE, "no-such-group"),
        (["bind", BDF, "--user", "nobody-there"], Exit.USAGE, "no-such-user"),
        (["bind", BDF, "--driver", "igb_uio"], Exit.USAGE, "usage"),
        (["bind", BDF, "--persisted"], Exit.FAILED, "not-persisted"),
        (["unbind", "0000:00:02.0"], Exit.FAILED, "no-such-drive"),
    ],
)
def test_what_cannot_be_meant(
    host: Host, on_host: Shell, words: list[str], exit_code: Exit, code: str
) -> None:
    host.add_drive(BDF)
    host.add_device("0000:00:02.0", "0x020000", "e1000e", "1")
    found, document = on_host.json(*words)
    assert (found, code_of(document)) == (exit_code, code)
    assert host.changes == 0


def test_other_users_may_only_look(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.add_drive(BDF)
    monkeypatch.setattr(type(host.system), "may_change", False)
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "not-root")
    assert on_host("bind", BDF, "--dry-run") == Exit.DONE


# ---- dry run


def test_a_dry_run_shows_the_steps_and_changes_nothing(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    before = host.snapshot()
    code, document = on_host.json("bind", BDF, "--dry-run", "--persist")
    assert code == Exit.DONE
    assert host.snapshot() == before
    assert host.changes == 0
    planned = document["data"]["steps"]
    assert f"move {BDF} from nvme to vfio-pci" in planned
    assert on_host("--dry-run", "bind", BDF) == Exit.DONE
    assert f"would move {BDF} from nvme to vfio-pci\n" in on_host.out
    # And these are the steps that are done.
    code, document = on_host.json("bind", BDF, "--persist")
    assert document["data"]["steps"] == planned
    before = host.snapshot()
    assert on_host("unbind", BDF, "--dry-run") == Exit.DONE
    assert host.snapshot() == before


def test_a_dry_run_refuses_like_the_real_one(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    in_mount(host, node)
    code, document = on_host.json("bind", BDF, "--dry-run")
    assert (code, code_of(document)) == (Exit.REFUSED, "mounted")


# ---- failures


def test_a_driver_that_does_not_take_it(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.broken_drivers.add("vfio-pci")
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.FAILED, "driver-did-not-take")
    assert is_with_the_kernel(host, node)
    assert not host.path(RECORD).exists()


ERRORS: list[Callable[[], BaseException]] = [
    lambda: OSError(errno.EBUSY, "made to fail"),
    KeyboardInterrupt,
]


@pytest.mark.parametrize("failure", ERRORS, ids=["error", "ctrl-c"])
def test_whichever_change_fails_the_previous_driver_is_back(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, host: Host, on_host: Shell, failure: Any
) -> None:
    """All changes of a bind in turn."""
    node = host.add_drive(BDF)
    assert on_host("bind", BDF, "--persist") == Exit.DONE
    count = host.changes
    assert on_host("unbind", BDF) == Exit.DONE
    assert count >= 8
    before = host.snapshot()
    for number in range(count):
        host.changes, host.fail_at, host.failure = 0, number, failure
        code, document = on_host.json("bind", BDF, "--persist")
        assert code == Exit.FAILED, number
        assert code_of(document) in ("step-failed", "interrupted"), document
        host.fail_at = None
        assert is_with_the_kernel(host, node), number
        after = host.snapshot()
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        assert not {name for name in changed if name.startswith(("run", "etc", "dev"))}, number


def test_whichever_change_of_unbind_fails_it_stays_bound(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    assert on_host("bind", BDF, "--persist") == Exit.DONE
    host.changes = 0
    assert on_host("unbind", BDF, "--dry-run") == Exit.DONE
    before = host.snapshot()
    number = 0
    while True:
        host.changes, host.fail_at = 0, number
        code = on_host("unbind", BDF)
        host.fail_at = None
        if code == Exit.DONE:
            break
        assert code == Exit.FAILED
        assert host.driver(BDF) == "vfio-pci", number
        after = host.snapshot()
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        assert not {name for name in changed if name.startswith(("run", "etc"))}, number
        number += 1
    assert number >= 6
    assert is_with_the_kernel(host, node)


def test_a_kill_at_any_change_is_put_right_by_unbind(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    assert on_host("bind", BDF, "--persist") == Exit.DONE
    count = host.changes
    assert on_host("unbind", BDF) == Exit.DONE
    for number in range(count):
        host.changes, host.fail_at, host.failure = 0, number, Killed
        with pytest.raises(Killed):
            on_host("bind", BDF, "--persist")
        host.revive()
        assert on_host("unbind", BDF) == Exit.DONE, number
        assert is_with_the_kernel(host, node), number
        assert not host.path(RECORD).exists()
        assert not host.path("/run/hifc-admin/groups/12").exists()


def test_what_cannot_be_put_back_is_said(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    host.broken_drivers |= {"vfio-pci", "nvme"}
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.FAILED, "not-restored")
    assert host.path(RECORD).exists() is False
    host.broken_drivers.clear()
    assert on_host("unbind", BDF) == Exit.DONE
    assert host.driver(BDF) == "nvme"


# ---- two at once


def test_two_at_once(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.folder("/run/hifc-admin")
    lock = host.system.lock(f"/run/hifc-admin/{BDF}.lock")
    assert lock is not None
    for words in (["bind", BDF], ["unbind", BDF], ["bind", BDF, "--dry-run"]):
        code, document = on_host.json(*words)
        assert (code, code_of(document)) == (Exit.REFUSED, "locked")
    assert is_with_the_kernel(host, node)
    os.close(lock)
    assert on_host("bind", BDF) == Exit.DONE


def test_the_lock_is_held_while_the_drive_moves(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    seen = []
    moved = host.written

    def written(name: str, text: str) -> None:
        seen.append(host.system.lock(f"/run/hifc-admin/{BDF}.lock"))
        moved(name, text)

    host.written = written  # type: ignore[method-assign]
    assert on_host("bind", BDF) == Exit.DONE
    assert seen == [None, None, None]  # driver_override, unbind, drivers_probe


def test_namespaces_are_claimed_until_the_drive_has_left(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    seen = []
    moved = host.written

    def open_nodes() -> list[Path]:
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return [link for link in links if link.name == node]

    def written(name: str, text: str) -> None:
        seen.append(len(open_nodes()))
        moved(name, text)

    host.written = written  # type: ignore[method-assign]
    assert on_host("bind", BDF) == Exit.DONE
    assert seen == [1, 1, 0]  # driver_override, unbind, drivers_probe


# ---- unbind


def test_a_drive_that_a_process_drives_stays(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    host.add_holder(42, "vllm", "vfio/12")
    code, document = on_host.json("unbind", BDF)
    assert (code, code_of(document)) == (Exit.REFUSED, "process")
    assert "process 42 (vllm)" in document["problems"][0]["detail"]
    assert host.driver(BDF) == "vfio-pci"


def test_a_drive_whose_engine_holds_its_lock_stays(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    name = "/run/hifc/0000_3b_00.0-ns1-12345678.lock"
    host.put(name, "")
    lock = host.system.lock(name)
    assert lock is not None
    assert code_of(on_host.json("unbind", BDF)[1]) == "process"
    os.close(lock)
    assert on_host("unbind", BDF) == Exit.DONE


def test_the_kernels_driver_that_does_not_take_it(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    host.broken_drivers.add("nvme")
    code, document = on_host.json("unbind", BDF)
    assert (code, code_of(document)) == (Exit.FAILED, "step-failed")
    assert host.driver(BDF) == "vfio-pci"
    assert host.path(RECORD).exists()


def test_a_block_device_that_does_not_come_back(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    record = json.loads(host.path(RECORD).read_text())
    record["namespaces"].append([2, 4096, 512])
    host.put(RECORD, json.dumps(record))
    code, document = on_host.json("unbind", BDF)
    assert (code, code_of(document)) == (Exit.PARTLY, "no-block-device")
    assert host.driver(BDF) == "nvme"


def test_a_drive_that_others_bound_goes_to_nvme(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    host.path(RECORD).unlink()
    assert on_host("unbind", BDF) == Exit.DONE
    assert is_with_the_kernel(host, node)


def test_a_drive_that_the_kernel_has_already(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    code, document = on_host.json("unbind", BDF)
    assert (code, document["data"]["changed"]) == (Exit.DONE, False)


def test_a_drive_without_a_driver_is_not_bound_unseen(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.system.write(f"{PCI}/devices/{BDF}/driver/unbind", BDF)
    code, document = on_host.json("bind", BDF)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-checked")
    assert "hifc-admin unbind" in document["problems"][0]["fix"]
    assert on_host("unbind", BDF) == Exit.DONE
    assert is_with_the_kernel(host, node)


# ---- at each boot


def test_what_is_persisted_binds_the_same_drive_at_boot(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.write_at(node, 0, b"XFSB")
    assert on_host("bind", BDF, "--persist", "--signature", "xfs") == Exit.DONE
    wants = host.path(f"/etc/systemd/system/multi-user.target.wants/hifc-bind@{BDF}.service")
    assert str(wants.readlink()) == "/etc/systemd/system/hifc-bind@.service"
    reboot(host)
    assert is_with_the_kernel(host, node)
    assert on_host("bind", BDF, "--persisted") == Exit.DONE
    assert host.owners["/dev/vfio/12"] == (0, 990, 0o660)


def test_another_drive_at_that_address_is_not_bound(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    assert on_host("bind", BDF, "--persist") == Exit.DONE
    reboot(host)
    host.put(f"{PCI}/devices/{BDF}/nvme/nvme0/serial", "ANOTHER\n")
    code, document = on_host.json("bind", BDF, "--persisted")
    assert (code, code_of(document)) == (Exit.REFUSED, "another-drive")
    assert is_with_the_kernel(host, node)


def reboot(host: Host) -> None:
    """What is in /run is gone, and the kernel has its drives."""
    host.system.write(f"{PCI}/devices/{BDF}/driver_override", "\n")
    host.system.write(f"{PCI}/devices/{BDF}/driver/unbind", BDF)
    host.system.write(f"{PCI}/drivers_probe", BDF)
    for path in host.path("/run/hifc-admin").rglob("*"):
        if path.is_file():
            path.unlink()
