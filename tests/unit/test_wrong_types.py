# SPDX-License-Identifier: Apache-2.0
"""Whatever the Python API is given, wrong kinds raise errors of HiFC, and nothing has changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hifc
from hifc import Answer, HiFC, HiFCError, InvalidRequest, Namespace, NotSupported
from hifc.namespace import calls
from hifc.namespace.ring import make_descriptors
from hifc.native_lib.handle import Handle
from hifc.stream.plan import KVShape, make_plan
from hifc.util import checking

KEY = b"k" * 16
WRONG = [
    None,
    True,
    -1,
    1.5,
    float("nan"),
    2**32,
    2**64 + 4096,
    2**70,
    float("inf"),
    1e308,
    "x",
    "",
    b"",
    b"k" * 15,
    [],
    [None],
    {"a": 1},
    ("a",),
    object(),
    type,
    np.zeros(3),
    np.zeros((2, 2), dtype=object),
    np.float32(1),
]
PART = bytes(4096)
TENSOR = np.ones(4, dtype=np.float32)
MASS = np.ones((2, 1), dtype=np.float32)
SCHEME = hifc.KeyScheme(model="m", block_tokens=4)
DEVICE = "ram://wrong-types?size=64MiB"


@pytest.fixture(scope="module")
def engine() -> Any:
    config = {
        "device": DEVICE,
        "format": "always",
        "memory_budget": "1MiB",
        "swap_buffer_size": "1MiB",
        "owner_socket": False,
    }
    with HiFC(config) as opened:
        yield opened


def write(ns: Namespace, offset_bytes: Any, data: Any) -> None:
    with ns.reserve(KEY, 8192) as reservation:
        reservation.write(offset_bytes, data)


ENGINE: dict[str, Callable[[HiFC, Any], object]] = {
    "key of store": lambda e, x: e.store(x, TENSOR),
    "tensor": lambda e, x: e.store(KEY, x),
    "cls": lambda e, x: e.store(KEY, TENSOR, cls=x),
    "sequence": lambda e, x: e.store(KEY, TENSOR, sequence=x),
    "depth": lambda e, x: e.store(KEY, TENSOR, depth=x),
    "head": lambda e, x: e.store(KEY, TENSOR, head=x),
    "dtype": lambda e, x: e.store(KEY, TENSOR, dtype=x),
    "key of load": lambda e, x: e.load(x),
    "key of delete": lambda e, x: e.delete(x),
    "in": lambda e, x: x in e,
    "keys of prefetch": lambda e, x: e.prefetch(x),
    "a key of prefetch": lambda e, x: e.prefetch([x]),
    "keys of attention": lambda e, x: e.observe_attention(MASS, x),
    "model_config": lambda e, x: e.cache(x, 10),
}
NAMESPACE: dict[str, Callable[[Namespace, Any], object]] = {
    "get": lambda n, x: n.get(x),
    "get into": lambda n, x: n.get(KEY, x),
    "put": lambda n, x: n.put(KEY, x),
    "put parts": lambda n, x: n.put(KEY, b"12345678", parts=x),
    "delete": lambda n, x: n.delete(x),
    "exists": lambda n, x: n.exists(x),
    "lookup": lambda n, x: n.lookup(x),
    "lookup lengths": lambda n, x: n.lookup([KEY], x),
    "longest_prefix": lambda n, x: n.longest_prefix(x),
    "touch": lambda n, x: n.touch(x),
    "lease": lambda n, x: n.lease(x).release(),
    "lease ttl": lambda n, x: n.lease([KEY], x).release(),
    "get_many": lambda n, x: n.get_many(x, [bytearray(9)]),
    "get_many buffers": lambda n, x: n.get_many([KEY], x),
    "put_many": lambda n, x: n.put_many(x, [b"value"]),
    "put_many buffers": lambda n, x: n.put_many([KEY], x),
    "reserve": lambda n, x: n.reserve(KEY, x).abort(),
    "get_range offset": lambda n, x: n.get_range(KEY, x, 1),
    "get_range length": lambda n, x: n.get_range(KEY, 0, x),
    "buffer": lambda n, x: n.buffer(x),
    "submit": lambda n, x: n.submit(x),
    "offset of a write": lambda n, x: write(n, x, PART),
    "data of a write": lambda n, x: write(n, 0, x),
    "reservation of write": lambda n, x: n.write(x, 0, PART),
    "reservation of commit": lambda n, x: n.commit(x),
    "reservation of abort": lambda n, x: n.abort(x),
    "wait": lambda n, x: n.get_many([KEY]).wait(x),
    "result": lambda n, x: n.get_many([KEY]).result(x),
    "drain": lambda n, x: n.drain(x),
    "events": lambda n, x: n.events(x),
    "staging buffer": lambda n, x: n.staging.buffer(x),
    "descriptor op": lambda n, x: make_descriptors([KEY], 0, 0, op=x),
    "request op": lambda n, x: hifc.make_requests(1, x),
}
OTHERS: dict[str, Callable[[Any], object]] = {
    "HiFC": HiFC,
    "policy": lambda x: HiFC({"device": DEVICE}, policy=1 if x is None else x).close(),
    "Namespace.open": Namespace.open,
    "Namespace.format": Namespace.format,
    "label": lambda x: Namespace.format("ram://wrong-label?size=64MiB", label=x, force=True),
    "read_only": lambda x: Namespace.open("ram://wrong-none?size=64MiB", read_only=x),
    "owner_socket": lambda x: Namespace.open("ram://wrong-none?size=64MiB", owner_socket=x),
    "salt": lambda x: hifc.KeyScheme(model="m", salt=x),
    "block_tokens": lambda x: hifc.KeyScheme(model="m", block_tokens=x),
    "tp_size": lambda x: hifc.KeyScheme(model="m", tp_size=x),
    "tokens": SCHEME.keys,
    "num_heads": hifc.HiFCPrefetcher,
    "window_size": lambda x: hifc.HiFCPrefetcher(2, x),
    "block_tokens of attention": lambda x: hifc.HiFCPrefetcher(2, block_tokens=x),
    "attention": lambda x: hifc.HiFCPrefetcher(2).update(x),
    "degree": lambda x: hifc.HiFCPrefetcher(2).predict(x),
    "max_tokens": lambda x: make_plan(KVShape(4, 2, 64, 4), x, 1.0),
    "slots": lambda x: make_plan(KVShape(4, 2, 64, 4), 999, 0.9, slots=x),
} | {
    f"Config {name}": (lambda x, name=name: hifc.Config(**{name: x}))
    for name in hifc.Config.__dataclass_fields__
}


def refused(call: Callable[[Any], object]) -> int:
    """How many of WRONG raised an error of HiFC. Any other exception fails the test."""
    count = 0
    for value in WRONG:
        try:
            call(value)
        except HiFCError as error:
            assert len(str(error)) > 15
            count += 1
    return count


@pytest.mark.parametrize("what", ENGINE)
def test_engine(engine: HiFC, what: str) -> None:
    before = len(engine.blocks)
    engine.store(b"o" * 16, TENSOR)
    assert refused(lambda value: ENGINE[what](engine, value)) >= len(WRONG) - 8
    # A store that was refused has left nothing half done.
    engine.delete(KEY)
    engine.delete(b"o" * 16)
    assert len(engine.blocks) == before
    engine.store(KEY, TENSOR, sequence="s", depth=3, head=1)
    assert (engine.load(KEY) == TENSOR).all()
    engine.delete(KEY)


@pytest.mark.parametrize("what", NAMESPACE)
def test_namespace(engine: HiFC, what: str) -> None:
    assert refused(lambda value: NAMESPACE[what](engine.namespace, value)) >= len(WRONG) - 8


@pytest.mark.parametrize("what", OTHERS)
def test_others(what: str) -> None:
    assert refused(OTHERS[what]) >= len(WRONG) - 8


@pytest.mark.parametrize("offset_bytes", [2**32, 2**32 + 4096, 2**64, np.uint64(2**63)])
def test_a_write_far_beyond_the_value_is_not_one_at_its_start(
    engine: HiFC, offset_bytes: int
) -> None:
    with engine.namespace.reserve(b"w" * 16, 8192) as reservation:
        for at in (0, 4096):
            reservation.write(at, PART)
        with pytest.raises(InvalidRequest, match="offset_bytes"):
            reservation.write(offset_bytes, b"x" * 4096)
        reservation.commit()
    assert not engine.namespace.get(b"w" * 16).any()
    engine.namespace.delete(b"w" * 16)


def test_a_reservation_of_another_namespace_is_refused(engine: HiFC) -> None:
    """Handles are numbers, which two namespaces may give out alike."""
    here = engine.namespace
    other_device = "ram://wrong-namespace?size=64MiB"
    Namespace.format(other_device, force=True)
    with Namespace.open(other_device, pool_size="4MiB", owner_socket=False) as there:
        ours = [here.reserve(bytes([number]) * 16, 4096) for number in range(8)]
        theirs = [there.reserve(bytes([number]) * 16, 4096) for number in range(8)]
        assert {one.handle for one in ours} & {one.handle for one in theirs}
        for one in theirs:
            for call in (here.commit, here.abort, lambda held: here.write(held, 0, PART)):
                with pytest.raises(InvalidRequest, match=r"one of ram://wrong-namespace"):
                    call(one)
            one.write(0, PART)
            assert one.commit() is Answer.OK
        for one in ours:
            one.abort()


@pytest.mark.usefixtures("faulty_library")
def test_abort_gives_room_back_that_writes_in_flight_still_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inline nobody polls: a write is in flight for as long as abort tries."""
    monkeypatch.setattr(calls, "RETRY_WAIT_S", 0.0)
    monkeypatch.setattr(Handle, "pause", lambda *_: None)
    device = "ram://wrong-abort?size=64MiB"
    Namespace.format(device, force=True)
    slow = device.replace("ram", "faulty+ram", 1) + "&fault_delay=20"
    with Namespace.open(slow, drive="inline", pool_size="4MiB", owner_socket=False) as ns:
        held = ns.reserve(KEY, 8192)
        requests = hifc.make_requests(1, hifc.Op.WRITE)
        data = ns.buffer(4096)
        requests["handle"], requests["length"] = held.handle, 4096
        requests["buffer_offset"] = ns.offset(data)
        ticket = ns.submit(requests)
        assert ticket.answers[0] == Answer.IN_FLIGHT
        held.abort()
        assert not held
        assert ns.stats().reservations == 1
        ticket.wait()
        for number in range(64):  # the janitor goes round with what is asked for
            ns.put(bytes([number]) * 16, PART)
        assert ns.reserve(KEY, 8192), "the key is free again"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_holds_something_of_libhifc_is_not_copied(
    engine: HiFC, copied: Callable[[Any], object]
) -> None:
    ns = engine.namespace
    with (
        ns.reserve(b"c" * 16, 4096) as held,
        ns.lease([KEY]) as lease,
        ns.ring(ns.buffer(4096), 4096, slots=16) as ring,
    ):
        for thing in (engine, ns, held, lease, ring, ns.get_many([KEY])):
            with pytest.raises(NotSupported, match="neither copied nor pickled"):
                copied(thing)


def test_what_is_right_passes() -> None:
    assert checking.whole("x", np.int64(7), 0, 7) == 7
    for value in (True, 8, -1, 7.0, "7"):
        with pytest.raises(InvalidRequest, match="x: "):
            checking.whole("x", value, 0, 7)
    with pytest.raises(InvalidRequest) as caught:
        checking.items("keys", 3)  # type: ignore[arg-type]
    assert "keys: 3 is no sequence" in str(caught.value)
    with pytest.raises(HiFCError) as long:
        checking.text("uri", [0] * 999)
    assert len(str(long.value)) < 120
