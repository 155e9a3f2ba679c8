# SPDX-License-Identifier: Apache-2.0
"""Request rings from Python, on every device: descriptors in, verified bytes and answers out."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

import hifc
from hifc import ClosedError, ForkError, InvalidRequest, Namespace, NoSpace
from hifc.namespace.ring import DESCRIPTOR, Ring, RingOp, RingStatus, make_descriptors

if TYPE_CHECKING:
    from conftest import Opener

BLOCK = 16384
BLOCKS = 32
PARTS = 4


def keys_of(numbers: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    array = np.zeros((np.size(numbers), 2), np.uint64)
    array[:, 0] = numbers
    return array.view(np.uint8)


def values() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, (BLOCKS, BLOCK), np.uint8)


def stored(ns: Namespace) -> npt.NDArray[np.uint8]:
    """Puts BLOCKS values of PARTS parts under keys 0 to BLOCKS - 1."""
    data = values()
    ns.put_many(keys_of(np.arange(BLOCKS)), list(data), parts=PARTS).raise_for_errors()
    return data


def open_ring(ns: Namespace, slots: int = 64) -> Ring:
    return ns.ring(ns.buffer(BLOCKS * BLOCK), BLOCK, slots=slots)


def test_blocks_arrive(ns: Namespace) -> None:
    data = stored(ns)
    order = np.random.default_rng(1).permutation(BLOCKS)
    with open_ring(ns) as ring:
        assert (ring.statuses == RingStatus.IDLE).all()
        words = np.arange(BLOCKS)
        wanted = make_descriptors(keys_of(order), words * BLOCK // 4096, words)
        assert ring.submit(wanted) == BLOCKS
        assert ring.wait(words, 120)
        assert (ring.statuses[:BLOCKS] == RingStatus.OK).all()
        assert (ring.arena.reshape(BLOCKS, BLOCK) == data[order]).all()
        assert ring.header.answers == BLOCKS
        assert ring.poll(words).all()
    stats = ns.stats()
    assert stats.prefetch_submitted == stats.prefetch_completed == BLOCKS
    assert stats.prefetch_bytes == BLOCKS * BLOCK


def test_parts_arrive_and_neighbours_are_one_read(ns: Namespace) -> None:
    data = stored(ns)
    part = BLOCK // PARTS
    with open_ring(ns) as ring:
        words = np.arange(PARTS)
        wanted = make_descriptors(
            keys_of(np.full(PARTS, 3)), words, words, first_part=words, part_count=1
        )
        assert ring.submit(wanted) == PARTS
        assert ring.wait(words, 120)
        assert (ring.statuses[:PARTS] == RingStatus.OK).all()
        assert (ring.arena[:BLOCK] == data[3]).all()
        one = make_descriptors(keys_of(5), 10, 9, first_part=2, part_count=1)
        ring.submit(one)
        assert ring.wait(9, 120)
        assert (ring.arena[10 * 4096 : 10 * 4096 + part] == data[5, 2 * part : 3 * part]).all()
    assert ns.stats().prefetch_reads <= 1 + PARTS  # 2 where the thread did not come in between


def test_numpy_is_a_producer(ns: Namespace) -> None:
    """What a kernel does, in numpy: credit, claim, status words, descriptors, and the laps last."""
    data = stored(ns)
    with open_ring(ns, slots=16) as ring:
        slots = ring.header.slots
        produced = 0
        for start in range(0, 400, 8):
            numbers = np.arange(start, start + 8) % BLOCKS
            words = np.arange(8)
            assert ring.header.tail + 8 - ring.header.head <= slots
            positions = ring.header.tail + np.arange(8)
            ring.header.tail += 8
            ring.statuses[words] = RingStatus.WAITING
            wanted = make_descriptors(keys_of(numbers), words * BLOCK // 4096, words)
            at = positions % slots
            for field in ("key", "place", "first_part", "part_count", "control"):
                ring.descriptors[field][at] = wanted[field]
            ring.descriptors["sequence"][at] = positions // slots + 1
            ring.kick()
            assert ring.wait(words, 120)
            assert (ring.statuses[words] == RingStatus.OK).all()
            assert (ring.arena.reshape(BLOCKS, BLOCK)[:8] == data[numbers]).all()
            produced += 8
        assert ring.header.head == produced == ns.stats().prefetch_submitted


def test_every_answer(ns: Namespace) -> None:
    stored(ns)
    with open_ring(ns) as ring:
        wanted = make_descriptors(
            keys_of([0, 999, 1, 2]),
            [0, 4, BLOCKS * BLOCK // 4096, 8],
            [0, 1, 2, 3],
            first_part=[0, 0, 0, 3],
            part_count=[0, 0, 0, 2],
        )
        assert ring.submit(wanted) == 4
        assert ring.wait([0, 1, 2, 3], 120)
        assert ring.statuses[:4].tolist() == [
            RingStatus.OK,
            RingStatus.MISS,
            -errno.EFAULT,
            -errno.ERANGE,
        ]
        stats = ns.stats()
        assert (stats.prefetch_completed, stats.prefetch_failed, stats.prefetch_bad) == (1, 1, 2)


def test_overflow_and_cancel(device: Opener) -> None:
    ns = device.open(drive="inline", prefetch_inflight=1)  # nothing moves until somebody waits
    stored(ns)
    with open_ring(ns, slots=16) as ring:
        words = np.arange(12)
        wanted = make_descriptors(keys_of(words), words * BLOCK // 4096, words)
        assert ring.submit(wanted) == 12
        assert ring.cancel([4, 5, 6]) == 3
        assert ring.submit(wanted) == 1
        assert ns.stats().prefetch_overflowed == 11
        assert ring.wait(words, 120)
        cancelled = ring.statuses[words] == RingStatus.CANCELLED
        assert np.flatnonzero(cancelled).tolist() == [4, 5, 6]
        assert ns.stats().prefetch_cancelled == 3


def test_duplicates_are_dropped(device: Opener) -> None:
    ns = device.open(drive="inline")
    stored(ns)
    with open_ring(ns) as ring:
        ring.submit(make_descriptors(keys_of([1, 1]), [0, 4], [0, 1]))
        assert ring.wait([0, 1], 120)
        assert ring.statuses[:2].tolist() == [RingStatus.OK, RingStatus.DUPLICATE]
        assert ns.stats().prefetch_duplicates == 1


def test_threads_produce_at_once(ns: Namespace) -> None:
    data = stored(ns)
    with open_ring(ns) as ring:
        blocks = ring.arena.reshape(BLOCKS, BLOCK)
        failures: list[str] = []

        def produce(thread: int) -> None:
            rng = np.random.default_rng(thread)
            words = np.arange(thread * 8, thread * 8 + 8)
            for _ in range(60):
                numbers = thread * 8 + rng.permutation(8)  # each its own, so none is a duplicate
                wanted = make_descriptors(keys_of(numbers), words * BLOCK // 4096, words)
                if ring.submit(wanted) != 8 or not ring.wait(words, 120):
                    failures.append(f"thread {thread}: not taken, or not answered")
                if not (blocks[words] == data[numbers]).all():
                    failures.append(f"thread {thread}: {ring.statuses[words]}")

        threads = [threading.Thread(target=produce, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert not failures, failures[0]


def test_damage_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    Namespace.format(f"file://{path}?size=64MiB", segment_size="2MiB")
    with Namespace.open(f"file://{path}") as ns:
        data = stored(ns)
        ns.sync()
        with path.open("r+b") as file:
            at = file.read().find(data[4].tobytes()[:64])
            file.seek(at)
            file.write(b"damaged!")
        with open_ring(ns) as ring:
            ring.submit(make_descriptors(keys_of([4, 5]), [0, 4], [0, 1]))
            assert ring.wait([0, 1], 120)
            assert ring.statuses[:2].tolist() == [RingStatus.MISS, RingStatus.OK]
            assert not ring.arena[:BLOCK].any()
            assert ns.stats().corrupt_count == 1


def test_a_ring_is_closed_while_others_use_it(ram: Opener) -> None:
    ns = ram.open()
    stored(ns)
    for _ in range(30):
        ring = open_ring(ns)
        refused: list[bool] = []

        def use(ring: Ring = ring, refused: list[bool] = refused) -> None:
            wanted = make_descriptors(keys_of(np.arange(8)), np.arange(8) * 4, np.arange(8))
            try:
                while True:
                    ring.submit(wanted)
                    ring.wait(np.arange(8), 120)
            except ClosedError:
                refused.append(True)

        threads = [threading.Thread(target=use, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        closers = [threading.Thread(target=ring.close, daemon=True) for _ in range(2)]
        time.sleep(0.005)
        for closer in closers:
            closer.start()
        for thread in threads + closers:
            thread.join(120)
            assert not thread.is_alive()
        assert refused == [True, True]


def test_arrays_outlive_the_ring_and_the_namespace(ram: Opener) -> None:
    ns = ram.open()
    stored(ns)
    ring = open_ring(ns)
    statuses, descriptors = ring.statuses, ring.descriptors
    ring.submit(make_descriptors(keys_of([1]), [0], [0]))
    assert ring.wait(0, 120)
    ns.close()
    assert ring.closed
    assert ring.header.state == 3
    with pytest.raises(ClosedError):
        ring.submit(make_descriptors(keys_of([1]), [0], [0]))
    with pytest.raises(ClosedError):
        ring.kick()
    ring.close()
    ring.close()
    del ring
    gc.collect()
    assert statuses[0] == RingStatus.OK
    assert descriptors["sequence"][0] == 1


def test_a_dropped_ring_is_closed_and_gives_its_arena_back(ram: Opener) -> None:
    ns = ram.open()
    stored(ns)
    used = ns.stats().buffer_used_bytes
    ring = open_ring(ns)
    died = weakref.ref(ring)
    assert ns.stats().buffer_used_bytes > used
    del ring
    gc.collect()
    assert died() is None
    deadline = time.monotonic() + 120
    while ns.stats().buffer_used_bytes > used:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(40):  # more than may be open at once
        open_ring(ns)


def test_a_namespace_has_room_for_16(ram: Opener) -> None:
    ns = ram.open()
    arena = ns.buffer(BLOCK)
    rings = [ns.ring(arena, BLOCK, slots=16) for _ in range(16)]
    with pytest.raises(NoSpace):
        ns.ring(arena, BLOCK, slots=16)
    rings[3].close()
    with pytest.raises(ClosedError, match=r"ns\.ring"):
        rings[3].kick()
    ns.ring(arena, BLOCK, slots=16).close()


def test_bad_input_is_named(ram: Opener) -> None:
    ns = ram.open()
    arena = ns.buffer(BLOCK)
    wrong = [{"slots": 17}, {"slots": -1}, {"statuses": 1 << 25}, {"poll_us": 2_000_000}]
    for name in ("slots", "statuses", "poll_us"):
        wrong += [{name: value} for value in (1 << 40, True, 1.5, "x", None)]
    for options in wrong:
        with pytest.raises(hifc.HiFCError):
            ns.ring(arena, BLOCK, **options)
    fixed = arena.view()
    fixed.flags.writeable = False
    with pytest.raises(InvalidRequest, match="read-only"):
        ns.ring(fixed, 64)
    for bad_arena in (np.zeros(BLOCK, np.uint8), arena[1:], arena[:100]):
        with pytest.raises(InvalidRequest):
            ns.ring(bad_arena, 64)
    with pytest.raises(InvalidRequest):
        ns.ring(arena, BLOCK + 1)
    with ns.ring(arena, BLOCK) as ring:
        with pytest.raises(InvalidRequest, match="DESCRIPTOR"):
            ring.submit(np.zeros(3, np.uint8))
        with pytest.raises(InvalidRequest, match="status word"):
            ring.submit(make_descriptors(keys_of([1]), 0, 1024))
        with pytest.raises(InvalidRequest, match="status words"):
            ring.wait([1024])
        with pytest.raises(InvalidRequest, match="DESCRIPTOR"):
            ring.submit(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            ring.wait([0.5])
        for timeout in (float("nan"), float("inf"), "x"):
            with pytest.raises(InvalidRequest, match="timeout_s"):
                ring.wait([0], timeout)  # type: ignore[arg-type]
        assert ring.wait([])
        assert ring.submit(np.zeros(0, DESCRIPTOR)) == 0
    for fields in (
        {"places": -1, "words": 0},
        {"places": 1 << 32, "words": 0},
        {"places": 0, "words": 1 << 24},
        {"places": [0, 1], "words": 0},
        {"places": 0.5, "words": 0},
        {"places": 0, "words": 0, "part_count": 1 << 16},
    ):
        with pytest.raises(InvalidRequest):
            make_descriptors(keys_of([1]), **fields)
    made = make_descriptors(keys_of([1]), 7, 9, op=RingOp.CANCEL)
    assert made["control"][0] == 2 << 24 | 9


def test_a_child_of_fork_is_refused(ram: Opener) -> None:
    ns = ram.open(drive="inline")
    stored(ns)
    ring = open_ring(ns)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (ring.kick, lambda: ring.wait(0), lambda: ring.cancel(0)):
                with pytest.raises(ForkError):
                    call()
            ring.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ring.submit(make_descriptors(keys_of([1]), 0, 0))
    assert ring.wait(0, 120)
    assert ring.statuses[0] == RingStatus.OK


def test_statistics_are_exported(tmp_path: Path) -> None:
    config = {
        "device": f"file://{tmp_path}/kv?size=128MiB",
        "format": "if_missing",
        "memory_budget": "4MiB",
    }
    with hifc.HiFC(config) as engine:
        ns = engine.namespace
        ns.put(bytes(16), b"x" * BLOCK)
        with ns.ring(ns.buffer(BLOCK), BLOCK) as ring:
            ring.submit(make_descriptors([bytes(16), b"n" * 16], 0, [0, 1]))
            assert ring.wait([0, 1], 120)
        assert engine.metrics["namespace_prefetch_completed"] == 1
        assert engine.metrics["namespace_prefetch_failed"] == 1
        assert "hifc_namespace_prefetch_submitted 2" in engine.metrics.prometheus()
