# SPDX-License-Identifier: Apache-2.0
"""When, where and with which versions something ran: what a report needs to be read later."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path

PACKAGES = ("hifc", "torch", "transformers")


def describe() -> dict[str, str]:
    """One line each: date, versions, machine. What cannot be told is "unknown"."""
    found = {"date": datetime.datetime.now().astimezone().isoformat(" ", "seconds")}
    found |= {name: _version(name) for name in PACKAGES}
    found["Python"] = platform.python_version()
    found["kernel"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    found["CPU"] = f"{_cpu()}, {len(os.sched_getaffinity(0))} threads for this process"
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # a checkout that is not installed


def _cpu() -> str:
    try:
        written = Path("/proc/cpuinfo").read_text()
    except OSError:
        written = ""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", written, re.M)
    return match[1].strip() if match else platform.processor() or "unknown"
