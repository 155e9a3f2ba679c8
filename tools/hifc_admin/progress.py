# SPDX-License-Identifier: Apache-2.0
"""How far a long verb has come, on stderr: one line that is drawn again on a terminal, a line now
and then elsewhere, nothing with --json."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TextIO

from hifc_admin import text

TERMINAL_INTERVAL_S = 0.2
LOG_INTERVAL_S = 10.0
BAR_WIDTH = 24


class Progress:
    """total: how much there is to do, in bytes where is_bytes. A context manager."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        is_bytes: bool = True,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._stream = stream or sys.stderr
        self._is_bytes = is_bytes
        self._is_terminal = self._stream.isatty()
        self._quiet = quiet
        self._start_s = time.monotonic()
        self._shown_s = self._start_s if not self._is_terminal else 0.0
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._width:
            self._stream.write(f"\r{'':{self._width}}\r")
            self._stream.flush()

    def add(self, amount: int) -> None:
        """So much more is done."""
        self.at(self.done + amount)

    def at(self, done: int) -> None:
        """So much is done."""
        self.done = done
        now_s = time.monotonic()
        interval_s = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        if self._quiet or now_s - self._shown_s < interval_s:
            return
        self._shown_s = now_s
        line = self.line(now_s - self._start_s)
        if self._is_terminal:
            self._stream.write(f"\r{line:{self._width}}")
            self._width = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def line(self, elapsed_s: float) -> str:
        """What is shown after that time."""
        share = min(1.0, self.done / self.total) if self.total else 1.0
        filled = int(share * BAR_WIDTH)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        parts = [f"{self.what} [{bar}] {share:4.0%}"]
        if elapsed_s > 0 and self._is_bytes:
            parts.append(f"{text.size(int(self.done / elapsed_s))}/s")
        if 0 < share < 1:
            parts.append(f"{elapsed_s / share - elapsed_s:.0f} s left")
        return "  ".join(parts)


def of(arguments: argparse.Namespace, what: str, total: int, *, is_bytes: bool = True) -> Progress:
    """For a verb: silent with --json."""
    return Progress(what, total, is_bytes=is_bytes, quiet=arguments.json)
