# SPDX-License-Identifier: Apache-2.0
"""What a request is: operations, classes, answers, and arrays of requests for the hot path.

A request array is a numpy array of `REQUEST`, byte for byte `struct hifc_req`. It is prepared
once, submitted as often as wanted with `Namespace.submit`, and costs no Python object per block.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hifc.errors import InvalidRequest
from hifc.native_lib.layouts import ENTRY, EVENT, KEY_BYTES, REQUEST
from hifc.util.checking import items, whole

__all__ = [
    "ENTRY",
    "EVENT",
    "REQUEST",
    "Answer",
    "BlockClass",
    "ClassLike",
    "EventKind",
    "KeyArray",
    "Keys",
    "Op",
    "class_name",
    "class_of",
    "key_bytes",
    "keys_array",
    "make_requests",
]

KeyArray: TypeAlias = npt.NDArray[np.uint8]  # shape (n, 16)
Keys: TypeAlias = Any  # (n, 16) uint8 array or a sequence of 16-byte keys

_OF_TEXT = "hifc.key(...) makes one of any text or bytes"
_OF_TOKENS = "hifc.KeyScheme makes keys of tokens"

# Flag of put and write: raw part checksums are given; of get: they are wanted. See hifc.h.
F_CHECKSUMS = 0x1


class Op(enum.IntEnum):
    """What a prepared request does: the `op` field of a request array (C: enum hifc_op)."""

    GET = 1
    PUT = 2
    DELETE = 3
    RESERVE = 4
    WRITE = 5
    COMMIT = 6
    ABORT = 7


class Answer(enum.IntEnum):
    """How a request ended where no error ended it (C: enum hifc_answer).

    An answer is true where the value is there afterwards: OK and EXISTS. All others are false, so
    `if namespace.put(key, value):` means what it says, although OK is 0. str() gives the name.
    In arrays of answers, such as `ticket.answers`, there are plain numbers: compare those.
    """

    OK = 0
    MISS = 1  # no such key, or its bytes were quarantined
    EXISTS = 2  # a reuse key that is there: nothing was written
    PENDING = 3  # in flight, or reserved and not committed
    REJECTED = 4  # admission declined to write it
    RETRY = 5  # a bounded queue is full: try again after completions
    NO_SPACE = 6  # nothing that may be evicted is left
    IN_FLIGHT = 7  # not completed yet

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else self.name

    def __bool__(self) -> bool:
        return self.value in (0, 2)  # OK, EXISTS


class BlockClass(enum.IntEnum):
    """What becomes of a stored value: may it be evicted, and does it outlive its writer?

    Calls take the texts "reuse" and "swap" as well (C: enum hifc_class).
    """

    REUSE = 0  # evictable, survives a restart
    SWAP = 1  # pinned until deleted, ends with the process that wrote it


# What calls take as `cls`.
ClassLike: TypeAlias = Literal["reuse", "swap"] | BlockClass


class EventKind(enum.IntEnum):
    """What happened to a key, as Namespace.events tells it (C: enum hifc_event_kind)."""

    STORED = 1
    EVICTED = 2
    QUARANTINED = 3


def class_of(cls: ClassLike) -> int:
    """BlockClass of "reuse" or "swap"."""
    if isinstance(cls, BlockClass):
        return int(cls)
    if isinstance(cls, str) and cls in ("reuse", "swap"):
        return int(cls == "swap")
    raise InvalidRequest(f'cls is {cls!r}: use "reuse" or "swap"')


def class_name(cls: ClassLike) -> Literal["reuse", "swap"]:
    """The text for a class."""
    return "swap" if class_of(cls) == BlockClass.SWAP else "reuse"


def make_requests(count: int, op: Op | int = 0) -> npt.NDArray[np.void]:
    """An array of count zeroed requests with the given op, aligned as libhifc wants it."""
    requests = np.zeros(whole("count of requests", count, 0), dtype=REQUEST)
    requests["op"] = whole("op", op, 0, 255)
    return requests


def key_bytes(key: Any) -> bytes:
    """The 16 bytes of one key: bytes-like or an array of shape (16,) of uint8."""
    if isinstance(key, bytes):
        raw = key
    elif isinstance(key, np.ndarray):
        if key.dtype != np.uint8 or key.ndim != 1:
            raise InvalidRequest(
                f"a key is 16 bytes or a uint8 array of shape (16,), not an array of shape "
                f"{key.shape} of {key.dtype}; {_OF_TOKENS}"
            )
        raw = key.tobytes()
    elif isinstance(key, bytearray | memoryview):
        raw = bytes(key)
    else:
        advice = _OF_TOKENS if isinstance(key, list | tuple) else _OF_TEXT
        raise InvalidRequest(f"a key is 16 bytes, not {type(key).__name__}; {advice}")
    if len(raw) != KEY_BYTES:
        raise InvalidRequest(f"a key is 16 bytes, not {len(raw)}; {_OF_TEXT}")
    return raw


def keys_array(keys: Keys) -> KeyArray:
    """Keys as a C-contiguous uint8 array of shape (n, 16); one that is that already is not copied.

    Raises InvalidRequest on another shape, dtype or key length.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise InvalidRequest(
                f"keys are a uint8 array of shape (n, 16), not {keys.shape} of {keys.dtype}"
            )
        return np.ascontiguousarray(keys)
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise InvalidRequest("keys are a sequence of 16-byte keys, not one key: write [key]")
    joined = b"".join([key_bytes(key) for key in items("keys", keys)])
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, KEY_BYTES)
