# SPDX-License-Identifier: Apache-2.0
"""The border to libhifc: what does not fit is refused at load, a failing call raises."""

from __future__ import annotations

import ctypes
import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hifc.errors import (
    BufferExhausted,
    ConfigError,
    CorruptionError,
    Detail,
    DeviceBusy,
    DeviceError,
    FormatError,
    HiFCError,
    InvalidRequest,
    LibraryError,
    NoSpace,
    NotPermitted,
    error_of,
)
from hifc.native_lib import layouts, libhifc

HEADER = Path(__file__).parents[2] / "driver/include/hifc.h"
DEVICE_HEADER = HEADER.with_name("hifc_device.h")
RING_HEADER = HEADER.with_name("hifc_ring.h")


def test_every_function_of_the_header_is_in_the_table() -> None:
    names = set(
        re.findall(r"HIFC_API[^;]*?\b(hifc_\w+)\(", HEADER.read_text() + DEVICE_HEADER.read_text())
    )
    # Python gives back by the calls named drop, which may be repeated.
    of_c_alone = {"hifc_close", "hifc_buffer_free", "hifc_ticket_free", "hifc_ring_close"}
    assert names - of_c_alone == set(libhifc._SYMBOLS)


def test_every_struct_of_the_header_is_compared() -> None:
    text = HEADER.read_text() + DEVICE_HEADER.read_text() + RING_HEADER.read_text()
    structs = set(re.findall(r"^struct (hifc_\w+) \{", text, re.MULTILINE))
    assert structs == set(libhifc._SIZES)


def test_fields_of_a_ring_stand_where_its_header_says() -> None:
    text = RING_HEADER.read_text()
    said = re.findall(r"offsetof\(struct (\w+), (\w+)\) == (\d+)", text)
    assert len(said) > 8
    descriptor = dict(layouts.DESCRIPTOR.fields or {})
    for struct, field, offset in said:
        found = (
            descriptor[field][1]
            if struct == "hifc_descriptor"
            else getattr(layouts.RingHeader, field).offset
        )
        assert found == int(offset), field


def test_missing_library_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=re.escape("pip install .")):
        libhifc.load(tmp_path / "libhifc.so")


def test_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libhifc.so"
    path.write_text("hello")
    with pytest.raises(LibraryError, match="cannot be loaded"):
        libhifc.load(path)


def test_library_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = libhifc.library_path()
    monkeypatch.setattr(libhifc, "ABI_VERSION", 99)
    with pytest.raises(LibraryError, match="ABI version"):
        libhifc.load(library)
    monkeypatch.undo()
    monkeypatch.setitem(libhifc._SIZES, "hifc_stats", 8)
    with pytest.raises(LibraryError, match="hifc_stats has"):
        libhifc.load(library)
    monkeypatch.undo()
    monkeypatch.setitem(libhifc._SYMBOLS, "hifc_nothing", (ctypes.c_int, (), None))
    with pytest.raises(LibraryError, match="hifc_nothing"):
        libhifc.load(library)


def test_import_loads_neither_torch_nor_the_library() -> None:
    code = (
        "import sys, hifc; assert 'torch' not in sys.modules, 'torch'; "
        "hifc.Namespace, hifc.HiFC, hifc.Config, hifc.KeyScheme; "
        "assert 'torch' not in sys.modules, 'torch'; "
        "assert 'libhifc' not in open('/proc/self/maps').read(), 'libhifc'; "
        "assert all(hasattr(hifc, name) for name in hifc.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_failing_call_raises_with_the_message_of_the_library() -> None:
    lib = libhifc.library()
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        lib.hifc_format(b"carrier-pigeon://coop", ctypes.byref(layouts.FormatOpts()))


def test_checksums_of_corruption_come_from_the_struct_not_from_its_words() -> None:
    raw = layouts.Error(code=-errno.EBADMSG, checksums=1, expected=0x12, found=0x34)
    error = error_of(-errno.EBADMSG, raw.detail(), doing="get")
    assert isinstance(error, CorruptionError)
    assert (error.expected, error.found) == (0x12, 0x34)
    raw.checksums = 0
    error = error_of(-errno.EBADMSG, raw.detail(), doing="get")
    assert isinstance(error, CorruptionError)
    assert (error.expected, error.found) == (None, None)


def test_crc32c_is_raw() -> None:
    lib = libhifc.library()
    assert lib.hifc_crc32c_raw(b"\0" * 64, 64) == 0
    assert lib.hifc_crc32c_raw(b"\1", 1) != 0


@pytest.mark.parametrize(
    ("code", "doing", "kind"),
    [
        (errno.EIO, "get", DeviceError),
        (errno.ENODEV, "open", DeviceError),
        (errno.EBADMSG, "get", CorruptionError),
        (errno.ENOSPC, "put", NoSpace),
        (errno.ENOSPC, "format", NoSpace),
        (errno.ENOSPC, "open", NoSpace),
        (errno.EFBIG, "format", ConfigError),
        (errno.EBUSY, "open", DeviceBusy),
        (errno.EACCES, "open", NotPermitted),
        (errno.EINVAL, "open", ConfigError),
        (errno.EINVAL, "put", InvalidRequest),
        (errno.EFBIG, "open", FormatError),
        (errno.EFBIG, "put", InvalidRequest),
        (errno.ENOMEDIUM, "open", FormatError),
        (errno.ENOMEM, "allocate a buffer", BufferExhausted),
        (errno.EXDEV, "get", HiFCError),
    ],
)
def test_errno_to_exception(code: int, doing: str, kind: type[HiFCError]) -> None:
    error = error_of(-code, None, doing=doing, where="ram://x")
    assert type(error) is kind
    assert error.code == -code
    assert "ram://x" in str(error)


def test_details_reach_the_exception() -> None:
    text = "read failed; wait"
    detail = Detail(
        -errno.EIO, sct=2, sc=0x81, opcode=2, lba=77, blocks=8, message=text, fix="wait"
    )
    error = error_of(-errno.EIO, detail, doing="get")
    assert isinstance(error, DeviceError)
    assert (str(error), error.fix) == ("get: read failed; wait [EIO]", "wait")
    assert (error.sct, error.sc, error.command, error.lba, error.blocks) == (2, 0x81, "read", 77, 8)
    busy = error_of(
        -errno.EBUSY,
        Detail(-errno.EBUSY, message="x: in use by pid 12 (pid 9)", holders=(12, 7)),
        doing="open",
    )
    assert isinstance(busy, DeviceBusy)
    assert (busy.holders, busy.fix) == ((12, 7), "")
    stale = error_of(-errno.EINVAL, detail, doing="put")
    assert "read failed" not in str(stale)
