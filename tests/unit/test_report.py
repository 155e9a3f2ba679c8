# SPDX-License-Identifier: Apache-2.0
"""tools/lib/report.py, on which the exit code of tools/test and of CI rests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPORT = Path(__file__).parents[2] / "tools/lib/report.py"
PASSED = '<testcase classname="a" name="good"/>'
PROPERTY = '<property name="needs" value="spdk"/>'
SPDK = f'<testcase name="spdk"><properties>{PROPERTY}</properties></testcase>'
VM = SPDK.replace("spdk", "vm")
SKIPPED = '<testcase name="left"><skipped message="needs a moon"/></testcase>'
FAILED = '<testcase classname="b" name="bad"><failure message="no"/></testcase>'
ERROR = '<testcase name="broken"><error message="no fixture"/></testcase>'


def report(folder: Path, cases: str, *more: str, ci: bool = False) -> tuple[int, list[str]]:
    """Exit code and lines of a report over one JUnit file."""
    suite = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
    (folder / "python.xml").write_text(suite)
    done = subprocess.run(
        [sys.executable, REPORT, folder, *more],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"CI": "true"} if ci else {},
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_all_passed(tmp_path: Path) -> None:
    code, lines = report(tmp_path, PASSED + SPDK)
    assert (code, lines[-1]) == (0, "total: 2 passed, 0 failed, 0 skipped")


def test_skipped_with_its_reason(tmp_path: Path) -> None:
    code, lines = report(tmp_path, PASSED + SKIPPED, "--reason", "the far side")
    assert code == 0
    assert "  python: ::left: needs a moon" in lines
    assert "  the far side" in lines
    assert lines[-1] == "total: 1 passed, 0 failed, 1 skipped"


def test_failures_and_errors_fail(tmp_path: Path) -> None:
    code, lines = report(tmp_path, PASSED + FAILED + ERROR)
    assert (code, lines[-1]) == (1, "total: 1 passed, 2 failed, 0 skipped")
    assert "  python: b::bad" in lines


def test_a_failed_stage_fails(tmp_path: Path) -> None:
    assert report(tmp_path, PASSED, "--failed-stage", "lint")[0] == 1


def test_nothing_ran_fails(tmp_path: Path) -> None:
    assert report(tmp_path, SKIPPED)[0] == 1


def test_a_torn_file_fails(tmp_path: Path) -> None:
    (tmp_path / "c.xml").write_text("<testsuite>")
    assert report(tmp_path, PASSED)[0] == 1


def test_ci_wants_spdk_tests(tmp_path: Path) -> None:
    code, lines = report(tmp_path, PASSED + VM, ci=True)
    assert code == 1
    assert "  no SPDK test passed, which CI requires" in lines
    assert report(tmp_path, PASSED + SPDK + VM, ci=True)[0] == 0


def test_ci_wants_tests_in_the_virtual_machine(tmp_path: Path) -> None:
    code, lines = report(tmp_path, PASSED + SPDK, ci=True)
    assert code == 1
    assert "  no virtual machine test passed, which CI requires" in lines


def test_ci_rejects_skipped_spdk_tests(tmp_path: Path) -> None:
    skipped = SPDK.replace("<properties>", '<skipped message="no huge pages"/><properties>')
    assert report(tmp_path, PASSED + SPDK + VM + skipped, ci=True)[0] == 1
    assert report(tmp_path, PASSED + SPDK + VM + skipped)[0] == 0
