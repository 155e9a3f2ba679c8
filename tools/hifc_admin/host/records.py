# SPDX-License-Identifier: Apache-2.0
"""What hifc-admin writes down about drives it bound, and the lock of each drive.

    /run/hifc-admin/BDF.lock       held by whoever changes the drive's driver
    /run/hifc-admin/BDF.json       the drive as the kernel knew it, and how far binding got
    /run/hifc-admin/groups/N       who may open /dev/vfio/N: read by udev/60-hifc.rules
    /etc/hifc/bind.d/BDF.json      what to bind again at the next boot (--persist)

The folder in /run is root's alone: the rule trusts it. A record whose phase is "binding" and whose
lock is free was left by a process that was killed: the drive goes back to its previous driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hifc_admin.host.drives import Drive
from hifc_admin.host.processes import lock_holders
from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem

FOLDER = "/run/hifc-admin"
GROUPS = f"{FOLDER}/groups"
PERSISTED = "/etc/hifc/bind.d"
BINDING = "binding"
BOUND = "bound"


@dataclass(frozen=True)
class Record:
    """One drive. `override` is what driver_override said before."""

    bdf: str
    phase: str
    driver: str
    previous: str | None
    override: str
    owner: str
    group: str
    iommu_group: str | None
    model: str
    serial: str
    namespaces: tuple[tuple[int | None, int, int], ...]  # nsid, bytes, bytes of a logical block

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class Persisted:
    """The options of a bind that is repeated at each boot, for the drive of that serial only:
    addresses move when hardware does."""

    bdf: str
    serial: str
    driver: str
    owner: str
    group: str
    signatures: tuple[str, ...]
    no_iommu: bool

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def record_file(bdf: str) -> str:
    return f"{FOLDER}/{bdf}.json"


def lock_file(bdf: str) -> str:
    return f"{FOLDER}/{bdf}.lock"


def persisted_file(bdf: str) -> str:
    return f"{PERSISTED}/{bdf}.json"


def wants_link(bdf: str) -> str:
    """Enabled for boot means that this link is there."""
    return f"/etc/systemd/system/multi-user.target.wants/hifc-bind@{bdf}.service"


def group_file(group: str) -> str:
    return f"{GROUPS}/{group}"


def make_record(drive: Drive, driver: str, override: str, owner: str, group: str) -> Record:
    """As it is while the drive is being bound."""
    return Record(
        bdf=drive.bdf,
        phase=BINDING,
        driver=driver,
        previous=drive.driver,
        override=override,
        owner=owner,
        group=group,
        iommu_group=drive.iommu_group,
        model=drive.model,
        serial=drive.serial,
        namespaces=tuple((n.nsid, n.size_bytes, n.lba_bytes) for n in drive.namespaces),
    )


def read_record(system: System, bdf: str) -> Record | None:
    """None where there is none. Raises OSError, and Failure where it cannot be understood."""
    found = _load(system, record_file(bdf))
    if found is None:
        return None
    try:
        found["namespaces"] = tuple(tuple(item) for item in found["namespaces"])
        return Record(**found)
    except (TypeError, KeyError) as error:
        raise _unreadable(record_file(bdf), error) from error


def read_persisted(system: System, bdf: str) -> Persisted | None:
    """The same for what is kept over a boot."""
    found = _load(system, persisted_file(bdf))
    if found is None:
        return None
    try:
        found["signatures"] = tuple(found["signatures"])
        return Persisted(**found)
    except (TypeError, KeyError) as error:
        raise _unreadable(persisted_file(bdf), error) from error


def recorded(system: System) -> list[str]:
    """Addresses of the drives that there are records of."""
    names = system.names(FOLDER)
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def all_records(system: System) -> list[Record]:
    """Raises as read_record."""
    found = [read_record(system, bdf) for bdf in recorded(system)]
    return [record for record in found if record is not None]


@contextlib.contextmanager
def locked(system: System, bdf: str, dry_run: bool) -> Iterator[None]:
    """Holds the drive's lock, whose file is gone afterwards; a dry run makes none.

    Raises Failure where another process holds it.
    """
    fd = _lock(system, bdf, dry_run)
    try:
        yield
    finally:
        if fd is not None:
            if not dry_run:
                system.path(lock_file(bdf)).unlink(missing_ok=True)
            os.close(fd)


def _lock(system: System, bdf: str, dry_run: bool) -> int | None:
    name = lock_file(bdf)
    if not system.exists(name):
        if dry_run:
            return None
        system.make_folder(FOLDER)
    fd = system.lock(name)
    if fd is None:
        holders = ", ".join(f"process {pid}" for pid in lock_holders(system, name))
        problem = Problem(
            "locked",
            bdf,
            f"another hifc-admin changes this drive: {holders or 'its process is not to be seen'}",
            f"the lock on {name} is held",
            "wait until it is done, and repeat",
        )
        raise Failure(Exit.REFUSED, problem)
    return fd


def _load(system: System, name: str) -> dict[str, Any] | None:
    text = system.get(name)
    if text is None:
        return None
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> Failure:
    problem = Problem(
        "bad-record",
        name,
        "this file was not written by this version of hifc-admin",
        str(error),
        f"look at the drive with hifc-admin list, then remove {name}",
    )
    return Failure(Exit.FAILED, problem)
