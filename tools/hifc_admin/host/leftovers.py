# SPDX-License-Identifier: Apache-2.0
"""What dead processes left on the host: files of huge pages, locks, sockets, half a bind.

Whether an owner lives is asked of the kernel, by the lock or the socket that a living one holds,
not of its pid, which may be another process's by now. A lock is removed while it is held, and its
users look whether the file they locked still has its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hifc_admin.engine.owner import FOLDERS
from hifc_admin.host import memory, records
from hifc_admin.host.system import System
from hifc_admin.result import Failure, Problem, Severity

# Files of huge pages that DPDK makes for a process, and its folder for the process's state.
_HUGE_FILE = re.compile(r"spdk_pid\d+map_\d+")
_DPDK_FOLDERS = ("/run/dpdk/spdk_pid*", "/run/user/*/dpdk/spdk_pid*", "/tmp/dpdk/spdk_pid*")
_SPDK_LOCKS = ("/tmp/spdk_pci_lock_*", "/var/tmp/spdk_pci_lock_*")
_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Leftover:
    """Something to remove. `remove` looks again before it does."""

    name: str
    kind: str
    size_bytes: int
    evidence: str
    remove: Callable[[], None]


def find_leftovers(system: System) -> tuple[list[Leftover], list[Problem]]:
    """All of them but half binds, and warnings for what could not be looked at."""
    found: list[Leftover] = []
    problems: list[Problem] = []
    for name, look in _candidates(system):
        try:
            leftover = look(system, name)
        except FileNotFoundError:
            continue
        except (OSError, Failure) as error:
            problems.append(_not_checked(name, error))
            continue
        if leftover is not None:
            found.append(_with_second_look(system, leftover, look))
    return found, problems


def half_binds(system: System) -> tuple[list[records.Record], list[Problem]]:
    """Drives whose bind was killed, since their record says so and nobody holds their lock; and
    warnings for what could not be looked at."""
    found: list[records.Record] = []
    problems: list[Problem] = []
    for bdf in records.recorded(system):
        try:
            record = records.read_record(system, bdf)
            if record is None or record.phase != records.BINDING:
                continue
            if not _is_held(system, records.lock_file(bdf)):
                found.append(record)
        except (OSError, Failure) as error:
            problems.append(_not_checked(records.record_file(bdf), error))
    return found, problems


def _not_checked(name: str, error: OSError | Failure) -> Problem:
    detail = "could not check whether its owner lives, so it stays"
    fix = error.problem.fix if isinstance(error, Failure) else "run it as root"
    return Problem("not-checked", name, detail, str(error), fix, Severity.WARNING)


Look = Callable[[System, str], Leftover | None]


def _with_second_look(system: System, found: Leftover, look: Look) -> Leftover:
    """A name may have got an owner since: a process that starts, or one that gives a drive away."""

    def remove() -> None:
        with contextlib.suppress(FileNotFoundError):
            if look(system, found.name) is not None:
                found.remove()

    return dataclasses.replace(found, remove=remove)


def _candidates(system: System) -> Iterator[tuple[str, Look]]:
    for mount in memory.huge_mounts(system):
        for name in system.names(mount.folder):
            if _HUGE_FILE.fullmatch(name):
                yield f"{mount.folder}/{name}", _huge_file
    for folder in FOLDERS:
        for name in system.glob(f"/{folder}/*.lock"):
            yield name, _lock
        for pattern in ("*.sock", "*.new"):
            for name in system.glob(f"/{folder}/{pattern}"):
                yield name, _socket
    for name in system.glob(f"{records.FOLDER}/*.lock"):
        yield name, _lock
    for name in system.glob(f"{records.GROUPS}/*"):
        yield name, _group_file
    for pattern in _SPDK_LOCKS:
        for name in system.glob(pattern):
            yield name, _spdk_lock
    for pattern in _DPDK_FOLDERS:
        for name in system.glob(pattern):
            yield name, _dpdk_folder


def _huge_file(system: System, name: str) -> Leftover | None:
    if _is_held(system, name):
        return None
    size = system.stat(name).st_size
    evidence = "no process holds the lock on it that DPDK takes"
    return Leftover(name, "huge pages", size, evidence, lambda: _remove_locked(system, name))


def _lock(system: System, name: str) -> Leftover | None:
    if _is_held(system, name):
        return None
    evidence = "no process holds it"
    return Leftover(name, "lock", 0, evidence, lambda: _remove_locked(system, name))


def _spdk_lock(system: System, name: str) -> Leftover | None:
    if system.is_record_locked(name):
        return None

    def remove() -> None:
        if not system.is_record_locked(name):
            system.remove(name)

    return Leftover(name, "lock", 0, "no process holds it", remove)


def _socket(system: System, name: str) -> Leftover | None:
    probe = socket.socket(socket.AF_UNIX)
    with contextlib.closing(probe):
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(system.path(name)))
        except ConnectionRefusedError:
            evidence = "nobody listens on it"
            return Leftover(name, "socket", 0, evidence, lambda: system.remove(name))
    return None


def _group_file(system: System, name: str) -> Leftover | None:
    group = name.rpartition("/")[2]
    if any(record.iommu_group == group for record in records.all_records(system)):
        return None
    evidence = "no bound drive is in that group"
    return Leftover(name, "permission", 0, evidence, lambda: system.remove(name))


def _dpdk_folder(system: System, name: str) -> Leftover | None:
    config = f"{name}/config"
    if system.exists(config):
        if system.is_record_locked(config):
            return None
        evidence = f"no process holds the lock on {config}"
    else:
        # A process that shares nothing makes the folder and locks nothing in it.
        pid = name.rpartition("spdk_pid")[2]
        if not pid.isdigit() or system.exists(f"/proc/{pid}"):
            return None
        evidence = f"there is no process {pid}"
    return Leftover(name, "state", 0, evidence, lambda: system.remove_tree(name))


def _is_held(system: System, name: str) -> bool:
    if not system.exists(name):
        return False
    fd = system.lock(name, create=False)
    if fd is None:
        return True
    os.close(fd)
    return False


def _remove_locked(system: System, name: str) -> None:
    """While the lock is ours, so that nobody takes it meanwhile."""
    try:
        fd = system.lock(name, create=False)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return
        raise
    if fd is None:
        return
    try:
        system.remove(name)
    finally:
        os.close(fd)
