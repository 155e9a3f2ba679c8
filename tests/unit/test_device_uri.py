# SPDX-License-Identifier: Apache-2.0
"""A path will do wherever a device URI is wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hifc
from hifc.device.device import device_info, device_uri
from hifc_admin.main import main


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("file:///var/tmp/x?size=8GiB", "file:///var/tmp/x?size=8GiB"),
        ("ram://kv?size=1GiB", "ram://kv?size=1GiB"),
        ("spdk://0000:01:00.0?ns=1", "spdk://0000:01:00.0?ns=1"),
        ("/var/tmp/x", "file:///var/tmp/x"),
        ("/var/tmp/x?size=8GiB&sparse=1", "file:///var/tmp/x?size=8GiB&sparse=1"),
        ("/var/tmp/../x", "file:///var/x"),
        ("/dev/nvme0n1", "file:///dev/nvme0n1"),
        ("/tmp/why?", "file:///tmp/why%3F"),
        ("/tmp/a?b/c", "file:///tmp/a%3Fb/c"),
        ("/tmp/50%", "file:///tmp/50%25"),
        ("/tmp/50%?size=1GiB", "file:///tmp/50%25?size=1GiB"),
        (Path("/tmp/a?size=1"), "file:///tmp/a%3Fsize=1"),
    ],
)
def test_what_names_a_device(given: Any, uri: str) -> None:
    assert device_uri(given) == uri


def test_relative_paths_are_resolved_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    uri = f"file://{tmp_path}/x"
    assert device_uri("./x") == uri
    assert device_uri("../" + tmp_path.name + "/x") == uri
    assert device_uri(Path("x")) == uri
    config = hifc.Config(device="./x?size=64MiB")
    monkeypatch.chdir(tmp_path / "sub")
    assert config.device == f"{uri}?size=64MiB"


@pytest.mark.parametrize(
    "given", ["", "kv.hifc", "nvme0n1", "0000:01:00.0", "ram:", "~/x", 7, None]
)
def test_what_is_neither_says_what_to_write(given: Any) -> None:
    with pytest.raises(hifc.ConfigError, match=r"device URI|is no text"):
        device_uri(given)


def test_a_bare_name_is_not_taken_for_a_file() -> None:
    with pytest.raises(hifc.ConfigError, match=r"write \./kv\.hifc for a file in this folder"):
        hifc.Namespace.open("kv.hifc")


def test_a_path_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hifc.Namespace.format("./50% of ?.hifc?size=64MiB")
    file = tmp_path / "50% of ?.hifc"
    assert file.exists()
    with hifc.Namespace.open(file) as namespace:
        namespace[hifc.key("a")] = b"value"
        assert namespace.uri == device_uri(file)
    with hifc.HiFC(device=file) as engine:
        assert hifc.key("a") in engine
    assert device_info(str(file)).size_bytes == 64 << 20
    assert main(["info", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["entries"] == 1
    assert main(["fsck", "./50% of ?.hifc", "--json"]) == 0
