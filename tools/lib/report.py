# SPDX-License-Identifier: Apache-2.0
"""Adds up the JUnit files of one tools/test run and prints its last lines.

usage: report.py FOLDER [--reason TEXT]... [--failed-stage NAME]... [--partial]

Prints what failed, what was skipped and why, and last "total: N passed, N failed, N skipped".
Exits 1 if anything failed, if nothing ran, or, with CI=true, if a test that needs SPDK or the
virtual machine was skipped, or none of either kind passed.
"""

from __future__ import annotations

import argparse
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# What CI has to have, by the value of a test's property "needs".
REQUIRED = {"spdk": "SPDK", "vm": "virtual machine"}


@dataclass
class Report:
    passed: int = 0
    needs_passed: Counter[str] = field(default_factory=Counter)
    needs_skipped: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)  # reason: tests

    def read(self, path: Path) -> None:
        """Adds the test cases of one JUnit file; the file's name tells which run they are of."""
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{path.stem}: {case.get('classname', '')}::{case.get('name', '')}"
            skip = case.find("skipped")
            properties = case.iter("property")
            needs = {p.get("value", "") for p in properties if p.get("name") == "needs"}
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(name)
            elif skip is not None or case.get("status") in ("notrun", "disabled"):
                message = "" if skip is None else skip.get("message", "")
                reason = message.splitlines()[0] if message else "no reason given"
                self.skipped.setdefault(reason, []).append(name)
                self.needs_skipped.update(needs)
            else:
                self.passed += 1
                self.needs_passed.update(needs)


def main() -> int:
    parser = argparse.ArgumentParser(description="sums up the JUnit files of a test run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reason", action="append", default=[], help="what was left out, and why")
    parser.add_argument("--failed-stage", action="append", default=[])
    parser.add_argument("--partial", action="store_true", help="not all stages were wanted")
    arguments = parser.parse_args()

    report = Report()
    problems = [f"stage {stage} failed" for stage in arguments.failed_stage]
    for path in sorted(arguments.folder.glob("*.xml")):
        try:
            report.read(path)
        except ElementTree.ParseError as error:
            problems.append(f"{path} cannot be read: {error}")

    if report.skipped or arguments.reason:
        print("\nNot run:")
        for reason in arguments.reason:
            print(f"  {reason}")
        for reason, names in sorted(report.skipped.items()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(f"  {names[0]}{more}: {reason}")
    if report.passed == 0 and not arguments.partial:
        problems.append("no test passed")
    if os.environ.get("CI") == "true":
        for need, name in REQUIRED.items():
            if report.needs_passed[need] == 0:
                problems.append(f"no {name} test passed, which CI requires")
            if count := report.needs_skipped[need]:
                problems.append(f"{count} {name} tests were skipped, which CI forbids")
    if report.failed or problems:
        print("\nFailed:")
        for line in problems + report.failed:
            print(f"  {line}")
    skipped = sum(len(names) for names in report.skipped.values())
    print(f"\ntotal: {report.passed} passed, {len(report.failed)} failed, {skipped} skipped")
    return 1 if report.failed or problems else 0


if __name__ == "__main__":
    sys.exit(main())
