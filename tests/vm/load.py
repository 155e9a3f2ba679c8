# SPDX-License-Identifier: Apache-2.0
"""A process that keeps a namespace busy until something stops it. Started by tests as a program.

    load.py URI --timeout-ms N

Stores SYNCED values and syncs, prints "synced", then stores and reads back further ones, and prints
"busy" once that runs. At the first error it prints one line of JSON about it, closes, and prints
"closed". A wrong byte ends it with an assertion.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import hifc

SYNCED = 8
BATCH = 4
VALUE_BYTES = 64 << 10
BUSY_S = 1800.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def value(number: int) -> npt.NDArray[np.uint8]:
    """What is stored under key(number)."""
    return np.random.default_rng(number).integers(0, 256, VALUE_BYTES, dtype=np.uint8)


def batches() -> Iterator[range]:
    first = SYNCED
    while True:
        yield range(first, first + BATCH)
        first += BATCH


def work(ns: hifc.Namespace) -> None:
    deadline = time.monotonic() + BUSY_S
    for numbers in batches():
        assert time.monotonic() < deadline, f"nothing happened for {BUSY_S} s"
        keys = [key(number) for number in numbers]
        ns.put_many(keys, [value(number) for number in numbers]).raise_for_errors()
        out = np.zeros((BATCH, VALUE_BYTES), dtype=np.uint8)
        ns.get_many(keys, out).raise_for_errors()
        for number, row in zip(numbers, out, strict=True):
            assert (row == value(number)).all(), f"wrong bytes for {number}"
        if numbers[0] == SYNCED:
            print("busy", flush=True)
        # Bounded space, and segments that are freed and used again.
        for number in numbers:
            ns.delete(key(number))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("--timeout-ms", type=int, required=True)
    options = parser.parse_args()
    ns = hifc.Namespace.open(options.uri, command_timeout_ms=options.timeout_ms, pool_size="16MiB")
    for number in range(SYNCED):
        ns.put(key(number), value(number))
    ns.sync()
    print("synced", flush=True)
    try:
        work(ns)
    except hifc.HiFCError as error:
        found = {"type": type(error).__name__, "text": str(error)}
        found |= {"sct": getattr(error, "sct", 0), "sc": getattr(error, "sc", 0)}
        print(json.dumps(found), flush=True)
    try:
        ns.close()
    except hifc.HiFCError as error:
        print(f"close: {error}", flush=True)
    print("closed", flush=True)


if __name__ == "__main__":
    main()
