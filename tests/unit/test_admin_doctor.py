# SPDX-License-Identifier: Apache-2.0
"""hifc-admin doctor: each check on a pretended host or engine, on the good side and on the bad."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import types
from pathlib import Path
from typing import Any

import pytest

from admin_shell import Shell, code_of
from fake_host import PCI, Host
from hifc.errors import DeviceBusy
from hifc.namespace.namespace import Namespace
from hifc_admin.doctor import checks as doctor
from hifc_admin.doctor import drive as doctor_drive
from hifc_admin.doctor import engine as doctor_engine
from hifc_admin.doctor import file as doctor_file
from hifc_admin.doctor import host as doctor_host
from hifc_admin.doctor.checks import Engine, Row, Scene, Status
from hifc_admin.host.drives import all_drives, all_gpus
from hifc_admin.result import Exit
from hifc_admin.verbs import device as device_verbs
from hifc_admin.verbs.doctor import ALL_CHECKS, scene_of

BDF = "0000:3b:00.0"
URI = f"spdk://{BDF}?ns=1"
CHECKS = dict(ALL_CHECKS)


def scene(host: Host, uri: str | None = None, **more: Any) -> Scene:
    """What doctor sees of that host; engines only where they are given."""
    drives = tuple(all_drives(host.system))
    wanted = BDF if uri and uri.startswith("spdk://") else None
    values: dict[str, Any] = {
        "system": host.system,
        "uri": uri,
        "wanted_bdf": wanted,
        "all_drives": drives,
        "drives": tuple(d for d in drives if uri is None or d.bdf == wanted),
        "gpus": tuple(all_gpus(host.system)),
    }
    return Scene(**(values | more))


def rows_of(seen: Scene, name: str) -> list[Row]:
    return doctor.run(seen, [(name, CHECKS[name])])


def worst(seen: Scene, name: str) -> Row | None:
    """The most telling row of one check."""
    rows = rows_of(seen, name)
    order = [Status.FAIL, Status.WARN, Status.PASS]
    return min(rows, key=lambda row: order.index(row.finding.status), default=None)


def status_of(seen: Scene, name: str) -> Status | None:
    row = worst(seen, name)
    return row.finding.status if row else None


def bound(host: Host, driver: str = "vfio-pci") -> None:
    host.add_drive(BDF)
    host.system.write(f"{PCI}/devices/{BDF}/driver_override", driver)
    host.system.write(f"{PCI}/devices/{BDF}/driver/unbind", BDF)
    host.add_driver(driver)
    host.system.write(f"{PCI}/drivers/{driver}/bind", BDF)


# ---- the verb


def test_every_check_has_its_own_name() -> None:
    names = [name for name, _ in ALL_CHECKS]
    assert len(names) == len(set(names))


def test_a_sound_host_passes(host: Host, on_host: Shell) -> None:
    bound(host)
    code, document = on_host.json("doctor")
    failures = [row for row in document["data"]["checks"] if row["status"] == "FAIL"]
    assert failures == []
    assert code == 0
    assert {row["check"] for row in document["data"]["checks"]} >= {
        "drives",
        "huge pages",
        "iommu",
        "driver",
        "iommu group",
        "group node",
        "locked memory",
        "vfio_iommu_type1",
    }


def test_a_failing_check_fails_the_verb(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    code, document = on_host.json("doctor", URI)
    assert code == Exit.FAILED
    assert "driver" in [problem["code"] for problem in document["problems"]]
    assert on_host("doctor", URI) == Exit.FAILED
    assert f"fix:  hifc-admin bind {BDF}" in on_host.out
    assert on_host.err == ""


def test_a_file_needs_no_huge_pages(host: Host, on_host: Shell) -> None:
    host.path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").write_text("0\n")
    host.path("/var/tmp/kv").parent.mkdir(parents=True)
    host.path("/var/tmp/kv").touch()
    code, document = on_host.json("doctor", "file:///var/tmp/kv")
    assert code == 0
    assert [row["check"] for row in document["data"]["checks"]] == ["file system"]


def without_spdk(host: Host) -> None:
    """Neither huge pages nor an IOMMU, as in a container or on a laptop."""
    host.path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").write_text("0\n")
    mounts = host.path("/proc/self/mountinfo")
    mounts.write_text("".join(line for line in mounts.open() if "hugetlbfs" not in line))


def test_what_only_spdk_needs_does_not_fail_where_nobody_asked_for_it(
    host: Host, on_host: Shell
) -> None:
    without_spdk(host)
    assert on_host("doctor") == 0
    summary = on_host.out.splitlines()[-4:]
    assert summary[0].endswith(" 0 FAIL")
    assert summary[1] == "you can use: file, ram"
    assert summary[2].startswith("not: spdk, because no IOMMU: vfio-pci cannot have a drive; ")
    assert summary[3].startswith("not: spdk+tcp, because at least 36 free huge pages")
    code, document = on_host.json("doctor")
    assert (code, document["data"]["verdict"]) == (0, "usable")
    assert document["data"]["usable"] == ["file", "ram"]
    assert set(document["data"]["unusable"]) == {"spdk", "spdk+tcp"}
    assert {problem["severity"] for problem in document["problems"]} == {"warning"}


@pytest.mark.parametrize("uri", [URI, "spdk+tcp://127.0.0.1:4420/nqn.2024-01.org.hifc:kv?ns=1"])
def test_what_spdk_needs_fails_where_it_is_asked_for(host: Host, on_host: Shell, uri: str) -> None:
    without_spdk(host)
    code, document = on_host.json("doctor", uri)
    assert (code, document["data"]["verdict"]) == (Exit.FAILED, "not usable")
    failed = {row["check"] for row in document["data"]["checks"] if row["status"] == "FAIL"}
    assert "huge pages" in failed
    assert ("iommu" in failed) == (uri == URI), "NVMe over TCP needs no IOMMU"


def test_a_bound_drive_asks_for_spdk(host: Host, on_host: Shell) -> None:
    bound(host)
    assert on_host("doctor") == 0
    assert on_host.out.endswith("\nyou can use: file, ram, spdk, spdk+tcp\n")
    without_spdk(host)
    assert on_host("doctor") == Exit.FAILED
    assert "to be put right: huge pages" in on_host.out


def test_fixes_do_not_contradict(host: Host) -> None:
    """Two findings of one check, one command that helps against both."""
    without_spdk(host)
    rows = rows_of(scene(host), "huge pages")
    assert len(rows) == 2
    (fix,) = {row.finding.fix for row in rows}
    assert fix.startswith("hifc-admin hugepages --count ")


# ---- a file at rest


@pytest.fixture
def at_rest(tmp_path: Path) -> str:
    uri = f"file://{tmp_path.resolve()}/kv?size=128MiB&sparse=1"
    Namespace.format(uri, segment_size="8MiB")
    with Namespace.open(uri) as namespace:
        namespace.put(b"k" * 16, b"v" * 5000)
    return uri


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def checks_of(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in document["data"]["checks"]}


def test_a_file_at_rest(admin: Shell, at_rest: str) -> None:
    code, document = admin.json("doctor", at_rest)
    assert code == 0, document
    rows = checks_of(document)
    assert set(rows) == {
        "build",
        "namespace",
        "o_direct",
        "io_uring",
        "memlock",
        "room",
        "file system",
        "segment size",
        "packages",
    }
    assert rows["namespace"]["detail"].startswith("valid: 1 entry, ")
    assert "Llama 3.1 8B" in rows["segment size"]["detail"]
    assert "torch" in rows["packages"]["detail"]
    assert document["data"]["verdict"] == "usable"
    assert admin("doctor", at_rest) == 0
    assert admin.out.splitlines()[-1].startswith(f"you can use {at_rest}")


def test_a_file_without_a_namespace(admin: Shell, tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(bytes(16 << 20))
    code, document = admin.json("doctor", f"file://{tmp_path}/kv")
    assert code == Exit.FAILED
    assert checks_of(document)["namespace"]["status"] == "FAIL"
    assert "segment size" not in checks_of(document)
    assert "not usable as it is: namespace: there is no namespace" in document["data"]["summary"]


def test_a_damaged_file(admin: Shell, at_rest: str) -> None:
    path = Path(at_rest.removeprefix("file://").partition("?")[0])
    image = bytearray(path.read_bytes())
    place = image.index(b"v" * 5000)
    start = (place - (1 << 20)) // (8 << 20) * (8 << 20) + (1 << 20)
    image[start : start + 4096] = b"\x5a" * 4096
    path.write_bytes(image)
    code, document = admin.json("doctor", at_rest)
    assert code == Exit.FAILED
    assert "--repair" in checks_of(document)["namespace"]["fix"]


def test_a_ring_that_is_forbidden(
    admin: Shell, at_rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_file, "_ring_error", lambda: errno.EPERM)
    _, document = admin.json("doctor", at_rest)
    row = checks_of(document)["io_uring"]
    assert row["status"] == "FAIL"
    assert "io=sync" in row["fix"]
    assert "Operation not permitted" in row["evidence"]
    _, document = admin.json("doctor", f"{at_rest}&io=sync")
    assert checks_of(document)["io_uring"]["status"] == "PASS"
    code, document = admin.json("doctor")
    assert code == Exit.FAILED
    assert "file" in document["data"]["unusable"]


def test_a_file_system_without_direct_io(
    admin: Shell, at_rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_direct(name: str, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(name, flags, *rest, **more)

    opened = os.open
    monkeypatch.setattr(os, "open", no_direct)
    _, document = admin.json("doctor", at_rest)
    assert checks_of(document)["o_direct"]["status"] == "WARN"


def test_a_sparse_file_on_a_full_disk(
    admin: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"file://{tmp_path}/kv?size=64MiB&sparse=1"
    Namespace.format(uri)
    _, document = admin.json("doctor", uri)
    assert "is not allocated yet" in checks_of(document)["room"]["detail"]
    full = types.SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    code, document = admin.json("doctor", uri)
    assert code == Exit.FAILED
    assert "its disk has 4 KiB left" in checks_of(document)["room"]["detail"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ext4", Status.PASS),
        ("xfs", Status.PASS),
        ("nfs4", Status.WARN),
        ("fuse.sshfs", Status.WARN),
    ],
)
def test_file_systems(host: Host, kind: str, expected: Status) -> None:
    host.mount("/data", "server:/x", "0:99", kind)
    assert status_of(scene(host, "file:///data/kv"), "file system") is expected
    assert status_of(scene(host, "file:///database/kv"), "file system") is Status.PASS


def test_how_much_may_be_locked(
    admin: Shell, at_rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, expected in ((8 << 20, "WARN"), (1 << 40, "PASS"), (None, "PASS")):
        monkeypatch.setattr(doctor_file, "_own_limit", lambda _, limit=limit: limit)
        _, document = admin.json("doctor", at_rest)
        assert checks_of(document)["memlock"]["status"] == expected


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        # 2 * 30 layers * 3 heads * 64 * 2 bytes are 23040 a token.
        ({"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}, 358, "PASS"),
        # 2 * 80 * 64 * 128 * 4 bytes are 5 MiB a token.
        ({"num_hidden_layers": 80, "hidden_size": 8192, "dtype": "float32"}, 1, "WARN"),
    ],
)
def test_segments_for_a_model_of_ones_own(
    admin: Shell,
    at_rest: str,
    tmp_path: Path,
    config: dict[str, Any],
    tokens: int,
    expected: str,
) -> None:
    written = {"num_attention_heads": 64, **config}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": written}))
    _, document = admin.json("doctor", at_rest, "--model", str(tmp_path))
    row = checks_of(document)["segment size"]
    assert (row["status"], row["detail"]) == (
        expected,
        f"8 MiB: a block has up to {tokens} tokens of {tmp_path}",
    )
    assert ("--segment-size 256MiB" in row["fix"]) == (expected == "WARN")


def test_a_model_that_does_not_tell_its_shape(admin: Shell, at_rest: str, tmp_path: Path) -> None:
    for text in ("{}", "[]", "no json"):
        (tmp_path / "config.json").write_text(text)
        code, document = admin.json("doctor", at_rest, "--model", str(tmp_path))
        assert (code, code_of(document)) == (Exit.USAGE, "no-model")
    assert admin.json("doctor", "--model", str(tmp_path))[0] == Exit.USAGE


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0+cpu", "transformers": "5.24.0"}, Status.PASS),
        ({"torch": "2.13.0"}, Status.PASS),
        ({"torch": "2.13.0", "transformers": "4.57.1"}, Status.WARN),
    ],
)
def test_versions_of_packages(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    expected: Status,
) -> None:
    wanted = ['torch>=2.4; extra == "torch"', 'transformers<7,>=5.15; extra == "transformers"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    monkeypatch.setattr(doctor_file, "_version", versions.get)
    monkeypatch.setattr(type(host.system), "is_real", True)
    row = worst(scene(host), "packages")
    assert row is not None
    assert row.finding.status is expected
    assert ("transformers>=5.15" in row.finding.fix) == (expected is Status.WARN)
    assert ("transformers is not installed" in row.finding.detail) == (len(versions) == 1)


def test_no_device_has_an_empty_table(admin: Shell, on_host: Shell) -> None:
    for shell in (admin, on_host):
        _, document = shell.json("doctor", "ram://x?size=16MiB")
        assert document["data"]["checks"]


def test_a_build_without_spdk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(host.system), "is_real", True)
    monkeypatch.setattr(doctor_file, "schemes", lambda: ["ram", "file", "faulty"])
    assert status_of(scene(host), "build") is Status.PASS
    assert status_of(scene(host, "file:///var/tmp/kv"), "build") is Status.PASS
    assert status_of(scene(host, "faulty+file:///var/tmp/kv"), "build") is Status.PASS
    for uri in (URI, "spdk+tcp://127.0.0.1:4420/nqn:kv"):
        assert status_of(scene(host, uri), "build") is Status.FAIL


@pytest.mark.parametrize(
    ("uri", "code"),
    [("file:///var/tmp/kv", "not-found"), ("blah://x", "bad-uri"), ("faulty+blah://x", "bad-uri")],
)
def test_what_names_nothing_is_not_well(on_host: Shell, uri: str, code: str) -> None:
    exit_code, document = on_host.json("doctor", uri)
    assert exit_code != 0
    assert (document["ok"], code_of(document)) == (False, code)


def test_doctor_changes_nothing(host: Host, on_host: Shell) -> None:
    bound(host)
    before = host.snapshot()
    on_host("doctor")
    assert host.snapshot() == before


def test_what_cannot_be_checked_is_no_pass(host: Host) -> None:
    def broken(_: Scene) -> Any:
        raise PermissionError("not for you")

    (row,) = doctor.run(scene(host), [("broken", broken)])
    assert row.finding.status is Status.WARN
    assert "not for you" in row.finding.evidence


def test_what_an_engine_keeps_from_being_checked_is_no_matter_of_root(host: Host) -> None:
    def busy(_: Scene) -> Any:
        raise DeviceBusy("in use by pid 7", holders=(7,))

    (row,) = doctor.run(scene(host), [("busy", busy)])
    assert "process 7" in row.finding.fix


def test_bugs_are_not_hidden(host: Host) -> None:
    def broken(_: Scene) -> Any:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError):
        doctor.run(scene(host), [("broken", broken)])


# ---- the host


def test_huge_pages(host: Host) -> None:
    assert status_of(scene(host), "huge pages") is Status.PASS
    host.path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").write_text("3\n")
    row = worst(scene(host), "huge pages")
    assert row is not None
    assert row.finding.status is Status.FAIL
    assert "hugepages --count" in row.finding.fix


def test_huge_pages_without_a_mount(host: Host) -> None:
    host.put("/proc/self/mountinfo", "")
    row = worst(scene(host), "huge pages")
    assert row is not None
    assert row.finding.status is Status.FAIL
    assert "no hugetlbfs" in row.finding.detail


def test_huge_pages_of_another_size(host: Host) -> None:
    assert status_of(scene(host), "huge page size") is None
    for name, count in (("nr", 4), ("free", 4), ("surplus", 0)):
        host.put(f"/sys/kernel/mm/hugepages/hugepages-1048576kB/{name}_hugepages", f"{count}\n")
    assert status_of(scene(host), "huge page size") is Status.WARN


def test_a_mount_that_is_not_writable(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of(scene(host), "hugetlbfs access") is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert status_of(scene(host), "hugetlbfs access") is Status.WARN


def test_what_dead_processes_left(host: Host) -> None:
    assert status_of(scene(host), "leftovers") is None
    host.put(f"/var/tmp/spdk_pci_lock_{BDF}", "")
    assert status_of(scene(host), "leftovers") is Status.WARN
    host.put("/dev/hugepages/spdk_pid77map_0", "x" * 100)
    row = worst(scene(host), "leftovers")
    assert row is not None
    assert row.finding.status is Status.FAIL
    assert "spdk_pid77map_0" in row.finding.evidence
    assert row.finding.fix == "hifc-admin cleanup"


@pytest.mark.parametrize(
    ("arguments", "table", "fix"),
    [
        ("intel_iommu=off", True, "take intel_iommu=off off"),
        ("quiet", True, "boot with intel_iommu=on"),
        ("intel_iommu=on", False, "in the firmware"),
    ],
)
def test_no_iommu(host: Host, arguments: str, table: bool, fix: str) -> None:
    host.put("/proc/cmdline", arguments)
    if table:
        host.put("/sys/firmware/acpi/tables/DMAR", "")
    row = worst(scene(host), "iommu")
    assert row is not None
    assert row.finding.status is Status.FAIL
    assert fix in row.finding.fix


def test_an_iommu(host: Host) -> None:
    host.add_drive(BDF)
    assert status_of(scene(host), "iommu") is Status.PASS


@pytest.mark.parametrize(("is_on", "expected"), [(True, Status.WARN), (False, Status.FAIL)])
def test_gpudirect_storage(host: Host, is_on: bool, expected: Status) -> None:
    assert status_of(scene(host), "gpudirect storage") is None
    host.folder("/sys/module/nvidia_fs")
    if is_on:
        host.add_drive(BDF)
    assert status_of(scene(host), "gpudirect storage") is expected


def test_type1(host: Host) -> None:
    bound(host)
    assert status_of(scene(host), "vfio_iommu_type1") is Status.PASS
    host.path("/sys/module/vfio_iommu_type1").rmdir()
    assert status_of(scene(host), "vfio_iommu_type1") is Status.FAIL


def test_locked_memory_is_that_of_who_uses_the_drive(host: Host) -> None:
    assert status_of(scene(host), "locked memory") is Status.PASS
    assert status_of(scene(host, user="kv"), "locked memory") is Status.PASS
    assert status_of(scene(host, user="ann"), "locked memory") is Status.FAIL
    assert status_of(scene(host, user="nobody-here"), "locked memory") is Status.WARN


def test_more_huge_pages_than_mappings(host: Host) -> None:
    assert status_of(scene(host), "dma mappings") is None
    host.put("/sys/module/vfio_iommu_type1/parameters/dma_entry_limit", "32\n")
    assert status_of(scene(host), "dma mappings") is Status.WARN
    large = engine(uri=URI, buffer_size_bytes=1 << 30)
    assert status_of(scene(host, engines=(large,)), "dma mappings") is Status.FAIL


def test_no_drive_at_all(host: Host) -> None:
    assert status_of(scene(host), "drives") is Status.WARN
    host.add_drive(BDF)
    assert status_of(scene(host), "drives") is Status.PASS


# ---- drives


def test_a_drive_that_is_not_there(host: Host) -> None:
    assert status_of(scene(host, URI), "drive") is Status.FAIL
    host.add_drive(BDF)
    assert status_of(scene(host, URI), "drive") is None


def test_a_drive_that_the_kernel_still_has(host: Host) -> None:
    host.add_drive(BDF)
    assert status_of(scene(host), "driver") is None  # nobody asked for it
    assert status_of(scene(host, URI), "driver") is Status.FAIL


def test_a_drive_that_lost_its_driver_since_it_was_bound(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == 0
    assert status_of(scene(host), "driver") is Status.PASS
    host.system.write(f"{PCI}/devices/{BDF}/driver_override", "\n")
    host.system.write(f"{PCI}/devices/{BDF}/driver/unbind", BDF)
    host.system.write(f"{PCI}/drivers_probe", BDF)
    row = worst(scene(host), "driver")
    assert row is not None
    assert row.finding.status is Status.FAIL
    assert "bound before" in row.finding.detail


def test_only_system_disks(host: Host) -> None:
    node = host.add_drive(BDF)
    assert status_of(scene(host), "system disks") is None
    host.mount("/boot", f"/dev/{node}", host.number(node), "ext4")
    assert status_of(scene(host), "system disks") is Status.WARN


def test_a_group_with_foreign_members(host: Host) -> None:
    bound(host)
    assert status_of(scene(host), "iommu group") is Status.PASS
    host.add_device("0000:3b:00.1", "0x010601", "ahci", "12")
    assert status_of(scene(host), "iommu group") is Status.FAIL


def test_uio_and_vfio_mixed(host: Host) -> None:
    bound(host)
    assert status_of(scene(host), "uio and vfio") is None
    host.add_device("0000:3c:00.0", "0x010802", "uio_pci_generic", None)
    assert status_of(scene(host), "uio and vfio") is Status.FAIL


def test_a_container_without_the_group_node(host: Host) -> None:
    bound(host)
    assert status_of(scene(host), "group node") is Status.PASS
    host.path("/dev/vfio/12").unlink()
    row = worst(scene(host), "group node")
    assert row is not None
    assert row.finding.status is Status.FAIL
    assert "--device /dev/vfio/12" in row.finding.fix


def test_a_group_node_that_is_not_for_this_user(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(host)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert status_of(scene(host), "group node") is Status.FAIL


def test_another_program_on_spdk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    bound(host)
    host.put(f"/var/tmp/spdk_pci_lock_{BDF}", "")
    assert status_of(scene(host), "locks") is None
    monkeypatch.setattr(type(host.system), "is_record_locked", lambda *_: True)
    assert status_of(scene(host), "locks") is Status.WARN
    assert status_of(scene(host, engines=(engine(uri=URI),)), "locks") is None


def test_an_engine_that_does_not_answer(host: Host) -> None:
    bound(host)
    name = f"/run/hifc/{BDF.replace(':', '_')}-ns1.lock"
    host.put(name, "")
    status = host.path(name).stat()
    number = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    host.put("/proc/locks", f"1: FLOCK  ADVISORY  WRITE 4711 {number} 0 EOF\n")
    row = worst(scene(host), "locks")
    assert row is not None
    assert row.finding.status is Status.WARN
    assert "4711" in row.finding.detail


def test_a_narrow_link(host: Host) -> None:
    host.add_drive(BDF)  # x2 at 8 GT/s where x4 at 16 fits
    row = worst(scene(host), "pcie link")
    assert row is not None
    assert row.finding.status is Status.WARN
    assert "25%" in row.finding.detail
    for name in ("speed", "width"):
        best = host.path(f"{PCI}/devices/{BDF}/max_link_{name}").read_text()
        host.path(f"{PCI}/devices/{BDF}/current_link_{name}").write_text(best)
    assert status_of(scene(host), "pcie link") is Status.PASS


def test_a_gpu_on_another_node(host: Host) -> None:
    host.add_drive(BDF)
    host.add_device("0000:af:00.0", "0x030200", "nvidia", "40", vendor="0x10de")
    assert status_of(scene(host), "numa") is None  # both on node 1
    host.path(f"{PCI}/devices/0000:af:00.0/numa_node").write_text("0\n")
    assert status_of(scene(host), "numa") is Status.WARN


def test_huge_pages_on_another_node(host: Host) -> None:
    bound(host)
    assert status_of(scene(host), "numa") is None
    host.path(
        "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages"
    ).write_text("1\n")
    row = worst(scene(host), "numa")
    assert row is not None
    assert "--node 1" in row.finding.fix


def page(**fields: int) -> bytes:
    """A health log of a drive at 41 C."""
    log = bytearray(512)
    log[1:3] = (273 + fields.get("celsius", 41)).to_bytes(2, "little")
    log[0] = fields.get("critical", 0)
    log[3:6] = bytes([100, 10, fields.get("used", 3)])
    return bytes(log)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (page(), Status.PASS),
        (page(used=95), Status.WARN),
        (page(celsius=80), Status.WARN),
        (page(critical=8), Status.FAIL),
    ],
)
def test_health(host: Host, monkeypatch: pytest.MonkeyPatch, log: bytes, expected: Status) -> None:
    monkeypatch.setattr(device_verbs, "health_log", lambda _: log)
    assert status_of(scene(host, engines=(engine(uri=URI),)), "health") is expected


def test_health_of_the_others_when_one_does_not_tell(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(uri: str) -> bytes:
        if uri == URI:
            raise DeviceBusy("in use")
        return page()

    monkeypatch.setattr(device_verbs, "health_log", answer)
    both = engine(uri=URI), engine(uri="spdk://0000:3c:00.0?ns=1")
    rows = rows_of(scene(host, engines=both), "health")
    assert [row.finding.status for row in rows] == [Status.WARN, Status.PASS]


def test_health_of_a_drive_that_does_not_tell(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: str) -> bytes:
        raise DeviceBusy("process 7 has it")

    monkeypatch.setattr(device_verbs, "health_log", busy)
    assert status_of(scene(host, engines=(engine(uri=URI),)), "health") is Status.WARN


# ---- engines


def engine(uri: str = "file:///kv", **more: Any) -> Engine:
    """One that has done well."""
    names = [
        "device_error_count",
        "corrupt_count",
        "segments_damaged",
        "no_space_count",
        "entries_swap",
        "segments_free",
        "rejected_count",
        "retry_count",
        "miss_count",
        "evicted_count",
        "bounce_bytes",
        "reinserted_bytes",
        "write_budget_bytes",
        "write_budget_left_bytes",
    ]
    good = dict.fromkeys(names, 0) | {
        "direct": 1,
        "segment_size_bytes": 1 << 20,
        "get_count": 5000,
        "put_count": 5000,
        "get_bytes": 100 << 20,
        "put_bytes": 100 << 20,
        "device_write_bytes": 105 << 20,
        "buffer_size_bytes": 64 << 20,
    }
    return Engine("/run/hifc/1-0.sock", uri, 4711, good | more)


def test_a_good_engine_passes(host: Host) -> None:
    said = {"prefetch_issued": 5000, "prefetch_hit": 4000}
    rows = doctor.run(scene(host, engines=(engine(published=said),)), doctor_engine.CHECKS)
    assert {row.finding.status for row in rows} == {Status.PASS}
    assert {row.check for row in rows} == {
        "engine errors",
        "write amplification",
        "hits",
        "prefetch",
    }


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("engine errors", {"device_error_count": 1}, Status.FAIL),
        ("engine errors", {"corrupt_count": 1}, Status.FAIL),
        ("space", {"segments_damaged": 2}, Status.FAIL),
        ("space", {"no_space_count": 9}, Status.WARN),
        ("direct i/o", {"direct": 0}, Status.WARN),
        ("copies", {"bounce_bytes": 150 << 20}, Status.WARN),
        ("queues", {"retry_count": 5000}, Status.WARN),
        ("write amplification", {"device_write_bytes": 200 << 20}, Status.WARN),
        (
            "write budget",
            {"write_budget_bytes": 1 << 30, "write_budget_left_bytes": 4096},
            Status.WARN,
        ),
        ("hits", {"miss_count": 60000, "evicted_count": 5}, Status.WARN),
        ("hits", {"miss_count": 60000}, Status.PASS),
        (
            "prefetch",
            {"published": {"prefetch_issued": 5000, "prefetch_hit": 100}},
            Status.WARN,
        ),
    ],
)
def test_an_engine_in_trouble(
    host: Host, name: str, more: dict[str, Any], expected: Status
) -> None:
    assert status_of(scene(host, engines=(engine(**more),)), name) is expected


def test_an_engine_that_does_not_tell_is_no_reason_to_leave_others_out(host: Host) -> None:
    other = Engine("/run/hifc/2-0.sock", "spdk://0000:3c:00.0?ns=1", 12, {})
    rows = rows_of(scene(host, engines=(other, engine())), "engine errors")
    assert [row.finding.status for row in rows] == [Status.WARN, Status.PASS]
    assert "device_error_count" in rows[0].finding.evidence


def test_the_limit_that_an_engine_runs_with(host: Host) -> None:
    limits = "Limit Soft Hard Units\nMax locked memory         {}    {}   bytes\n"
    one = (engine(uri=URI),)
    host.put("/proc/4711/limits", limits.format("unlimited", "unlimited"))
    assert status_of(scene(host, engines=one), "engine's locked memory") is None
    host.put("/proc/4711/limits", limits.format(8388608, 8388608))
    assert status_of(scene(host, engines=one), "engine's locked memory") is Status.WARN
    host.put("/proc/4711/status", "Name:\tpython\nCapEff:\t0000000000000000\n")
    assert status_of(scene(host, engines=one), "engine's locked memory") is Status.WARN
    host.put("/proc/4711/status", "Name:\tpython\nCapEff:\t000001ffffffffff\n")
    assert status_of(scene(host, engines=one), "engine's locked memory") is None


def test_a_real_engine_is_found_and_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"file://{tmp_path.resolve()}/kv?size=16MiB"
    Namespace.format(uri, segment_size="256KiB")
    admin = Shell(capsys)
    with Namespace.open(uri) as namespace:
        namespace.put(b"k" * 16, b"v" * 5000)
        code, document = admin.json("doctor", uri)
    assert code == 0
    rows = {row["check"]: row for row in document["data"]["checks"]}
    assert rows["engine errors"]["status"] == "PASS"
    assert rows["engine errors"]["subject"] == uri


def test_the_scene_of_a_uri(host: Host) -> None:
    host.add_drive(BDF)
    host.add_drive("0000:3c:00.0", group="13")
    seen = scene_of(host.system, URI.replace("3b:00.0", "3B:00.0"), None)
    assert [drive.bdf for drive in seen.drives] == [BDF]
    assert len(seen.all_drives) == 2
    assert len(scene_of(host.system, None, None).drives) == 2


def test_checks_are_in_one_list() -> None:
    parts = (doctor_host.CHECKS, doctor_drive.CHECKS, doctor_file.CHECKS, doctor_engine.CHECKS)
    assert sum(map(len, parts)) == len(ALL_CHECKS)
