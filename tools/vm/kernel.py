# SPDX-License-Identifier: Apache-2.0
"""Debian's kernel: the package is downloaded and unpacked, not installed.

A kernel's folder in the cache appears by one rename when it is complete; two runs at once may both
make it, and the second finds the first one's. It holds `vmlinuz` and `lib/modules/RELEASE`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

METAPACKAGE = "linux-image-amd64"
# Two thirds of the package, and nothing in the machine could use them.
UNUSED = (
    "sound", "drivers/gpu", "drivers/hwmon", "drivers/iio", "drivers/infiniband", "drivers/input",
    "drivers/media", "drivers/net", "drivers/platform", "drivers/staging", "drivers/usb",
)  # fmt: skip


class SetupError(RuntimeError):
    """The machine cannot be put together. The message says what to do."""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel."""

    folder: Path
    release: str

    @property
    def image(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def modules(self) -> Path:
        return self.folder / "lib/modules" / self.release


def find(cache: Path) -> Kernel:
    """The kernel that apt offers now, downloaded if the cache lacks it; the newest cached one where
    apt offers none."""
    try:
        package, version = candidate()
    except SetupError:
        cached = sorted(cache.glob("linux-image-*_*"), key=lambda folder: folder.stat().st_mtime)
        if not cached:
            raise
        package = cached[-1].name.split("_")[0]
        return Kernel(cached[-1], package.removeprefix("linux-image-"))
    kernel = Kernel(cache / f"{package}_{version}", package.removeprefix("linux-image-"))
    if not kernel.folder.exists():
        unpack(package, version, kernel)
    return kernel


def candidate() -> tuple[str, str]:
    """Package and version that the metapackage stands for."""
    depends = output("apt-cache", "depends", METAPACKAGE)
    match = re.search(r"Depends: (linux-image-[0-9][\w.+-]*)$", depends, re.M)
    policy = output("apt-cache", "policy", match[1]) if match else ""
    version = re.search(r"Candidate: ([^(\s]\S*)", policy)
    if match is None or version is None:
        raise SetupError(f"apt knows no {METAPACKAGE}: run apt-get update, on Debian for amd64")
    return match[1], version[1]


def unpack(package: str, version: str, kernel: Kernel) -> None:
    kernel.folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=kernel.folder.parent))
    try:
        subprocess.run(
            ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3",
             "download", f"{package}={version}"],
            cwd=work, check=True,
        )  # fmt: skip
        (archive,) = work.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, work / "package"], check=True)
        root = work / "kernel"
        shutil.copytree(work / "package/lib", root / "lib", symlinks=True)
        shutil.copy(work / f"package/boot/vmlinuz-{kernel.release}", root / "vmlinuz")
        for unused in UNUSED:
            shutil.rmtree(root / "lib/modules" / kernel.release / "kernel" / unused)
        subprocess.run(["/sbin/depmod", "-b", root, kernel.release], check=True)
        if not kernel.folder.exists():
            root.rename(kernel.folder)
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        if not kernel.folder.exists():
            raise SetupError(f"{package} {version} could not be unpacked: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is missing: the machine's kernel comes by apt") from error
