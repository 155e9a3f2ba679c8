# SPDX-License-Identifier: Apache-2.0
"""The namespace from Python, over every device and both ways to drive it."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hifc import (
    Answer,
    BackPressure,
    BlockClass,
    BufferExhausted,
    ClosedError,
    EventKind,
    HiFCError,
    InvalidRequest,
    Namespace,
    NoSpace,
    Op,
    make_requests,
)

if TYPE_CHECKING:
    from conftest import Opener

SIZES = [1, 15, 16, 4095, 4096, 4097, 100_000, 368_640, 1 << 20]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys_of(count: int, first: int = 0) -> Any:
    keys = np.zeros((count, 16), dtype=np.uint8)
    keys[:, :8] = np.arange(first, first + count, dtype="<u8").reshape(-1, 1).view(np.uint8)
    return keys


def value(seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


# ---- one value


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cls", ["reuse", "swap"])
def test_what_was_put_comes_back(ns: Namespace, size: int, cls: str) -> None:
    data = value(size, size)
    assert ns.put(key(1), data, cls=cls) is Answer.OK
    found = ns.get(key(1))
    assert found is not None
    assert found.tobytes() == data.tobytes()
    assert ns.exists(key(1))


def test_miss_is_none(ns: Namespace) -> None:
    assert ns.get(key(1)) is None
    assert ns.get_range(key(1), 0, 1) is None
    assert not ns.exists(key(1))
    assert not ns.delete(key(1))
    assert ns.stats().miss_count >= 1


def test_reuse_answers_exists_and_swap_is_replaced(ns: Namespace) -> None:
    assert ns.put(key(1), b"one") is Answer.OK
    assert ns.put(key(1), b"two") is Answer.EXISTS
    assert bytes(ns.get(key(1))) == b"one"
    assert ns.put(key(2), b"one", cls="swap") is Answer.OK
    assert ns.put(key(2), b"three", cls=BlockClass.SWAP) is Answer.OK
    assert bytes(ns.get(key(2))) == b"three"


def test_delete(ns: Namespace) -> None:
    for cls in ("reuse", "swap"):
        ns.put(key(1), b"one", cls=cls)
        assert ns.delete(key(1)) is True
        assert ns.get(key(1)) is None
        assert ns.put(key(1), b"two", cls=cls) is Answer.OK
        assert bytes(ns.get(key(1))) == b"two"
        assert ns.delete(key(1)) is True


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "numpy", "torch", "bf16"])
def test_kinds_of_buffers(ns: Namespace, kind: str) -> None:
    data = value(7, 10_000)
    buffer: Any = data
    if kind in ("bytes", "bytearray", "memoryview"):
        buffer = {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}[kind](data)
    elif kind in ("torch", "bf16"):
        torch = pytest.importorskip("torch")
        buffer = torch.from_numpy(data.copy())
        if kind == "bf16":
            buffer = buffer.view(torch.bfloat16).reshape(50, 100)
    assert ns.put(key(1), buffer) is Answer.OK
    assert ns.get(key(1)).tobytes() == data.tobytes()


def test_get_into_memory_of_the_caller(ns: Namespace) -> None:
    torch = pytest.importorskip("torch")
    data = value(7, 8192)
    ns.put(key(1), data)
    for out in (
        bytearray(8192),
        np.zeros(8192, dtype=np.uint8),
        np.zeros((2, 1024), dtype=np.float32),
        torch.zeros(2048, dtype=torch.float32),
        ns.buffer(8192),
    ):
        found = ns.get(key(1), out=out)
        assert found.tobytes() == data.tobytes()
        whole = out.numpy() if isinstance(out, torch.Tensor) else out
        assert bytes(memoryview(whole).cast("B")) == data.tobytes()


def test_larger_memory_is_filled_from_its_start(ns: Namespace) -> None:
    ns.put(key(1), b"abc")
    out = bytearray(b"........")
    found = ns.get(key(1), out=out)
    assert bytes(found) == b"abc"
    assert bytes(out) == b"abc....."


def test_too_small_or_read_only_memory_is_refused(ns: Namespace) -> None:
    ns.put(key(1), b"abcdef")
    with pytest.raises(InvalidRequest, match="6 bytes"):
        ns.get(key(1), out=bytearray(5))
    with pytest.raises(InvalidRequest, match="read-only"):
        ns.get(key(1), out=bytes(6))


@pytest.mark.parametrize(("size", "parts"), [(64 << 10, 1), (64 << 10, 16), (48_000, 3), (999, 9)])
def test_ranges(ns: Namespace, size: int, parts: int) -> None:
    data = value(3, size)
    assert ns.put(key(1), data, parts=parts) is Answer.OK
    step = size // parts
    for offset, length in ((0, size), (0, step), (size - step, step), (1, size - 2), (size - 1, 1)):
        found = ns.get_range(key(1), offset, length)
        assert found.tobytes() == data[offset : offset + length].tobytes(), (offset, length)
        out = ns.buffer(length)
        ns.get_range(key(1), offset, length, out)
        assert out.tobytes() == data[offset : offset + length].tobytes(), (offset, length)
    with pytest.raises(InvalidRequest):
        ns.get_range(key(1), 1, size)
    with pytest.raises(InvalidRequest, match="no range"):
        ns.get_range(key(1), 0, 0)


# ---- memory


def test_pool_buffers_move_without_a_copy(ns: Namespace) -> None:
    torch = pytest.importorskip("torch")
    buffer = ns.buffer(64 << 10)
    assert buffer.__array_interface__["data"][0] % 4096 == 0
    buffer[:] = value(5, 64 << 10)
    tensor = torch.from_numpy(buffer).view(torch.float16).reshape(16, -1)
    ns.put(key(1), buffer)
    ns.put(key(2), tensor)
    ns.put(key(3), memoryview(buffer)[4096:8192])
    out = ns.buffer(64 << 10)
    assert ns.get(key(1), out=torch.from_numpy(out)).tobytes() == buffer.tobytes()
    assert ns.get(key(2), out=out).tobytes() == buffer.tobytes()
    assert ns.stats().bounce_bytes == 0


def test_any_other_buffer_costs_one_counted_bounce(ns: Namespace) -> None:
    data = value(5, 64 << 10)
    ns.put(key(1), data)
    assert ns.stats().bounce_bytes == data.size
    ns.get(key(1), out=np.empty(data.size, np.uint8))
    assert ns.stats().bounce_bytes == 2 * data.size


def test_a_result_is_pool_memory(ns: Namespace) -> None:
    data = value(5, 64 << 10)
    ns.put(key(1), data, parts=16)
    before, used = ns.stats().bounce_bytes, ns.stats().buffer_used_bytes
    whole, part = ns.get(key(1)), ns.get_range(key(1), 4096, 8192)
    assert whole.tobytes() == data.tobytes()
    assert part.tobytes() == data[4096:12288].tobytes()
    assert ns.offset(whole) >= 0
    assert ns.stats().bounce_bytes == before, "it was read where it is"
    assert ns.stats().buffer_used_bytes >= used + whole.size + part.size
    del whole, part
    gc.collect()
    assert ns.stats().buffer_used_bytes <= used


def test_results_that_are_kept_leave_half_of_the_pool(ns: Namespace) -> None:
    """Who collects values can go on putting and getting, whatever the size of the pool."""
    data = value(5, 1 << 20)
    ns.put(key(1), data)
    size = ns.stats().buffer_size_bytes
    before = ns.stats().bounce_bytes
    kept = [ns.get(key(1)) for _ in range(2 * size // data.size)]
    assert all((one == data).all() for one in kept)
    bounced = ns.stats().bounce_bytes - before
    assert 0 < bounced < len(kept) * data.size, "the first ones are pool memory, not the others"
    assert ns.stats().buffer_used_bytes < 0.6 * size
    others = [value(number, 1 << 20) for number in range(5)]
    ns.put_many(keys_of(5, 2), others).result()
    out = np.empty((5, 1 << 20), np.uint8)
    ns.get_many(keys_of(5, 2), out).result()
    assert (out == others).all()


def test_a_result_outlives_the_namespace(device: Opener) -> None:
    ns = device.open()
    ns.put(key(1), value(5, 64 << 10))
    whole = ns.get(key(1))
    many = ns.get_many([key(1)]).result().values
    ns.close()
    assert (whole == value(5, 64 << 10)).all()
    assert (many[0] == whole).all()
    base = ns._handle.pool_base
    del whole, many
    gc.collect()
    ns._handle.collect()
    assert f"{base:x}-" not in open("/proc/self/maps").read()  # noqa: SIM115, PTH123


# ---- as a mapping


def test_a_namespace_is_a_mapping(ns: Namespace) -> None:
    assert len(ns) == 0
    assert ns, "an empty namespace is one, too"
    ns[key(1)] = b"one"
    ns[key(2)] = value(2, 10_000)
    ns[key(2)] = value(2, 10_000)
    assert key(1) in ns
    assert key(3) not in ns
    assert len(ns) == 2
    assert set(ns) == {key(1), key(2)}
    assert bytes(ns[key(1)]) == b"one"
    assert (ns[key(2)] == value(2, 10_000)).all()
    ns[key(1)] = b"another"
    assert bytes(ns[key(1)]) == b"another"
    ns.put(key(4), b"swap", cls="swap")
    ns[key(4)] = b"as reuse"
    assert bytes(ns[key(4)]) == b"as reuse"
    del ns[key(1)], ns[key(4)]
    for change in (ns.__getitem__, ns.__delitem__):
        with pytest.raises(KeyError):
            change(key(1))
    assert set(ns) == {key(2)}
    assert "1 entries" in repr(ns)
    ns.close()
    assert repr(ns).endswith("closed>")


def test_item_assignment_never_fails_in_silence(
    ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer, error, match in (
        (Answer.NO_SPACE, NoSpace, "nothing that may be evicted"),
        (Answer.REJECTED, HiFCError, "admission declined"),
        (Answer.RETRY, BackPressure, "still RETRY"),
        (Answer.PENDING, BackPressure, "still PENDING"),
    ):
        monkeypatch.setattr(ns, "put", lambda *_arguments, answer=answer: answer)
        with pytest.raises(error, match=match):
            ns[key(1)] = b"value"


# ---- many values without buffers


def test_get_many_makes_its_buffers(ns: Namespace) -> None:
    sizes = [1, 4096, 16_384, 368_640]
    ns.put_many(keys_of(4), [value(i, size) for i, size in enumerate(sizes)]).result()
    before = ns.stats()
    ticket = ns.get_many([key(9), *keys_of(4), key(8), key(0)]).result()
    assert [None if one is None else one.size for one in ticket.values] == [None, *sizes, None, 1]
    for number, found in enumerate(ticket.values[1:5]):
        assert found is not None
        assert (found == value(number, sizes[number])).all()
    after = ns.stats()
    assert after.miss_count == before.miss_count + 2
    assert after.bounce_bytes <= before.bounce_bytes + 2, "but for what is less than a page"
    assert ns.get_many([]).result().values == []
    assert ns.get_many([key(9)]).result().values == [None]
    with pytest.raises(InvalidRequest, match="without buffers"):
        _ = ns.get_many([key(0)], [bytearray(1)]).values


def test_a_batch_larger_than_half_of_the_pool_comes_in_part_elsewhere(ns: Namespace) -> None:
    data = value(5, 1 << 20)
    ns.put(key(1), data)
    room = ns.stats().buffer_size_bytes // data.size
    ticket = ns.get_many([key(1)] * (room - 4)).result()
    assert all((one == data).all() for one in ticket.values if one is not None)
    assert None not in [type(one) for one in ticket.values]
    with pytest.raises(BackPressure, match="smaller batches"):
        ns.get_many([key(1)] * (4 * room)).result()


def test_what_comes_during_a_get_many_is_to_be_asked_for_again(
    ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns.put(key(1), b"longer than it was")
    ns.put(key(2), b"not known to the look-up")

    def lookup(keys: Any, lengths: Any) -> Any:
        lengths[:] = [3, 0]
        return np.array([Answer.OK, Answer.MISS], np.int32)

    monkeypatch.setattr(ns, "lookup", lookup)
    ticket = ns.get_many([key(1), key(2)])
    with pytest.raises(BackPressure, match="RETRY"):
        ticket.result()
    assert ticket.answers.tolist() == [Answer.RETRY, Answer.RETRY]
    assert ticket.values == [None, None]


def test_a_view_off_the_page_is_bounced(ns: Namespace) -> None:
    buffer = ns.buffer(64 << 10)
    buffer[:] = value(5, 64 << 10)
    view = buffer[100:20_000]
    assert ns.put(key(1), view) is Answer.OK
    assert ns.get(key(1)).tobytes() == view.tobytes()
    out = ns.buffer(64 << 10)
    assert ns.get(key(1), out=out[1000:30_000]).tobytes() == view.tobytes()


def test_buffers_are_freed_with_their_last_view(ns: Namespace) -> None:
    before = ns.stats().buffer_used_bytes
    buffer = ns.buffer(1 << 20)
    view = buffer[10:20].reshape(2, 5)
    del buffer
    gc.collect()
    assert ns.stats().buffer_used_bytes >= before + (1 << 20)
    view[:] = 3
    del view
    gc.collect()
    assert ns.stats().buffer_used_bytes == before


def test_tensor_keeps_its_buffer(ns: Namespace) -> None:
    torch = pytest.importorskip("torch")
    before = ns.stats().buffer_used_bytes
    tensor = torch.from_numpy(ns.buffer(1 << 20))
    gc.collect()
    assert ns.stats().buffer_used_bytes >= before + (1 << 20)
    tensor.fill_(1)
    del tensor
    gc.collect()
    assert ns.stats().buffer_used_bytes == before


def test_pool_that_is_full(ns: Namespace) -> None:
    held = [ns.buffer(1 << 20) for _ in range(15)]
    with pytest.raises(BufferExhausted, match="pool_size"):
        for _ in range(16):
            held.append(ns.buffer(1 << 20))
    with pytest.raises(BufferExhausted, match="larger than the pool"):
        ns.buffer(1 << 30)
    del held
    assert ns.put(key(1), b"x" * (1 << 20)) is Answer.OK


def test_buffers_outlive_the_namespace(device: Opener) -> None:
    ns = device.open()
    buffer = ns.buffer(1 << 20)
    buffer[:] = 9
    other = ns.buffer(4096)
    ns.close()
    buffer[:4096] += 1
    assert buffer[0] == 10
    assert buffer[-1] == 9
    base = ns._handle.pool_base
    assert f"{base:x}-" in open("/proc/self/maps").read()  # noqa: SIM115, PTH123
    del buffer
    other[:] = 1
    del other
    gc.collect()
    ns._handle.collect()
    assert f"{base:x}-" not in open("/proc/self/maps").read()  # noqa: SIM115, PTH123
    with device.open() as again:
        assert again.get(key(1)) is None


# ---- many values


def test_put_many_and_get_many(ns: Namespace) -> None:
    keys = keys_of(20)
    sizes = [SIZES[i % 7] for i in range(20)]
    data = [value(i, size) for i, size in enumerate(sizes)]
    ticket = ns.put_many(keys, data)
    assert ticket.wait(120)
    assert ticket.ok
    assert ticket.bytes == sum(sizes)
    assert ticket.elapsed_s > 0
    assert ticket.failed_keys.shape == (0, 16)
    out = [np.zeros(size + 5, dtype=np.uint8) for size in sizes]
    ticket = ns.get_many([bytes(one) for one in keys], out).raise_for_errors()
    assert ticket.requests["value_length"].tolist() == sizes
    for one, two in zip(data, out, strict=True):
        assert two[: one.size].tobytes() == one.tobytes()
        assert not two[one.size :].any()


def test_rows_of_one_array(ns: Namespace) -> None:
    rows = ns.buffer(16 * 8192).reshape(16, 8192)
    rows[:] = value(1, 16 * 8192).reshape(16, 8192)
    assert ns.put_many(keys_of(16), rows).raise_for_errors().ok
    back = ns.buffer(16 * 8192).reshape(16, 8192)
    assert ns.get_many(keys_of(16), back).raise_for_errors().ok
    assert (back == rows).all()
    assert ns.stats().bounce_bytes == 0
    elsewhere = np.zeros((16, 8192), dtype=np.uint8)
    assert ns.get_many(keys_of(16), elsewhere).raise_for_errors().ok
    assert (elsewhere == rows).all()
    odd = ns.buffer(16 * 1000).reshape(16, 1000)
    odd[:] = rows[:, :1000]
    assert ns.put_many(keys_of(16, 100), odd).raise_for_errors().ok
    assert (ns.get_many(keys_of(16, 100), back[:, :1000].copy()).raise_for_errors()).ok


def test_misses_leave_their_buffers(ns: Namespace) -> None:
    ns.put(key(1), b"abcd")
    out = [bytearray(b"...."), bytearray(b"....")]
    ticket = ns.get_many([key(0), key(1)], out).raise_for_errors()
    assert ticket.answers.tolist() == [Answer.MISS, Answer.OK]
    assert out == [b"....", b"abcd"]
    assert not ticket.ok


def test_many_with_bad_arguments(ns: Namespace) -> None:
    ns.put(key(0), b"abcd")
    with pytest.raises(InvalidRequest, match="2 keys, but 1 buffers"):
        ns.put_many(keys_of(2), [b"x"])
    ticket = ns.get_many(keys_of(2), [bytearray(3), bytearray(3)])
    with pytest.raises(InvalidRequest, match="4 bytes"):
        ticket.raise_for_errors()
    assert ticket.failed_keys.tobytes() == key(0)
    assert ticket.answers[1] == Answer.MISS
    with pytest.raises(InvalidRequest, match="shape"):
        ns.put_many(keys_of(2), np.zeros((3, 4), dtype=np.uint8))
    with pytest.raises(InvalidRequest, match="one buffer a key"):
        ns.put_many(keys_of(1), b"x")
    with pytest.raises(InvalidRequest, match="not one key"):
        ns.put_many(key(1), [b"x"])
    with pytest.raises(InvalidRequest, match="empty"):
        ns.put_many(keys_of(1), [b""])
    assert ns.stats().buffer_used_bytes < 1 << 20


def test_empty_batches(ns: Namespace) -> None:
    ticket = ns.put_many([], [])
    assert ticket.wait()
    assert ticket.answers.shape == (0,)


def test_no_room_in_the_pool_is_answered_retry(ns: Namespace) -> None:
    count, size = 48, 512 << 10  # 24 MiB through a pool of 16
    data = [value(i, size) for i in range(count)]
    left = list(range(count))
    rounds = 0
    while left:
        ticket = ns.put_many([key(i) for i in left], [data[i] for i in left]).raise_for_errors()
        answers = ticket.answers.tolist()
        assert set(answers) <= {Answer.OK, Answer.RETRY}
        left = [i for i, answer in zip(left, answers, strict=True) if answer == Answer.RETRY]
        rounds += 1
        assert rounds < 1000
    assert rounds > 1
    for i in range(count):
        assert ns.get(key(i)).tobytes() == data[i].tobytes()


def test_full_queues_are_answered_retry(device: Opener) -> None:
    ns = device.open(requests_max=4)
    rows = ns.buffer(64 * 4096).reshape(64, 4096)
    rows[:] = value(1, rows.size).reshape(64, 4096)
    ticket = ns.put_many(keys_of(64), rows).raise_for_errors()
    answers = ticket.answers
    assert set(answers.tolist()) == {Answer.OK, Answer.RETRY}
    for i in range(64):  # one at a time there is room
        assert ns.put(key(i), rows[i]) in (Answer.OK, Answer.EXISTS)
    tickets = [ns.get_many(keys_of(1, i), [bytearray(4096)]) for i in range(64)]
    assert {int(t.raise_for_errors().answers[0]) for t in tickets} <= {Answer.OK, Answer.RETRY}


@pytest.mark.parametrize("drive", ["reactor", "inline"])
def test_synchronous_calls_outwait_what_is_in_flight(device: Opener, drive: str) -> None:
    """Nobody waits for the ticket; driven inline, nobody else polls either."""
    ns = device.open(requests_max=8, drive=drive)
    rows = ns.buffer(8 * 65536).reshape(8, 65536)
    rows[:] = value(1, rows.size).reshape(rows.shape)
    ticket = ns.put_many(keys_of(8), rows)
    assert ns.put(key(100), b"x") is Answer.OK  # Retry at first
    again = ns.put_many(keys_of(7, 10), rows[:7])
    assert (ns.get(key(10)) == rows[0]).all()  # pending at first
    assert ns.delete(key(11))
    assert ticket.wait(120)
    assert again.wait(120)


def test_prepared_requests(ns: Namespace) -> None:
    count, size = 32, 4096
    memory = ns.buffer(count * size).reshape(count, size)
    memory[:] = value(1, count * size).reshape(count, size)
    base = ns.offset(memory)
    put = make_requests(count, Op.PUT)
    put["key"] = keys_of(count)
    put["buffer_offset"] = base + size * np.arange(count)
    put["length"] = size
    put["user"] = np.arange(count)
    assert ns.submit(put).raise_for_errors().ok
    expected = memory.copy()
    get = put.copy()
    get["op"] = Op.GET
    get["length"] = 0
    get["capacity"] = size
    for _ in range(3):  # reusable
        memory[:] = 0
        ticket = ns.submit(get)
        assert ticket.wait(120)
        assert ticket.ok
        assert ticket.bytes == count * size
        assert (memory == expected).all()
    assert get["user"].tolist() == list(range(count))
    bad = get.copy()
    bad["buffer_offset"][3] = 1 << 40
    ticket = ns.submit(bad)
    assert ticket.wait()
    assert (ticket.failed_keys == get["key"][3:4]).all()
    with pytest.raises(InvalidRequest, match="does not lie within"):
        ticket.raise_for_errors()


def test_submit_takes_request_arrays_only(ns: Namespace) -> None:
    for bad in (
        np.zeros(4),
        make_requests(0),
        make_requests(4)[::2],
        make_requests(4).reshape(2, 2),
    ):
        with pytest.raises(InvalidRequest):
            ns.submit(bad)


def test_dropped_tickets_keep_their_buffers_until_done(ns: Namespace) -> None:
    for i in range(200):
        ns.put_many([key(i)], [value(i, 10_000)])
    gc.collect()
    ns.drain()
    for i in range(200):
        found = ns.get(key(i))
        if found is not None:  # Retry is possible, a wrong byte is not
            assert found.tobytes() == value(i, 10_000).tobytes()
    del found
    ns.stats()
    assert len(ns._handle.loans) == 0
    assert sum(ns.exists(key(i)) for i in range(200)) > 100


def test_ticket_wait_is_bounded(ns: Namespace) -> None:
    ticket = ns.put_many(keys_of(64), [value(i, 100_000) for i in range(64)])
    deadline = time.monotonic() + 120
    while not ticket.wait(0.0001):
        assert time.monotonic() < deadline
    assert ticket.done()
    assert "64 done" in repr(ticket)


# ---- look-ups


def test_lookup_and_longest_prefix(ns: Namespace) -> None:
    keys = keys_of(10)
    ns.put_many(keys[:6], [b"x" * (i + 1) for i in range(6)]).raise_for_errors()
    ns.put(keys[8], b"y")
    lengths = np.zeros(10, dtype=np.uint32)
    answers = ns.lookup(keys, lengths)
    assert answers.tolist() == [0] * 6 + [1, 1, 0, 1]
    assert lengths.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 1, 0]
    assert ns.longest_prefix(keys) == 6
    assert ns.longest_prefix(keys[6:]) == 0
    assert ns.longest_prefix([]) == 0
    with pytest.raises(InvalidRequest, match="uint32"):
        ns.lookup(keys, np.zeros(9, dtype=np.uint32))


@pytest.mark.parametrize(("size", "parts"), [(64 << 10, 1), (64 << 10, 16), (999, 9)])
def test_a_value_is_told_from_others(ns: Namespace, size: int, parts: int) -> None:
    data = value(1, size)
    assert not ns.is_value(key(1), data)
    ns.put(key(1), data, parts=parts)
    assert ns.is_value(key(1), data)
    assert not ns.is_value(key(1), data[:-1])
    assert not ns.is_value(key(2), data)
    for place in (0, size // 2, size - 1):
        other = data.copy()
        other[place] ^= 1
        assert not ns.is_value(key(1), other)
    with pytest.raises(InvalidRequest, match="contiguous"):
        ns.is_value(key(1), data[::2])


def test_touch_and_heat(ns: Namespace) -> None:
    ns.put(key(1), b"x")
    before = {entry.key: entry.heat for entry in ns.list()}[key(1)]
    ns.touch([key(1), key(2)])
    assert {entry.key: entry.heat for entry in ns.list()}[key(1)] == before + 1


def test_lease(ns: Namespace) -> None:
    ns.put(key(1), b"x")
    with ns.lease([key(1), key(2)], ttl_s=600) as lease:
        assert lease.answers.tolist() == [Answer.OK, Answer.MISS]
        assert ns.stats().leases == 1
    assert ns.stats().leases == 0
    lease.release()
    short = ns.lease([key(1)], ttl_s=0.001)
    time.sleep(0.01)
    ns.lease([key(1)]).release()
    short.release()  # over already, which is no error
    with pytest.raises(InvalidRequest, match="ttl_s"):
        ns.lease([key(1)], ttl_s=0)


def test_list(ns: Namespace) -> None:
    assert list(ns.list()) == []
    count = 1500  # more than one page of the listing
    ns.put_many(keys_of(count), [i.to_bytes(2, "little") for i in range(count)]).raise_for_errors()
    ns.put(key(9999), b"abcd", cls="swap", parts=2)
    found = {entry.key: entry for entry in ns.list()}
    assert len(found) == count + 1
    assert found[key(9999)].part_count == 2
    assert found[key(9999)].cls is BlockClass.SWAP
    assert found[key(9999)].length_bytes == 4
    assert ns.stats().entries == count + 1
    assert ns.stats().entries_swap == 1


def test_events(ns: Namespace) -> None:
    ns.put(key(1), b"abc")
    ns.put(key(2), b"abc", cls="swap")
    events, dropped = ns.events()
    assert dropped == 0
    assert [(e["key"].tobytes(), e["kind"], e["length"]) for e in events] == [
        (key(1), EventKind.STORED, 3)
    ]
    assert len(ns.events().events) == 0


# ---- two phases


def test_parts_in_any_order_become_visible_at_commit(ns: Namespace) -> None:
    data = value(1, 4 * 8192)
    reservation = ns.reserve(key(1), data.size, parts=4)
    assert reservation
    assert ns.lookup([key(1)]).tolist() == [Answer.PENDING]
    for part in (2, 0, 3, 1):
        reservation.write(part * 8192, data[part * 8192 : (part + 1) * 8192])
    assert not ns.exists(key(1))
    assert ns.put(key(2), b"between") is Answer.OK  # the chain of batches goes on
    assert reservation.commit() is Answer.OK
    assert ns.get(key(1)).tobytes() == data.tobytes()
    assert ns.get_range(key(1), 8192, 8192).tobytes() == data[8192:16384].tobytes()
    reservation.abort()
    assert ns.exists(key(1))
    with pytest.raises(InvalidRequest, match="over"):
        reservation.write(0, b"x")


def test_abort_drop_and_leaving_the_block_give_room_back(ns: Namespace) -> None:
    ns.reserve(key(1), 8192).abort()
    with ns.reserve(key(2), 8192) as reservation:
        reservation.write(0, value(1, 8192))
    reservation = ns.reserve(key(3), 8192)
    del reservation
    gc.collect()
    ns.put(key(9), b"x")
    assert ns.stats().reservations == 0
    assert ns.lookup([key(1), key(2), key(3)]).tolist() == [Answer.MISS] * 3
    for number in (1, 2, 3):
        assert ns.put(key(number), b"new") is Answer.OK


def test_refused_reservations_are_false(ns: Namespace) -> None:
    ns.put(key(1), b"x")
    exists = ns.reserve(key(1), 10)
    assert not exists
    assert exists.answer is Answer.EXISTS
    first = ns.reserve(key(2), 4096)
    second = ns.reserve(key(2), 4096)
    assert second.answer is Answer.PENDING
    with pytest.raises(InvalidRequest):
        second.write(0, b"x")
    first.abort()


# ---- state


def test_stats_add_up(ns: Namespace) -> None:
    ns.put_many(keys_of(50), [value(i, 10_000) for i in range(50)]).raise_for_errors()
    ns.sync()
    stats = ns.stats()
    assert stats.put_count == 50
    assert stats.put_bytes == 500_000
    assert stats.live_bytes >= 500_000
    parts = stats.live_bytes + stats.dead_bytes + stats.free_bytes + stats.metadata_bytes
    assert parts == stats.capacity_bytes
    assert stats.device_write_bytes >= stats.put_bytes
    assert stats.write_amplification >= 1.0
    assert stats.segment_size_bytes == 2 << 20
    assert stats.requests_inflight == 0
    assert len(stats.uuid) == 32


def test_check(ns: Namespace) -> None:
    ns.put_many(keys_of(50), [value(i, 10_000) for i in range(50)]).raise_for_errors()
    result = ns.check()
    assert result.ok, result.first_problem
    assert result.entries_checked == 50


# ---- open and close


def test_reuse_survives_and_swap_does_not(device: Opener) -> None:
    data = {i: value(i, SIZES[i % 9]) for i in range(30)}
    with device.open() as ns:
        for i, one in data.items():
            assert ns.put(key(i), one) is Answer.OK
        ns.put(key(100), b"gone", cls="swap")
        ns.delete(key(7))
        uuid = ns.stats().uuid
    with device.open(read_only=True) as ns:
        assert ns.stats().uuid == uuid
        assert sum(1 for _ in ns.list()) == 29
    with device.open(drive="inline") as ns:
        for i, one in data.items():
            found = ns.get(key(i))
            assert (found is None) if i == 7 else (found.tobytes() == one.tobytes())
        assert ns.get(key(100)) is None
        assert ns.check().ok


def test_format_empties_and_labels(device: Opener) -> None:
    with device.open() as ns:
        ns.put(key(1), b"x")
    device.format(label="kv of node 3")
    with device.open() as ns:
        assert ns.stats().label == "kv of node 3"
        assert ns.get(key(1)) is None


def test_close_is_idempotent_and_says_so(device: Opener) -> None:
    ns = device.open()
    ticket = ns.put_many(keys_of(10), [value(i, 100_000) for i in range(10)])
    reservation = ns.reserve(key(50), 4096)
    lease = ns.lease([key(1)])
    ns.close()
    ns.close()
    assert ns.closed
    assert "closed" in repr(ns)
    assert ticket.done()  # what was in flight was completed
    assert ticket.ok
    assert ticket.bytes == 1_000_000
    for call in (
        lambda: ns.get(key(1)),
        lambda: ns.put(key(1), b"x"),
        lambda: ns.put_many([key(1)], [b"x"]),
        lambda: ns.submit(make_requests(1)),
        lambda: ns.buffer(1),
        ns.stats,
        ns.sync,
        lambda: list(ns.list()),
        reservation.commit,
        lease.release,
    ):
        with pytest.raises(ClosedError, match="open it again"):
            call()
    with device.open() as again:
        assert again.exists(key(1))
        assert not again.exists(key(50))


def test_a_dropped_namespace_is_closed(device: Opener) -> None:
    ns = Namespace.open(device.uri, pool_size="16MiB")
    ns.put(key(1), b"kept")
    del ns
    gc.collect()
    with device.open() as again:
        assert bytes(again.get(key(1))) == b"kept"


def test_context_manager_closes_on_error(device: Opener) -> None:
    with pytest.raises(ZeroDivisionError), device.open() as ns:
        1 / 0  # noqa: B018
    assert ns.closed


def test_read_only_changes_nothing(device: Opener) -> None:
    with device.open() as ns:
        ns.put(key(1), b"x")
    with device.open(read_only=True) as ns:
        assert bytes(ns.get(key(1))) == b"x"
        with pytest.raises(PermissionError, match="read-only"):
            ns.put(key(2), b"y")
        with pytest.raises(PermissionError, match="read-only"):
            ns.delete(key(1))
    with device.open() as ns:
        assert ns.exists(key(1))


def test_detach_from_outside(ram: Opener) -> None:
    """What hifc-admin detach does: calls refuse, memory stays, close is in order."""
    ns = ram.open()
    buffer = ns.buffer(1 << 20)
    buffer[:] = 3
    ns.put(key(1), buffer)
    ticket = ns.put_many([key(2)], [b"y" * 100_000])
    reservation = ns.reserve(key(3), 4096)
    folders = (
        Path("/run/hifc"),
        Path(f"/run/user/{os.getuid()}/hifc"),
        Path(f"/tmp/hifc-{os.getuid()}"),
    )
    sockets = [path for folder in folders for path in folder.glob(f"{os.getpid()}-*.sock")]
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"hello\n")
            if ns.uri.encode() not in connection.recv(4096):
                continue
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"detach\n")
            assert b'"ok": true' in connection.recv(4096)
    for call in (lambda: ns.get(key(1)), ns.stats, lambda: ns.buffer(1), reservation.commit):
        with pytest.raises(ClosedError, match="detached"):
            call()
    assert ticket.wait(120)
    assert ticket.ok
    ns.close()
    assert (buffer == 3).all()
    with ram.open() as again:
        assert again.exists(key(1))
        assert again.exists(key(2))
        assert not again.exists(key(3))


def test_exit_without_close_loses_nothing(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/kv.img"
    Namespace.format(f"{uri}?size=64MiB", segment_size="2MiB")
    code = (
        "import hifc, sys\n"
        "ns = hifc.Namespace.open(sys.argv[1], pool_size='16MiB')\n"
        "buffer = ns.buffer(1 << 20)\n"
        "ns.put(b'1' * 16, b'kept')\n"
        "ticket = ns.put_many([b'2' * 16], [buffer])\n"
        "ns.put_many([b'3' * 16], [buffer])\n"
        "room = ns.reserve(b'4' * 16, 4096)\n"
    )
    subprocess.run([sys.executable, "-c", code, uri], check=True, timeout=300)
    with Namespace.open(uri, pool_size="16MiB") as ns:
        assert ns.stats().recovery_dropped == 0
        assert ns.lookup([c * 16 for c in (b"1", b"2", b"3", b"4")]).tolist() == [0, 0, 0, 1]
