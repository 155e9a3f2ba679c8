# SPDX-License-Identifier: Apache-2.0
"""What is in flight and does not end: its memory is not handed to anything else."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest

from hifc import Answer, make_requests
from hifc.errors import WaitTimeout
from hifc.native_lib.request import Op
from hifc.sparse.arena import ArenaStream
from hifc.stream import buffers as stream_buffers
from hifc.stream.buffers import Batch, InFlight
from hifc.stream.layers import LayerStream


class Unending:
    def wait(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        return False


def stream_of(kind: type[LayerStream]) -> tuple[Any, Batch]:
    stream: Any = object.__new__(kind)
    stream.flights = InFlight(SimpleNamespace(uri="ram://never", submit=lambda _: Unending()))
    return stream, stream.flights.send(None)


def test_a_slot_that_is_still_read_into_is_not_free() -> None:
    stream, batch = stream_of(LayerStream)
    stream._ahead, stream._free = collections.deque(), collections.deque()
    slot = SimpleNamespace(load=batch, writes=[])
    stream._ahead.append(slot)
    stream.slots = [slot]
    for ends in (stream._drop_ahead, stream._idle) * 2:  # nor at the second try
        with pytest.raises(WaitTimeout, match="on ram://never did not end"):
            ends()
    assert not stream._free
    assert slot.load is batch


def test_an_arena_that_is_still_read_into_keeps_its_use() -> None:
    stream, batch = stream_of(ArenaStream)
    stream._holds_blocks = True
    stream._prefetch = (batch, None)
    with pytest.raises(WaitTimeout, match="reading ahead"):
        stream._to_slots()
    assert stream._holds_blocks
    assert stream._prefetch is not None


class Losing:
    """Submits, and is interrupted before anybody knows the ticket."""

    uri = "ram://never"

    def __init__(self) -> None:
        self.submitted: list[Any] = []

    def submit(self, requests: Any) -> None:
        requests["status"] = Answer.IN_FLIGHT
        self.submitted.append(requests)
        raise KeyboardInterrupt


def test_a_batch_whose_ticket_nobody_knows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_buffers, "BATCH_WAIT_S", 0.01)
    namespace: Any = Losing()
    flights, requests = InFlight(namespace), make_requests(3, Op.GET)
    with pytest.raises(KeyboardInterrupt):
        flights.send(requests)
    requests["status"][:2] = Answer.OK
    for _ in range(2):
        assert not flights.done()
        with pytest.raises(WaitTimeout, match="what was in flight on ram://never"):
            flights.await_all()
    requests["status"] = Answer.OK
    flights.await_all()
    assert flights.done()


def test_a_reservation_whose_ticket_nobody_knows_is_aborted() -> None:
    namespace: Any = Losing()
    flights, requests = InFlight(namespace), make_requests(3, Op.RESERVE)
    with pytest.raises(KeyboardInterrupt):
        flights.send(requests, reserves=True)
    requests["status"] = Answer.OK, Answer.EXISTS, Answer.OK
    requests["handle"] = 5, 6, 7
    flights.await_all()
    with pytest.raises(KeyboardInterrupt):
        flights.abort()
    assert flights.reserved, "it is to be aborted once more"
    abort = namespace.submitted[-1]
    assert abort["op"].tolist() == [Op.ABORT, Op.ABORT]
    assert abort["handle"].tolist() == [5, 7]
