# SPDX-License-Identifier: Apache-2.0
"""What a caller gave is of the kind that is wanted, or an error says what it is instead.

Python would find out somewhere below, by a TypeError about something that the caller never wrote,
perhaps after half of the work is done.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from hifc.errors import ConfigError, HiFCError, InvalidRequest

NUMBER_MAX = (1 << 63) - 1  # larger ones fit no field of libhifc
SECONDS_MAX = 1e9  # in microseconds an int64 all the same


def whole(
    name: str,
    value: object,
    least: int,
    most: int = NUMBER_MAX,
    error: type[HiFCError] = InvalidRequest,
) -> int:
    """A whole number, numpy's too, from least to most. Raises error.

    most: what the field that it goes to holds. ctypes takes a larger number modulo the size of the
    field, and says nothing."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        limit = "up" if most == NUMBER_MAX else f"to {most}"
        raise error(f"{name}: {_shown(value)} is no whole number from {least} {limit}")
    return number


def number(
    name: str,
    value: object,
    least: float = -math.inf,
    error: type[HiFCError] = InvalidRequest,
) -> float:
    """A finite number, numpy's too, from least up. Raises error."""
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or found < least:
        limit = "" if least == -math.inf else f" from {least} up"
        raise error(f"{name}: {_shown(value)} is no finite number{limit}")
    return found


def seconds(name: str, value: object) -> float:
    """How long to wait: a finite number, of which no more than 30 years count. Raises
    InvalidRequest."""
    return min(number(name, value), SECONDS_MAX)


def text(name: str, value: object) -> str:
    """A str that C and UTF-8 can take. Raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{name}: {_shown(value)} is no text")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(
            f"{name}: {_shown(value)} holds a zero character or half a surrogate pair"
        )
    return value


def flag(name: str, value: object) -> bool:
    """True or False and nothing that passes for it. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {_shown(value)} is no boolean; write True or False")
    return value


def items(name: str, value: Iterable[Any]) -> list[Any]:
    """A list of what an iterable gives. Raises InvalidRequest for what is none."""
    try:
        return list(value)
    except TypeError:
        raise InvalidRequest(f"{name}: {_shown(value)} is no sequence") from None


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{type(value).__name__} {shown[:40]}..."
