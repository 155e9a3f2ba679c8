# SPDX-License-Identifier: Apache-2.0
"""The verbs that verify a namespace at rest: fsck and scrub. Only fsck --repair changes anything.

fsck compares the structures of docs/format.md with each other, scrub reads the values as an
engine would. A repair gives up what is lost already, so that its room is used and its keys are
stored again: segments whose header is gone are set free, and with --payload entries whose value
fails its checksum are deleted. It restores no data.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hifc.errors import DeviceBusy
from hifc.namespace.namespace import Namespace
from hifc.namespace.stats import CheckResult, NamespaceStats
from hifc_admin import progress, scan, text
from hifc_admin.failures import what_failed
from hifc_admin.host.plan import would
from hifc_admin.parsing import Verbs, add_uri, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result, Severity
from hifc_admin.verbs.medium import size

KEYS_NAMED_MAX = 100


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "fsck",
        fsck,
        "verify a namespace at rest, and repair it only where that is asked for",
        "hifc-admin fsck file:///var/tmp/kv.hifc --payload",
        honours=("dry_run",),
    )
    add_uri(parser)
    parser.add_argument("--payload", action="store_true", help="also read and verify every value")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="set damaged segments free and, with --payload, delete entries whose value is lost",
    )

    parser = add_verb(
        verbs,
        "scrub",
        scrub,
        "read and verify every value of a namespace at rest",
        "hifc-admin scrub file:///var/tmp/kv.hifc --rate 200MiB",
    )
    add_uri(parser)
    parser.add_argument(
        "--rate",
        metavar="SIZE",
        type=size,
        default=0,
        help="read at most so many bytes a second (default: no limit)",
    )


@contextlib.contextmanager
def _at_rest(arguments: argparse.Namespace) -> Iterator[None]:
    """Says what to do where a running engine has the namespace open: nothing can be compared with
    what it changes meanwhile."""
    try:
        yield
    except DeviceBusy as error:
        if not error.holders:
            raise  # no engine: the kernel has the drive, say
        pids = " ".join(map(str, error.holders))
        fix = (
            f"an engine verifies each value that it reads: hifc-admin stats "
            f"{shlex.quote(arguments.uri)} shows corrupt_count; to verify all of them, stop it "
            f"(process {pids}) and repeat"
        )
        problem = Problem("in-use", arguments.uri, what_failed(error), fix=fix)
        raise Failure(Exit.REFUSED, problem) from error


# ---- fsck


@dataclass(frozen=True)
class _Look:
    """What a check saw."""

    stats: NamespaceStats
    check: CheckResult

    def data(self) -> dict[str, Any]:
        return {
            "entries_checked": self.check.entries_checked,
            "problems": self.check.problems,
            "recovery_dropped": self.stats.recovery_dropped,
            "recovery_damaged": self.stats.recovery_damaged,
            "segments_damaged": self.stats.segments_damaged,
        }

    @property
    def ok(self) -> bool:
        stats = self.stats
        return self.check.ok and not stats.recovery_damaged and not stats.segments_damaged


def _look(namespace: Namespace, payload: bool) -> _Look:
    return _Look(namespace.stats(), namespace.check(payload=payload))


def fsck(arguments: argparse.Namespace) -> Result:
    uri, payload = arguments.uri, arguments.payload
    started_s = time.monotonic()
    with _at_rest(arguments), Namespace.open(uri, read_only=True) as namespace:
        before = _look(namespace, payload)
    data = {
        "uri": uri,
        "payload": payload,
        **before.data(),
        **_verdict(before.ok, time.monotonic() - started_s),
    }
    lines = text.pairs(_fsck_rows(before, payload))
    result = Result(data, lines, _problems(uri, before))
    if arguments.repair and not arguments.dry_run:
        return _repair(arguments, before)
    if arguments.repair:
        data["steps"] = _steps(before, payload)
        lines += would(data["steps"])
    else:
        lines.append(_fsck_sentence(data, uri))
        result.exit = Exit.DONE if before.ok else Exit.FAILED
    return result


def _verdict(ok: bool, elapsed_s: float) -> dict[str, Any]:
    """What fsck and scrub add to their data."""
    return {"verdict": "clean" if ok else "damaged", "elapsed_s": round(elapsed_s, 3)}


def _fsck_rows(look: _Look, payload: bool) -> Iterator[tuple[str, str]]:
    """What was looked at, and of what is wrong only what there is."""
    yield "entries", str(look.check.entries_checked)
    yield "values", "read and verified" if payload else "not read: --payload reads them"
    wrong = (
        ("dropped", look.stats.recovery_dropped, "entries that a crash cut short"),
        ("lost", look.stats.recovery_damaged, "entries that had been flushed"),
        ("damaged", look.stats.segments_damaged, "segments without a valid header"),
        ("problems", look.check.problems, "found by comparing and reading"),
    )
    for name, number, what in wrong:
        if number:
            yield name, f"{number} {what}"


def _fsck_sentence(data: dict[str, Any], uri: str) -> str:
    """What it comes to, and what to do then."""
    entries = text.count(data["entries_checked"], "entry", "entries")
    took = f"in {data['elapsed_s']:.1f} s"
    if data["verdict"] == "clean":
        seen = "verified" if data["payload"] else "consistent, their values not read,"
        return f"{text.paint('clean', text.Color.GOOD)}: {entries} {seen} {took}"
    payload = " --payload" if data["payload"] else ""
    return (
        f"{text.paint('damaged', text.Color.BAD)}: {entries} checked {took}; "
        f"hifc-admin fsck {shlex.quote(uri)}{payload} --repair gives up what is lost, no more"
    )


def _problems(uri: str, look: _Look) -> list[Problem]:
    found = []
    stats = look.stats
    if look.check.problems:
        fix = f"hifc-admin fsck {shlex.quote(uri)} --payload --repair deletes what is lost"
        found.append(Problem("check-failed", uri, look.check.first_problem, fix=fix))
    if stats.recovery_damaged or stats.segments_damaged:
        lost = stats.segments_damaged * stats.segment_size_bytes
        found.append(
            Problem(
                "damaged",
                uri,
                "entries that had been acknowledged and flushed are lost",
                f"{stats.recovery_damaged} entries; {stats.segments_damaged} segments "
                f"({text.size(lost)}) with whatever they held",
                fix=f"hifc-admin fsck {shlex.quote(uri)} --repair gives the room back; no data",
            )
        )
    return found


def _steps(look: _Look, payload: bool) -> list[str]:
    steps = []
    if look.stats.segments_damaged:
        steps.append(f"set {look.stats.segments_damaged} damaged segments free")
    if payload:
        steps.append("delete every entry whose value cannot be read or fails its checksum")
    return steps


def _repair(arguments: argparse.Namespace, before: _Look) -> Result:
    """A writable open seals what a crash left open and writes all four superblock copies."""
    uri = arguments.uri
    started_s = time.monotonic()
    deleted: list[bytes] = []
    found = scan.Found()
    with Namespace.open(uri, pool_size=_pool_size(uri), owner_socket=False) as namespace:
        repaired = namespace.repair()
        if arguments.payload:
            found = _scan(arguments, namespace, scan.Rate(0))
            deleted = [key for key in found.lost_keys if namespace.delete(key)]
        namespace.sync()
    with Namespace.open(uri, read_only=True) as namespace:
        after = _look(namespace, arguments.payload)
    data = {
        "uri": uri,
        "payload": arguments.payload,
        "before": before.data(),
        "after": after.data(),
        "segments_freed": repaired.segments_freed,
        "entries_deleted": len(deleted),
        "keys_deleted": [key.hex() for key in deleted[:KEYS_NAMED_MAX]],
    }
    lost = str(before.stats.recovery_damaged)
    if repaired.segments_damaged:
        lost = f"not known; {lost} counted"
    lines = [
        f"segments set free: {repaired.segments_freed} of {repaired.segments_damaged} damaged",
        f"entries lost with them or before: {lost}",
        f"entries deleted, their values lost: {len(deleted)}",
        *(f"  {key.hex()}" for key in deleted[:KEYS_NAMED_MAX]),
        f"problems left: {after.check.problems}",
    ]
    result = Result(data, problems=_problems(uri, after))
    if repaired.first_problem:
        result.problems.append(Problem("not-repaired", uri, repaired.first_problem))
    result.problems += _unclear(uri, found)
    if result.problems:
        result.exit = Exit.PARTLY
    elif deleted or not before.ok:
        detail = "what was damaged is given up; store it again where it is needed"
        result.problems.append(Problem("data-lost", uri, detail, severity=Severity.WARNING))
    data |= _verdict(result.exit is Exit.DONE, time.monotonic() - started_s)
    if result.exit is Exit.DONE and result.problems:
        data["verdict"] = "repaired"
    result.lines = [*lines, _repair_sentence(data)]
    return result


def _repair_sentence(data: dict[str, Any]) -> str:
    entries = text.count(data["after"]["entries_checked"], "entry", "entries")
    took = f"in {data['elapsed_s']:.1f} s"
    if data["verdict"] == "clean":
        return f"{text.paint('clean', text.Color.GOOD)}: {entries} there, nothing to repair {took}"
    if data["verdict"] == "repaired":
        verdict = text.paint("repaired", text.Color.GOOD)
        return f"{verdict}: {entries} left {took}; what was lost reads as a miss from now on"
    verdict = text.paint("damaged", text.Color.BAD)
    return f"{verdict}: {entries} left {took}, and not everything could be repaired, see below"


def _unclear(uri: str, found: scan.Found) -> list[Problem]:
    """What could not be read is not known to be lost, and nothing of it is deleted."""
    if not found.unclear:
        return []
    detail = f"{found.unclear} values could not be read, and may be intact: they were left alone"
    fix = "see that the device answers (smart, doctor), then repeat"
    return [Problem("not-checked", uri, detail, found.first_unclear, fix)]


# ---- scrub


def scrub(arguments: argparse.Namespace) -> Result:
    uri = arguments.uri
    with (
        _at_rest(arguments),
        Namespace.open(uri, read_only=True, pool_size=_pool_size(uri)) as namespace,
    ):
        started_s = time.monotonic()
        found = _scan(arguments, namespace, scan.Rate(arguments.rate))
        elapsed_s = time.monotonic() - started_s
    named = [key.hex() for key in found.lost_keys[:KEYS_NAMED_MAX]]
    data = {
        "uri": uri,
        "entries_read": found.entries_read,
        "bytes_read": found.bytes_read,
        "corrupt": found.corrupt,
        "unreadable": found.unreadable,
        "unclear": found.unclear,
        "keys": named,
        **_verdict(not found.lost_keys, elapsed_s),
    }
    if found.unclear and not found.lost_keys:
        data["verdict"] = "unclear"
    result = Result(data, [*text.pairs(_scrub_rows(found, named)), _scrub_sentence(data)])
    if found.lost_keys:
        result.exit = Exit.FAILED
        detail = f"{found.corrupt} values fail their checksum, {found.unreadable} cannot be read"
        named_uri = shlex.quote(uri)
        fix = f"hifc-admin fsck {named_uri} --payload --repair deletes them; smart {named_uri}"
        result.problems.append(Problem("corrupt", uri, detail, ", ".join(named[:3]), fix))
    unclear = _unclear(uri, found)
    if unclear:
        result.problems += unclear
        result.exit = result.exit or Exit.PARTLY
    return result


def _scrub_rows(found: scan.Found, named: list[str]) -> Iterator[tuple[str, str]]:
    """What was read, and of what is wrong only what there is."""
    yield "values", f"{found.entries_read} read and verified"
    yield "bytes", text.size(found.bytes_read)
    wrong = (
        ("corrupt", found.corrupt, "values fail their checksum"),
        ("unreadable", found.unreadable, "values that the medium has lost"),
        ("unclear", found.unclear, "values could not be read now, and may be intact"),
        ("gone", found.gone, "values went away meanwhile"),
    )
    for name, number, what in wrong:
        if number:
            yield name, f"{number} {what}"
    for number, key in enumerate(named):
        yield "" if number else "keys", key


def _scrub_sentence(data: dict[str, Any]) -> str:
    """What it comes to."""
    values = text.count(data["entries_read"], "value")
    took = f"in {data['elapsed_s']:.1f} s"
    if data["verdict"] == "clean":
        amount = text.size(data["bytes_read"])
        return f"{text.paint('clean', text.Color.GOOD)}: {values} ({amount}) verified {took}"
    if data["verdict"] == "unclear":
        verdict = text.paint("unclear", text.Color.WARNING)
        return f"{verdict}: {values} verified {took}, {data['unclear']} could not be read"
    lost = text.count(data["corrupt"] + data["unreadable"], "value")
    return f"{text.paint('damaged', text.Color.BAD)}: {lost} lost, {values} verified {took}"


def _pool_size(uri: str) -> int:
    with scan.look(uri) as namespace:
        return scan.pool_size(scan.totals(namespace).longest_bytes)


def _scan(arguments: argparse.Namespace, namespace: Namespace, rate: scan.Rate) -> scan.Found:
    total = scan.totals(namespace)
    with progress.of(arguments, "verifying", total.size_bytes) as shown:
        return scan.scan(namespace, rate, shown.at)
