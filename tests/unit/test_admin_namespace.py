# SPDX-License-Identifier: Apache-2.0
"""hifc-admin on a namespace: format, info, list-keys, dump."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from admin_shell import Shell, code_of
from hifc.namespace.namespace import Namespace
from hifc_admin import scan
from hifc_admin.result import Exit

SIZE = "16MiB"
SEGMENT = "256KiB"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "kv.hifc"


@pytest.fixture
def uri(path: Path) -> str:
    return f"file://{path}?size={SIZE}"


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def format_at(admin: Shell, uri: str, path: Path, *more: str) -> int:
    return admin("format", uri, "--confirm", str(path), "--segment-size", SEGMENT, *more)


def test_format_then_info(admin: Shell, uri: str, path: Path) -> None:
    assert format_at(admin, uri, path, "--label", "test drive") == 0
    code, document = admin.json("info", uri)
    assert code == 0
    assert document["schema"] == "hifc-admin.info.1"
    data = document["data"]
    assert data["label"] == "test drive"
    assert data["segment_size_bytes"] == 256 << 10
    assert data["entries"] == 0
    parts = ("live_bytes", "dead_bytes", "free_bytes", "metadata_bytes")
    assert sum(data[name] for name in parts) == data["capacity_bytes"]


def test_info_as_text_is_on_stdout_alone(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    assert admin("info", uri) == 0
    assert "16 MiB" in admin.out
    assert "retry_count" not in admin.out  # a namespace at rest has done nothing
    assert admin.err == ""


def test_format_over_a_namespace_wants_force(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    _, first = admin.json("info", uri)
    code, document = admin.json("format", uri, "--confirm", str(path), "--segment-size", SEGMENT)
    assert (code, code_of(document)) == (Exit.REFUSED, "occupied")
    assert admin.json("info", uri)[1]["data"]["uuid"] == first["data"]["uuid"]
    assert format_at(admin, uri, path, "--force") == 0
    assert admin.json("info", uri)[1]["data"]["uuid"] != first["data"]["uuid"]


def test_confirm_names_the_medium_not_the_link(admin: Shell, path: Path) -> None:
    path.touch()
    os.truncate(path, 16 << 20)
    link = path.with_name("link")
    link.symlink_to(path)
    assert format_at(admin, f"file://{link}?size={SIZE}", link) == Exit.REFUSED
    assert format_at(admin, f"file://{link}?size={SIZE}", path) == 0


def fill(uri: str) -> list[bytes]:
    keys = [bytes([i]) * 16 for i in range(5)]
    with Namespace.open(uri) as namespace:
        for i, key in enumerate(keys):
            namespace.put(key, bytes([i]) * (1000 * (i + 1)))
        namespace.sync()
    return keys


def test_list_keys(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    keys = fill(uri)
    _, document = admin.json("list-keys", uri)
    entries = document["data"]["entries"]
    assert {entry["key"]: entry["length"] for entry in entries} == {
        key.hex(): 1000 * (i + 1) for i, key in enumerate(keys)
    }
    assert all(entry["class"] == "reuse" for entry in entries)
    assert len(admin.json("list-keys", uri, "--limit", "2")[1]["data"]["entries"]) == 2
    for limit in ("-1", "many"):
        code, document = admin.json("list-keys", uri, "--limit", limit)
        assert code == Exit.USAGE
        assert limit in document["problems"][0]["detail"]


def test_info_describes_the_device_below(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    below = admin.json("info", uri)[1]["data"]["device"]
    assert below["model"].startswith("file")
    assert below["size_bytes"] == 16 << 20
    assert "nvme" not in below["flags"]


def test_dump_shows_a_value(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    keys = fill(uri)
    code, document = admin.json("dump", uri, keys[2].hex(), "--limit", "20")
    assert code == 0
    assert document["data"]["length"] == 3000
    assert document["data"]["hex"] == "02" * 20
    assert admin("dump", uri, keys[2].hex()) == 0
    assert "00000010  02 02" in admin.out
    assert "2744 more bytes" in admin.out


def test_dump_writes_a_whole_value(admin: Shell, uri: str, path: Path, tmp_path: Path) -> None:
    format_at(admin, uri, path)
    keys = fill(uri)
    out = tmp_path / "value"
    assert admin("dump", uri, keys[4].hex(), "--output", str(out)) == 0
    assert out.read_bytes() == bytes([4]) * 5000


def test_dump_of_what_is_not_there(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    code, document = admin.json("dump", uri, "ff" * 16)
    assert (code, code_of(document)) == (Exit.FAILED, "not-found")
    for key in ("ff", "zz" * 16, "ff" * 17):
        assert admin.json("dump", uri, key)[0] == Exit.USAGE


def test_dump_of_a_corrupt_value_says_so(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    keys = fill(uri)
    image = bytearray(path.read_bytes())
    image[image.index(bytes([4]) * 5000) + 7] ^= 1
    path.write_bytes(image)
    code, document = admin.json("dump", uri, keys[4].hex())
    assert (code, code_of(document)) == (Exit.FAILED, "corrupt")
    assert admin.json("dump", uri, keys[3].hex())[0] == 0


def test_a_file_without_a_namespace(admin: Shell, path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    code, document = admin.json("info", f"file://{path}")
    assert code == Exit.FAILED
    assert code_of(document) == "no-namespace"


def test_json_may_stand_after_the_verb(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    assert admin("info", uri, "--json") == 0
    assert json.loads(admin.out)["ok"] is True


def test_console_script(uri: str, path: Path) -> None:
    words = ["hifc-admin", "format", uri, "--confirm", str(path), "--segment-size", SEGMENT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("formatted ")
    help_text = subprocess.check_output(["hifc-admin", "format", "--help"], text=True, timeout=300)
    assert "example:\n  hifc-admin format" in help_text


@pytest.mark.parametrize("uri", ["not a uri", "gopher://x", "file://"])
def test_a_bad_uri_is_wrong_usage(admin: Shell, uri: str) -> None:
    code, document = admin.json("info", uri)
    assert code == Exit.USAGE
    assert document["problems"][0]["subject"] == uri


def test_a_device_in_use_is_left_to_its_owner(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    with Namespace.open(uri) as namespace:
        namespace.put(b"k" * 16, b"value")
        code, document = admin.json("stats", f"file://{path}")
        assert code == 0
        assert (document["data"]["entries"], document["data"]["pid"]) == (1, os.getpid())
        assert document["data"]["uuid"] == namespace.stats().uuid
        for words in (["info", uri], ["format", uri, "--confirm", str(path), "--force"]):
            code, document = admin.json(*words)
            assert (code, code_of(document)) == (Exit.REFUSED, "in-use")
        assert namespace.get(b"k" * 16) is not None
    assert admin("stats", uri) == Exit.PREREQUISITE


def test_smart_of_a_file_is_not_to_be_had(admin: Shell, uri: str, path: Path) -> None:
    format_at(admin, uri, path)
    code, document = admin.json("smart", uri)
    assert (code, code_of(document)) == (Exit.USAGE, "no-drive")
    # Whether an engine has it makes no difference.
    with Namespace.open(uri):
        code, document = admin.json("smart", uri)
    assert (code, code_of(document)) == (Exit.USAGE, "no-drive")


@pytest.mark.parametrize("size_bytes", [0, 6])
def test_a_file_smaller_than_a_block(admin: Shell, path: Path, size_bytes: int) -> None:
    path.write_bytes(bytes(size_bytes))
    assert admin("info", f"file://{path}") == Exit.USAGE
    assert f"{size_bytes} bytes are less than one block" in admin.err


@pytest.mark.parametrize("words", [["info"], ["list-keys"], ["dump", "00" * 16]])
def test_a_look_takes_little_of_the_pool(
    admin: Shell, uri: str, path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Huge pages may be scarce, and format must not fail after it formatted."""
    asked = []
    real = Namespace.open

    def open_it(*args: Any, **options: Any) -> Namespace:
        asked.append(options.get("pool_size"))
        return real(*args, **options)

    monkeypatch.setattr(Namespace, "open", open_it)
    format_at(admin, uri, path)
    admin(words[0], uri, *words[1:])
    assert asked == [scan.LOOK_POOL_BYTES] * 2


def test_list_keys_has_a_head_like_other_tables_and_says_when_it_is_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    admin = Shell(capsys)
    uri = f"file://{tmp_path}/empty?size=16MiB"
    Namespace.format(uri)
    assert admin("list-keys", uri) == 0
    assert admin.out == f"{uri}: it has no entries\n"
    with Namespace.open(uri) as namespace:
        namespace.put(b"k" * 16, b"v")
    assert admin("list-keys", uri) == 0
    assert admin.out.splitlines()[0].split() == ["KEY", "LENGTH", "PARTS", "CLASS", "HEAT"]
