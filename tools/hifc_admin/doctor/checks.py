# SPDX-License-Identifier: Apache-2.0
"""What doctor's checks have in common: what they look at, what they say, and how it is shown.

A check is a function from a Scene to findings, registered with its name in one of the lists
CHECKS of doctor_host, doctor_drive, doctor_file and doctor_engine. It reads and never changes
anything. A check that does not apply yields nothing; one that could not look raises OSError,
HiFCError or Failure, which becomes a WARN: "could not check" is never a PASS. What only SPDK needs
fails where SPDK is asked for, and warns elsewhere.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hifc.errors import HiFCError
from hifc_admin import text
from hifc_admin.failures import failure_of
from hifc_admin.host import iommu
from hifc_admin.host.drives import Drive, Gpu
from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem, Result, Severity

# Checks of the host that matter to SPDK alone.
SPDK_CHECKS = frozenset(
    {
        "drives",
        "huge pages",
        "huge page size",
        "hugetlbfs access",
        "iommu",
        "gpudirect storage",
        "vfio_iommu_type1",
        "locked memory",
        "dma mappings",
    }
)


class Status(enum.StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


_COLORS = {
    Status.PASS: text.Color.GOOD,
    Status.WARN: text.Color.WARNING,
    Status.FAIL: text.Color.BAD,
}


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
    model: str | None = None  # the checkpoint that blocks are of
    memo: dict[str, Any] = field(default_factory=dict, compare=False)  # of checks, for each other

    @property
    def bound(self) -> list[Drive]:
        """Drives that a driver of user space has."""
        return [drive for drive in self.drives if drive.driver in iommu.USERSPACE_DRIVERS]

    @property
    def wants_spdk(self) -> bool:
        """Whether huge pages matter at all."""
        return self.uri is None or self.uri.startswith("spdk")

    @property
    def wants_pcie(self) -> bool:
        """Whether vfio and the IOMMU matter at all."""
        return self.uri is None or self.uri.startswith("spdk://")

    @property
    def asks_for_spdk(self) -> bool:
        """Whether SPDK is what this host is used with, and not just one way to use it."""
        uris = [self.uri or "", *(engine.uri for engine in self.engines)]
        return bool(self.bound) or any(uri.startswith("spdk") for uri in uris)


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


def weighed(scene: Scene, rows: list[Row]) -> list[Row]:
    """The rows, with what only SPDK needs a WARN where nobody asked for SPDK: files, memory and the
    kernel's own block devices work without."""
    if scene.asks_for_spdk:
        return rows
    return [
        Row(row.check, dataclasses.replace(row.finding, status=Status.WARN))
        if row.check in SPDK_CHECKS and row.finding.status is Status.FAIL
        else row
        for row in rows
    ]


@dataclass(frozen=True)
class Summary:
    """What it all comes to. usable, unusable: kinds of devices, where no device was named."""

    verdict: str  # "usable" or "not usable"
    sentences: list[str]
    usable: list[str] = field(default_factory=list)
    unusable: dict[str, list[str]] = field(default_factory=dict)  # with the reasons

    def data(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "summary": "; ".join(self.sentences),
            "usable": self.usable,
            "unusable": self.unusable,
        }


def summary_of_device(uri: str, rows: list[Row]) -> Summary:
    """Of the device that was named."""
    failures = [row for row in rows if row.finding.status is Status.FAIL]
    if failures:
        first = f"{failures[0].check}: {failures[0].finding.detail}"
        more = f", and {len(failures) - 1} more" if failures[1:] else ""
        return Summary("not usable", [f"{uri} is not usable as it is: {first}{more}"])
    warnings = sum(row.finding.status is Status.WARN for row in rows)
    how = f", with {text.count(warnings, 'warning')}" if warnings else ""
    return Summary("usable", [f"you can use {uri}{how}"])


def summary_of_host(rows: list[Row], reasons: dict[str, list[str]]) -> Summary:
    """Of a whole host. reasons: kinds of devices, each with why it cannot be used."""
    usable = [kind for kind, why in reasons.items() if not why]
    unusable = {kind: why for kind, why in reasons.items() if why}
    sentences = [f"you can use: {', '.join(usable) or 'nothing'}"]
    by_reason: dict[str, list[str]] = {}
    for kind, why in unusable.items():
        by_reason.setdefault("; ".join(why), []).append(kind)
    sentences += [f"not: {', '.join(kinds)}, because {why}" for why, kinds in by_reason.items()]
    failures = [row for row in rows if row.finding.status is Status.FAIL]
    verdict = "not usable" if failures or not usable else "usable"
    if failures:
        names = ", ".join(dict.fromkeys(row.check for row in failures))
        sentences.append(f"to be put right: {names}")
    return Summary(verdict, sentences, usable, unusable)


def report(uri: str | None, rows: list[Row], summary: Summary, as_json: bool) -> Result:
    """Exit 1 if a check failed. As text the table is all, so problems are for JSON alone."""
    counts = {status: sum(row.finding.status is status for row in rows) for status in Status}
    data = {
        "uri": uri,
        "checks": [row.data() for row in rows],
        **{status.lower(): count for status, count in counts.items()},
        **summary.data(),
    }
    problems = [_problem(row) for row in rows if row.finding.status is not Status.PASS]
    code = Exit.FAILED if counts[Status.FAIL] else Exit.DONE
    lines = _lines(rows, counts, summary)
    return Result(data, lines, problems if as_json else [], code)


def _problem(row: Row) -> Problem:
    found = row.finding
    severity = Severity.ERROR if found.status is Status.FAIL else Severity.WARNING
    code = row.check.replace(" ", "-")
    about = found.subject or "host"
    return Problem(code, about, found.detail, found.evidence, found.fix, severity)


def _shown(status: Status) -> str:
    return text.paint(status, _COLORS[status])


def _lines(rows: list[Row], counts: dict[Status, int], summary: Summary) -> Iterator[str]:
    cells = [
        (_shown(row.finding.status), row.check, row.finding.subject, row.finding.detail)
        for row in rows
    ]
    yield from text.table(("", "CHECK", "ABOUT", ""), cells)
    for row in rows:
        if row.finding.status is not Status.PASS:
            yield from _advice(row)
    yield ""
    yield ", ".join(f"{count} {status}" for status, count in counts.items())
    good = summary.verdict == "usable"
    first, *others = summary.sentences
    yield text.paint(first, text.Color.GOOD if good else text.Color.BAD)
    yield from others


def _advice(row: Row) -> Iterator[str]:
    found = row.finding
    if not found.evidence and not found.fix:
        return
    yield ""
    about = f" {found.subject}" if found.subject else ""
    yield f"{_shown(found.status)} {row.check}{about}"
    if found.evidence:
        yield f"  seen: {found.evidence}"
    if found.fix:
        yield f"  fix:  {found.fix}"
