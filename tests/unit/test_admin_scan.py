# SPDX-License-Identifier: Apache-2.0
"""What a scan takes for lost, which a repair deletes, when reads fail for one reason or another."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hifc.errors import CorruptionError, DeviceError, HiFCError, WaitTimeout
from hifc.namespace.namespace import Namespace
from hifc.namespace.state import Entry
from hifc.native_lib.layouts import EVENT
from hifc.native_lib.request import Answer, BlockClass
from hifc_admin import scan


def device_error(code: int, sct: int, sc: int) -> DeviceError:
    error = DeviceError("made to fail", sct=sct, sc=sc)
    error.code = -code
    return error


class Failing:
    """A namespace of one entry: a read in a batch answers `status`, one alone ends as `again`."""

    uri = "pretended://"

    def __init__(self, status: int, again: HiFCError | bytes | None) -> None:
        self.status, self.again = status, again

    def list(self) -> Iterator[Entry]:
        yield Entry(b"k" * 16, 4096, 0, BlockClass.REUSE, 0)

    def buffer(self, size_bytes: int) -> Any:
        return np.zeros(size_bytes, dtype=np.uint8)

    def get_many(self, keys: list[bytes], pieces: list[Any]) -> Any:
        return SimpleNamespace(wait=lambda: None, answers=np.array([self.status] * len(keys)))

    def events(self) -> Any:
        return SimpleNamespace(events=np.zeros(0, dtype=EVENT))

    def get(self, key: bytes) -> bytes | None:
        if isinstance(self.again, HiFCError):
            raise self.again
        return self.again


@pytest.mark.parametrize(
    ("status", "again", "counted"),
    [
        (Answer.OK, None, "entries_read"),
        (Answer.MISS, None, "gone"),
        (-errno.EBADMSG, None, "corrupt"),
        (Answer.RETRY, b"value", "entries_read"),
        (-errno.EIO, b"value", "entries_read"),
        (-errno.EIO, CorruptionError("checksum"), "corrupt"),
        (-errno.EIO, device_error(errno.EIO, 2, 0x81), "unreadable"),
        (-errno.EIO, device_error(errno.EIO, 0, 0x06), "unreadable"),
        (-errno.EIO, device_error(errno.EIO, 3, 0x70), "unclear"),
        (-errno.EIO, device_error(errno.EIO, 0, 0x1D), "unclear"),
        (-errno.ENODEV, device_error(errno.ENODEV, 0, 0), "unclear"),
        (-errno.ETIMEDOUT, WaitTimeout("slow"), "unclear"),
        (Answer.PENDING, WaitTimeout("never committed"), "unclear"),
    ],
)
def test_only_what_the_medium_lost_is_lost(
    status: int, again: HiFCError | bytes | None, counted: str
) -> None:
    found = scan.scan(cast(Namespace, Failing(status, again)), scan.Rate(0), lambda _: None)
    names = ("entries_read", "gone", "corrupt", "unreadable", "unclear")
    assert {name: getattr(found, name) for name in names} == dict.fromkeys(names, 0) | {counted: 1}
    assert bool(found.lost_keys) == (counted in ("corrupt", "unreadable"))
    assert bool(found.first_unclear) == (counted == "unclear")
