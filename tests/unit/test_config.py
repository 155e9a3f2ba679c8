# SPDX-License-Identifier: Apache-2.0
"""Configuration: what is accepted, what is refused and with which advice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hifc import Answer, Namespace
from hifc.config import Config
from hifc.errors import ConfigError
from hifc.util.units import format_size, parse_size


def test_defaults_are_those_of_the_design() -> None:
    config = Config()
    assert config.hot_ratio == 0.30
    assert config.watermark == 0.15
    assert config.swap_batch_size == 8
    assert config.block_tokens == 0
    assert config.decay_lambda == 0.1
    assert config.enable_compression is False


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20),
        ("1.5KiB", 1536),
        ("1.50GiB", 3 << 29),
        ("0.001MB", 1000),
        ("4096", 4096),
        (4096, 4096),
        (" 2 GB ", 2 * 10**9),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "64 mib",
        "MiB",
        "-1",
        -1,
        True,
        None,
        1.5,
        "0.3B",
        "1.1GiB",
        "1e3",
        ".5MiB",
        "1.MiB",
        "\N{ARABIC-INDIC DIGIT THREE}MiB",
        1 << 63,
        "8388608TiB",
        "9" * 5000,
    ],
)
def test_bad_sizes_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="pool_size"):
        parse_size(text, "pool_size")


@pytest.mark.parametrize(
    ("text", "meant"),
    [("64M", "64MiB"), ("1.5g", "1.5GiB"), ("8gib", "8GiB"), ("8gb", "8GB"), ("64 K", "64KiB")],
)
def test_a_unit_that_is_none_is_refused_with_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"write {meant}$"):
        parse_size(text, "pool_size")
    with pytest.raises(ConfigError, match=f"write {meant}[^a-zA-Z]"):
        Namespace.format(f"ram://sizes?size={text}", segment_size="256KiB")


@pytest.mark.parametrize(
    "text", ["6.5MiB", "6815.744 kB", "6.8157440MB", "6815744", "0.00634765625GiB"]
)
def test_a_size_in_a_uri_means_what_it_means_in_a_configuration(text: str) -> None:
    """Spaces, fractions and units alike."""
    Namespace.format(f"ram://sizes?size={text}", segment_size="256KiB", force=True)
    with Namespace.open(f"ram://sizes?size={text}", pool_size="4MiB", owner_socket=False) as ns:
        assert ns.stats().capacity_bytes == (parse_size(text) - (1152 << 10)) // (1 << 18) << 18


@pytest.mark.parametrize(("name", "most"), [("queue_depth", 4096), ("index_entries_max", 1 << 34)])
def test_a_limit_is_what_every_device_takes(name: str, most: int, tmp_path: Path) -> None:
    for device in ("ram://limits?size=8MiB", f"file://{tmp_path}/kv?size=8MiB"):
        Namespace.format(device, force=True)
        settings: dict[str, Any] = {name: most}
        with Namespace.open(device, pool_size="4MiB", owner_socket=False, **settings) as ns:
            assert ns.put(bytes(16), b"x") is Answer.OK
        with pytest.raises(ConfigError, match=rf"{name}.*{most}"):
            Namespace.open(device, **{name: most + 1})
    assert getattr(Config(**{name: most}), name) == most
    with pytest.raises(ConfigError, match=rf"{name}.*{most}"):
        Config(**{name: most + 1})


@pytest.mark.parametrize("size", [0, 1, 1024, 3 << 20, 1 << 30, 5 << 40, 123456789])
def test_size_text_is_exact(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_yaml_round_trip() -> None:
    config = Config(device="ram://?size=1GiB", decay_lambda=0.5, pool_size="1GiB")
    text = config.to_yaml()
    assert "pool_size: 1GiB" in text
    assert "lambda: 0.5" in text
    assert Config.from_yaml(text) == config


def test_file_and_mapping(tmp_path: Path) -> None:
    path = tmp_path / "hifc.yaml"
    path.write_text("device: ram://?size=1GiB\nswap_buffer_size: 8MiB\nenable_compression: true\n")
    config = Config.load(str(path))
    assert config.swap_buffer_size == 8 << 20
    assert config.enable_compression is True
    assert Config.load(config) is config
    assert Config.load({"lambda": 2}).decay_lambda == 2.0


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean prefetch_degree"):
        Config.from_yaml("prefetch_degre: 3")
    with pytest.raises(ConfigError, match="known are"):
        Config.from_mapping({"zzzzzz": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_compression", "false"),
        ("enable_compression", 0),
        ("hot_ratio", 1.5),
        ("hot_ratio", float("nan")),
        ("hot_ratio", True),
        ("swap_batch_size", 0),
        ("swap_batch_size", 2.0),
        ("swap_batch_size", True),
        ("policy", "lfru"),
        ("device", 7),
        ("device", "ram://a\0b"),
        ("label", "\ud800"),
        ("salt", "xyz"),
        ("salt", "00" * 65),
        ("segment_size", 3 << 20),
        ("staging", False),
        ("format", "yes"),
    ],
)
def test_bad_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        Config.from_mapping({key: value})


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="hot_ratio"):
        Config(hot_ratio=0.2, hot_ratio_min=0.3)
    with pytest.raises(ConfigError, match="memory_reserved"):
        Config(memory_budget="1MiB", memory_reserved="1MiB")
    with pytest.raises(ConfigError, match="write_budget_per_day"):
        Config(admission="budget")


def test_yaml_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not YAML"):
        Config.from_yaml("a: [")
    with pytest.raises(ConfigError, match="mapping"):
        Config.from_yaml("- a")
    with pytest.raises(ConfigError, match="given twice"):
        Config.from_yaml("policy: lru\npolicy: default")
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path / "absent.yaml")
    assert Config.from_yaml("") == Config()


@pytest.mark.parametrize(
    "text",
    ["? [a, b]\n: c", "1: c", "label: 2020-99-99", "queue_depth: !!int abc", "{a: " * 5000],
)
def test_yaml_that_the_library_stumbles_over(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not YAML|named by a text"):
        Config.from_yaml(text)


@pytest.mark.parametrize("content", [b"label: \xff", "label: x".encode("utf-16")])
def test_files_that_are_no_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hifc.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load("a\0b")


def test_it_is_frozen_and_replace_checks_again() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hot_ratio = 0.5  # type: ignore[misc]
    assert config.replace(hot_ratio=0.5).hot_ratio == 0.5
    with pytest.raises(ConfigError):
        config.replace(hot_ratio=2.0)
