# SPDX-License-Identifier: Apache-2.0
"""The verb bench: loads on a namespace at rest, as a table, JSON and a plot.

What it writes are swap entries under keys of its own, in room that is free, and they are deleted
at the end: it evicts nothing, overwrites nothing and leaves nothing, so it needs no --confirm.
--read-only reads what is there instead.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hifc.namespace.namespace import Namespace
from hifc.native_lib.request import Answer, KeyArray
from hifc.util.units import page_up
from hifc_admin import progress, scan, target, text
from hifc_admin.bench import load as bench_load
from hifc_admin.bench import plot as bench_plot
from hifc_admin.bench.load import Load, Outcome, Scratch
from hifc_admin.doctor import baseline
from hifc_admin.parsing import Verbs, add_uri, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result, Severity
from hifc_admin.verbs.medium import size

LOADS = ("write", "sequential", "random", "mixed", "swap")
READING = ("sequential", "random")
MIXED_PUT_SHARE = 0.3
SWAP_BATCH = 8
VALUE_MAX_BYTES = 64 << 20
DEPTH_DEFAULT = 16
DEPTH_MAX = 1024
DURATION_MAX_S = 3600.0
# Of the free room, what the data set takes, and as much each for what mixed and swap add.
ROOM_SHARE = 4
SEGMENTS_SPARED = 8
KEYS_MAX = 1 << 20
MEANINGS = {
    Answer.RETRY: "a queue was full, as it is now and then under load (Retry); nothing is wrong",
    Answer.PENDING: "the value was still on its way to the device (Pending); nothing is wrong",
    Answer.MISS: "the value was not there (Miss): something evicted or deleted it meanwhile",
    Answer.NO_SPACE: "no room was left (NoSpace): use less --data or a larger device",
    Answer.REJECTED: "the write budget or the admission policy declined it (Rejected)",
    Answer.EXISTS: "the key was there already (Exists)",
}
PERCENTILES = ("p50", "p95", "p99", "p999", "max")


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "bench",
        bench,
        "measure a namespace at rest; entries that are there stay as they are",
        "hifc-admin bench file:///var/tmp/kv.hifc --plot kv.svg",
    )
    add_uri(parser)
    parser.add_argument(
        "--confirm",
        metavar="ID",
        help="refuse to run unless this names the medium, as for format (not needed: bench "
        "overwrites nothing)",
    )
    parser.add_argument(
        "--read-only", action="store_true", help="read the entries that are there; write nothing"
    )
    parser.add_argument(
        "--load",
        action="append",
        choices=LOADS,
        help="one of the loads; may be repeated (default: all)",
    )
    parser.add_argument(
        "--size", metavar="SIZE", type=size, default=256 << 10, help="of a value (default: 256KiB)"
    )
    parser.add_argument(
        "--data",
        metavar="SIZE",
        type=size,
        default=256 << 20,
        help="to write at first, if that much is free (default: 256MiB)",
    )
    parser.add_argument(
        "--depth",
        metavar="N",
        type=int,
        default=DEPTH_DEFAULT,
        help="in flight (default: %(default)s)",
    )
    parser.add_argument(
        "--duration",
        metavar="SECONDS",
        type=float,
        default=3.0,
        help="of each load (default: %(default)s)",
    )
    parser.add_argument("--plot", metavar="FILE", help="latency percentiles as .svg, .png or .pdf")
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="with --read-only: keep the result for doctor --measure",
    )


def bench(arguments: argparse.Namespace) -> Result:
    _check(arguments)
    if arguments.read_only:
        uuid, outcomes, problems = _read_only(arguments)
    else:
        if arguments.confirm is not None:
            medium = target.parse(arguments.uri)
            command = f"hifc-admin bench {shlex.quote(arguments.uri)}"
            target.require_confirmation(medium, arguments.confirm, command, "the medium to measure")
        uuid, outcomes, problems = _read_and_write(arguments)
    data: dict[str, Any] = {
        "uri": arguments.uri,
        "uuid": uuid,
        "read_only": arguments.read_only,
        "loads": [outcome.data() for outcome in outcomes],
    }
    result = Result(data, _table(outcomes), problems)
    if any(outcome.failed for outcome in outcomes):
        first = next(o.first_error for o in outcomes if o.failed)
        result.problems.append(Problem("failed", arguments.uri, "some requests failed", first))
        result.exit = Exit.PARTLY
    if arguments.baseline:
        data["baseline"] = str(baseline.folder() / f"{uuid}.json")
    if arguments.plot:
        title = f"{arguments.uri}, values of {text.size(outcomes[0].value_bytes)}"
        bench_plot.draw(outcomes, title, arguments.plot)
        data["plot"] = arguments.plot
    return result


def _check(arguments: argparse.Namespace) -> None:
    """Raises Failure for what makes no sense, before anything is opened."""
    limits = (
        ("--size", arguments.size, 1, VALUE_MAX_BYTES),
        ("--depth", arguments.depth, 1, DEPTH_MAX),
        ("--duration", arguments.duration, 0.01, DURATION_MAX_S),
    )
    for option, value, least, most in limits:
        if not least <= value <= most:
            _usage(arguments, f"{option} is {value}: use {least} to {most}")
    if arguments.read_only and set(arguments.load or ()) - set(READING):
        _usage(arguments, f"with --read-only, --load is {' or '.join(READING)}")
    if arguments.baseline and not (
        arguments.read_only and "sequential" in (arguments.load or READING)
    ):
        _usage(arguments, "--baseline wants --read-only, and the load sequential")
    if arguments.plot:
        bench_plot.require(arguments.plot)


def _usage(arguments: argparse.Namespace, detail: str) -> None:
    raise Failure(Exit.USAGE, Problem("bad-argument", arguments.uri, detail))


Ran = tuple[str, list[Outcome], list[Problem]]


# ---- reading what is there


def _read_only(arguments: argparse.Namespace) -> Ran:
    uri = arguments.uri
    wanted = arguments.load or READING
    with reading(uri, arguments.depth) as (namespace, keys, longest, total):
        load = Load(namespace, longest, arguments.depth)
        outcomes = []
        if "sequential" in wanted:
            outcomes.append(_timed(arguments, load, "sequential", bench_load.sequential_gets(keys)))
        if "random" in wanted:
            outcomes.append(_timed(arguments, load, "random", bench_load.random_gets(keys)))
        uuid = namespace.stats().uuid
    if arguments.baseline:
        rate, value_bytes = outcomes[0].data()["bytes_per_s"], total / len(keys)
        now_s = time.time()
        baseline.save(baseline.Baseline(uuid, uri, rate, value_bytes, arguments.depth, now_s))
    return uuid, outcomes, []


@contextlib.contextmanager
def reading(uri: str, depth: int) -> Iterator[tuple[Namespace, KeyArray, int, int]]:
    """A namespace open for reading with room for that many of its values; up to KEYS_MAX of its
    keys, the longest value and the sum of their lengths, in bytes. Raises Failure where there is
    none."""
    with scan.look(uri) as namespace:
        entries = [
            (entry.key, entry.length_bytes)
            for entry, _ in zip(namespace.list(), range(KEYS_MAX), strict=False)
        ]
    if not entries:
        detail = "the namespace is empty: there is nothing to read"
        fix = "leave --read-only out: bench then writes values of its own and deletes them again"
        raise Failure(Exit.FAILED, Problem("empty", uri, detail, fix=fix))
    keys = np.frombuffer(b"".join(key for key, _ in entries), dtype=np.uint8).reshape(-1, 16)
    longest = max(length for _, length in entries)
    pool = _pool(longest, depth)
    with Namespace.open(uri, read_only=True, pool_size=pool) as namespace:
        yield namespace, keys, longest, sum(length for _, length in entries)


def _pool(value_bytes: int, count: int) -> int:
    return page_up(value_bytes) * count + scan.pool_size(0)


# ---- writing as well


def _read_and_write(arguments: argparse.Namespace) -> Ran:
    count = _count(arguments)
    most = text.size(3 * count * page_up(arguments.size))
    arguments.announce(
        f"will write up to {most} of values into free room, and delete them at the end; entries "
        "that are there stay as they are"
    )
    pool = _pool(arguments.size, 2 * max(arguments.depth, SWAP_BATCH))
    with Namespace.open(arguments.uri, pool_size=pool) as namespace:
        uuid = namespace.stats().uuid
        scratch = Scratch(3 * count)
        try:
            outcomes = _loads(arguments, namespace, scratch, count)
        finally:
            left = scratch.delete(namespace)
            namespace.sync()
    problems = []
    if left:
        detail = f"{left} values that bench wrote could not be deleted"
        evidence = "they are swap entries and end with this process"
        problems.append(Problem("left", arguments.uri, detail, evidence, severity=Severity.WARNING))
    return uuid, outcomes, problems


def _count(arguments: argparse.Namespace) -> int:
    """How many values the data set has. Looked at read-only: a writable open of a namespace that is
    nearly full makes room by evicting. Raises Failure where too little is free."""
    with scan.look(arguments.uri) as namespace:
        stats = namespace.stats()
    spared = SEGMENTS_SPARED * stats.segment_size_bytes
    room = max(0, stats.segments_free * stats.segment_size_bytes - spared)
    held = page_up(arguments.size)
    count: int = min(arguments.data // held, room // ROOM_SHARE // held, KEYS_MAX)
    least = max(2 * arguments.depth, SWAP_BATCH)
    if arguments.data // held < least:
        shown = text.size(arguments.data)
        detail = f"--data {shown} is too little: {least} values of {text.size(held)} are needed"
        fix = f"--data {least * held} or more, or a smaller --size or --depth"
        raise Failure(Exit.USAGE, Problem("bad-argument", arguments.uri, detail, fix=fix))
    if count < least:
        detail = f"too little is free: {text.size(room)} for values of {text.size(arguments.size)}"
        fix = "a smaller --size or --depth, or --read-only"
        raise Failure(Exit.FAILED, Problem("no-space", arguments.uri, detail, fix=fix))
    return count


def _loads(
    arguments: argparse.Namespace, namespace: Namespace, scratch: Scratch, count: int
) -> list[Outcome]:
    """The data set is written first, whichever loads are wanted."""
    wanted = arguments.load or LOADS
    data, fresh, swapped = np.split(scratch.keys, [count, 2 * count])
    load = Load(namespace, arguments.size, arguments.depth)
    written = _timed(arguments, load, "write", bench_load.sequential_puts(data))
    there = data[namespace.lookup(data) == Answer.OK]
    if not len(there):
        detail = "nothing could be written"
        raise Failure(Exit.FAILED, Problem("failed", arguments.uri, detail, written.first_error))
    choices: dict[str, Callable[[], bench_load.Choose]] = {
        "sequential": lambda: bench_load.sequential_gets(there),
        "random": lambda: bench_load.random_gets(there),
        "mixed": lambda: bench_load.mixed(there, fresh, MIXED_PUT_SHARE),
    }
    outcomes = [written] if "write" in wanted else []
    outcomes += [
        _timed(arguments, load, name, make()) for name, make in choices.items() if name in wanted
    ]
    del load
    if "swap" in wanted:
        outcomes += _swap(arguments, namespace, swapped)
    return outcomes


def _swap(arguments: argparse.Namespace, namespace: Namespace, keys: KeyArray) -> list[Outcome]:
    """Paused sequences: eight blocks leave together and come back together, one at a time."""
    load = Load(namespace, arguments.size, 1, SWAP_BATCH)
    out = _timed(arguments, load, "swap out", bench_load.sequential_puts(keys))
    there = keys[namespace.lookup(keys) == Answer.OK]
    if not len(there):
        return [out]
    back = _timed(arguments, load, "swap in", bench_load.sequential_gets(there))
    return [out, back]


def _timed(
    arguments: argparse.Namespace, load: Load, name: str, choose: bench_load.Choose
) -> Outcome:
    total_ms = int(arguments.duration * 1000)
    with progress.of(arguments, name, total_ms, is_bytes=False) as shown:
        return load.run(name, choose, arguments.duration, lambda now: shown.at(int(now * 1000)))


# ---- for people


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    head = ("LOAD", "SIZE", "IN FLIGHT", "BYTES/S", "PER S", *(f"{p} us" for p in PERCENTILES))
    rows = []
    for outcome in outcomes:
        found = outcome.data()
        times = found["latency_us"]
        rows.append(
            (
                outcome.name,
                text.size(outcome.value_bytes),
                outcome.batch * outcome.depth,
                f"{text.size(found['bytes_per_s']):>10}",
                f"{found['operations_per_s']:>8.0f}",
                *("-" if times[p] is None else f"{times[p]:>7.0f}" for p in PERCENTILES),
            )
        )
    yield from text.table(head, rows)
    yield from _unmoved(outcomes)


def _unmoved(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What became of requests that moved no value, and whether that matters."""
    for outcome in outcomes:
        for answer, number in outcome.answers.items():
            requests = f"{text.count(number, 'request')} moved nothing, outside all rates above"
            yield f"{outcome.name}: {requests}: {MEANINGS.get(answer, answer.name)}"
