# SPDX-License-Identifier: Apache-2.0
"""Block keys: equal only where everything is equal. Tables: bytes are counted once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hifc.blocks.keys import BlockTable, KeyScheme, KVBlock, canonical
from hifc.errors import InvalidRequest

SCHEME = KeyScheme(model="m", block_tokens=4)


def test_keys_are_stable_over_releases() -> None:
    """Stored prefixes are found by these: a change here makes every store useless."""
    keys = KeyScheme(model="m", block_tokens=2, salt=b"tenant").keys([1, 2, 3])
    assert keys.full.tobytes().hex() == "951c58e5639731c857d7364d98cd8c90"
    assert keys.partial is not None
    assert keys.partial.hex() == "a00d7e8060a2593896c5491e5a7ee200"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"revision": "1"},
        {"lora": "a"},
        {"position": {"theta": 10000.0}},
        {"position": {"theta": 10000}},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"layout": "head-major"},
        {"block_tokens": 2},
        {"kv_group": 1},
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"salt": b"other"},
    ],
)
def test_whatever_differs_changes_the_key(change: dict[str, Any]) -> None:
    other = dataclasses.replace(SCHEME, **change)
    mine = {bytes(key) for key in SCHEME.keys(range(8)).full}
    theirs = {bytes(key) for key in other.keys(range(8)).full}
    assert not mine & theirs
    assert other != SCHEME


def test_every_field_is_in_the_test_above() -> None:
    names = {field.name for field in dataclasses.fields(KeyScheme)}
    marks = test_whatever_differs_changes_the_key.pytestmark  # type: ignore[attr-defined]
    changed = {name for change in marks[0].args[1] for name in change}
    assert names == changed


def test_chain_depends_on_all_tokens_before() -> None:
    one = SCHEME.keys([1, 2, 3, 4, 5, 6, 7, 8])
    two = SCHEME.keys([9, 2, 3, 4, 5, 6, 7, 8])
    longer = SCHEME.keys([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert not (one.full == two.full).all(axis=1).any()
    assert (longer.full == one.full).all()
    assert longer.partial_tokens == 2
    assert longer.array().shape == (3, 16)
    assert one.partial is None
    assert one.array() is one.full


def test_a_sequence_can_go_on_from_a_known_parent() -> None:
    whole = SCHEME.keys(range(12))
    rest = SCHEME.keys(range(4, 12), parent=whole.full[0].tobytes())
    assert (rest.full == whole.full[1:]).all()


def test_partial_block_is_not_the_full_one_of_a_shorter_scheme() -> None:
    short = dataclasses.replace(SCHEME, block_tokens=2)
    assert SCHEME.keys([1, 2]).partial != short.keys([1, 2]).full[0].tobytes()


def test_images_with_equal_placeholders_differ() -> None:
    tokens = [7] * 8
    plain = SCHEME.keys(tokens)
    cat = SCHEME.keys(tokens, images=[(5, b"cat")])
    dog = SCHEME.keys(tokens, images=[(5, b"dog")])
    moved = SCHEME.keys(tokens, images=[(6, b"cat")])
    assert (plain.full[0] == cat.full[0]).all()
    assert len({bytes(keys.full[1]) for keys in (plain, cat, dog, moved)}) == 4
    with pytest.raises(InvalidRequest, match="outside"):
        SCHEME.keys(tokens, images=[(8, b"cat")])


def test_tokens_by_any_integer_type_and_torch() -> None:
    torch = pytest.importorskip("torch")
    wanted = SCHEME.keys([1, 2, 3, 4]).full
    for tokens in (
        np.array([1, 2, 3, 4], np.int32),
        np.array([1, 2, 3, 4], np.uint16),
        torch.tensor([1, 2, 3, 4]),
    ):
        assert (SCHEME.keys(tokens).full == wanted).all()


def test_bad_tokens_and_schemes() -> None:
    with pytest.raises(InvalidRequest, match="integers"):
        SCHEME.keys([1.0, 2.0])
    with pytest.raises(InvalidRequest, match="shape"):
        SCHEME.keys([[1, 2], [3, 4]])
    with pytest.raises(InvalidRequest, match="do not fit"):
        SCHEME.child(SCHEME.root, [1, 2, 3, 4, 5])
    with pytest.raises(InvalidRequest, match="salt"):
        KeyScheme(model="m", salt=b"x" * 65)
    with pytest.raises(InvalidRequest, match="tp_rank"):
        KeyScheme(model="m", tp_rank=2, tp_size=2)
    with pytest.raises(InvalidRequest, match="cannot be made"):
        KeyScheme(model="m", position={"x": object()})


def test_swap_keys() -> None:
    found = {SCHEME.swap_key(seq, block) for seq in ("1", 1, b"1", "11") for block in range(12)}
    assert len(found) == 48
    assert not found & {bytes(key) for key in SCHEME.keys(range(40)).full}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def _typed(value: Any) -> Any:
    """Equality that tells True from 1."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return type(value).__name__, value


@given(_VALUES, _VALUES)
def test_canonical_is_injective(one: Any, two: Any) -> None:
    assert (canonical(one) == canonical(two)) == (_typed(one) == _typed(two))


def test_block_table_counts_resident_bytes() -> None:
    table = BlockTable()
    blocks = [
        KVBlock(bytes([i]) * 16, size_bytes=5000, sequence="s", depth=3 - i, memory=1)
        for i in range(3)
    ]
    for block in blocks:
        table.add(block)
    assert table.resident_bytes == 3 * 8192
    assert [block.depth for block in table.sequence("s")] == [1, 2, 3]
    table.set_resident(blocks[0], None)
    table.set_resident(blocks[0], None)
    assert table.resident_bytes == 2 * 8192
    assert table.residents() == blocks[1:]
    table.remove(blocks[1].key)
    assert table.remove(blocks[1].key) is None
    assert table.resident_bytes == 8192
    table.set_resident(blocks[0], 1)
    assert table.resident_bytes == 2 * 8192
    with pytest.raises(InvalidRequest, match="already"):
        table.add(blocks[0])
    assert len(table) == 2


def test_block_table_counts_anew_what_an_exception_left() -> None:
    table = BlockTable()
    blocks = [KVBlock(bytes([i]) * 16, size_bytes=5000, sequence="s", memory=1) for i in range(3)]
    for block in blocks[:2]:
        table.add(block)
    table.name(blocks[0].key, None)
    table.name(blocks[2].key, blocks[2])
    blocks[1].memory = None
    assert table.residents() == blocks[:2], "not told yet"
    table.recount()
    assert table.residents() == blocks[2:]
    assert table.resident_bytes == 8192
    assert table.sequence("s") == blocks[1:]


def test_a_block_in_the_place_of_another_is_counted_once() -> None:
    table = BlockTable()
    earlier, block = (KVBlock(b"k" * 16, size_bytes=size, memory=1) for size in (5000, 100))
    table.add(earlier)
    table.name(block.key, block)
    table.drop(earlier)
    table.count(block)
    assert table.residents() == [table.get(block.key)] == [block]
    assert table.resident_bytes == 4096


@pytest.mark.parametrize("parent", [b"", b"k" * 15, "k" * 16, 7, np.int64(7), np.zeros(16)])
def test_a_parent_is_a_key(parent: Any) -> None:
    for call in (
        lambda: SCHEME.keys(range(8), parent=parent),
        lambda: SCHEME.child(parent, range(4)),
    ):
        with pytest.raises(InvalidRequest, match="a key is 16 bytes"):
            call()


@pytest.mark.parametrize(
    "images", [7, [7], [(1,)], [(1, 7)], [(1, "cat")], [("1", b"cat")], [(-1, b"cat")], None]
)
def test_images_are_places_and_hashes(images: Any) -> None:
    """A number is not a hash: bytes(7) would be seven zeros."""
    with pytest.raises(InvalidRequest, match="image"):
        SCHEME.keys(range(8), images)
    with pytest.raises(InvalidRequest, match="image"):
        SCHEME.child(SCHEME.root, range(4), images)


def test_half_a_surrogate_pair_names_a_sequence_like_any_text() -> None:
    keys = {SCHEME.swap_key(name, 0) for name in ("\ud800", "\ud801", "?", "")}
    assert len(keys) == 4
