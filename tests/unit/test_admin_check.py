# SPDX-License-Identifier: Apache-2.0
"""hifc-admin's verification of a namespace at rest: fsck, its repair, and scrub."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from admin_shell import Shell, code_of
from hifc.namespace.namespace import Namespace
from hifc_admin import scan
from hifc_admin.progress import Progress
from hifc_admin.result import Exit

SEGMENT = 256 << 10
COUNT = 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "kv.hifc"


@pytest.fixture
def uri(path: Path) -> str:
    """A namespace with 40 values of 20,000 bytes each, in several segments."""
    uri = f"file://{path}?size=16MiB"
    Namespace.format(uri, segment_size=SEGMENT)
    with Namespace.open(uri) as namespace:
        for number in range(COUNT):
            namespace.put(key(number), value(number))
        namespace.sync()
    return uri


def key(number: int) -> bytes:
    return bytes([number]) * 16


def value(number: int) -> bytes:
    return bytes([number + 100]) * 20_000


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def flip(path: Path, number: int) -> None:
    """One bit of a value."""
    image = bytearray(path.read_bytes())
    image[image.index(value(number)) + 9999] ^= 1
    path.write_bytes(image)


def break_header(path: Path, number: int) -> None:
    """The header page of the segment that holds a value."""
    image = bytearray(path.read_bytes())
    place = image.index(value(number))
    start = (place - (1 << 20)) // SEGMENT * SEGMENT + (1 << 20)
    image[start : start + 4096] = b"\x5a" * 4096
    path.write_bytes(image)


def test_fsck_of_a_sound_namespace(admin: Shell, uri: str) -> None:
    code, document = admin.json("fsck", uri, "--payload")
    assert code == 0
    assert document["data"]["entries_checked"] == COUNT
    assert document["problems"] == []


def last_line(admin: Shell) -> str:
    return admin.out.splitlines()[-1]


def test_a_check_ends_with_a_verdict(admin: Shell, uri: str, path: Path) -> None:
    clean = rf"clean: {COUNT} (entries|values \(781.2 KiB\)) verified in \d+\.\d s"
    for words in (["fsck", uri, "--payload"], ["scrub", uri]):
        assert admin(*words) == 0
        assert re.fullmatch(clean, last_line(admin))
        assert "unclear" not in admin.out
        assert "False" not in admin.out
        assert "none" not in admin.out
        assert admin.json(*words)[1]["data"]["verdict"] == "clean"
    assert admin("fsck", uri) == 0
    assert "their values not read" in last_line(admin)
    assert "not read: --payload reads them" in admin.out
    flip(path, 4)
    for words in (["fsck", uri, "--payload"], ["scrub", uri]):
        assert admin(*words) == Exit.FAILED
        assert last_line(admin).startswith("damaged: ")
        assert f"fix:  hifc-admin fsck '{uri}' --payload --repair" in admin.err
        assert admin.json(*words)[1]["data"]["verdict"] == "damaged"
    assert key(4).hex() in admin.out
    assert admin("fsck", uri, "--payload", "--repair") == 0
    assert last_line(admin).startswith(f"repaired: {COUNT - 1} entries left")
    assert admin.json("fsck", uri, "--repair")[1]["data"]["verdict"] == "clean"


def test_scrub_of_what_cannot_be_read_now_is_unclear(
    admin: Shell, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scan.Found(entries_read=3, unclear=2, first_unclear="it timed out")
    monkeypatch.setattr(scan, "scan", lambda *_: found)
    assert admin("scrub", uri) == Exit.PARTLY
    assert last_line(admin).startswith("unclear: 3 values verified")
    assert "2 values could not be read now, and may be intact" in admin.out
    assert admin.json("scrub", uri)[1]["data"]["verdict"] == "unclear"


def test_fsck_repair_of_a_sound_namespace(admin: Shell, uri: str) -> None:
    assert admin("fsck", uri, "--repair", "--dry-run") == 0
    assert admin.out.endswith("\nwould change nothing\n")
    assert admin("fsck", uri, "--repair") == 0
    assert "entries lost with them or before: 0\n" in admin.out


def test_fsck_finds_a_flipped_bit_and_changes_nothing(admin: Shell, uri: str, path: Path) -> None:
    flip(path, 4)
    image = path.read_bytes()
    code, document = admin.json("fsck", uri, "--payload")
    assert (code, code_of(document)) == (Exit.FAILED, "check-failed")
    code, document = admin.json("fsck", uri, "--payload", "--repair", "--dry-run")
    assert document["data"]["steps"] == [
        "delete every entry whose value cannot be read or fails its checksum"
    ]
    assert path.read_bytes() == image


def test_fsck_repair_deletes_what_fails_its_checksum(admin: Shell, uri: str, path: Path) -> None:
    flip(path, 4)
    flip(path, 30)
    code, document = admin.json("fsck", uri, "--payload", "--repair")
    assert (code, code_of(document)) == (0, "data-lost")
    assert sorted(document["data"]["keys_deleted"]) == [key(4).hex(), key(30).hex()]
    assert admin.json("fsck", uri, "--payload")[1]["data"]["entries_checked"] == COUNT - 2
    with Namespace.open(uri) as namespace:
        assert namespace.get(key(4)) is None
        assert namespace.put(key(4), value(4)) == 0
        survivor = namespace.get(key(5))
        assert survivor is not None
        assert survivor.tobytes() == value(5)


def test_fsck_without_payload_deletes_nothing(admin: Shell, uri: str, path: Path) -> None:
    flip(path, 4)
    assert admin.json("fsck", uri, "--repair")[1]["data"]["entries_deleted"] == 0
    assert admin.json("fsck", uri, "--payload")[0] == Exit.FAILED


def test_fsck_repair_sets_damaged_segments_free(admin: Shell, uri: str, path: Path) -> None:
    break_header(path, 0)
    code, document = admin.json("fsck", uri)
    assert (code, code_of(document)) == (Exit.FAILED, "damaged")
    assert "1 segments" in document["problems"][0]["evidence"]
    code, document = admin.json("fsck", uri, "--repair")
    assert (code, code_of(document)) == (0, "data-lost")
    assert document["data"]["segments_freed"] == 1
    code, document = admin.json("fsck", uri, "--payload")
    assert code == 0
    assert document["data"]["segments_damaged"] == 0
    assert 0 < document["data"]["entries_checked"] < COUNT


def test_scrub_reads_everything(admin: Shell, uri: str) -> None:
    code, document = admin.json("scrub", uri)
    assert code == 0
    assert document["data"]["entries_read"] == COUNT
    assert document["data"]["bytes_read"] == COUNT * 20_000


def test_scrub_names_what_fails_and_changes_nothing(admin: Shell, uri: str, path: Path) -> None:
    flip(path, 7)
    image = path.read_bytes()
    code, document = admin.json("scrub", uri)
    assert (code, code_of(document)) == (Exit.FAILED, "corrupt")
    assert document["data"]["keys"] == [key(7).hex()]
    assert document["data"]["entries_read"] == COUNT - 1
    assert path.read_bytes() == image


def test_scrub_reads_values_longer_than_its_buffer(
    admin: Shell, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "BUFFER_BYTES", 4096)
    assert admin.json("scrub", uri)[1]["data"]["entries_read"] == COUNT


class Clock:
    """Reading takes no time by it, and a sleep just its length."""

    def __init__(self) -> None:
        self.now_s, self.sleeps = 0.0, 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps += 1


def test_scrub_keeps_its_rate(admin: Shell, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(scan, "BUFFER_BYTES", 64 << 10)
    monkeypatch.setattr(scan, "time", clock)
    assert admin.json("scrub", uri, "--rate", "2MB")[0] == 0  # 800,000 bytes
    assert clock.now_s == pytest.approx(0.4)
    assert clock.sleeps >= 800_000 // (64 << 10), "it sleeps as it goes, not at the end"


def test_scrub_tells_how_far_it_is_on_stderr(admin: Shell, uri: str) -> None:
    assert admin("scrub", uri) == 0
    assert admin.out.startswith(f"values  {COUNT} read and verified\n")
    assert "verifying" not in admin.out


def test_progress_is_one_line_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Progress("reading", 100 << 20, stream=out) as progress:
        progress.at(25 << 20)
    assert "reading [######..................]  25%" in out.getvalue()
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r")


def test_progress_is_silent_where_it_is_told() -> None:
    out = io.StringIO()
    with Progress("reading", 10, stream=out, quiet=True) as progress:
        progress.at(5)
    assert out.getvalue() == ""
