# SPDX-License-Identifier: Apache-2.0
"""Replays access traces against the policies of driver/policy, and against Belady's algorithm.

A trace is in Mooncake's format (FAST 2025): a JSON object a line with `timestamp` in milliseconds,
`hash_ids`, the blocks of the request's prefix, head first, and `output_length` in tokens, which a
server knows once it lets go of the blocks, and which may be missing. Blocks are asked for one after
the other; a hit is a block that is in the cache at its turn. The loop over accesses is in C.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hifc.blocks.policy import NativePolicy
from hifc.errors import InvalidRequest
from hifc.native_lib import layouts, libhifc

BELADY = "belady"
ADMISSIONS = {"always": 0, "second_use": 1, "budget": 2, "expected": 3}
_TIMESTAMP_MAX_MS = 1 << 53


@dataclass(frozen=True)
class Trace:
    """Requests by time. ids: of all requests one after the other, numbered from 0 as they come;
    request i has ids[offsets[i]:offsets[i + 1]]. answers: tokens of each answer, 0: not known."""

    times_s: npt.NDArray[np.float64]
    offsets: npt.NDArray[np.uint64]
    ids: npt.NDArray[np.uint32]
    answers: npt.NDArray[np.uint32]
    block_count: int  # different ones

    def native(self) -> layouts.Trace:
        """struct hifc_trace over these arrays, which must stay."""
        return layouts.Trace(
            self.times_s.ctypes.data,
            self.offsets.ctypes.data,
            self.ids.ctypes.data,
            self.answers.ctypes.data,
            len(self.times_s),
            self.block_count,
        )


@dataclass(frozen=True)
class Outcome:
    """What a replay counted, in blocks."""

    access_count: int
    reused_blocks: int  # hits
    written_blocks: int

    @property
    def hit_ratio(self) -> float:
        """Hits over accesses."""
        return self.reused_blocks / self.access_count if self.access_count else 0.0

    @property
    def written_per_reused(self) -> float:
        """Bytes written per byte reused, since all blocks are of one size; inf without a hit."""
        return self.written_blocks / self.reused_blocks if self.reused_blocks else float("inf")


def make_trace(
    requests: Iterable[tuple[float, Iterable[int]]], answers: Iterable[int] | None = None
) -> Trace:
    """From (time in seconds, block ids) of each request and the tokens of its answer, where they
    are known; sorted by time if they are not."""
    rows = [(time_s, list(ids)) for time_s, ids in requests]
    tokens = [0] * len(rows) if answers is None else list(answers)
    order = sorted(range(len(rows)), key=lambda at: rows[at][0])
    found = [rows[at] for at in order]
    numbers: dict[int, int] = {}
    ids = [numbers.setdefault(block, len(numbers)) for _, chain in found for block in chain]
    lengths = [len(chain) for _, chain in found]
    return Trace(
        np.array([time_s for time_s, _ in found], np.float64),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64),
        np.array(ids, np.uint32),
        np.array([tokens[at] for at in order], np.uint32),
        len(numbers),
    )


def load_trace(path: str | Path, warn: Callable[[str], None] = lambda _: None) -> Trace:
    """A file in Mooncake's format. warn hears of requests that were out of order and are sorted.

    InvalidRequest: names the line that is not what it should be, or says that nothing is there.
    """
    requests: list[tuple[float, list[int]]] = []
    answers: list[int] = []
    disorder = 0
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                time_s, chain, answer = _request(line, f"{path}:{number}")
                requests.append((time_s, chain))
                answers.append(answer)
                disorder += len(requests) > 1 and requests[-1][0] < requests[-2][0]
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: is no text in UTF-8 ({error.reason})") from error
    if not any(chain for _, chain in requests):
        raise InvalidRequest(
            f"{path}: no accesses in it; a line is like "
            '{"timestamp": 0, "hash_ids": [1, 2], "input_length": 700, "output_length": 10}'
        )
    if disorder:
        warn(f"{path}: {disorder} requests are earlier than the one before; sorted by timestamp")
    return make_trace(requests, answers)


def _request(line: str, where: str) -> tuple[float, list[int], int]:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}: is not JSON: {error}") from error
    if not isinstance(entry, dict) or "timestamp" not in entry or "hash_ids" not in entry:
        raise InvalidRequest(f"{where}: wants an object with timestamp and hash_ids")
    time_ms, chain = entry["timestamp"], entry["hash_ids"]
    if (
        isinstance(time_ms, bool)
        or not isinstance(time_ms, int | float)
        or not -_TIMESTAMP_MAX_MS < time_ms < _TIMESTAMP_MAX_MS
    ):
        raise InvalidRequest(f"{where}: timestamp is {time_ms!r}, not a number of milliseconds")
    if not isinstance(chain, list) or not all(type(block) is int for block in chain):
        raise InvalidRequest(f"{where}: hash_ids is not a list of whole numbers")
    answer = entry.get("output_length", 0)
    if type(answer) is not int or not 0 <= answer < 1 << 32:
        raise InvalidRequest(f"{where}: output_length is {answer!r}, not a number of tokens")
    return time_ms / 1000.0, chain, answer


def replay(
    trace: Trace,
    policy: str,
    capacity_blocks: int,
    *,
    admission: str = "always",
    budget_blocks_per_day: float = 0.0,
    decay_lambda: float = 0.1,
) -> Outcome:
    """Runs the trace through a policy of that name, or `belady`, whose misses are all written.

    budget_blocks_per_day: of the admission `budget`; a day's worth is there at the start.
    """
    if capacity_blocks < 1:
        raise InvalidRequest(f"capacity: {capacity_blocks} blocks; a cache has at least one")
    if admission not in ADMISSIONS:
        raise InvalidRequest(f"admission: {admission!r} is none of {', '.join(ADMISSIONS)}")
    lib = libhifc.library()
    native = trace.native()
    counts = layouts.Replay(admission=ADMISSIONS[admission], budget_blocks=budget_blocks_per_day)
    if policy == BELADY:
        if admission != "always":
            raise InvalidRequest(f"admission: {BELADY} takes every block, not {admission}")
        lib.hifc_belady_replay(capacity_blocks, ctypes.byref(native), ctypes.byref(counts))
    else:
        opened = NativePolicy(policy, capacity_blocks, decay_lambda)
        lib.hifc_policy_replay(opened.pointer, ctypes.byref(native), ctypes.byref(counts))
    return Outcome(counts.access_count, counts.hit_count, counts.written_count)
