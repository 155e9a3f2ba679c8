# SPDX-License-Identifier: Apache-2.0
"""Debian's packages, downloaded and unpacked, not installed: the host may want none of them.

What is made of one gets a folder of the cache, which appears by one rename when it is complete. Two
runs at once may both make it, and the second finds the first one's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


class SetupError(RuntimeError):
    """The machine cannot be put together. The message says what to do."""


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is missing: the machine's kernel comes by apt") from error


def candidate(package: str) -> str | None:
    """The version that apt offers now; None where it offers none."""
    match = re.search(r"Candidate: ([^(\s]\S*)", output("apt-cache", "policy", package))
    return match[1] if match else None


def newest(cache: Path, pattern: str, missing: str) -> Path:
    """What an earlier run left, where apt offers nothing. SetupError: nothing is left either."""
    cached = sorted(cache.glob(pattern), key=lambda folder: folder.stat().st_mtime)
    if not cached:
        raise SetupError(missing)
    print(f"tools/vm/run: {missing}; going on with {cached[-1].name}", file=sys.stderr)
    return cached[-1]


def unpack(
    package: str,
    version: str,
    target: Path,
    arrange: Callable[[Path], Path] = lambda folder: folder,
) -> None:
    """Makes target of what the package holds. arrange: is given the unpacked package and returns
    the folder, on the same file system, that becomes target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=target.parent))
    try:
        subprocess.run(
            ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3",
             "download", f"{package}={version}"],
            cwd=work, check=True,
        )  # fmt: skip
        (archive,) = work.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, work / "package"], check=True)
        made = arrange(work / "package")
        if not target.exists():
            made.rename(target)
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        if not target.exists():
            raise SetupError(f"{package} {version} could not be unpacked: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
