# SPDX-License-Identifier: Apache-2.0
"""Files on real file systems that are full, or that cannot allocate: small ones, mounted for it.

Where mounting is not permitted this is skipped with the reason; tests/sim/full_disk.c and
tests/unit/file.c try the same without.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hifc import Answer, Config, HiFC, Namespace, NoSpace

MIB = 1 << 20
DISK_BYTES = 48 * MIB
VALUE_BYTES = 900_000
KEYS = 120  # twice of what the disk has room for


def mounted(kind: str, folder: Path, where: Path) -> str:
    """Mounts a new file system of that kind at `where`: "" or why not."""
    where.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "hifc-test", str(where)]
    else:
        image = folder / f"{kind}.img"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        made = subprocess.run(
            [f"mkfs.{kind}", "-q", "-b", "4096", str(image)],
            check=False,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            return made.stderr.strip()
        command = ["mount", "-o", "loop", str(image), str(where)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The root of a file system of 48 MiB, of the kind that the test names."""
    where = tmp_path / "disk"
    try:
        problem = mounted(request.param, tmp_path, where)
    except FileNotFoundError as error:
        problem = f"{error.filename} is missing"
    if problem:
        pytest.skip(f"no {request.param} can be mounted here: {problem}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


KINDS = pytest.mark.parametrize("disk", ["tmpfs", "ext4", "ext2"], indirect=True)


def fill(disk: Path) -> Path:
    """A file of its own takes whatever room is left."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
    return path


def uri(disk: Path) -> str:
    return f"file://{disk}/kv?size=256MiB&sparse=1"


def open_at(disk: Path) -> Namespace:
    return Namespace.open(uri(disk), pool_size="8MiB", owner_socket=False)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def value(number: int) -> bytes:
    return bytes([number % 251]) * VALUE_BYTES


def put_all(ns: Namespace, first: int) -> None:
    for number in range(first, first + KEYS):
        assert ns.put(key(number), value(number)) in (Answer.OK, Answer.EXISTS)
        found = ns.get(key(number))
        assert found is not None
        assert bytes(found) == value(number)


def right_or_missing(ns: Namespace, first: int) -> int:
    """How many are there, each of them whole."""
    there = 0
    for number in range(first, first + KEYS):
        found = ns.get(key(number))
        assert found is None or bytes(found) == value(number)
        there += found is not None
    return there


@KINDS
def test_all_that_may_be_evicted_makes_room_on_a_full_disk(disk: Path) -> None:
    Namespace.format(uri(disk), segment_size="1MiB")
    with open_at(disk) as ns:
        for number in range(20):
            assert ns.put(key(number), value(number)) is Answer.OK
        filler = fill(disk)
        put_all(ns, 0)
        assert ns.delete(key(KEYS - 1))
        ns.sync()
        assert ns.stats().evicted_count > 0
        assert ns.stats().device_error_count == 0
    with open_at(disk) as ns:
        assert right_or_missing(ns, 0) > 0
        assert ns.get(key(KEYS - 1)) is None
        put_all(ns, KEYS)
    filler.unlink()
    with open_at(disk) as ns:
        there = right_or_missing(ns, KEYS)
        assert there > 0
        put_all(ns, 2 * KEYS)


@KINDS
def test_a_disk_that_is_full_from_the_start(disk: Path) -> None:
    Namespace.format(uri(disk), segment_size="1MiB")
    filler = fill(disk)
    with open_at(disk) as ns:
        assert ns.put(key(0), value(0)) is Answer.NO_SPACE
        assert ns.get(key(0)) is None
        assert not ns.delete(key(0))
        ns.sync()
    with open_at(disk) as ns:
        assert ns.put(key(0), value(0)) is Answer.NO_SPACE
        filler.unlink()  # while it is open
        for _ in range(1000):  # it looks for room again every 0.1 s
            if ns.put(key(0), value(0)) is not Answer.NO_SPACE:
                break
            time.sleep(0.01)
        put_all(ns, 0)


PUT_AND_DIE = """
import os, signal, sys
from hifc import Namespace
ns = Namespace.open(sys.argv[1], pool_size="8MiB", owner_socket=False)
for number in range(1000, 1004):
    ns.put(number.to_bytes(16, "big"), bytes([number % 251]) * 900_000)
ns.sync()
os.kill(os.getpid(), signal.SIGKILL)
"""


@KINDS
@pytest.mark.parametrize("dig", [False, True], ids=["", "as earlier releases left it"])
def test_open_after_a_kill_on_a_full_disk(disk: Path, dig: bool) -> None:
    """With holes in the segment that was open, as earlier releases left it, too."""
    Namespace.format(uri(disk), segment_size="1MiB")
    fill(disk).unlink()
    killed = subprocess.run([sys.executable, "-P", "-c", PUT_AND_DIE, uri(disk)], check=False)
    assert killed.returncode == -9
    if dig:
        dug = subprocess.run(
            ["fallocate", "--dig-holes", str(disk / "kv")], check=False, capture_output=True
        )
        if dug.returncode:
            pytest.skip(f"no holes here: {dug.stderr.decode().strip()}")
    fill(disk)
    with open_at(disk) as ns:
        for number in range(1000, 1004):
            found = ns.get(key(number))
            assert found is not None
            assert bytes(found) == value(number)
    with open_at(disk) as ns:
        assert ns.get(key(1003)) is not None


@KINDS
def test_a_format_without_room_leaves_no_file(disk: Path) -> None:
    fill(disk)
    for parameters in ("size=256MiB&sparse=1", "size=256MiB&sparse=0", "size=16MiB&sparse=0"):
        with pytest.raises(NoSpace):
            Namespace.format(f"file://{disk}/kv?{parameters}", segment_size="1MiB")
        assert not (disk / "kv").exists()


@KINDS
def test_room_that_is_not_sparse_is_there(disk: Path) -> None:
    with pytest.raises(NoSpace, match="use a smaller size"):
        Namespace.format(f"file://{disk}/kv?size=400MiB&sparse=0")
    assert not (disk / "kv").exists()
    Namespace.format(f"file://{disk}/kv?size=16MiB&sparse=0")
    status = (disk / "kv").stat()
    assert status.st_size == 16 * MIB
    assert status.st_blocks * 512 >= 16 * MIB


@pytest.mark.parametrize("disk", ["ext4", "ext2"], indirect=True)
def test_a_file_that_is_too_large_for_the_file_system(disk: Path) -> None:
    """Which is a setting, not what is on the medium."""
    with pytest.raises(Exception, match="use a smaller size") as caught:
        Namespace.format(f"file://{disk}/kv?size=1000000TiB&sparse=1")
    assert type(caught.value).__name__ == "ConfigError"
    assert not (disk / "kv").exists()


def test_an_engine_that_does_not_open_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    for how in ("always", "if_missing"):
        config = Config(
            device=f"file://{path}?size=64MiB",
            format=how,
            memory_budget=1 << 62,  # more than there is
        )
        with pytest.raises(Exception, match="open"):
            HiFC(config)
        assert not path.exists()
