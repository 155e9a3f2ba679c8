# SPDX-License-Identifier: Apache-2.0
"""Debian's udev: the package is downloaded and unpacked, not installed: the host may want none.

The guest starts it for the tests that are about its rules.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from vm.kernel import SetupError, output

PACKAGE = "udev"


def find(cache: Path) -> Path:
    """A folder with bin/udevadm and lib/udev/rules.d: what apt offers now, or else is cached."""
    version = re.search(r"Candidate: ([^(\s]\S*)", output("apt-cache", "policy", PACKAGE))
    if version is None:
        cached = sorted(cache.glob(f"{PACKAGE}_*"))
        if not cached:
            raise SetupError(f"apt knows no {PACKAGE}: run apt-get update")
        return cached[-1]
    folder = cache / f"{PACKAGE}_{version[1].replace(':', '%3a')}"
    if not folder.exists():
        unpack(version[1], folder)
    return folder


def unpack(version: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=folder.parent))
    try:
        subprocess.run(
            ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3",
             "download", f"{PACKAGE}={version}"],
            cwd=work, check=True,
        )  # fmt: skip
        (archive,) = work.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, work / "package"], check=True)
        if not folder.exists():
            (work / "package").rename(folder)
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        if not folder.exists():
            raise SetupError(f"{PACKAGE} {version} could not be unpacked: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
