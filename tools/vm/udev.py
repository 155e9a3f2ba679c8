# SPDX-License-Identifier: Apache-2.0
"""Debian's udev, which the guest starts for the tests that are about its rules."""

from __future__ import annotations

from pathlib import Path

from vm import apt

PACKAGE = "udev"


def find(cache: Path) -> Path:
    """A folder with bin/udevadm and lib/udev/rules.d: what apt offers now, or else is cached."""
    version = apt.candidate(PACKAGE)
    if version is None:
        return apt.newest(cache, f"{PACKAGE}_*", f"apt knows no {PACKAGE}: run apt-get update")
    folder = cache / f"{PACKAGE}_{version.replace(':', '%3a')}"
    if not folder.exists():
        apt.unpack(PACKAGE, version, folder)
    return folder
