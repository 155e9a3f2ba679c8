# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind gets a clear error that names the fix, and nothing is lost."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hifc import (
    Answer,
    ConfigError,
    DeviceBusy,
    FormatError,
    HiFCError,
    InvalidRequest,
    Namespace,
    NoSpace,
    NotSupported,
)
from hifc.native_lib import libhifc

if TYPE_CHECKING:
    from conftest import Opener

KEY = b"k" * 16
MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A formatted file of 16 MiB with one value."""
    path = tmp_path / "kv.img"
    Namespace.format(f"file://{path}?size=16MiB", segment_size="256KiB")
    with Namespace.open(f"file://{path}", pool_size="4MiB") as ns:
        assert ns.put(KEY, b"precious") is Answer.OK
    return path


def still_there(path: Path) -> None:
    with Namespace.open(f"file://{path}", pool_size="4MiB", read_only=True) as ns:
        assert bytes(ns.get(KEY)) == b"precious"


# ---- uri and device


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("pigeon://coop", "file"),  # what can be opened is listed
        ("/dev/nvme0n1", "://"),
        ("", "://"),
        ("ram://x?size=12parsecs", "size"),
        ("ram://x?sise=1MiB", "sise"),
        ("file:///no/such/directory/x?size=16MiB", "directory"),
    ],
)
def test_bad_uri(uri: str, message: str) -> None:
    for call in (Namespace.format, Namespace.open):
        with pytest.raises(ConfigError, match=message) as caught:
            call(uri)
        assert len(str(caught.value)) > 30


def test_spdk_in_a_build_without_it() -> None:
    if "spdk" in libhifc.library().hifc_schemes().decode().split():
        pytest.skip("this build has SPDK")
    with pytest.raises((ConfigError, NotSupported), match=r"(?i)spdk"):
        Namespace.open("spdk://0000:3b:00.0?ns=1")


def test_too_small_device() -> None:
    with pytest.raises(ConfigError, match="too few"):
        Namespace.format("ram://small?size=1MiB")
    with pytest.raises(ConfigError, match="smaller segments"):
        Namespace.format("ram://small-2?size=64MiB", segment_size="256MiB")


@pytest.mark.parametrize("size", ["100KiB", "300KiB", "512MiB"])
def test_bad_segment_size(size: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)segment"):
        Namespace.format("ram://segments?size=1GiB", segment_size=size)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format it first"):
        Namespace.open(f"file://{tmp_path}/absent.img")
    assert not (tmp_path / "absent.img").exists()


def test_file_that_is_no_namespace(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"dear diary\n" * 400_000)
    with pytest.raises(FormatError, match="no HiFC namespace"):
        Namespace.open(f"file://{path}")
    assert path.read_bytes() == b"dear diary\n" * 400_000


def test_foreign_file_system_is_not_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "ext4.img"
    with path.open("wb") as file:
        file.truncate(16 * MIB)
        file.seek(1024 + 56)  # magic number of an ext2, 3 or 4 superblock
        file.write(struct.pack("<H", 0xEF53))
    before = path.read_bytes()
    with pytest.raises(FormatError, match=r"(?i)ext.*force"):
        Namespace.format(f"file://{path}")
    assert path.read_bytes() == before
    Namespace.format(f"file://{path}", force=True, segment_size="256KiB")
    with Namespace.open(f"file://{path}", pool_size="4MiB") as ns:
        assert ns.put(KEY, b"x") is Answer.OK


def test_an_existing_namespace_is_not_overwritten_without_force(image: Path) -> None:
    with pytest.raises(FormatError, match="force"):
        Namespace.format(f"file://{image}")
    still_there(image)


def crc32c(data: bytes) -> int:
    """CRC-32C as the format uses it: initial value and final inversion all ones."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def edit_superblocks(path: Path, at: int, data: bytes) -> None:
    """Changes all four copies and makes their checksums right again (docs/format.md)."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in (0, 64 << 10, size - (128 << 10), size - (64 << 10)):
            file.seek(offset)
            page = bytearray(file.read(4096))
            page[at : at + len(data)] = data
            page[8:12] = bytes(4)
            seed = bytes(16) + struct.pack("<QQ", offset, 0)
            page[8:12] = struct.pack("<I", crc32c(seed + page))
            file.seek(offset)
            file.write(page)


def test_newer_format_version(image: Path) -> None:
    edit_superblocks(image, 12, struct.pack("<I", 2))
    before = image.read_bytes()
    with pytest.raises(FormatError, match="version 2"):
        Namespace.open(f"file://{image}")
    assert image.read_bytes() == before
    edit_superblocks(image, 12, struct.pack("<I", 1))
    still_there(image)


def test_truncated_image(image: Path) -> None:
    whole = image.read_bytes()
    os.truncate(image, 8 * MIB)
    with pytest.raises(FormatError, match="truncated"):
        Namespace.open(f"file://{image}")
    image.write_bytes(whole)
    still_there(image)


def test_two_of_four_superblocks_are_enough(image: Path) -> None:
    with image.open("r+b") as file:
        file.write(b"\xff" * 4096)
        file.seek(image.stat().st_size - (64 << 10))
        file.write(b"\xff" * 4096)
    still_there(image)


def test_device_in_use_names_its_holder(image: Path) -> None:
    with Namespace.open(f"file://{image}", pool_size="4MiB"):
        with pytest.raises(DeviceBusy) as caught:
            Namespace.open(f"file://{image}")
        assert os.getpid() in caught.value.holders
        code = (
            "import hifc, sys\n"
            "try: hifc.Namespace.open(sys.argv[1])\n"
            "except hifc.DeviceBusy as error: print(error.holders)"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, f"file://{image}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert str(os.getpid()) in out.stdout
    still_there(image)


def test_holders_and_fix_are_not_read_out_of_the_message(image: Path) -> None:
    """Neither the name of a process nor that of a file adds to them."""
    odd = image.with_name("a; use pid 5; b.img")
    image.rename(odd)
    code = (
        "import hifc, sys\n"
        "open('/proc/self/comm', 'w').write('pid 7; pid 8')\n"
        "with hifc.Namespace.open(sys.argv[1]):\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(odd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(DeviceBusy, match="pid 7; pid 8") as caught:
            Namespace.open(odd)
        holder.communicate("")
    assert caught.value.holders == (holder.pid,)
    assert (
        caught.value.fix == "one process owns a device: stop that one first, or use another device"
    )
    with pytest.raises(FormatError, match="a; use pid 5; b") as refused:
        Namespace.format(odd, segment_size="1MiB")
    assert refused.value.fix.startswith("name another device")
    with pytest.raises(ConfigError, match="a; use pid 5; x") as absent:
        Namespace.open(odd.with_name("a; use pid 5; x"))
    assert absent.value.fix == "format it first, giving its size, or check the path"


# ---- options


def test_bad_open_options(image: Path) -> None:
    uri = f"file://{image}"
    with pytest.raises(ConfigError, match="did you mean queue_depth"):
        Namespace.open(uri, queue_dept=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="reactor, inline"):
        Namespace.open(uri, drive="horse")
    with pytest.raises(ConfigError, match="pool_size"):
        Namespace.open(uri, pool_size="lots")
    with pytest.raises(ConfigError, match="queue_depth"):
        Namespace.open(uri, queue_depth=-1)
    with pytest.raises(ConfigError, match="admission"):
        Namespace.open(uri, admission="maybe")
    with pytest.raises(ConfigError, match="reinsert"):
        Namespace.open(uri, reinsert_percent=101)
    with pytest.raises(ConfigError, match="31 fit"):
        Namespace.format(uri, label="x" * 32)
    still_there(image)


# ---- requests


@pytest.mark.parametrize(
    "bad",
    [b"", b"short", b"k" * 17, "k" * 16, 7, None, np.zeros(16), np.zeros((1, 16), np.uint8)],
)
def test_bad_keys(ram: Opener, bad: object) -> None:
    ns = ram.open()
    for call in (
        lambda: ns.put(bad, b"x"),
        lambda: ns.get(bad),
        lambda: ns.get_range(bad, 0, 1),
        lambda: ns.delete(bad),
        lambda: ns.exists(bad),
        lambda: ns.reserve(bad, 4096),
        lambda: ns.lookup([bad]),
        lambda: ns.put_many([KEY, bad], [b"x", b"y"]),
    ):
        with pytest.raises(InvalidRequest, match="16"):
            call()
    assert ns.stats().entries == 0


@pytest.mark.parametrize("bad", [np.zeros((2, 8), np.uint8), np.zeros((2, 16)), np.zeros(16, "u1")])
def test_bad_key_arrays(ram: Opener, bad: object) -> None:
    ns = ram.open()
    with pytest.raises(InvalidRequest, match=r"\(n, 16\)"):
        ns.lookup(bad)


def test_bad_buffers(ram: Opener) -> None:
    torch = pytest.importorskip("torch")
    ns = ram.open()
    for bad, message in (
        (np.zeros((4, 4))[:, 1], "ascontiguousarray"),
        (memoryview(b"abcdef")[::2], "strided"),
        (torch.zeros(4, 4).t()[:2], r"contiguous\(\)"),
        (torch.zeros(4, device="meta"), "meta"),
        (np.array([object()]), "objects"),
        ("text", "no buffer"),
        (None, "no buffer"),
        (b"", "empty"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            ns.put(KEY, bad)
    assert ns.stats().entries == 0


def test_value_larger_than_a_segment(ram: Opener) -> None:
    ns = ram.open()
    buffer = ns.buffer(2 * MIB)
    with pytest.raises(InvalidRequest, match="larger segments"):
        ns.put(KEY, buffer)
    with pytest.raises(InvalidRequest, match="larger segments"):
        ns.reserve(KEY, 3 * MIB)
    with pytest.raises(InvalidRequest, match="1 to"):
        ns.reserve(KEY, 0)
    with pytest.raises(InvalidRequest, match="1 to"):
        ns.reserve(KEY, 1 << 29)
    assert ns.put(KEY, buffer[:MIB]) is Answer.OK


def test_bad_parts(ram: Opener) -> None:
    ns = ram.open()
    with pytest.raises(InvalidRequest, match="equal parts"):
        ns.put(KEY, b"x" * 10, parts=3)
    for parts in (0, -1, 65536):
        with pytest.raises(InvalidRequest, match="parts"):
            ns.put(KEY, b"x" * 10, parts=parts)
    with pytest.raises(InvalidRequest, match='"reuse" or "swap"'):
        ns.put(KEY, b"x", cls="shared")


def test_full_swap_class(ram: Opener) -> None:
    ns = ram.open()
    data = np.random.default_rng(1).integers(0, 256, MIB // 2, dtype=np.uint8)
    stored = 0
    while (answer := ns.put(stored.to_bytes(16, "little"), data, cls="swap")) is Answer.OK:
        stored += 1
        assert stored < 200
    assert answer is Answer.NO_SPACE
    with pytest.raises(HiFCError, match="delete swap entries"):
        ns.reserve(KEY, MIB // 2, cls="swap")
    for i in range(stored):  # nothing was lost
        assert ns.get(i.to_bytes(16, "little")).tobytes() == data.tobytes()
    for i in range(stored):
        assert ns.delete(i.to_bytes(16, "little"))
    assert ns.put(KEY, data, cls="swap") is Answer.OK
    assert ns.check().ok


def test_delete_without_room_is_no_miss(ram: Opener) -> None:
    """A deleted reuse key takes room on the device. Where there is none, the key stays, and False
    would say that it was not there."""
    ns = ram.open()
    names = [i.to_bytes(16, "little") for i in range(4000)]
    for some in (names[:2000], names[2000:]):
        assert ns.put_many(some, np.ones((2000, 100), np.uint8)).wait(120)
    assert not ns.lookup(names).any()
    lease = ns.lease(names, 600)
    data = np.ones(MIB // 2, np.uint8)
    while ns.put(os.urandom(16), data, cls="swap") is Answer.OK:
        pass
    with pytest.raises(NoSpace, match="release leases"):
        for name in names:
            assert ns.delete(name)
    assert ns.exists(name)
    lease.release()
    ns.delete(name)  # False where it was evicted first
    assert not ns.exists(name)


def test_corrupt_value(image: Path) -> None:
    raw = image.read_bytes()
    at = raw.index(b"precious")
    with image.open("r+b") as file:
        file.seek(at)
        file.write(b"vicious!")
    with Namespace.open(f"file://{image}", pool_size="4MiB") as ns:
        out = bytearray(b"........")
        assert ns.get(KEY, out=out) is None  # a miss for reuse, never the wrong bytes
        assert bytes(out) in (bytes(8), b"........")
        assert ns.stats().corrupt_count == 1
        assert not ns.exists(KEY)
        assert ns.put(KEY, b"precious") is Answer.OK
        assert bytes(ns.get(KEY)) == b"precious"


def test_health_of_a_device_without_it(ram: Opener) -> None:
    ns = ram.open()
    with pytest.raises(NotSupported):
        ns.health()


def test_a_range_beyond_any_value_is_refused(ram: Opener) -> None:
    # 2**32 would wrap to the first byte.
    with ram.open() as ns:
        ns.put(bytes(16), b"x" * 100)
        with pytest.raises(InvalidRequest, match="no range"):
            ns.get_range(bytes(16), 2**32, 1)
