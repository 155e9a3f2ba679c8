# SPDX-License-Identifier: Apache-2.0
"""No Python test asserts how long something took, since a busy machine is not a fault of the code.
A test waits for an event with a bound that only a hang reaches, counts, or brings a clock of its
own; anything else is a benchmark (docs/measuring.md). These checks do not see a test that assumes
after a sleep that something has happened.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns")
HANG_S = 60  # what a busy machine never reaches


def is_clock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        and node.func.attr in CLOCKS
    )


def is_elapsed(node: ast.AST) -> bool:
    """`time.monotonic() - start`, also within a larger expression."""
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and is_clock(part.left)
        for part in ast.walk(node)
    )


def bounds_from_above(compare: ast.Compare) -> bool:
    terms = [compare.left, *compare.comparators]
    for left, operator, right in zip(terms, compare.ops, terms[1:], strict=False):
        below = isinstance(operator, ast.Lt | ast.LtE) and is_elapsed(left)
        above = isinstance(operator, ast.Gt | ast.GtE) and is_elapsed(right)
        if below or above:
            return True
    return False


def is_short_deadline(node: ast.AST) -> bool:
    """`time.monotonic() + 5`."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and is_clock(node.left)
        and isinstance(node.right, ast.Constant)
        and isinstance(node.right.value, int | float)
        and node.right.value < HANG_S
    )


def judged_times(source: str) -> Iterator[int]:
    """Lines that bound from above how long something took, or wait for it too briefly."""
    for node in ast.walk(ast.parse(source)):
        asserted = isinstance(node, ast.Assert) and any(
            isinstance(part, ast.Compare) and bounds_from_above(part)
            for part in ast.walk(node.test)
        )
        if asserted or is_short_deadline(node):
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("assert time.monotonic() - start < 5", 1),
        ("assert 0.3 < time.perf_counter() - start <= bound", 1),
        ("assert 2 >= (time.monotonic() - start) / 7", 1),
        ("end = time.monotonic() + 10", 1),
        ("assert time.monotonic() - start > 0.4", 0),
        ("end = time.monotonic() + 120", 0),
        ("assert time.monotonic() < end", 0),
    ],
)
def test_what_is_seen(source: str, count: int) -> None:
    assert len(list(judged_times(source))) == count


def test_no_test_judges_how_long_anything_took() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 80
    found = [
        f"{file.relative_to(TESTS)}:{line}"
        for file in files
        for line in judged_times(file.read_text())
    ]
    assert not found
