# SPDX-License-Identifier: Apache-2.0
"""What doctor's checks have in common: what they look at, what they say, and how it is shown.

A check is a function from a Scene to findings, registered with its name in one of the lists
CHECKS of doctor_host, doctor_drive and doctor_engine. It reads and never changes anything. A check
that does not apply yields nothing; one that could not look raises OSError, HiFCError or Failure,
which becomes a WARN: "could not check" is never a PASS.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hifc.errors import HiFCError
from hifc_admin import iommu, text
from hifc_admin.drives import Drive, Gpu
from hifc_admin.failures import failure_of
from hifc_admin.result import Exit, Failure, Problem, Result, Severity
from hifc_admin.system import System


class Status(enum.StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    status: Status
    detail: str
    evidence: str = ""
    fix: str = ""
    subject: str = ""  # where a check has one for each drive or engine


@dataclass(frozen=True)
class Engine:
    """A running engine, as it answers on its socket."""

    socket: str
    uri: str
    pid: int
    stats: dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """What is looked at: the host, and either what a URI names or everything there is."""

    system: System
    uri: str | None = None
    wanted_bdf: str | None = None  # of an spdk:// URI
    all_drives: tuple[Drive, ...] = ()
    drives: tuple[Drive, ...] = ()  # those the question is about
    gpus: tuple[Gpu, ...] = ()
    engines: tuple[Engine, ...] = ()
    user: str | None = None  # whose limits count

    @property
    def bound(self) -> list[Drive]:
        """Drives that a driver of user space has."""
        return [drive for drive in self.drives if drive.driver in iommu.USERSPACE_DRIVERS]

    @property
    def wants_pcie(self) -> bool:
        """Whether huge pages, vfio and the IOMMU matter at all."""
        return self.uri is None or self.uri.startswith("spdk")


Check: TypeAlias = Callable[[Scene], Iterable[Finding]]
Checks: TypeAlias = Sequence[tuple[str, Check]]


@dataclass
class Row:
    check: str
    finding: Finding

    def data(self) -> dict[str, str]:
        found = self.finding
        return {
            "check": self.check,
            "status": found.status,
            "subject": found.subject,
            "detail": found.detail,
            "evidence": found.evidence,
            "fix": found.fix,
        }


def passed(detail: str, evidence: str = "", subject: str = "") -> Finding:
    return Finding(Status.PASS, detail, evidence, "", subject)


def warned(detail: str, evidence: str = "", fix: str = "", subject: str = "") -> Finding:
    return Finding(Status.WARN, detail, evidence, fix, subject)


def failed(detail: str, evidence: str = "", fix: str = "", subject: str = "") -> Finding:
    return Finding(Status.FAIL, detail, evidence, fix, subject)


def of_problem(problem: Problem, status: Status = Status.FAIL) -> Finding:
    return Finding(status, problem.detail, problem.evidence, problem.fix, problem.subject)


def run(scene: Scene, checks: Checks) -> list[Row]:
    """Every check, in order."""
    return [Row(name, finding) for name, check in checks for finding in _findings(scene, check)]


def _findings(scene: Scene, check: Check) -> Iterator[Finding]:
    try:
        yield from check(scene)
    except Failure as failure:
        yield of_problem(failure.problem, Status.WARN)
    except (OSError, HiFCError) as error:
        fix = failure_of(error, scene.uri or "doctor").problem.fix
        yield warned("could not check", str(error), fix or "run it as root on the host itself")


def report(uri: str | None, rows: list[Row], as_json: bool) -> Result:
    """Exit 1 if a check failed. As text the table is all, so problems are for JSON alone."""
    counts = {status: sum(row.finding.status is status for row in rows) for status in Status}
    data = {
        "uri": uri,
        "checks": [row.data() for row in rows],
        **{status.lower(): count for status, count in counts.items()},
    }
    problems = [_problem(row) for row in rows if row.finding.status is not Status.PASS]
    code = Exit.FAILED if counts[Status.FAIL] else Exit.DONE
    return Result(data, _lines(rows, counts), problems if as_json else [], code)


def _problem(row: Row) -> Problem:
    found = row.finding
    severity = Severity.ERROR if found.status is Status.FAIL else Severity.WARNING
    code = row.check.replace(" ", "-")
    about = found.subject or "host"
    return Problem(code, about, found.detail, found.evidence, found.fix, severity)


def _lines(rows: list[Row], counts: dict[Status, int]) -> Iterator[str]:
    cells = [
        (row.finding.status, row.check, row.finding.subject, row.finding.detail) for row in rows
    ]
    yield from text.table(("", "CHECK", "ABOUT", ""), cells)
    for row in rows:
        if row.finding.status is not Status.PASS:
            yield from _advice(row)
    yield ""
    yield ", ".join(f"{count} {status}" for status, count in counts.items())


def _advice(row: Row) -> Iterator[str]:
    found = row.finding
    if not found.evidence and not found.fix:
        return
    yield ""
    about = f" {found.subject}" if found.subject else ""
    yield f"{found.status} {row.check}{about}"
    if found.evidence:
        yield f"  seen: {found.evidence}"
    if found.fix:
        yield f"  fix:  {found.fix}"
