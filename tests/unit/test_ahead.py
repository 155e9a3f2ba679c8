# SPDX-License-Identifier: Apache-2.0
"""What attention makes expected comes through a request ring: it is there when it is loaded, and
whatever happens to a block meanwhile, no load gives anything but what was stored last."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hifc import ConfigError, CorruptionError, HiFC, InvalidRequest, Namespace
from hifc.namespace.ring import Ring, RingOp, RingStatus
from hifc.prefetch import ahead

HELD = 64 << 10  # of a block in memory: 61,440 bytes and a trailer
_turns = itertools.count()


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def block(number: int, items: int = 15_360) -> Any:
    return np.random.default_rng(number).standard_normal(items).astype(np.float32)


def opened(**changes: Any) -> HiFC:
    """16 blocks fit into memory, 16 more are on their way or wait for their use."""
    device = f"ram://ahead-{next(_turns) % 4}?size=32MiB"
    if "device" not in changes:
        Namespace.format(device, segment_size="1MiB", force=True)
    settings = {
        "device": device,
        "memory_budget": 16 * HELD,
        "swap_buffer_size": 16 * HELD,
        "owner_socket": False,
    }
    return HiFC(settings | changes)


@pytest.fixture
def hifc() -> Iterator[HiFC]:
    with opened() as engine:
        yield engine


def fill(hifc: HiFC, count: int, **options: Any) -> list[bytes]:
    """Blocks 0 to count - 1 on flash."""
    for number in range(count):
        hifc.store(key(number), block(number), **options)
    hifc.offload()
    return keys_of(range(count))


def mass(count: int, wanted: Sequence[int]) -> Any:
    """Two heads that look at these, the first ones most."""
    found = np.zeros((2, count), np.float32)
    found[:, wanted] = 1 - np.arange(len(wanted)) / 100
    return found


def ring_of(hifc: HiFC, names: list[bytes]) -> Ring:
    """With nothing asked for yet."""
    hifc.observe_attention(mass(len(names), []), names)
    ring = hifc.ahead._ring
    assert ring is not None
    return ring


def await_all(hifc: HiFC) -> None:
    ring = hifc.ahead._ring
    assert ring is not None
    assert ring.wait(np.arange(ring.statuses.size), 120)


@contextlib.contextmanager
def held(ring: Ring) -> Iterator[None]:
    """What is asked for meanwhile stands in the ring, behind a slot that is claimed and empty."""
    place = ring.header.tail
    ring.header.tail = place + 1
    try:
        yield
    finally:
        if not ring.closed:
            slot = ring.descriptors[place % ring.header.slots]
            slot["control"] = RingOp.CANCEL << 24
            slot["sequence"] = place // ring.header.slots + 1
            ring.kick()


def same(found: Any, number: int) -> bool:
    return found is not None and found.tobytes() == block(number).tobytes()


def test_what_is_expected_is_there_without_a_get(
    hifc: HiFC, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = fill(hifc, 30)
    for call in ("get", "get_many", "get_range", "submit"):
        monkeypatch.delattr(Namespace, call)
    assert hifc.observe_attention(mass(30, [11, 23]), names) == 2
    for number in (11, 23, 23):
        assert same(hifc.load(names[number]), number)
    assert hifc.blocks.resident_count == 2
    metrics = hifc.metrics
    assert [metrics[f"prefetch_{name}"] for name in ("issued", "landed", "hit")] == [2, 2, 2]
    assert metrics["hit"] == metrics["total_access"] == 3
    assert metrics["namespace_prefetch_completed"] == 2
    assert metrics["prefetch_lost"] == metrics["prefetch_failed"] == 0


def test_what_is_here_or_on_its_way_is_not_asked_for(hifc: HiFC) -> None:
    names = fill(hifc, 12)
    hifc.load(names[0])
    assert hifc.prefetch(names[1:2]) == 1
    wanted = mass(12, range(8))
    with held(ring_of(hifc, names)):
        assert hifc.observe_attention(wanted, names) == 2  # 2 and 3
        assert hifc.observe_attention(wanted, names) == 2  # 4 and 5
        assert hifc.prefetch(names[2:6]) == 0
        assert hifc.metrics["prefetch_skipped"] == 2 + 4
    for number in range(6):
        assert same(hifc.load(names[number]), number)
    assert hifc.metrics["prefetch_hit"] == 5
    hifc.offload()
    assert hifc.observe_attention(wanted, names) == 2, "they left memory"
    for number in (0, 1):
        assert same(hifc.load(names[number]), number)
    assert hifc.metrics["prefetch_hit"] == 7


def test_sequences_grow_and_change(hifc: HiFC) -> None:
    names = fill(hifc, 24)
    assert hifc.observe_attention(mass(8, [3, 5]), names[:8]) == 2
    assert hifc.observe_attention(mass(12, [3, 9, 11]), names[:12]) == 2
    other = names[12:] + names[3:4] + [names[20]]
    await_all(hifc)
    # 3 landed by its old column, 20 has two: neither is asked for again.
    assert hifc.observe_attention(mass(14, [12, 8, 13, 0]), other) == 2
    for number in (3, 5, 9, 11, 20, 12):
        assert same(hifc.load(names[number]), number)
    assert hifc.metrics["prefetch_hit"] == hifc.metrics["prefetch_issued"] == 6


def test_more_columns_than_keys_and_unknown_keys(hifc: HiFC) -> None:
    names = fill(hifc, 4)
    assert hifc.observe_attention(mass(9, [7, 8, 2]), names) == 1
    assert same(hifc.load(names[2]), 2)
    assert hifc.observe_attention(mass(9, [7, 3]), [*names, *keys_of(range(90, 95))]) == 2
    await_all(hifc)
    assert same(hifc.load(names[3]), 3)
    assert hifc.load(key(93)) is None
    many = keys_of(range(3000))
    assert hifc.observe_attention(mass(3000, [1, 2999]), many) == 2
    assert same(hifc.load(names[1]), 1)
    assert hifc.metrics["prefetch_hit"] == 3
    with pytest.raises(InvalidRequest):
        hifc.observe_attention(mass(1, [0]), [b"short"])


def test_fewer_columns_than_keys_and_keys_named_twice(hifc: HiFC) -> None:
    names = fill(hifc, 6)
    assert hifc.observe_attention(mass(3, [1]), names) == 1, "3 to 5 have no column"
    assert same(hifc.load(names[1]), 1)
    hifc.offload()
    twice = [names[2], names[4], names[2], names[4]]
    assert hifc.observe_attention(mass(4, [2, 3]), twice) == 0, "only by their first columns"
    assert hifc.observe_attention(mass(4, [0, 2, 3]), twice) == 1
    assert same(hifc.load(names[2]), 2)
    assert hifc.metrics["prefetch_hit"] == hifc.metrics["prefetch_issued"] == 2


def test_longer_blocks_make_longer_landings(hifc: HiFC) -> None:
    names = fill(hifc, 4)
    assert hifc.observe_attention(mass(4, [0]), names) == 1
    long = block(50, 40_000)
    hifc.store(names[3], long)
    hifc.offload()
    assert hifc.observe_attention(mass(4, [3]), names) == 1
    assert hifc.load(names[3]).tobytes() == long.tobytes()
    assert same(hifc.load(names[0]), 0)
    assert hifc.metrics["prefetch_hit"] == 1
    assert hifc.metrics["prefetch_landings"] == 6


def test_what_landed_for_another_column_is_asked_for_again_once_it_is_lost(hifc: HiFC) -> None:
    names = fill(hifc, 4)
    assert hifc.observe_attention(mass(4, [2]), names) == 1
    await_all(hifc)
    turned = names[::-1]
    assert hifc.observe_attention(mass(4, [1]), turned) == 0, "2 has landed"
    hifc.store(names[0], block(50, 40_000))
    hifc.offload()
    assert hifc.observe_attention(mass(4, [1]), turned) == 1, "with longer landings"
    assert hifc.metrics["prefetch_wasted"] == 1
    assert same(hifc.load(names[2]), 2)
    assert hifc.metrics["prefetch_hit"] == 1


@pytest.mark.parametrize("cls", ["swap", "reuse"])
def test_a_value_of_the_same_length_by_other_means(hifc: HiFC, cls: str) -> None:
    names = fill(hifc, 8, cls=cls)
    ring = ring_of(hifc, names)
    value = hifc.namespace.get(names[5])
    assert value is not None
    assert hifc.observe_attention(mass(8, [2, 4]), names) == 2
    await_all(hifc)
    assert hifc.namespace.delete(names[2])
    hifc.namespace.put(names[2], value, cls=cls)
    assert same(hifc.load(names[2]), 5), "what is there now, not what had landed"
    assert same(hifc.load(names[4]), 4)
    assert hifc.metrics["prefetch_hit"] == 1
    assert ring is hifc.ahead._ring


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("how", ["replace", "delete", "store again", "by other means"])
def test_a_block_that_changes_meanwhile(hifc: HiFC, landed: bool, how: str) -> None:
    names = fill(hifc, 8)
    ring = ring_of(hifc, names)
    with contextlib.ExitStack() as stack:
        if not landed:
            stack.enter_context(held(ring))
        assert hifc.observe_attention(mass(8, [2, 4]), names) == 2
        if landed:
            await_all(hifc)
        expected = block(99)
        if how == "by other means":  # longer, or the answer could be told from nothing
            assert hifc.namespace.delete(names[2])
        else:
            if how != "replace":
                assert hifc.delete(names[2])
            if how != "delete":
                hifc.store(names[2], expected)
                hifc.offload()
    found = hifc.load(names[2])
    if how in ("delete", "by other means"):
        assert found is None
    else:
        assert found.tobytes() == expected.tobytes()
    assert hifc.metrics["prefetch_hit"] == 0
    assert same(hifc.load(names[4]), 4)
    assert hifc.metrics["prefetch_hit"] == 1
    assert hifc.observe_attention(mass(8, [1, 6]), names) == 2
    assert same(hifc.load(names[1]), 1)


def test_reuse_blocks_that_are_evicted_meanwhile() -> None:
    device = "ram://ahead-small?size=6MiB"
    Namespace.format(device, segment_size="256KiB", force=True)
    with opened(device=device) as hifc:
        names = fill(hifc, 30, cls="reuse")
        with held(ring_of(hifc, names)):
            assert hifc.observe_attention(mass(30, [0, 29]), names) == 2
            for number in range(100, 260):
                hifc.store(key(number), block(number), cls="reuse")
            assert key(0) not in hifc
        assert hifc.load(names[0]) is None
        for number in range(200, 260):
            found = hifc.load(key(number))
            assert found is None or same(found, number)


@pytest.mark.parametrize("cls", ["reuse", "swap"])
def test_a_damaged_block(tmp_path: Path, cls: str) -> None:
    image = tmp_path / "kv"
    device = f"file://{image}?size=32MiB"
    Namespace.format(device, segment_size="1MiB")
    with opened(device=device) as hifc:
        names = fill(hifc, 4, cls=cls)
        hifc.namespace.sync()
        place = image.read_bytes().index(block(2).tobytes())
        with image.open("r+b") as file:
            file.seek(place + 5000)
            file.write(b"damaged!")
        assert hifc.observe_attention(mass(4, [2, 3]), names) == 2
        await_all(hifc)
        if cls == "reuse":
            assert hifc.load(names[2]) is None
        else:
            with pytest.raises(CorruptionError):
                hifc.load(names[2])
        assert same(hifc.load(names[3]), 3)
        hifc.observe_attention(mass(4, []), names)
        assert hifc.metrics["prefetch_failed"] == 1
        assert hifc.metrics["prefetch_landed"] == hifc.metrics["prefetch_hit"] == 1


def test_a_full_ring_loses_prefetches_only(hifc: HiFC) -> None:
    names = fill(hifc, 12)
    ring = ring_of(hifc, names)
    before = ring.header.tail
    ring.header.tail = before + ring.header.slots
    assert hifc.observe_attention(mass(12, [1, 2]), names) == 0
    assert hifc.metrics["prefetch_lost"] == 2
    assert hifc.metrics["namespace_prefetch_overflowed"] == 2
    for number in range(12):
        assert same(hifc.load(names[number]), number)
    assert hifc.metrics["prefetch_hit"] == 0
    ring.header.tail = before
    hifc.offload()
    assert hifc.observe_attention(mass(12, [1, 2]), names) == 2
    assert same(hifc.load(names[1]), 1)
    assert hifc.metrics["prefetch_hit"] == 1


def test_taken_landings_lose_prefetches_and_unused_ones_make_room(hifc: HiFC) -> None:
    names = fill(hifc, 60)
    everything = mass(60, range(60))
    with held(ring_of(hifc, names)):
        started = [hifc.observe_attention(everything, names) for _ in range(10)]
        assert started == [2] * 8 + [0, 0]
        assert hifc.metrics["prefetch_lost"] == 4
        assert hifc.ahead.arena_bytes == 16 * HELD
    await_all(hifc)
    assert hifc.observe_attention(everything, names) == 2
    assert hifc.metrics["prefetch_wasted"] == 2, "the oldest"
    for number in range(59, -1, -1):
        assert same(hifc.load(names[number]), number)
        assert hifc.blocks.resident_bytes <= 16 * HELD
    assert 14 <= hifc.metrics["prefetch_hit"] <= 16
    assert hifc.pool_size_bytes == 32 * HELD


@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_swap_buffer_size_bounds_the_landings(blocks: int) -> None:
    with opened(swap_buffer_size=blocks * HELD, prefetch_degree=8) as hifc:
        names = fill(hifc, 12)
        wanted = mass(12, range(12))
        assert hifc.observe_attention(wanted, names) == blocks
        assert hifc.metrics["prefetch_landings"] == blocks
        assert hifc.prefetch(names) == 0, "they share the buffer"
        for number in range(12):
            assert same(hifc.load(names[number]), number)
        assert hifc.metrics["prefetch_hit"] == blocks


def test_a_load_does_not_wait_for_a_prefetch_that_gives_way(
    hifc: HiFC, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LANDING_WAIT_S", 0.01)
    names = fill(hifc, 8)
    with held(ring_of(hifc, names)):
        assert hifc.observe_attention(mass(8, [1, 2]), names) == 2
        assert same(hifc.load(names[1]), 1)
    await_all(hifc)
    assert same(hifc.load(names[2]), 2)
    hifc.observe_attention(mass(8, []), names)
    assert hifc.metrics["prefetch_hit"] == hifc.metrics["prefetch_failed"] == 1  # taken back
    assert (hifc.ahead._items == -1).all()


def test_close_in_flight() -> None:
    device = "ram://ahead-close?size=32MiB"
    Namespace.format(device, segment_size="1MiB", force=True)
    for hold in (False, True):
        with opened(device=device) as hifc:
            names = fill(hifc, 8, cls="reuse")
            ring = ring_of(hifc, names)
            with held(ring) if hold else contextlib.nullcontext():
                assert hifc.observe_attention(mass(8, [1, 2]), names) == 2
                hifc.close()
            assert ring.closed
            assert (ring.statuses != RingStatus.WAITING).all()
            hifc.close()
    with opened(device=device) as hifc:
        assert same(hifc.load(key(1)), 1)


def test_the_namespace_is_closed_first(hifc: HiFC) -> None:
    names = fill(hifc, 8)
    with held(ring_of(hifc, names)):
        hifc.observe_attention(mass(8, [1, 2]), names)
        hifc.namespace.close()
    hifc.close()


def test_inline_has_nobody_who_reads_meanwhile() -> None:
    with opened(drive="inline") as hifc:
        names = fill(hifc, 4)
        with pytest.raises(ConfigError, match="drive: reactor"):
            hifc.observe_attention(mass(4, [1]), names)
        assert same(hifc.load(names[1]), 1)
    with opened(drive="inline", prefetch_degree=0) as hifc:
        names = fill(hifc, 4)
        assert hifc.observe_attention(mass(4, [1]), names) == 0
        assert hifc.prefetcher is not None
        assert hifc.prefetcher.num_blocks == 4


def test_threads_that_load_store_and_observe(hifc: HiFC) -> None:
    names = fill(hifc, 24)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(40):
            hifc.observe_attention(random.random((2, 24)).astype(np.float32), names)
            stored, loaded = random.integers(24, size=2).tolist()
            hifc.store(names[stored], block(stored))
            assert same(hifc.load(names[loaded]), loaded)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result(timeout=600)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_loads_are_right(seed: int) -> None:
    random = np.random.default_rng(seed)
    stored: dict[int, int] = {}
    versions = itertools.count(1000)
    with opened(prefetch_degree=4, swap_buffer_size=6 * HELD) as hifc:
        for _ in range(400):
            number = int(random.integers(40))
            match int(random.integers(8)):
                case 0 | 1:
                    stored[number] = next(versions)
                    hifc.store(key(number), block(stored[number]))
                case 2:
                    assert hifc.delete(key(number)) == (stored.pop(number, None) is not None)
                case 3:
                    first = int(random.integers(3)) * 5
                    wanted = random.random((2, 25)).astype(np.float32)
                    hifc.observe_attention(wanted, keys_of(range(first, first + 25)))
                case 4:
                    hifc.offload()
                case 5:
                    hifc.prefetch([key(number), key(number + 1)])
                case _:
                    found = hifc.load(key(number))
                    if number in stored:
                        assert same(found, stored[number])
                    else:
                        assert found is None
            assert hifc.blocks.resident_bytes <= 16 * HELD
        metrics = hifc.metrics
        assert metrics["prefetch_hit"] > 0
        assert metrics["prefetch_hit"] + metrics["prefetch_wasted"] <= metrics["prefetch_issued"]
