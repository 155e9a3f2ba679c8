# SPDX-License-Identifier: Apache-2.0
"""Numbers and columns for people; the JSON form carries plain bytes and counts instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


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
    widths = [max(len(line[i]) for line in [list(head), *cells]) for i in range(len(head))]
    lines = ["  ".join(f"{name:<{width}}" for name, width in zip(head, widths, strict=True))]
    for row, line in zip(rows, cells, strict=True):
        aligned = [
            f"{cell:>{width}}" if isinstance(value, int | float) else f"{cell:<{width}}"
            for value, cell, width in zip(row, line, widths, strict=True)
        ]
        lines.append("  ".join(aligned))
    return [line.rstrip() for line in lines]
