# SPDX-License-Identifier: Apache-2.0
"""The one seam between hifc-admin and the host: every file, folder, link, node and program.

Names are absolute as the host knows them ("/sys/bus/pci"); they are looked up below one root,
which is "/" or what --sysroot names. Tests build a tree there and replace what only a kernel does
(`write` to sysfs, `claim`, `mount`, `run`) in a subclass. A method that looks only says None or
nothing for what is missing and raises OSError for what cannot be read: those two are never mixed
up, since "could not check" counts as in use.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import time
from pathlib import Path

COMMAND_TIMEOUT_S = 60
# struct flock: type, whence, start, length, pid; the format of 64-bit Linux.
_FLOCK = "hhqqi"


class System:
    """The host below one root."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    @property
    def is_real(self) -> bool:
        """False below --sysroot: there is no kernel and there are no programs behind the files."""
        return self.root == Path("/")

    @property
    def may_change(self) -> bool:
        """Whether this user may change what hifc-admin changes."""
        return os.geteuid() == 0 or not self.is_real

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    # ---- looking

    def read(self, name: str) -> str:
        """The text of a file, without white space at its ends. OSError also where it is missing."""
        return self.path(name).read_text(errors="replace").strip()

    def get(self, name: str) -> str | None:
        """The same, None where it is missing."""
        try:
            return self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exact(self, name: str) -> str | None:
        """The same with the white space at its ends, for whoever puts it back."""
        try:
            return self.path(name).read_text(errors="surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def attribute(self, name: str) -> str | None:
        """The same, None also where it cannot be read: for what only describes."""
        try:
            return self.read(name)
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """A whole number, decimal or with 0x; None where there is none."""
        try:
            return int(self.attribute(name) or "", 0)
        except ValueError:
            return None

    def read_bytes(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def names(self, name: str) -> list[str]:
        """Names in a folder, sorted; none where it is missing."""
        try:
            return sorted(os.listdir(self.path(name)))  # noqa: PTH208 - iterdir hides errors later
        except (FileNotFoundError, NotADirectoryError):
            return []

    def glob(self, pattern: str) -> list[str]:
        """Names that match, sorted."""
        found = self.root.glob(pattern.lstrip("/"))
        return sorted(f"/{path.relative_to(self.root)}" for path in found)

    def exists(self, name: str) -> bool:
        """Whether it is there; a link counts by what it leads to."""
        return self.path(name).exists()

    def link(self, name: str) -> str | None:
        """What a symbolic link says, None where there is none."""
        try:
            return str(self.path(name).readlink())
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise

    def target(self, name: str) -> str | None:
        """The last component of where a link leads: a driver's name, a group's number."""
        link = self.link(name)
        return None if link is None else link.rstrip("/").rpartition("/")[2]

    def resolve(self, name: str) -> str:
        """The name with its symbolic links followed, below the root."""
        seen = 0
        while (link := self.link(name)) is not None and seen < 16:
            name = link if link.startswith("/") else f"{name.rpartition('/')[0]}/{link}"
            seen += 1
        return os.path.normpath(name)

    def stat(self, name: str) -> os.stat_result:
        return self.path(name).stat()

    def device_number(self, name: str) -> str | None:
        """ "259:3" for a device node, None for anything else or nothing."""
        try:
            status = self.stat(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not (stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode)):
            return None
        return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"

    # ---- descriptors

    def open(self, name: str, flags: int) -> int:
        """A file that this makes is its owner's alone: who may open a lock may hold it."""
        return os.open(self.path(name), flags | os.O_CLOEXEC, 0o600)

    def claim(self, name: str) -> int:
        """A read-only descriptor that keeps everybody else from claiming a block device.

        The kernel grants it only while neither the device nor a partition of it is mounted, or part
        of a volume, or claimed by another process; and as long as it is open, none of them can be.
        """
        return self.open(name, os.O_RDONLY | os.O_EXCL)

    def lock(self, name: str, create: bool = True) -> int | None:
        """A descriptor that holds the exclusive flock of a file, made if missing; None: it is held.

        Released by closing it. The file is checked to be one that still has a name.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        while True:
            fd = self.open(name, flags)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # cleanup removed it in between: take the new one

    def is_record_locked(self, name: str) -> bool:
        """Whether another process holds a lock on a file that fcntl set, as SPDK and DPDK do."""
        fd = self.open(name, os.O_RDWR)
        try:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, wanted)
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        finally:
            os.close(fd)

    # ---- changing

    def write(self, name: str, text: str) -> None:
        """Into what is there: an attribute of sysfs takes one write call."""
        fd = self.open(name, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def put(self, name: str, text: str, mode: int = 0o644) -> None:
        """A whole file at once, and its folders: a reader sees the old one or the new one."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        early = path.with_name(f".{path.name}.new")
        fd = os.open(early, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode)
            os.write(fd, text.encode(errors="surrogateescape"))
            os.fsync(fd)
        finally:
            os.close(fd)
        early.replace(path)

    def symlink(self, name: str, target: str) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        path.symlink_to(target)

    def remove(self, name: str) -> None:
        """A file or a link; nothing happens where there is none."""
        self.path(name).unlink(missing_ok=True)

    def remove_tree(self, name: str) -> None:
        shutil.rmtree(self.path(name))

    def make_folder(self, name: str, mode: int = 0o755) -> None:
        path = self.path(name)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)

    def set_owner(self, name: str, uid: int, gid: int, mode: int) -> None:
        os.chown(self.path(name), uid, gid)
        self.path(name).chmod(mode)

    def mount(self, kind: str, where: str, options: str) -> None:
        self.path(where).mkdir(parents=True, exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        words = (kind.encode(), str(self.path(where)).encode(), kind.encode())
        if libc.mount(*words, ctypes.c_ulong(0), options.encode()) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), where)

    def unmount(self, where: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount(str(self.path(where)).encode()) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), where)

    def has_program(self, name: str) -> bool:
        return self.is_real and shutil.which(name) is not None

    def run(self, *words: str) -> None:
        """Runs a program; OSError with what it said where it fails."""
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(
                errno.ETIMEDOUT, f"not done after {COMMAND_TIMEOUT_S} s", words[0]
            ) from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            raise OSError(errno.EIO, said, " ".join(words))

    # ---- time

    def now_s(self) -> float:
        return time.monotonic()

    def wait_s(self, seconds: float) -> None:
        time.sleep(seconds)


def of(arguments: argparse.Namespace) -> System:
    """The host that a command line is about."""
    return System(Path(arguments.sysroot).resolve())
