# SPDX-License-Identifier: Apache-2.0
"""What a URI names on this machine, the ID that `--confirm` must repeat, and whether it is in use.

Nothing here writes. "Could not check" counts as in use.
"""

from __future__ import annotations

import dataclasses
import shlex
import stat
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from hifc.device import device
from hifc_admin.host import drives
from hifc_admin.host.claims import Claims, claimed_usage
from hifc_admin.host.system import System
from hifc_admin.result import Exit, Failure, Problem

FABRICS = ("spdk+tcp", "spdk+rdma")
# Attributes of an NVMe namespace that the kernel drives.
IDS_OF_BLOCK = ("eui", "nguid")


@dataclasses.dataclass(frozen=True)
class Target:
    """A parsed device URI: scheme://name?parameters."""

    uri: str
    scheme: str
    name: str
    parameters: dict[str, str]

    @property
    def path(self) -> Path | None:
        """The file or block device, symbolic links resolved; None for other devices."""
        return Path(self.name).resolve() if self.scheme == "file" else None

    @property
    def is_block_device(self) -> bool:
        path = self.path
        return path is not None and path.exists() and stat.S_ISBLK(path.stat().st_mode)


def parse(uri: str) -> Target:
    """Splits a URI; whether the driver knows its scheme is the driver's to say."""
    scheme, separator, rest = uri.partition("://")
    if not separator or not scheme or not rest:
        file = f"./{uri} for a file in this folder, " if uri and "/" not in uri else ""
        fix = (
            f"write {file}file:///path?size=8GiB, spdk+tcp://ADDR:PORT/NQN?ns=1 or spdk://BDF?ns=1"
        )
        problem = Problem("bad-uri", uri, "this is not a device URI", fix=fix)
        raise Failure(Exit.USAGE, problem)
    name, _, query = rest.partition("?")
    if "\0" in unquote(name):
        fix = "write the path as it is, with %25 for a percent sign"
        problem = Problem("bad-uri", uri, "the path holds a zero character (%00)", fix=fix)
        raise Failure(Exit.USAGE, problem)
    return Target(uri, scheme, unquote(name), dict(parse_qsl(query, keep_blank_values=True)))


def confirm_ids(target: Target, sysroot: Path = Path("/")) -> list[str]:
    """What names the medium itself and not just the way to it: each will do for --confirm.

    A file: its path. A drive, driven by the kernel or through SPDK: SERIAL/NSID first, since all
    namespaces of a drive share the serial, then its EUI-64 and NGUID where it has them. Fabrics:
    NQN/NSID. Raises Failure where the identity cannot be told, HiFCError where the drive does not
    answer.
    """
    if target.scheme in FABRICS:
        _, _, nqn = target.name.partition("/")
        return [f"{nqn}/{target.parameters.get('ns', '1')}"]
    path = target.path
    if path is not None and not target.is_block_device:
        return [str(path)]
    if path is not None:
        block = sysroot / "sys/class/block" / path.name
        serial, nsid = _read(block / "device/serial"), _read(block / "nsid")
        unique = [_read(block / name).replace(" ", "").replace("-", "") for name in IDS_OF_BLOCK]
        ids = [f"{serial}/{nsid}"] if serial and nsid else [str(path)]
        return ids + [name for name in unique if name.strip("0")]
    return _ids_of_drive(target)


def _ids_of_drive(target: Target) -> list[str]:
    if target.scheme == "spdk":
        found = device.device_info(target.uri)
        if found.serial and found.nsid:
            ids = [f"{found.serial}/{found.nsid}", found.eui64, found.nguid]
            return [name for name in ids if name]
    detail = "a device of this kind has nothing that names it for good"
    fix = "a program lays a namespace there by itself: hifc.Namespace.format"
    problem = Problem("identity-unknown", target.uri, detail, fix=fix)
    raise Failure(Exit.REFUSED, problem)


def require_confirmation(
    target: Target, given: str | None, command: str, role: str = "the medium to overwrite"
) -> None:
    """Raises Failure unless --confirm names the medium. command: what to repeat, without it. role:
    what the command takes the medium for."""
    ids = confirm_ids(target)
    if given in ids:
        return
    said = "it is missing" if given is None else f"it is {given!r}"
    wanted = " or ".join(repr(name) for name in ids)
    problem = Problem(
        "not-confirmed",
        target.uri,
        f"--confirm must be {wanted}; {said}",
        fix=f"if that is {role}: {command} --confirm {shlex.quote(ids[0])}",
    )
    raise Failure(Exit.REFUSED, problem)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def refuse_if_in_use(target: Target, system: System) -> None:
    """Raises Failure if a block device, a partition of it or what is built on them is in use: the
    same check as before bind. What is written on it is not asked here."""
    path = target.path
    if path is None or not target.is_block_device:
        return
    if not system.exists(f"{drives.BLOCK}/{path.name}"):
        detail = f"{drives.BLOCK}/{path.name} is missing, so its use cannot be checked"
        raise Failure(Exit.REFUSED, Problem("not-checked", target.uri, detail))
    claims = Claims(system)
    try:
        usage = claimed_usage(system, drives.of_block_device(system, path.name), claims)
    finally:
        claims.release()
    found = [use.problem(target.uri) for use in usage.uses if not use.override]
    if found:
        raise Failure(Exit.REFUSED, *found)
