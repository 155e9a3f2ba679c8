# SPDX-License-Identifier: Apache-2.0
"""hifc-admin hugepages, cleanup and install on a pretended host."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin_shell import Shell, code_of
from fake_host import PCI, Host, Killed
from hifc_admin.host import install, records
from hifc_admin.host.drives import find_drive
from hifc_admin.host.leftovers import find_leftovers
from hifc_admin.result import Exit

BDF = "0000:3b:00.0"
PAGES = "/sys/kernel/mm/hugepages/hugepages-2048kB"
NODE_PAGES = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB"


# ---- hugepages


def test_hugepages_shows_and_changes_nothing(host: Host, on_host: Shell) -> None:
    code, document = on_host.json("hugepages")
    assert (code, host.changes) == (Exit.DONE, 0)
    assert document["data"]["pages"][0] == {
        "size_bytes": 2 << 20,
        "node": None,
        "total": 64,
        "free": 64,
        "surplus": 0,
    }
    assert [pages["node"] for pages in document["data"]["pages"]] == [None, 0, 1]
    assert on_host("hugepages") == Exit.DONE
    assert "hugetlbfs on /dev/hugepages, pages of 2 MiB" in on_host.out


def test_hugepages_are_reserved_and_kept(host: Host, on_host: Shell) -> None:
    assert on_host("hugepages", "--count", "512", "--persist") == Exit.DONE
    assert host.path(f"{PAGES}/nr_hugepages").read_text() == "512\n"
    kept = host.path("/etc/tmpfiles.d/hifc-hugepages-2048kB.conf").read_text()
    assert kept.splitlines()[1] == f"w {PAGES}/nr_hugepages - - - - 512"
    # What it did was said before it did it.
    assert on_host.err.startswith(f"will write 512 to {PAGES}/nr_hugepages, which says 64\n")
    before = host.changes
    assert on_host("hugepages", "--count", "512", "--persist") == Exit.DONE
    assert host.changes == before


def test_hugepages_of_one_node(host: Host, on_host: Shell) -> None:
    assert on_host("hugepages", "--count", "100", "--node", "1", "--persist") == Exit.DONE
    assert host.path(f"{NODE_PAGES}/nr_hugepages").read_text() == "100\n"
    assert host.path(f"{PAGES}/nr_hugepages").read_text() == "64\n"
    assert host.path("/etc/tmpfiles.d/hifc-hugepages-2048kB-node1.conf").exists()


def test_hugetlbfs_is_mounted_where_there_is_none(host: Host, on_host: Shell) -> None:
    host.put("/proc/self/mountinfo", "30 1 254:1 / / rw - ext4 /dev/vda1 rw\n")
    assert on_host("hugepages", "--count", "64") == Exit.DONE
    assert " /dev/hugepages " in host.path("/proc/self/mountinfo").read_text()
    assert "pagesize=2048K" in host.path("/proc/self/mountinfo").read_text()


def test_pages_of_another_size_get_a_mount_of_their_own(host: Host, on_host: Shell) -> None:
    for name in ("nr", "free", "surplus"):
        host.put(f"/sys/kernel/mm/hugepages/hugepages-1048576kB/{name}_hugepages", "0\n")
    assert on_host("hugepages", "--count", "1", "--size", "1GiB") == Exit.DONE
    assert " /dev/hugepages-1048576kB " in host.path("/proc/self/mountinfo").read_text()


def test_fewer_pages_than_asked_for(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(name: str, text: str) -> None:
        host.put(name, "300\n")  # fragmented memory

    monkeypatch.setattr(host, "written", written)
    code, document = on_host.json("hugepages", "--count", "512")
    assert (code, code_of(document)) == (Exit.PARTLY, "too-few-pages")
    assert "300 pages of 512" in document["problems"][0]["detail"]


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        (["--count", "8", "--size", "4MiB"], Exit.USAGE, "no-such-pages"),
        (["--count", "8", "--node", "9"], Exit.USAGE, "no-such-pages"),
        (["--count", "8", "--size", "plenty"], Exit.USAGE, "usage"),
        (["--count", "-1"], Exit.USAGE, "usage"),
        (["--persist"], Exit.USAGE, "usage"),
        (["--count", "1000"], Exit.PREREQUISITE, "not-enough-memory"),
    ],
)
def test_hugepages_that_cannot_be(
    host: Host, on_host: Shell, words: list[str], exit_code: Exit, code: str
) -> None:
    meminfo = host.path("/proc/meminfo").read_text()
    host.put("/proc/meminfo", f"{meminfo}MemAvailable:     1048576 kB\n")
    found, document = on_host.json("hugepages", *words)
    assert (found, code_of(document)) == (exit_code, code)
    assert host.changes == 0


def test_a_dry_run_of_hugepages(host: Host, on_host: Shell) -> None:
    before = host.snapshot()
    assert on_host("hugepages", "--count", "512", "--persist", "--dry-run") == Exit.DONE
    assert on_host.out.startswith("would write 512 to ")
    assert host.snapshot() == before


def test_pages_are_given_back_when_the_rest_fails(host: Host, on_host: Shell) -> None:
    host.fail_at = 1
    assert on_host("hugepages", "--count", "512", "--persist") == Exit.FAILED
    assert host.path(f"{PAGES}/nr_hugepages").read_text() == "64\n"


def test_a_mount_is_taken_back_when_the_rest_fails(host: Host, on_host: Shell) -> None:
    mounts = "30 1 254:1 / / rw - ext4 /dev/vda1 rw\n"
    host.put("/proc/self/mountinfo", mounts)
    host.fail_at = 2  # after pages and mount
    assert on_host("hugepages", "--count", "512", "--persist") == Exit.FAILED
    assert host.path("/proc/self/mountinfo").read_text() == mounts
    host.changes, host.fail_at = 0, 1  # the mount itself
    assert on_host("hugepages", "--count", "512") == Exit.FAILED
    assert "not be put back" not in on_host.err


# ---- cleanup


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """What the test keeps open, as a living process would."""
    held: list[int] = []
    yield held
    for fd in held:
        os.close(fd)


def hold(host: Host, name: str, held: list[int]) -> None:
    host.put(name, "")
    fd = host.system.lock(name)
    assert fd is not None
    held.append(fd)


def test_what_dead_processes_left_goes_and_the_rest_stays(
    host: Host, on_host: Shell, descriptors: list[int]
) -> None:
    dead = [
        "/dev/hugepages/spdk_pid4711map_0",
        "/run/hifc/0000_3b_00.0-ns1-12345678.lock",
        f"/run/hifc-admin/{BDF}.lock",
        "/run/hifc-admin/groups/99",
        "/var/tmp/spdk_pci_lock_0000:3b:00.0",
    ]
    for name in dead:
        host.put(name, "x" * 100)
    host.put("/run/dpdk/spdk_pid4711/config", "")
    host.folder("/run/dpdk/spdk_pid4712")
    host.folder("/run/dpdk/spdk_pid1")  # that process lives
    alive = ["/dev/hugepages/spdk_pid1map_0", "/run/hifc/0000_3c_00.0-ns1-12345678.lock"]
    for name in alive:
        hold(host, name, descriptors)
    others = ["/dev/hugepages/rtemap_0", "/dev/hugepages/libvirt", "/tmp/other.lock"]
    for name in others:
        host.put(name, "")
    gone = [*dead, "/run/dpdk/spdk_pid4711", "/run/dpdk/spdk_pid4712"]

    before = host.snapshot()
    code, document = on_host.json("cleanup", "--dry-run")
    assert code == Exit.DONE
    assert sorted(item["name"] for item in document["data"]["leftovers"]) == sorted(gone)
    assert host.snapshot() == before

    code, document = on_host.json("cleanup")
    assert (code, document["problems"]) == (Exit.DONE, [])
    assert document["data"]["freed_bytes"] >= 100
    assert not [name for name in gone if host.path(name).exists()]
    assert all(host.path(name).exists() for name in [*alive, *others, "/run/dpdk/spdk_pid1"])
    for words, said in (
        (["cleanup"], "nothing was left\n"),
        (
            ["cleanup", "--dry-run"],
            "would change nothing\n",
        ),
    ):
        assert on_host(*words) == Exit.DONE
        assert on_host.out == said


def test_sockets_nobody_listens_on(host: Host, on_host: Shell) -> None:
    host.folder("/run/hifc")
    folder = host.path("/run/hifc")
    before = Path.cwd()
    os.chdir(folder)  # their paths are short, and a temporary folder's is not
    try:
        dead, alive = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        dead.bind("1-0.sock")
        dead.close()
        alive.bind("2-0.sock")
        alive.listen()
    finally:
        os.chdir(before)
    if len(str(folder)) > 90:
        pytest.skip("the temporary folder's path is too long for a socket")
    assert on_host("cleanup") == Exit.DONE
    assert [path.name for path in folder.iterdir()] == ["2-0.sock"]
    alive.close()


def test_what_got_an_owner_since_stays(host: Host, descriptors: list[int]) -> None:
    """Between the first look and the removal a process may start or give a drive away."""
    host.put("/run/hifc-admin/groups/12", "")
    host.put("/run/hifc/a.lock", "")
    host.put("/run/hifc/gone.lock", "")
    host.folder("/run/dpdk/spdk_pid4712")
    found = {item.name: item for item in find_leftovers(host.system)[0]}
    assert len(found) == 4
    host.add_drive(BDF)
    drive = find_drive(host.system, BDF)
    record = records.make_record(drive, "vfio-pci", "", "root", "hifc")
    host.put(f"/run/hifc-admin/{BDF}.json", record.text())
    hold(host, "/run/hifc/a.lock", descriptors)
    host.path("/run/hifc/gone.lock").unlink()
    host.add_process(4712, "python3")
    for item in found.values():
        item.remove()
    for name in ("/run/hifc-admin/groups/12", "/run/hifc/a.lock", "/run/dpdk/spdk_pid4712"):
        assert host.path(name).exists(), name


def test_a_record_that_cannot_be_read_keeps_nothing_else(host: Host, on_host: Shell) -> None:
    host.put("/run/hifc-admin/0000:01:00.0.json", "{}")
    host.put("/run/hifc-admin/groups/12", "")
    host.put("/run/hifc/a.lock", "")
    assert on_host("status") == Exit.DONE
    code, document = on_host.json("cleanup")
    assert code == Exit.DONE
    assert {problem["code"] for problem in document["problems"]} == {"not-checked"}
    assert not host.path("/run/hifc/a.lock").exists()
    assert host.path("/run/hifc-admin/groups/12").exists()


def test_a_lock_is_its_owners_alone(host: Host, descriptors: list[int]) -> None:
    """Whoever may open it may hold it, and keep root from the drive."""
    host.folder("/run/hifc-admin")
    fd = host.system.lock("/run/hifc-admin/x.lock")
    assert fd is not None
    descriptors.append(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o600


def test_a_lock_that_fcntl_holds_is_no_leftover(host: Host, tmp_path: Path) -> None:
    name = "/var/tmp/spdk_pci_lock_0000:3b:00.0"
    host.put(name, "")
    ready, done = os.pipe(), os.pipe()
    child = os.fork()  # such locks do not show to the process that holds them
    if child == 0:
        fd = os.open(host.path(name), os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert find_leftovers(host.system)[0] == []
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
    assert [item.name for item in find_leftovers(host.system)[0]] == [name]
    for fd in (*ready, *done):
        os.close(fd)


def test_a_bind_that_was_killed_is_put_right(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    for number in range(3, 9):
        host.changes, host.fail_at, host.failure = 0, number, Killed
        try:
            on_host("bind", BDF)
        except Killed:
            pass
        else:
            break
        host.revive()
        assert on_host("cleanup") == Exit.DONE
        assert host.driver(BDF) == "nvme", number
        assert host.path(f"/dev/{node}").exists()
        assert host.system.attribute(f"{PCI}/devices/{BDF}/driver_override") == "(null)"
        assert not list(host.path("/run/hifc-admin").rglob("*.json"))
    assert number > 5


def test_a_bind_under_way_is_left_alone(host: Host, on_host: Shell, descriptors: list[int]) -> None:
    host.add_drive(BDF)
    host.changes, host.fail_at, host.failure = 0, 5, Killed
    with pytest.raises(Killed):
        on_host("bind", BDF)
    host.revive()
    driver = host.driver(BDF)
    hold(host, f"/run/hifc-admin/{BDF}.lock", descriptors)
    assert on_host("cleanup") == Exit.DONE
    assert host.driver(BDF) == driver


def test_what_may_not_be_removed_is_told(
    host: Host, on_host: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.put("/run/hifc/a.lock", "")
    host.put("/run/hifc/b.lock", "")
    host.fail_at = 0
    code, document = on_host.json("cleanup")
    assert (code, code_of(document)) == (Exit.PARTLY, "not-removed")
    assert not host.path("/run/hifc/b.lock").exists()


# ---- install


def test_install_puts_all_files_in_place(host: Host, on_host: Shell) -> None:
    host.put("/etc/group", "root:x:0:\n")
    before = host.snapshot()
    code, document = on_host.json("install", "--dry-run")
    assert code == Exit.DONE
    assert host.snapshot() == before
    planned = document["data"]["steps"]
    code, document = on_host.json("install")
    assert (code, document["data"]["steps"]) == (Exit.DONE, planned)
    for name in install.FILES.values():
        assert host.path(name).is_file(), name
    drop_in = host.path("/etc/systemd/system/hifc-.service.d/50-hifc-locked-memory.conf")
    assert "LimitMEMLOCK=infinity" in drop_in.read_text()
    assert ("systemd-sysusers", install.SYSUSERS) in host.ran
    assert ("udevadm", "control", "--reload") in host.ran
    unit = host.path("/etc/systemd/system/hifc-bind@.service").read_text()
    assert "@" not in unit.partition("ExecStart=")[2].splitlines()[0]
    assert unit.partition("ExecStart=")[2].startswith("/")


def test_install_again_does_nothing(host: Host, on_host: Shell) -> None:
    host.folder("/run/hifc")
    assert on_host("install") == Exit.DONE
    host.ran.clear()
    before = host.snapshot()
    assert on_host("install") == Exit.DONE
    assert on_host.out == "all is in place already\n"
    assert host.snapshot() == before
    assert host.ran == []


def test_install_for_a_service_and_a_user(host: Host, on_host: Shell) -> None:
    words = ("--service", "vllm.service", "--user", "ann", "--user", "kv")
    assert on_host("install", *words) == Exit.DONE
    assert host.path("/etc/systemd/system/vllm.service.d/50-hifc-locked-memory.conf").exists()
    assert ("usermod", "--append", "--groups", "hifc", "ann") in host.ran
    assert not [words for words in host.ran if words[-1] == "kv"]  # is a member


@pytest.mark.parametrize("words", [["--service", "../x.service"], ["--user", "nobody-there"]])
def test_install_for_what_is_not_there(host: Host, on_host: Shell, words: list[str]) -> None:
    assert on_host("install", *words) == Exit.USAGE
    assert host.changes == 0


def test_an_install_that_fails_leaves_nothing(host: Host, on_host: Shell) -> None:
    host.put("/etc/udev/rules.d/60-hifc.rules", "# my own\n")
    before = {name: text for name, text in host.snapshot().items() if host.path(name).is_file()}
    host.broken_programs.add("systemctl")
    host.system.has_program = lambda name: True  # type: ignore[method-assign]
    assert on_host("install") == Exit.FAILED
    after = {name: text for name, text in host.snapshot().items() if host.path(name).is_file()}
    assert after == before


def test_programs_that_are_not_there_are_left_out(host: Host, on_host: Shell) -> None:
    host.broken_programs |= {"udevadm", "systemctl", "systemd-tmpfiles", "install"}
    assert on_host("install") == Exit.DONE
    assert host.ran == []


def test_daemons_that_do_not_run_are_not_told(host: Host, on_host: Shell) -> None:
    host.path("/run/udev/control").unlink()
    host.path("/run/systemd/system").rmdir()
    assert on_host("install") == Exit.DONE
    assert {words[0] for words in host.ran} == {"systemd-tmpfiles"}


def test_the_rule_opens_only_groups_that_bind_noted() -> None:
    rules = [
        line
        for line in install.text_of("60-hifc.rules").splitlines()
        if line and not line.startswith("#")
    ]
    assert len(rules) == 1
    assert 'TEST=="/run/hifc-admin/groups/%k"' in rules[0]
    assert 'KERNEL=="[0-9]*"' in rules[0]
