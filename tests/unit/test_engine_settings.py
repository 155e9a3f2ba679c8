# SPDX-License-Identifier: Apache-2.0
"""Every setting of what stays in memory and how it moves does what it says in the engine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hifc import ConfigError, HiFC, Namespace, NoSpace

HELD = 64 << 10  # of a block in memory: 61,440 bytes and a trailer
_turns = itertools.count()


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def block(number: int) -> Any:
    return np.full(15_360, number, dtype=np.float32)


def opened(**changes: Any) -> HiFC:
    """16 blocks fit."""
    device = f"ram://settings-{next(_turns) % 4}?size=32MiB"
    Namespace.format(device, segment_size="1MiB", force=True)
    settings = {
        "device": device,
        "memory_budget": 16 * HELD,
        "swap_buffer_size": 16 * HELD,
        "pool_size": "8MiB",
        "owner_socket": False,
    }
    return HiFC(settings | changes)


def fill(hifc: HiFC, count: int) -> None:
    for number in range(count):
        hifc.store(key(number), block(number))


@pytest.mark.parametrize("watermark", [0.0, 0.15, 0.5])
def test_watermark(watermark: float) -> None:
    """Offload begins with the block that leaves less than the watermark free, not before."""
    fitting = int(16 * (1 - watermark))
    with opened(watermark=watermark, hot_ratio=0.05) as hifc:
        fill(hifc, fitting)
        assert hifc.metrics["swap_out_blocks"] == 0
        hifc.store(key(99), block(99))
        assert hifc.metrics["swap_out_blocks"] == 8
        # Of its own accord, except where there is no free memory to begin before the end.
        assert hifc.blocks.resident_bytes <= (1 - watermark) * 16 * HELD


@pytest.mark.parametrize("size", [1, 3, 8])
def test_swap_batch_size(size: int) -> None:
    with opened(swap_batch_size=size, hot_ratio=0.05) as hifc:
        fill(hifc, 14)
        assert hifc.metrics["swap_out_blocks"] == size
        assert hifc.metrics["swap_batches"] == 1, "they move with one submission"
        fill(hifc, 14)
        # A batch of the namespace holds them too: written together.
        assert hifc.metrics["swap_out_blocks"] / hifc.metrics["swap_batches"] <= size
        before = hifc.metrics["swap_batches"]
        left = hifc.blocks.resident_count
        assert hifc.offload() == left
        assert hifc.metrics["swap_batches"] - before <= -(-left // size)


@pytest.mark.parametrize("how", ["if_missing", "always"])
def test_a_memory_device_without_a_name_cannot_be_formatted(how: str) -> None:
    with pytest.raises(ConfigError, match=r"as in ram://kv\?size=64MiB"):
        HiFC({"device": "ram://?size=64MiB", "format": how})


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_hot_ratio(ratio: float) -> None:
    """The hot share stays at the watermark, whatever the batch would take."""
    settings = {"hot_ratio": ratio, "hot_ratio_min": 0.0, "hot_ratio_max": 1.0}
    with opened(swap_batch_size=64, **settings) as hifc:
        fill(hifc, 14)
        assert hifc.blocks.resident_count == round(ratio * 13) + 1  # room is made for the last
        assert hifc.metrics["policy_overruled"] == 0


def test_the_hot_ratio_follows_the_hit_rate_in_the_engine() -> None:
    with opened() as hifc:
        fill(hifc, 60)
        for number in itertools.chain(*[range(60)] * 20):  # a scan: nearly all of them miss
            hifc.load(key(number))
        assert hifc.classifier.hot_ratio > 0.5
        assert hifc.metrics["hot_ratio"] == hifc.classifier.hot_ratio
        assert hifc.classifier.hit_rate is not None
        assert hifc.classifier.hit_rate < 0.5
        highest = hifc.classifier.hot_ratio
        for _ in range(2000):
            hifc.load(key(59))
        assert hifc.classifier.hot_ratio < highest


def test_memory_reserved() -> None:
    with opened(memory_reserved=10 * HELD, watermark=0.0) as hifc:
        for number in range(40):
            hifc.store(key(number), block(number))
            assert hifc.blocks.resident_bytes <= 6 * HELD
        assert hifc.blocks.resident_count >= 1
        hifc.prefetch([key(number) for number in range(40)])
        assert hifc._pending_bytes + hifc.blocks.resident_bytes <= 6 * HELD
        for number in range(40):
            assert hifc.load(key(number)).tobytes() == block(number).tobytes()
            assert hifc.blocks.resident_bytes <= 6 * HELD


@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_swap_buffer_size(blocks: int) -> None:
    """Bounds what is on its way at a time."""
    with opened(swap_buffer_size=blocks * HELD) as hifc:
        fill(hifc, 12)
        hifc.offload()
        names = [key(number) for number in range(12)]
        assert hifc.prefetch(names) == blocks
        for number in range(blocks):
            hifc.load(key(number))
        assert hifc.metrics["prefetch_hit"] == blocks
        assert hifc.prefetch(names) == min(blocks, 12 - blocks), "room again once it arrived"


@pytest.mark.parametrize("degree", [0, 1, 4])
def test_prefetch_degree(degree: int) -> None:
    with opened(prefetch_degree=degree) as hifc:
        fill(hifc, 12)
        hifc.offload()
        names = [key(number) for number in range(12)]
        mass = np.arange(24, dtype=np.float32).reshape(2, 12)
        assert hifc.observe_attention(mass, names) == degree
        for number in range(12 - degree, 12):  # those with the most mass
            hifc.load(key(number))
        assert hifc.metrics["prefetch_hit"] == degree


def test_early_offload_to_a_full_device_keeps_the_block() -> None:
    device = "ram://settings-full?size=6MiB"
    Namespace.format(device, segment_size="256KiB", force=True)
    with opened(device=device) as hifc, pytest.raises(NoSpace):
        for number in range(1000):
            hifc.store(key(number), block(number))
    assert hifc.metrics["offload_failed"] > 0
