# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine on a small device in memory, and keys."""

from __future__ import annotations

import itertools
from typing import Any

from hifc import Namespace

_turns = itertools.cycle(range(8))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


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
