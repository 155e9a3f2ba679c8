# SPDX-License-Identifier: Apache-2.0
"""Keys of names: the same everywhere, and different where anything differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hifc


def test_a_key_is_the_digest_of_its_name() -> None:
    # Written out, since such keys stand on devices.
    assert hifc.key("any text").hex() == "0f10e3e181a5787f1172c48a785ee868"
    assert hifc.key("any text") == hifc.key(b"any text") == hifc.key(bytearray(b"any text"))
    assert len(hifc.key("")) == len(hifc.key(b"x" * 1_000_000)) == 16


def test_whatever_differs_gives_another_key() -> None:
    keys = [
        hifc.key("a"),
        hifc.key("b"),
        hifc.key("a", domain="d"),
        hifc.key("da"),
        hifc.key("a", domain="e"),
        hifc.key("a", salt=b"d"),
        hifc.key("a", salt=b"d", domain="d"),
        hifc.KeyScheme("a").root,
        hifc.KeyScheme("a").swap_key("a", 0),
    ]
    assert len(set(keys)) == len(keys)
    assert hifc.key("a", domain="d") == hifc.key("a", domain=b"d")


@pytest.mark.parametrize("name", [1, None, ["a"], np.zeros(16, np.uint8), "\ud800"])
def test_what_is_neither_text_nor_bytes_is_refused(name: Any) -> None:
    with pytest.raises(hifc.InvalidRequest, match="key: name"):
        hifc.key(name)


def test_a_long_salt_is_refused() -> None:
    with pytest.raises(hifc.InvalidRequest, match="65 bytes, at most 64"):
        hifc.key("a", salt=b"x" * 65)


@pytest.mark.parametrize("key", ["a text", b"short", b"x" * 17, 7])
def test_a_wrong_key_names_what_makes_one(key: Any) -> None:
    hifc.Namespace.format("ram://keys?size=64MiB", force=True)
    with hifc.Namespace.open("ram://keys?size=64MiB") as ns:
        with pytest.raises(hifc.InvalidRequest, match=r"hifc\.key\(\.\.\.\)"):
            ns.put(key, b"value")
        with pytest.raises(hifc.InvalidRequest, match=r"hifc\.KeyScheme"):
            ns.put([1, 2, 3], b"value")
        assert ns.put(hifc.key("a text"), b"value")
