# SPDX-License-Identifier: Apache-2.0
"""Numbers, columns and colours for people; the JSON form carries plain bytes and counts instead.

A verb colours its lines without knowing where they go: `show_text` of result.py takes the colours
out again where `wants_color` says no. The codes are written here and not by a library, since
hifc-admin runs as root on storage hosts and takes no further package (see pyproject.toml).
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

COLOR_CHOICES = ("auto", "always", "never")
_COLOR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Color(enum.Enum):
    """What a colour means, with its code: the 16 colours that every terminal has."""

    GOOD = "32"
    WARNING = "33"
    BAD = "1;31"
    STRONG = "1"


def paint(written: object, color: Color | None) -> str:
    """The text in that colour; as it is for None."""
    return str(written) if color is None else f"\x1b[{color.value}m{written}\x1b[0m"


def plain(line: str) -> str:
    """Without colours."""
    return _COLOR_CODE.sub("", line)


def wants_color(stream: TextIO, choice: str = "auto") -> bool:
    """Whether to colour what goes there. auto: on a terminal that can do it, unless NO_COLOR is set
    (https://no-color.org)."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def count(number: int, what: str, plural: str = "") -> str:
    """1 and "entry", "entries" -> "1 entry"; without a plural, "s" is appended."""
    return f"{number} {what if number == 1 else plural or what + 's'}"


def size(count_bytes: int) -> str:
    """1536 -> "1.5 KiB"; exact where it is exact."""
    value = float(count_bytes)
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} {_UNITS[-1]}"


def pairs(rows: Iterable[tuple[str, object]]) -> list[str]:
    """One "name  value" a line, values aligned."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell; numbers to the right."""
    rows = [list(row) for row in rows]
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(plain(line[i])) for line in [list(head), *cells]) for i in range(len(head))]
    lines = ["  ".join(f"{name:<{width}}" for name, width in zip(head, widths, strict=True))]
    for row, line in zip(rows, cells, strict=True):
        aligned = []
        for value, cell, width in zip(row, line, widths, strict=True):
            space = " " * (width - len(plain(cell)))
            aligned.append(space + cell if isinstance(value, int | float) else cell + space)
        lines.append("  ".join(aligned))
    return [line.rstrip() for line in lines]
