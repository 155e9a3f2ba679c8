# SPDX-License-Identifier: Apache-2.0
"""What the library's software costs a block from Python: CPU time of a put and of a get.

    HIFC_LIBRARY=.../libhifc_bench.so python tools/bench/pycost.py --rounds 25

The same as cost.c does, through hifc.Namespace: prepared request arrays, one submit and one wait a
batch, driven inline, on a ram device that moves no bytes and with checksums given by the caller. It
is started by tools/bench/driver, which builds the library with the switch for the copying.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import hifc
from hifc.native_lib import libhifc

BATCHES_A_ROUND = 32
URI = "ram://pycost?size=2GiB"
F_CHECKSUMS = 1  # of hifc.h: checksums are the caller's business
FILL_BATCH = 1024
FILL_BYTES = 64


def keys_of(first: int, count: int) -> npt.NDArray[np.uint8]:
    """Keys number first on, uint8 of shape (count, 16)."""
    halves = np.arange(first, first + count, dtype=np.uint64)[:, None] * np.array(
        [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], dtype=np.uint64
    )
    return np.ascontiguousarray(halves).view(np.uint8)


class Rig:
    """A namespace that holds `entries` small values, and memory for one batch."""

    def __init__(self, size_bytes: int, batch: int, entries: int) -> None:
        hifc.Namespace.format(URI, segment_size="64MiB", force=True)
        self.ns = hifc.Namespace.open(
            URI,
            drive="inline",
            pool_size=(16 << 20) + 2 * size_bytes * batch,
            index_entries_max=2 * entries + (1 << 20),
            owner_socket=False,
        )
        self.size_bytes = size_bytes
        self.batch = batch
        self.buffers = self.ns.buffer(size_bytes * batch)
        self.checksums = self.ns.buffer(4 * batch)
        pool = libhifc.library().hifc_pool_base(self.ns._handle.pointer, 0, None)
        self.offsets = self.buffers.ctypes.data - pool + np.arange(batch) * size_bytes
        self.checksum_offsets = self.checksums.ctypes.data - pool + np.arange(batch) * 4
        self.next_key = 0
        for _ in range(0, entries, FILL_BATCH):
            self._fill()

    def _fill(self) -> None:
        requests = hifc.make_requests(FILL_BATCH, hifc.Op.PUT)
        requests["key"] = keys_of(self.next_key, FILL_BATCH)
        requests["cls"] = hifc.BlockClass.SWAP
        requests["buffer_offset"] = self.offsets[0]
        requests["length"] = FILL_BYTES
        self.next_key += FILL_BATCH
        self.ns.submit(requests).raise_for_errors()

    def prepare(self, op: hifc.Op) -> list[npt.NDArray[np.void]]:
        """The batches of a round, made before the clock runs."""
        batches = []
        for i in range(BATCHES_A_ROUND):
            requests = hifc.make_requests(self.batch, op)
            requests["key"] = keys_of(self.next_key + i * self.batch, self.batch)
            requests["cls"] = hifc.BlockClass.SWAP
            requests["flags"] = F_CHECKSUMS
            requests["buffer_offset"] = self.offsets
            requests["length"] = self.size_bytes
            requests["checksum_offset"] = self.checksum_offsets
            batches.append(requests)
        return batches

    def measure(self, op: hifc.Op) -> float:
        """CPU nanoseconds of one request."""
        batches = self.prepare(op)
        submit = self.ns.submit
        start = time.thread_time_ns()
        for requests in batches:
            submit(requests).wait()
        spent = time.thread_time_ns() - start
        for requests in batches:
            if requests["status"].any():
                raise SystemExit(f"pycost: {op.name} was answered {requests['status']}")
        return spent / (BATCHES_A_ROUND * self.batch)

    def round(self, copies: Any) -> tuple[float, float]:
        """Put, get and delete of a round of blocks: the costs of the first two."""
        copies(0)
        put = self.measure(hifc.Op.PUT)
        get = self.measure(hifc.Op.GET)
        self.measure(hifc.Op.DELETE)
        copies(1)
        self.next_key += BATCHES_A_ROUND * self.batch
        return put, get


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--size", type=int, default=131072, help="bytes of a block")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--entries", type=int, default=1 << 20, help="in the index beside them")
    options = parser.parse_args()
    rig = Rig(options.size, options.batch, options.entries)
    copies = libhifc.library().hifc_bench_ram_copies
    rig.round(copies)
    puts, gets = zip(*(rig.round(copies) for _ in range(options.rounds)), strict=True)
    result: dict[str, object] = {"size_bytes": options.size, "batch": options.batch}
    for name, values in ("put", puts), ("get", gets):
        low, median, high = statistics.quantiles(values, method="inclusive")
        result |= {name: round(median, 1), f"{name}_iqr": [round(low, 1), round(high, 1)]}
    rig.ns.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
