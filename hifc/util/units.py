# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes from numbers or texts such as "64MiB", and back."""

from __future__ import annotations

import re

from hifc.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
SIZE_MAX = (1 << 63) - 1
_FRACTION_DIGITS_MAX = 18
_SIZE = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: object, name: str = "size") -> int:
    """Bytes of 4096, "4096", "64MiB" or "1.5GiB", up to SIZE_MAX, as in a device's URI.

    ConfigError names the setting otherwise: no whole number of bytes, no such unit.
    """
    size = _bytes_of(value)
    if size is None:
        raise ConfigError(f"{name}: {value!r} is not a size; write {_suggestion(value)}")
    if size < 0:
        raise ConfigError(f"{name}: {value} is negative")
    if size > SIZE_MAX:
        raise ConfigError(f"{name}: {value} is more than 2^63 - 1 bytes")
    return size


def _match(value: object) -> re.Match[str] | None:
    return _SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= 64 else None


def _bytes_of(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _match(value)
    if match is None or match[3] not in _UNITS:
        return None
    fraction = (match[2] or "").rstrip("0")
    if len(fraction) > _FRACTION_DIGITS_MAX:
        return None
    size, rest = divmod(int(match[1] + fraction) * _UNITS[match[3]], 10 ** len(fraction))
    return None if rest else size


def _suggestion(value: object) -> str:
    """The text that was probably meant by one such as 64M or 8gib, or what there is."""
    match = _match(value)
    if match is not None and match[3] and match[3] not in _UNITS:
        unit = match[3].lower()
        for known in _UNITS:
            if known and (unit == known.lower() or unit + "ib" == known.lower()):
                number = match[1] + (f".{match[2]}" if match[2] else "")
                return f"{number}{known}"
    return "a whole number of bytes or a text such as 64MiB or 1.5GiB"


def format_size(size_bytes: int) -> str:
    """The shortest exact text, e.g. 67108864 -> "64MiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


def shown_size(size_bytes: float) -> str:
    """For people, to three digits, e.g. "1.25 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def page_up(size_bytes: int) -> int:
    """size_bytes rounded up to whole pages of 4 KiB."""
    return -(-size_bytes // 4096) * 4096
