# SPDX-License-Identifier: Apache-2.0
"""A drive that another process, running load.py, keeps busy."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import load
import pytest

from hifc import Namespace
from vm.pci import Drive

SEGMENT = "2MiB"
LINE_TIMEOUT_S = 180.0


class Child:
    """A process running load.py, and its lines as they come."""

    def __init__(self, uri: str, timeout_ms: int) -> None:
        command = [sys.executable, "-P", load.__file__, uri, "--timeout-ms", str(timeout_ms)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.seen: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, timeout_s: float = LINE_TIMEOUT_S) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            pytest.fail(f"the load is silent for {timeout_s} s after {self.seen}")
        if line is None:
            pytest.fail(f"the load ended with {self.process.wait()} after {self.seen}")
        self.seen.append(line)
        return line

    def wait_for(self, wanted: str) -> None:
        while self.line() != wanted:
            pass

    def error(self, timeout_s: float) -> dict[str, Any]:
        """What it says about the first error."""
        deadline = time.monotonic() + timeout_s
        while not (line := self.line(max(0.1, deadline - time.monotonic()))).startswith("{"):
            pass
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def under_load(drive: Drive, timeout_ms: int = 5000) -> Iterator[Child]:
    """The drive formatted and busy; the process is killed at the end. timeout_ms: of a command."""
    Namespace.format(drive.uri, segment_size=SEGMENT, force=True)
    child = Child(drive.uri, timeout_ms)
    try:
        child.wait_for("busy")
        yield child
    finally:
        child.process.kill()
        child.process.wait()


def assert_synced(ns: Namespace) -> None:
    """What the load had synced is there and right."""
    for number in range(load.SYNCED):
        found = ns.get(load.key(number))
        assert found is not None
        assert (found == load.value(number)).all()
