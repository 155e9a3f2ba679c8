# SPDX-License-Identifier: Apache-2.0
"""What is mounted, in every mount namespace of the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hifc_admin.host.system import System


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    device: str  # "259:3"; of a btrfs or ZFS file system a number of its own
    folder: str
    kind: str
    source: str
    options: str
    file: str  # where it was seen
    is_host: bool  # in the mount namespace of process 1, or in our own


def own_mounts(system: System) -> list[Mount]:
    """What this process sees. Raises OSError."""
    return list(_parse(system.read("/proc/self/mountinfo"), "/proc/self/mountinfo", True))


def all_mounts(system: System) -> list[Mount]:
    """Those of all processes, each namespace once. Raises OSError where one cannot be read."""
    found = own_mounts(system)
    seen = {system.link("/proc/self/ns/mnt")}
    pids = sorted((name for name in system.names("/proc") if name.isdigit()), key=int)
    for pid in pids:
        try:
            name = system.link(f"/proc/{pid}/ns/mnt")
            if name is None or name in seen:
                continue
            text = system.read(f"/proc/{pid}/mountinfo")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        except OSError as error:
            if _is_ending(system, pid):
                continue
            raise OSError(error.errno, f"the mounts of process {pid}: {error.strerror}") from error
        seen.add(name)
        found += _parse(text, f"/proc/{pid}/mountinfo", pid == "1")
    return found


def _is_ending(system: System, pid: str) -> bool:
    """Whether a process is gone, or a zombie, which has no mounts any more."""
    stat = system.attribute(f"/proc/{pid}/stat")
    return stat is None or stat.rpartition(")")[2].split()[:1] in (["Z"], ["X"])


def _parse(text: str, file: str, is_host: bool) -> Iterator[Mount]:
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        fields, more = head.split(), tail.split()
        if len(fields) < 5 or len(more) < 2:
            continue
        yield Mount(
            device=fields[2],
            folder=unescape(fields[4]),
            kind=more[0],
            source=unescape(more[1]),
            options=more[2] if len(more) > 2 else "",
            file=file,
            is_host=is_host,
        )


def unescape(text: str) -> str:
    r"""The kernel writes spaces in paths as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
