# SPDX-License-Identifier: Apache-2.0
"""Nothing of a batch fails in silence, and an answer says what it means."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hifc import (
    Answer,
    BackPressure,
    InvalidRequest,
    Namespace,
    NoSpace,
    Op,
    WaitTimeout,
    make_requests,
)

if TYPE_CHECKING:
    from conftest import Opener


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def too_large(ns: Namespace, count: int) -> Any:
    """Values that no segment has room for."""
    size = ns.stats().segment_size_bytes
    return np.ones((count, size), dtype=np.uint8)


@pytest.fixture
def ns(ram: Opener) -> Iterator[Namespace]:
    with ram.open(pool_size="64MiB") as namespace:
        yield namespace


# ---- answers


def test_an_answer_is_true_where_the_value_is_there(ns: Namespace) -> None:
    assert ns.put(key(1), b"one")
    assert ns.put(key(1), b"two"), "EXISTS: the value is there"
    assert {answer for answer in Answer if answer} == {Answer.OK, Answer.EXISTS}
    assert [int(answer) for answer in Answer] == list(range(8)), "the numbers are those of hifc.h"


def test_an_answer_is_shown_by_its_name(ns: Namespace) -> None:
    assert str(ns.put(key(1), b"one")) == "OK"
    assert f"{ns.put(key(1), b'one')}" == "EXISTS"
    assert f"{Answer.NO_SPACE:d}" == "6"


# ---- tickets


def test_result_of_a_batch_that_went_well(ns: Namespace) -> None:
    ticket = ns.put_many([key(1), key(2)], [b"one", b"two"])
    assert ticket.result() is ticket
    assert repr(ticket) == "<Ticket 2 done>"
    assert ns.put_many([key(1), key(3)], [b"one", b"three"]).result().answers.tolist() == [
        Answer.EXISTS,
        Answer.OK,
    ]
    ticket = ns.get_many([key(1), key(9)], [bytearray(3), bytearray(3)]).result()
    assert ticket.answers.tolist() == [Answer.OK, Answer.MISS]
    assert repr(ticket) == "<Ticket 2 done, 1 MISS>"


def test_result_and_await_raise_what_failed(ns: Namespace) -> None:
    keys = [key(number) for number in range(20)]
    ticket = ns.put_many(keys, too_large(ns, 20))
    assert ticket.wait() is True, "wait only waits"
    assert repr(ticket) == "<Ticket 20 done, 20 failed>"
    with pytest.raises(InvalidRequest) as caught:
        ticket.result()
    assert any("20 of 20 requests failed" in note for note in caught.value.__notes__)

    async def main() -> None:
        await ns.put_many(keys, too_large(ns, 20))

    with pytest.raises(InvalidRequest):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer.NO_SPACE, NoSpace),
        (Answer.RETRY, BackPressure),
        (Answer.PENDING, BackPressure),
        (Answer.EXISTS, None),
        (Answer.MISS, None),
        (Answer.REJECTED, None),
    ],
)
def test_every_answer_has_one_meaning(ns: Namespace, answer: Answer, error: Any) -> None:
    ticket = ns.put_many([key(1), key(2)], [b"one", b"two"])
    ticket.wait()
    ticket.requests["status"][1] = answer
    if error is None:
        assert ticket.result() is ticket
    else:
        with pytest.raises(error, match=f"put of key {key(2).hex()}") as caught:
            ticket.result()
        assert caught.value.__notes__ == [
            f"1 of 2 requests failed; the first has key {key(2).hex()}"
        ]
    assert ticket.raise_for_errors() is ticket, "answers are not errors there"


def test_a_full_device_is_told(ns: Namespace) -> None:
    value = np.ones(1 << 20, np.uint8)
    count = 0
    while ns.put(key(count), value, cls="swap"):  # put waits where a batch is answered RETRY
        count += 1
    assert ns.put(key(999), value, cls="swap") is Answer.NO_SPACE
    ticket = ns.put_many([key(999)], [value], cls="swap")
    with pytest.raises(NoSpace, match="nothing that may be evicted is left"):
        ticket.result()


def test_a_get_of_a_reserved_key_is_told(ns: Namespace) -> None:
    with ns.reserve(key(1), 4096):
        out = bytearray(4096)
        with pytest.raises(BackPressure, match="PENDING"):
            ns.get_many([key(1)], [out]).result()


def test_the_error_raised_is_one_of_a_request_of_the_batch(ns: Namespace) -> None:
    ticket = ns.put_many([key(1)], too_large(ns, 1))
    ticket.wait()
    ticket.requests["status"][0] = -errno.ENODEV  # not what the first error was
    with pytest.raises(Exception, match="ENODEV"):
        ticket.raise_for_errors()


def test_result_has_a_time_limit(ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = ns.put_many([key(1)], [b"one"])
    with monkeypatch.context() as patch:
        patch.setattr(ns._handle.lib, "hifc_ticket_wait", lambda *_arguments: 0)
        with pytest.raises(WaitTimeout, match="wait for the ticket again"):
            ticket.result(0.01)
    assert ticket.result().ok


def test_prepared_requests_too(ns: Namespace) -> None:
    requests = make_requests(2, Op.DELETE)
    requests["key"][:] = 7
    assert ns.submit(requests).result().answers.tolist() == [Answer.MISS] * 2


def test_no_ticket_left_is_back_pressure(ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_arguments: Any) -> int:
        raise BackPressure("no ticket is free")

    monkeypatch.setattr(ns._handle.lib, "hifc_submit", submit)
    with pytest.raises(BackPressure, match="RETRY"):
        ns.put_many([key(1)], [b"one"]).result()
