# SPDX-License-Identifier: Apache-2.0
"""Which processes hold a device node open."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass

from hifc_admin.host.system import System

# The first pid namespace of a machine, in which every process can be seen.
FIRST_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Holder:
    pid: int
    command: str
    node: str  # the name in /dev
    evidence: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def holders_of(system: System, nodes: Collection[str], numbers: Collection[str]) -> list[Holder]:
    """Processes other than this one with a descriptor of one of the nodes ("nvme0n1",
    "vfio/12"), by its name or by its device number ("259:1").

    Raises OSError where a process cannot be looked at, or where not all of them can be seen.
    """
    if system.link("/proc/self/ns/pid") != FIRST_PID_NAMESPACE:
        detail = "this is a container: processes outside of it cannot be seen; run it on the host"
        raise OSError(errno.EPERM, detail)
    found = []
    for pid in sorted((name for name in system.names("/proc") if name.isdigit()), key=int):
        if int(pid) != os.getpid():
            found += _holders_in(system, pid, nodes, numbers)
    return found


def _holders_in(
    system: System, pid: str, nodes: Collection[str], numbers: Collection[str]
) -> list[Holder]:
    found = {}
    try:
        for fd in system.names(f"/proc/{pid}/fd"):
            name = f"/proc/{pid}/fd/{fd}"
            link = system.link(name)
            # Only nodes are looked at: stat of a file on a dead file server would hang.
            if link is None or not link.startswith("/dev/"):
                continue
            node = link.removeprefix("/dev/").removesuffix(" (deleted)")
            if node in nodes or system.device_number(name) in numbers:
                found[node] = f"{name} -> {link}"
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended
    except OSError as error:
        raise OSError(error.errno, f"the files of process {pid}: {error.strerror}") from error
    command = system.attribute(f"/proc/{pid}/comm") or "?"
    return [Holder(int(pid), command, node, evidence) for node, evidence in found.items()]


def lock_holders(system: System, name: str) -> list[int]:
    """Processes that hold a flock of a file, by /proc/locks; none where it does not tell."""
    try:
        status = system.stat(name)
    except OSError:
        return []
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = []
    for line in (system.attribute("/proc/locks") or "").splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted:
            found.append(int(fields[4]))
    return found
