# SPDX-License-Identifier: Apache-2.0
"""hifc-admin's verbs on one bound drive: at rest, while an engine has it, after that was killed,
and erased at last. The tests share the drive and run in this order."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import load
import pytest
from busy import SEGMENT, Child, assert_synced, under_load

from admin_shell import Shell, code_of
from hifc import Namespace
from hifc_admin.result import Exit
from vm import drives
from vm.pci import Drive, PciDevice

VALUES = 6
LOAD_KEY = load.key(0).hex()


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="module")
def served(addresses: dict[str, str]) -> Iterator[Drive]:
    """The free drive, bound, with a namespace of some values."""
    drive = Drive(drives.FREE, PciDevice(addresses[drives.FREE.name]))
    with drive.pci.bound("vfio-pci"):
        Namespace.format(drive.uri, segment_size=SEGMENT, force=True, label="served")
        with Namespace.open(drive.uri) as ns:
            for number in range(VALUES):
                ns.put(load.key(number), load.value(number))
        yield drive


def confirm(drive: Drive) -> str:
    return f"{drive.spec.serial}/1"


def done(admin: Shell, *words: str) -> dict[str, Any]:
    """The data of a verb that has to succeed."""
    code, document = admin.json(*words)
    assert code == Exit.DONE, document
    return dict(document["data"])


def assert_healthy(log: dict[str, Any]) -> None:
    assert log["critical_warnings"] == []
    assert 0 < log["temperature_celsius"] < 100
    assert log["data_read_bytes"] > 0


# ---- at rest


def test_smart_through_the_kernel(admin: Shell, used: Drive) -> None:
    assert_healthy(done(admin, "smart", f"file://{used.pci.block_device()}"))


def test_smart_through_the_admin_queue(admin: Shell, served: Drive) -> None:
    assert_healthy(done(admin, "smart", served.uri))


def test_list_shows_a_bound_drive(admin: Shell, served: Drive) -> None:
    mine = listed(admin, served)
    assert (mine["driver"], mine["bound"], mine["in_use"]) == ("vfio-pci", True, False)
    assert mine["iommu_group"] == str(served.pci.iommu_group)
    assert mine["iommu_group_others"] == []
    assert mine["owner"] is None


def listed(admin: Shell, drive: Drive) -> dict[str, Any]:
    found = done(admin, "list")["drives"]
    return next(dict(item) for item in found if item["bdf"] == drive.pci.bdf)


def test_a_closed_namespace_leaves_nothing(admin: Shell, served: Drive) -> None:
    assert Namespace.open(served.uri, read_only=True).close() is None
    found = done(admin, "status")
    assert found["leftovers"] == []
    assert [drive["bdf"] for drive in found["drives"]] == [served.pci.bdf]
    assert found["modules"]["vfio_pci"]
    assert found["iommu_groups"] > 0
    assert done(admin, "cleanup", "--dry-run")["steps"] == []


def test_what_is_on_it(admin: Shell, served: Drive, tmp_path: Path) -> None:
    found = done(admin, "info", served.uri)
    assert (found["label"], found["entries"]) == ("served", VALUES)
    assert found["device"]["serial"] == served.spec.serial
    keys = [entry["key"] for entry in done(admin, "list-keys", served.uri)["entries"]]
    assert sorted(keys) == [load.key(number).hex() for number in range(VALUES)]
    file = tmp_path / "value"
    assert done(admin, "dump", served.uri, LOAD_KEY, "--output", str(file))["length"] == 65536
    assert file.read_bytes() == load.value(0).tobytes()
    code, document = admin.json("dump", served.uri, "f" * 32)
    assert (code, code_of(document)) == (Exit.FAILED, "not-found")


def test_it_is_verified(admin: Shell, served: Drive) -> None:
    found = done(admin, "fsck", served.uri, "--payload")
    assert (found["entries_checked"], found["problems"]) == (VALUES, 0)
    repaired = done(admin, "fsck", served.uri, "--payload", "--repair")
    assert (repaired["entries_deleted"], repaired["segments_freed"]) == (0, 0)
    started_s = time.monotonic()
    found = done(admin, "scrub", served.uri, "--rate", "256KiB")
    assert (found["entries_read"], found["corrupt"], found["unreadable"]) == (VALUES, 0, 0)
    assert time.monotonic() - started_s > 1.0  # not before its time: 384 KiB


def test_bench(admin: Shell, served: Drive) -> None:
    words = ["--size", "64KiB", "--data", "1MiB", "--duration", "0.3", "--depth", "4"]
    words += ["--load", "write", "--load", "random"]
    code, document = admin.json("bench", served.uri, "--confirm", "another/1", *words)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    found = done(admin, "bench", served.uri, "--confirm", confirm(served), *words)
    assert [load["load"] for load in found["loads"]] == ["write", "random"]
    assert all(load["bytes_per_s"] > 0 for load in found["loads"])
    assert done(admin, "info", served.uri)["entries"] == VALUES
    assert done(admin, "bench", served.uri, "--read-only", "--duration", "0.3")["loads"]


def test_doctor(admin: Shell, served: Drive) -> None:
    checks = done(admin, "doctor", served.uri)["checks"]
    by_name = {check["check"]: check["status"] for check in checks}
    for name in ("driver", "iommu", "vfio_iommu_type1", "huge pages", "health", "pcie link"):
        assert by_name[name] == "PASS", checks
    code, document = admin.json("doctor", "spdk://0000:7f:00.0?ns=1")
    assert code == Exit.FAILED
    assert "drive" in {problem["code"] for problem in document["problems"]}


# ---- while an engine has it


def test_a_running_engine_is_asked(admin: Shell, served: Drive) -> None:
    code, document = admin.json("top")
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "not-owned")
    with under_load(served) as child:
        assert_healthy(done(admin, "smart", served.uri))
        assert done(admin, "stats", served.uri)["pid"] == child.process.pid
        found = done(admin, "top", "--interval", "1")
        assert found["uri"] == served.uri
        assert found["put_per_s"] > 0 and found["device_write_bytes_per_s"] > 0
        assert admin("top", "--prometheus") == Exit.DONE
        assert f'hifc_namespace_put_total{{uri="{served.uri}"' in admin.out
        rows = done(admin, "doctor", served.uri)["checks"]
        assert {row["status"] for row in rows if row["check"] == "engine errors"} == {"PASS"}
        assert listed(admin, served)["owner"]["pid"] == child.process.pid
        assert [item["pid"] for item in done(admin, "status")["processes"]] == [child.process.pid]
        # A stopped one has it as well, and leaves the CPUs to what asks.
        os.kill(child.process.pid, signal.SIGSTOP)
        refused_in_use(admin, served, child)


def refused_in_use(admin: Shell, drive: Drive, child: Child) -> None:
    """Whatever wants the device for itself says who has it."""
    named = [drive.uri, "--confirm", confirm(drive)]
    for words in (
        ["info", drive.uri],
        ["fsck", drive.uri, "--payload", "--repair"],
        ["scrub", drive.uri],
        ["bench", drive.uri, "--read-only"],
        ["erase", *named, "--method", "format"],
        ["format", *named, "--force"],
        ["format", *named, "--force", "--dry-run"],
    ):
        code, document = admin.json(*words)
        assert (code, code_of(document)) == (Exit.REFUSED, "in-use"), (words, document)
        (problem,) = document["problems"]
        assert str(child.process.pid) in problem["detail"] + problem["fix"]
    code, document = admin.json("unbind", drive.pci.bdf)
    assert code == Exit.REFUSED
    assert drive.pci.driver == "vfio-pci"


def test_what_a_killed_engine_left_is_cleaned_up(admin: Shell, served: Drive) -> None:
    with under_load(served) as child:
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
    left = done(admin, "status")
    assert left["processes"] == []
    kinds = {item["kind"] for item in left["leftovers"]}
    assert "socket" in kinds, left
    planned = done(admin, "cleanup", "--dry-run")["steps"]
    assert len(planned) == len(left["leftovers"])
    assert done(admin, "cleanup")["steps"] == planned
    assert done(admin, "status")["leftovers"] == []
    found = done(admin, "fsck", served.uri, "--payload")
    assert (found["problems"], found["recovery_damaged"]) == (0, 0)
    with Namespace.open(served.uri) as ns:
        assert_synced(ns)


# ---- erased


def test_erase_refuses_what_the_drive_cannot(admin: Shell, served: Drive) -> None:
    command = ["erase", served.uri, "--confirm", confirm(served), "--method"]
    for method in ("crypto", "sanitize"):  # QEMU's drive has neither
        code, document = admin.json(*command, method)
        assert (code, code_of(document)) == (Exit.REFUSED, "method-refused"), document
        fix = "use --method deallocate or --method overwrite or --method format"
        assert document["problems"][0]["fix"] == fix
    assert done(admin, *command, "format", "--dry-run")["steps"] == [f"erase {served.uri}: format"]
    with Namespace.open(served.uri, read_only=True) as ns:
        assert_synced(ns)


@pytest.mark.parametrize("method", ["deallocate", "format"])
def test_erase_leaves_no_namespace(admin: Shell, served: Drive, method: str) -> None:
    if method == "format":
        Namespace.format(served.uri, segment_size=SEGMENT)
    command = ["erase", served.uri, "--confirm", confirm(served), "--method", method]
    found = done(admin, *command)
    assert found["method"] == method
    assert "HiFC" in found["held"]
    code, document = admin.json("info", served.uri)
    assert (code, code_of(document)) == (Exit.FAILED, "no-namespace")


# ---- through the kernel's driver


def test_format_and_erase_through_the_kernel_ask_like_bind(
    admin: Shell, small: Drive, tmp_path: Path
) -> None:
    node = small.pci.block_device()
    uri = f"file://{node}"
    words = [uri, "--confirm", confirm(small), "--force"]
    subprocess.run(["mkfs.ext4", "-q", "-F", node], check=True)
    subprocess.run(["mount", "-o", "ro", node, tmp_path], check=True)
    try:
        for verb in (["format"], ["format", "--dry-run"], ["erase"]):
            code, document = admin.json(verb[0], *words, *verb[1:])
            assert (code, code_of(document)) == (Exit.REFUSED, "mounted")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    with node.open("rb") as file, subprocess.Popen(["sleep", "600"], stdin=file) as child:
        code, document = admin.json("format", *words)
        assert (code, code_of(document)) == (Exit.REFUSED, "process")
        child.kill()
    code, document = admin.json("format", *words[:3], "--dry-run")
    assert (code, code_of(document)) == (Exit.REFUSED, "occupied")
    assert done(admin, "format", *words)["entries"] == 0
    # Nothing asked for: what the drive understands.
    assert done(admin, "erase", *words[:3])["method"] == "deallocate"
