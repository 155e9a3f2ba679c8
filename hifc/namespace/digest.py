# SPDX-License-Identifier: Apache-2.0
"""Keys of a program's own names: 16 bytes of any text or bytes."""

from __future__ import annotations

import hashlib

from hifc.errors import InvalidRequest
from hifc.native_lib.layouts import KEY_BYTES

_SALT_MAX_BYTES = 64
# BLAKE2b personalisation: such a key never equals one of hifc.KeyScheme.
_PERSON = b"hifc.key.1"


def key(
    name: str | bytes | bytearray | memoryview,
    *,
    domain: str | bytes = b"",
    salt: bytes = b"",
) -> bytes:
    """The key of a text, or of bytes, of any length: its BLAKE2b-128 digest, 16 bytes.

    A text counts as its UTF-8 bytes. The same name gives the same key in every process and on
    every machine. domain: equal names in different domains have different keys; use one a program
    or a kind of value. salt: at most 64 bytes; who does not know it can neither guess keys nor
    tell whether a name was stored. InvalidRequest: name is neither text nor bytes, or salt is too
    long. For blocks of tokens see hifc.KeyScheme.
    """
    salted = _bytes("salt", salt)
    if len(salted) > _SALT_MAX_BYTES:
        raise InvalidRequest(f"salt has {len(salted)} bytes, at most {_SALT_MAX_BYTES} fit")
    place = _bytes("domain", domain)
    state = hashlib.blake2b(
        digest_size=KEY_BYTES,
        key=salted,
        person=_PERSON,
        salt=hashlib.blake2b(place, digest_size=16).digest() if place else b"",
    )
    state.update(_bytes("name", name))
    return state.digest()


def _bytes(what: str, value: object) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"key: {what} holds half a surrogate pair: give bytes") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidRequest(
        f"key: {what} is text or bytes, not {type(value).__name__}; write str(...) of a number, "
        "array.tobytes() of an array; hifc.KeyScheme makes keys of tokens"
    )
