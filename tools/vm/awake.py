# SPDX-License-Identifier: Apache-2.0
"""Keeps the host's CPUs awake while the machine runs.

A read of an emulated drive wakes threads of QEMU three times. Where a CPU has gone to sleep, and
more so where the host is itself virtual, each of these takes longer than the drive's own work, and
hides what kernel and driver cost. A loop of the idle class on each CPU gives way to everything else
at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def cpus_awake() -> Iterator[None]:
    """For as long as the block runs, and no longer than this process lives."""
    with contextlib.ExitStack() as stack:
        for cpu in sorted(os.sched_getaffinity(0)):
            command = ["setpriv", "--pdeathsig", "KILL", "chrt", "--idle", "0"]
            command += ["taskset", "--cpu-list", str(cpu), "sh", "-c", "while :; do :; done"]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            stack.callback(process.kill)
        yield
