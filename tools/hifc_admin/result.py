# SPDX-License-Identifier: Apache-2.0
"""What a verb hands back, and the two forms in which it is shown: text and one JSON object.

The JSON object is an interface: {"schema": "hifc-admin.VERB.1", "ok", "data", "problems"}. A change
that takes something away or gives it another meaning raises the schema's number.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from hifc_admin import text

PROGRAM = "hifc-admin"
SCHEMA_VERSION = 1


class Exit(enum.IntEnum):
    """Exit codes of hifc-admin, the same for every verb."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3  # by a safety check: nothing was touched
    PARTLY = 4  # partly done, or done and not verified
    PREREQUISITE = 5  # a privilege or something this needs is missing


class Severity(enum.StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something the user should know: `code` for programs, the rest for people."""

    code: str
    subject: str  # the device, file or option it is about
    detail: str
    evidence: str = ""  # what was seen, and where
    fix: str = ""  # a command or an action
    severity: Severity = Severity.ERROR


@dataclasses.dataclass
class Result:
    """`data` is what --json shows, `lines` the same for people."""

    data: dict[str, Any]
    lines: Iterable[str] = ()
    problems: list[Problem] = dataclasses.field(default_factory=list)
    exit: Exit = Exit.DONE


class Failure(Exception):
    """Ends a verb with an exit code and a problem, or several, the most telling one first."""

    def __init__(self, exit_code: Exit, problem: Problem, *others: Problem) -> None:
        super().__init__(problem.detail)
        self.exit = exit_code
        self.problem = problem
        self.others = others

    def result(self) -> Result:
        return Result(data={}, problems=[self.problem, *self.others], exit=self.exit)


def show_json(verb: str, result: Result, out: TextIO) -> None:
    document = {
        "schema": f"hifc-admin.{verb}.{SCHEMA_VERSION}",
        "ok": result.exit is Exit.DONE,
        "data": result.data,
        "problems": [dataclasses.asdict(problem) for problem in result.problems],
    }
    json.dump(document, out, indent=2)
    out.write("\n")


def show_text(result: Result, out: TextIO, err: TextIO, color: str = "auto") -> None:
    """The result on `out`, problems on `err`. color: one of text.COLOR_CHOICES."""
    on_out, on_err = (text.wants_color(stream, color) for stream in (out, err))
    for line in result.lines:
        out.write(f"{line if on_out else text.plain(line)}\n")
    for problem in result.problems:
        for line in _problem_lines(problem):
            err.write(f"{line if on_err else text.plain(line)}\n")


def _problem_lines(problem: Problem) -> Iterator[str]:
    is_error = problem.severity is Severity.ERROR
    severity = text.paint(problem.severity, text.Color.BAD if is_error else text.Color.WARNING)
    # Of wrong usage, the subject is the command itself: its name stands in front already.
    subject = problem.subject.removeprefix(PROGRAM).strip()
    yield ": ".join(part for part in (PROGRAM, severity, subject, problem.detail) if part)
    if problem.evidence:
        yield f"  seen: {problem.evidence}"
    if problem.fix:
        yield f"  fix:  {problem.fix}"
