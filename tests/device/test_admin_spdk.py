# SPDX-License-Identifier: Apache-2.0
"""hifc-admin through a real SPDK queue pair: at rest, and while an engine owns the namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from admin_shell import Shell, code_of
from hifc import HiFC, Namespace
from hifc_admin.doctor import baseline
from hifc_admin.doctor import measure as doctor_measure
from hifc_admin.result import Exit

if TYPE_CHECKING:
    from conftest import Nvmf

pytestmark = pytest.mark.spdk

COUNT = 12
VALUE_BYTES = 100_000
QUICK = ("--duration", "0.1", "--size", "16KiB", "--depth", "4", "--data", "1MiB")


def key(number: int) -> bytes:
    return bytes([number]) * 16


def value(number: int) -> bytes:
    return bytes([number + 100]) * VALUE_BYTES


class Drive:
    """A target's namespace: its URI, what --confirm wants, the file behind it."""

    def __init__(self, target: Any) -> None:
        self.uri = str(target.uri)
        self.confirm = self.uri.split("/")[-1].split("?")[0] + "/1"
        self.backing = Path(target.backing)

    def fill(self) -> None:
        """Twelve values of 100,000 bytes."""
        Namespace.format(self.uri, segment_size="2MiB", label="loop", force=True)
        with Namespace.open(self.uri, pool_size="16MiB") as ns:
            ns.put_many([key(n) for n in range(COUNT)], [value(n) for n in range(COUNT)]).wait()

    def flip(self, number: int) -> None:
        """One bit of a value, behind the target's back."""
        image = self.backing.read_bytes()
        place = image.index(value(number)) + 50_000
        with self.backing.open("r+b") as file:
            file.seek(place)
            file.write(bytes([image[place] ^ 1]))

    def intact(self) -> bool:
        with Namespace.open(self.uri, read_only=True, pool_size="16MiB") as ns:
            return sorted(e.key for e in ns.list()) == [key(n) for n in range(COUNT)]


@pytest.fixture(scope="module")
def target(nvmf: Nvmf, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    return Drive(nvmf.start(tmp_path_factory.mktemp("nvmf") / "disk.img", size_bytes=128 << 20))


@pytest.fixture
def drive(target: Drive) -> Drive:
    target.fill()
    return target


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


# ---- at rest


def test_format_wants_the_name_of_the_namespace(admin: Shell, drive: Drive) -> None:
    nqn = drive.confirm.removesuffix("/1")
    words = ["format", drive.uri, "--label", "anew", "--force"]
    code, document = admin.json(*words, "--confirm", nqn)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    code, document = admin.json(*words, "--confirm", drive.confirm, "--dry-run")
    assert code == 0
    assert drive.intact()
    code, document = admin.json("format", drive.uri, "--confirm", drive.confirm)
    assert (code, code_of(document)) == (Exit.REFUSED, "occupied")
    assert drive.intact()
    code, document = admin.json(*words, "--confirm", drive.confirm)
    assert (code, document["data"]["label"]) == (0, "anew")
    assert not drive.intact()


def test_info_identifies_the_drive(admin: Shell, drive: Drive) -> None:
    code, document = admin.json("info", drive.uri)
    assert code == 0
    found, below = document["data"], document["data"]["device"]
    assert (found["label"], found["entries"]) == ("loop", COUNT)
    assert (below["nsid"], below["size_bytes"]) == (1, 128 << 20)
    assert below["serial"]
    assert below["model"]
    assert {"nvme", "whole", "health"} <= set(below["flags"])


def test_keys_and_values_are_shown(admin: Shell, drive: Drive, tmp_path: Path) -> None:
    code, document = admin.json("list-keys", drive.uri)
    assert code == 0
    assert sorted(e["key"] for e in document["data"]["entries"]) == [
        key(n).hex() for n in range(COUNT)
    ]
    out = tmp_path / "value"
    code, document = admin.json("dump", drive.uri, key(3).hex(), "--output", str(out))
    assert (code, document["data"]["length"]) == (0, VALUE_BYTES)
    assert out.read_bytes() == value(3)
    assert admin.json("dump", drive.uri, key(99).hex())[0] == Exit.FAILED


def test_a_sound_namespace_passes_fsck_and_scrub(admin: Shell, drive: Drive) -> None:
    code, document = admin.json("fsck", drive.uri, "--payload")
    assert (code, document["data"]["entries_checked"]) == (0, COUNT)
    code, document = admin.json("scrub", drive.uri, "--rate", "200MiB")
    assert (code, document["data"]["entries_read"]) == (0, COUNT)
    assert document["data"]["bytes_read"] == COUNT * VALUE_BYTES


def test_a_flipped_bit_is_found_and_repaired(admin: Shell, drive: Drive) -> None:
    drive.flip(5)
    code, document = admin.json("scrub", drive.uri)
    assert (code, code_of(document)) == (Exit.FAILED, "corrupt")
    assert document["data"]["keys"] == [key(5).hex()]
    assert admin.json("dump", drive.uri, key(5).hex())[0] == Exit.FAILED
    assert admin.json("fsck", drive.uri, "--payload")[0] == Exit.FAILED
    code, document = admin.json("fsck", drive.uri, "--payload", "--repair")
    assert (code, code_of(document)) == (0, "data-lost")
    assert admin.json("fsck", drive.uri, "--payload")[0] == 0
    assert admin.json("scrub", drive.uri)[1]["data"]["entries_read"] == COUNT - 1


def test_smart_and_doctor(admin: Shell, drive: Drive) -> None:
    code, document = admin.json("smart", drive.uri)
    assert code == 0
    assert document["data"]["percentage_used"] in range(101)
    code, document = admin.json("doctor", drive.uri)
    assert code in (Exit.DONE, Exit.FAILED)  # as the host under test has it
    assert document["data"]["checks"]


def test_bench_leaves_nothing_and_doctor_compares(
    admin: Shell, drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline, "folder", lambda: tmp_path / "state")
    monkeypatch.setattr(doctor_measure, "DURATION_S", 0.2)
    code, document = admin.json("bench", drive.uri, "--confirm", "another/1", *QUICK)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    code, document = admin.json("bench", drive.uri, "--confirm", drive.confirm, *QUICK)
    assert code == 0
    assert all(load["operations"] > 0 for load in document["data"]["loads"])
    assert drive.intact()
    code, _ = admin.json("bench", drive.uri, "--read-only", "--baseline", "--duration", "0.1")
    assert code == 0
    _, document = admin.json("doctor", drive.uri, "--measure")
    assert "throughput" in [row["check"] for row in document["data"]["checks"]]


def test_erase_leaves_nothing(admin: Shell, drive: Drive) -> None:
    words = ["erase", drive.uri, "--method", "overwrite"]
    assert admin.json(*words, "--confirm", "another/1")[0] == Exit.REFUSED
    assert drive.intact()
    code, document = admin.json(*words, "--confirm", drive.confirm)
    assert code == 0
    assert "HiFC" in document["data"]["held"]
    code, document = admin.json("info", drive.uri)
    assert (code, code_of(document)) == (Exit.FAILED, "no-namespace")
    assert value(0)[:4096] not in drive.backing.read_bytes()


@pytest.mark.parametrize("method", ["deallocate", "format", "crypto"])
def test_methods_that_the_target_lacks(admin: Shell, drive: Drive, method: str) -> None:
    words = ["erase", drive.uri, "--method", method, "--confirm", drive.confirm]
    code, document = admin.json(*words)
    assert (code, code_of(document)) == (Exit.REFUSED, "method-refused")
    assert "overwrite" in document["problems"][0]["fix"]
    assert drive.intact()


# ---- while an engine owns it


@pytest.fixture
def engine(drive: Drive) -> Iterator[HiFC]:
    config = {"device": drive.uri, "pool_size": "16MiB", "memory_budget": "8MiB"}
    with HiFC(config | {"swap_buffer_size": "4MiB"}) as engine:
        yield engine


def test_smart_stats_top_and_doctor_ask_the_owner(admin: Shell, drive: Drive, engine: HiFC) -> None:
    code, document = admin.json("smart", drive.uri)
    assert code == 0
    assert document["data"]["percentage_used"] in range(101)
    code, document = admin.json("stats", drive.uri)
    assert (code, document["data"]["entries"]) == (0, COUNT)
    code, document = admin.json("top", drive.uri, "--interval", "0.1")
    assert (code, document["data"]["uri"]) == (0, drive.uri)
    assert admin("top", drive.uri, "--prometheus") == 0
    assert f'hifc_namespace_entries{{uri="{drive.uri}"' in admin.out
    code, document = admin.json("doctor", drive.uri)
    assert "engine errors" in [row["check"] for row in document["data"]["checks"]]


@pytest.mark.parametrize(
    "words",
    [
        ("format", "--confirm"),
        ("format", "--force", "--confirm"),
        ("erase", "--method", "overwrite", "--confirm"),
        ("bench", *QUICK, "--confirm"),
        ("fsck", "--payload", "--repair"),
    ],
    ids=lambda words: words[0],
)
def test_what_writes_is_refused_while_it_is_owned(
    admin: Shell, drive: Drive, engine: HiFC, words: tuple[str, ...]
) -> None:
    confirm = [drive.confirm] if words[-1] == "--confirm" else []
    code, document = admin.json(words[0], drive.uri, *words[1:], *confirm)
    assert (code, code_of(document)) == (Exit.REFUSED, "in-use")
    engine.close()
    assert drive.intact()


def test_an_engine_that_ended_leaves_the_drive_to_others(
    admin: Shell, drive: Drive, engine: HiFC
) -> None:
    engine.close()
    assert admin.json("fsck", drive.uri)[0] == 0
