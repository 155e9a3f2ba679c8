# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine on a small device in memory, keys, and what comes back from a full one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from hifc import HiFC, Namespace, NoSpace

_turns = itertools.cycle(range(8))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def count_loaded(hifc: HiFC, numbers: Iterable[int], tensor: Callable[[int], Any]) -> int:
    """How many of the blocks come back, each exact. For the others there is no room to bring them
    back, but they are there."""
    count = 0
    for number in numbers:
        assert key(number) in hifc
        with contextlib.suppress(NoSpace):
            assert hifc.load(key(number)).tobytes() == tensor(number).tobytes()
            count += 1
    return count


def settings(**changes: Any) -> dict[str, Any]:
    """A configuration. Its device has just been formatted, unless `changes` names another one;
    named images stay until the process ends, so a few take turns."""
    device = f"ram://engine-{next(_turns)}?size=64MiB"
    found = {
        "device": device,
        "format": "if_missing",
        "segment_size": "1MiB",
        "memory_budget": "1MiB",
        "swap_buffer_size": "4MiB",
        "pool_size": "8MiB",
        "owner_socket": False,
    } | changes
    Namespace.format(device, segment_size=found["segment_size"], force=True)
    return found
