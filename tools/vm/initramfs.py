# SPDX-License-Identifier: Apache-2.0
"""The initramfs: busybox, the modules that reach the host's files, and `init`.

The archive is in cpio's "newc" format, which the kernel reads uncompressed. Modules are named in an
order that loads: each after those it depends on, as depmod wrote them down. The file in the cache
is named by a hash of its contents, so it never disagrees with the sources.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from vm.apt import SetupError
from vm.kernel import Kernel

MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console")
BUSYBOX = Path("/bin/busybox")
INIT = Path(__file__).with_name("init")


def find(kernel: Kernel) -> Path:
    """The initramfs of a kernel, made where it is missing."""
    archive = build(kernel)
    path = kernel.folder / f"initramfs-{hashlib.sha256(archive).hexdigest()[:16]}"
    if not path.exists():
        for old in kernel.folder.glob("initramfs-*"):
            old.unlink(missing_ok=True)
        work = kernel.folder / f".initramfs.{os.getpid()}"
        work.write_bytes(archive)
        work.rename(path)
    return path


def build(kernel: Kernel) -> bytes:
    if not BUSYBOX.exists():
        raise SetupError(f"{BUSYBOX} is missing: apt-get install busybox-static")
    modules = load_order(kernel.modules, MODULES)
    entries = [directory(name) for name in ("bin", "dev", "proc", "sys", "modules", "host", "root")]
    entries.append(file("bin/busybox", BUSYBOX.read_bytes(), mode=0o755))
    entries.append(file("init", INIT.read_bytes(), mode=0o755))
    entries += [file(f"modules/{module.name}", module.read_bytes()) for module in modules]
    entries.append(file("modules/order", "".join(f"{m.name}\n" for m in modules).encode()))
    return b"".join(entries) + entry("TRAILER!!!", b"", mode=0)


def load_order(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Files of the modules and of all they depend on; what is built into the kernel needs none."""
    depends: dict[str, list[str]] = {}  # name: its own path, then those of what it needs
    for line in (folder / "modules.dep").read_text().splitlines():
        paths = line.replace(":", "").split()
        depends[module_name(paths[0])] = paths
    built_in = {module_name(line) for line in (folder / "modules.builtin").read_text().split()}
    order: list[Path] = []
    for name in names:
        if name in depends:
            # depmod lists the nearest dependency first.
            for path in reversed(depends[name]):
                if folder / path not in order:
                    order.append(folder / path)
        elif name not in built_in:
            raise SetupError(f"the kernel in {folder} has no module {name}")
    return order


def module_name(path: str) -> str:
    return Path(path).name.split(".")[0].replace("-", "_")


def directory(name: str) -> bytes:
    return entry(name, b"", mode=0o040755)


def file(name: str, content: bytes, mode: int = 0o644) -> bytes:
    return entry(name, content, mode=0o100000 | mode)


def entry(name: str, content: bytes, *, mode: int) -> bytes:
    """One member: magic, 13 hexadecimal fields (mode is the second, sizes are the seventh and the
    twelfth), then name and content, each padded to four bytes."""
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
    header = b"070701" + b"".join(b"%08x" % field for field in fields)
    return padded(header + name.encode() + b"\0") + padded(content)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
