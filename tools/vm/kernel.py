# SPDX-License-Identifier: Apache-2.0
"""Debian's kernel: a folder of the cache that holds `vmlinuz` and `lib/modules/RELEASE`."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vm import apt

METAPACKAGE = "linux-image-amd64"
# Two thirds of the package, and nothing in the machine could use them.
UNUSED = (
    "sound", "drivers/gpu", "drivers/hwmon", "drivers/iio", "drivers/infiniband", "drivers/input",
    "drivers/media", "drivers/net", "drivers/platform", "drivers/staging", "drivers/usb",
)  # fmt: skip


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
    depends = apt.output("apt-cache", "depends", METAPACKAGE)
    match = re.search(r"Depends: (linux-image-[0-9][\w.+-]*)$", depends, re.M)
    version = apt.candidate(match[1]) if match else None
    if match is None or version is None:
        missing = f"apt knows no {METAPACKAGE}: run apt-get update, on Debian for amd64"
        folder = apt.newest(cache, "linux-image-*_*", missing)
        return Kernel(folder, release_of(folder.name.split("_")[0]))
    package = match[1]
    kernel = Kernel(cache / f"{package}_{version}", release_of(package))
    if not kernel.folder.exists():
        arrange = functools.partial(bootable, release=kernel.release)
        apt.unpack(package, version, kernel.folder, arrange)
    return kernel


def release_of(package: str) -> str:
    return package.removeprefix("linux-image-")


def bootable(package: Path, release: str) -> Path:
    """What the machine needs of the unpacked package, as Kernel has it."""
    root = package.with_name("kernel")
    shutil.copytree(package / "lib", root / "lib", symlinks=True)
    shutil.copy(package / f"boot/vmlinuz-{release}", root / "vmlinuz")
    for unused in UNUSED:
        shutil.rmtree(root / "lib/modules" / release / "kernel" / unused)
    subprocess.run(["/sbin/depmod", "-b", root, release], check=True)
    return root
