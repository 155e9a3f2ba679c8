# SPDX-License-Identifier: Apache-2.0
"""hifc-admin on a medium as a whole: erase, its refusals, and the identity that --confirm wants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from pretended_drive import INFO, SIZE

from admin_shell import Shell, code_of
from hifc.device import device
from hifc.device.device import InfoFlag
from hifc.namespace.namespace import Namespace
from hifc_admin import target
from hifc_admin.result import Exit, Failure


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "kv.hifc"


@pytest.fixture
def uri(path: Path) -> str:
    uri = f"file://{path}?size=16MiB&sparse=1"
    Namespace.format(uri, segment_size="256KiB")
    return uri


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.mark.parametrize("method", ["deallocate", "overwrite"])
def test_erase_leaves_nothing(admin: Shell, uri: str, path: Path, method: str) -> None:
    with Namespace.open(uri) as namespace:
        namespace.put(b"k" * 16, b"secret" * 1000)
    code, document = admin.json("erase", uri, "--confirm", str(path), "--method", method)
    assert code == 0
    assert "HiFC" in document["data"]["held"]
    assert code_of(document) == "may-remain"
    assert path.read_bytes() == bytes(SIZE)
    assert admin.json("info", uri)[0] == Exit.FAILED


@pytest.mark.parametrize("confirm", [[], ["--confirm", "/somewhere/else"]])
def test_erase_unconfirmed_touches_nothing(
    admin: Shell, uri: str, path: Path, confirm: list[str]
) -> None:
    before = path.read_bytes()
    code, document = admin.json("erase", uri, *confirm)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    assert path.read_bytes() == before


def test_erase_dry_run_touches_nothing(admin: Shell, uri: str, path: Path) -> None:
    before = path.read_bytes()
    code, document = admin.json("erase", uri, "--confirm", str(path), "--dry-run")
    assert code == 0
    assert document["data"]["steps"] == [f"erase {uri}: deallocate"]
    assert path.read_bytes() == before


def test_erase_of_what_is_not_ours_wants_force(admin: Shell, tmp_path: Path) -> None:
    path = tmp_path.resolve() / "disk"
    image = bytearray(SIZE)
    image[1080:1082] = b"\x53\xef"  # the mark of ext2, ext3 and ext4
    path.write_bytes(image)
    words = ["erase", f"file://{path}", "--confirm", str(path), "--method", "overwrite"]
    code, document = admin.json(*words)
    assert (code, code_of(document)) == (Exit.REFUSED, "occupied")
    assert path.read_bytes() == image
    assert admin.json(*words, "--force")[0] == 0
    assert path.read_bytes() == bytes(SIZE)


@pytest.mark.parametrize("method", ["format", "crypto", "sanitize"])
def test_a_file_has_no_erase_of_drives(admin: Shell, uri: str, path: Path, method: str) -> None:
    before = path.read_bytes()
    code, _ = admin.json("erase", uri, "--confirm", str(path), "--method", method)
    assert code == Exit.REFUSED
    assert path.read_bytes() == before


def test_a_device_in_use_is_not_erased(admin: Shell, uri: str, path: Path) -> None:
    with Namespace.open(uri) as namespace:
        code, document = admin.json("erase", uri, "--confirm", str(path))
        assert (code, code_of(document)) == (Exit.REFUSED, "in-use")
        assert namespace.put(b"k" * 16, b"v") == 0


# ---- a pretended drive behind SPDK

DRIVE = "spdk://0000:3b:00.0?ns=2"


@pytest.fixture
def erased(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What erase was called with; the drive is INFO."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(device, "device_info", lambda uri: INFO)
    monkeypatch.setattr(device, "erase", lambda uri, method: calls.append((uri, method.name)))
    return calls


def test_a_drive_is_confirmed_by_serial_or_eui(admin: Shell, erased: list[tuple[str, Any]]) -> None:
    words = ["erase", DRIVE, "--method", "crypto", "--confirm"]
    for wrong in ("S5GX", "S5GX/1", "0000:3b:00.0"):
        assert code_of(admin.json(*words, wrong)[1]) == "not-confirmed"
    assert not erased
    for right in ("S5GX/2", "0011223344556677"):
        assert admin.json(*words, right)[0] == 0
    assert erased == [(DRIVE, "CRYPTO")] * 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (INFO.flags | InfoFlag.FORMAT_ALL, "all 2 namespaces"),
        (INFO.flags | InfoFlag.SHARED, "share"),
        (INFO.flags & ~InfoFlag.WHOLE, "a part"),
        (INFO.flags & ~InfoFlag.CRYPTO_ERASE, "no cryptographic erase"),
        (INFO.flags & ~InfoFlag.FORMAT, "no Format NVM"),
        (INFO.flags | InfoFlag.RESERVED, "reserved"),
        (INFO.flags | InfoFlag.RESERVED_UNKNOWN, "did not tell"),
        (INFO.flags | InfoFlag.UNREADABLE, "could not be read"),
    ],
)
def test_format_nvm_reaches_one_namespace_only(
    admin: Shell,
    erased: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    flags: InfoFlag,
    said: str,
) -> None:
    monkeypatch.setattr(device, "device_info", lambda _: dataclasses.replace(INFO, flags=flags))
    code, document = admin.json("erase", DRIVE, "--confirm", "S5GX/2", "--method", "crypto")
    assert code == Exit.REFUSED
    assert said in document["problems"][0]["detail"]
    assert not erased


def test_a_drive_without_a_name_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_info", lambda _: dataclasses.replace(INFO, serial=""))
    with pytest.raises(Failure) as caught:
        target.confirm_ids(target.parse(DRIVE))
    assert caught.value.problem.code == "identity-unknown"
