# SPDX-License-Identifier: Apache-2.0
"""A read ahead that never ends: its memory is not handed to anything else."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest

from hifc.errors import WaitTimeout
from hifc.sparse_arena import ArenaStream
from hifc.streaming import LayerStream


class Unending:
    def wait(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        return False


def stream_of(kind: type[LayerStream]) -> Any:
    stream: Any = object.__new__(kind)
    stream.namespace = SimpleNamespace(uri="ram://never")
    stream._ahead, stream._free = collections.deque(), collections.deque()
    return stream


def test_a_slot_that_is_still_read_into_is_not_free() -> None:
    stream = stream_of(LayerStream)
    slot = SimpleNamespace(ticket=Unending())
    stream._ahead.append(slot)
    for _ in range(2):  # nor at the second try
        with pytest.raises(WaitTimeout, match="reading ahead on ram://never"):
            stream._drop_ahead()
    assert not stream._free
    assert slot.ticket is not None


def test_an_arena_that_is_still_read_into_keeps_its_use() -> None:
    stream = stream_of(ArenaStream)
    stream._holds_blocks = True
    stream._prefetch = (Unending(), None, None)
    with pytest.raises(WaitTimeout, match="reading ahead"):
        stream._to_slots()
    assert stream._holds_blocks
    assert stream._prefetch is not None
