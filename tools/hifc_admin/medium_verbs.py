# SPDX-License-Identifier: Apache-2.0
"""The verbs that overwrite a medium: format and erase. Nothing else here destroys what it finds.

Both want the medium named once more with --confirm, refuse what the kernel uses, and refuse what
is on it already unless --force is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil

from hifc import device
from hifc.device import DeviceInfo, EraseMethod, InfoFlag
from hifc.errors import ConfigError, HiFCError
from hifc.namespace import Namespace
from hifc.units import parse_size
from hifc_admin import target
from hifc_admin.failures import failure_of
from hifc_admin.parsing import Parser, Verbs, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result, Severity
from hifc_admin.stats_text import namespace_lines
from hifc_admin.system import System
from hifc_admin.target import Target

METHODS = {method.name.lower(): method for method in EraseMethod}
WHAT_IS_LEFT = {
    EraseMethod.DEALLOCATE: "the drive may keep the contents in its cells until it reuses them",
    EraseMethod.OVERWRITE: "the drive may keep older contents in cells that it has put aside",
}


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "format",
        format_namespace,
        "lay an empty namespace on a device; what is there is lost",
        "hifc-admin format 'file:///var/tmp/kv.hifc?size=8GiB' --confirm /var/tmp/kv.hifc",
        honours=("dry_run",),
    )
    _add_medium(parser)
    parser.add_argument(
        "--segment-size",
        metavar="SIZE",
        type=size,
        default=0,
        help="a power of two from 256KiB to 256MiB (default: by the size of the device)",
    )
    parser.add_argument("--label", default="", help="up to 31 bytes that info shows")

    parser = add_verb(
        verbs,
        "erase",
        erase,
        "take everything off a device",
        "hifc-admin erase 'spdk://0000:3b:00.0?ns=1' --confirm S5GXNX0T/1 --method crypto",
        honours=("dry_run",),
    )
    _add_medium(parser)
    parser.add_argument(
        "--method",
        choices=[*METHODS, "sanitize"],
        help="deallocate: tell the drive that nothing is needed; overwrite: write zeros; format: "
        "NVMe Format NVM with user data erase; crypto: the same with cryptographic erase "
        "(default: deallocate, or overwrite where the device does not understand that)",
    )


def _add_medium(parser: Parser) -> None:
    parser.add_argument("uri", metavar="URI")
    parser.add_argument(
        "--confirm",
        metavar="ID",
        help="names the medium once more: the path of a file; SERIAL/NSID, EUI-64 or NGUID of a "
        "drive; NQN/NSID of a fabrics namespace",
    )
    parser.add_argument("--force", action="store_true", help="overwrite what is there")


def size(written: str) -> int:
    """A size in bytes, for argparse."""
    try:
        return parse_size(written)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_namespace(arguments: argparse.Namespace) -> Result:
    medium = target.parse(arguments.uri)
    command = f"hifc-admin format {shlex.quote(arguments.uri)}"
    target.require_confirmation(medium, arguments.confirm, command)
    target.refuse_if_in_use(medium, System())
    if arguments.dry_run:
        _check_format(arguments, medium)
        return _would(arguments.uri, f"lay an empty namespace on {arguments.uri}")
    _format(arguments, arguments.uri)
    with Namespace.open(arguments.uri, read_only=True) as namespace:
        data = {"uri": arguments.uri, **dataclasses.asdict(namespace.stats())}
    return Result(data, [f"formatted {arguments.uri}", *namespace_lines(data)])


def _format(arguments: argparse.Namespace, uri: str, check_only: bool = False) -> None:
    Namespace.format(
        uri,
        segment_size=arguments.segment_size,
        force=arguments.force,
        label=arguments.label,
        check_only=check_only,
    )


def _check_format(arguments: argparse.Namespace, medium: Target) -> None:
    """Raises what format would. A file that is still to be made is tried in memory of its size."""
    path = medium.path
    if path is None or path.exists() or "size" not in medium.parameters:
        _format(arguments, arguments.uri, check_only=True)
        return
    size_bytes = parse_size(medium.parameters["size"], "size")
    room_bytes = shutil.disk_usage(path.parent).free
    if not os.access(path.parent, os.W_OK | os.X_OK):
        detail, fix = f"{path.parent}: this user may not make files there", "another folder or user"
        raise Failure(Exit.PREREQUISITE, Problem("not-permitted", arguments.uri, detail, fix=fix))
    if size_bytes > room_bytes and medium.parameters.get("sparse") != "1":
        detail = f"{path.parent} has room for {room_bytes} bytes, not for {size_bytes}"
        fix = "a smaller size, or sparse=1 to allocate on first write"
        raise Failure(Exit.FAILED, Problem("failed", arguments.uri, detail, fix=fix))
    pretended = f"ram://?size={size_bytes}"
    try:
        _format(arguments, pretended, check_only=True)
    except HiFCError as error:
        found = failure_of(error, arguments.uri)
        detail = found.problem.detail.replace(pretended, arguments.uri)
        raise Failure(found.exit, dataclasses.replace(found.problem, detail=detail)) from error


def erase(arguments: argparse.Namespace) -> Result:
    medium = target.parse(arguments.uri)
    if arguments.method == "sanitize":
        detail = "sanitize reaches all namespaces of a drive and outlives this command"
        fix = (
            "while the kernel drives it: nvme sanitize; here: --method crypto, format or overwrite"
        )
        raise Failure(Exit.REFUSED, Problem("not-supported", arguments.uri, detail, fix=fix))
    command = f"hifc-admin erase {shlex.quote(arguments.uri)}"
    if arguments.method:
        command += f" --method {arguments.method}"
    target.require_confirmation(medium, arguments.confirm, command)
    target.refuse_if_in_use(medium, System())
    found = device.device_info(arguments.uri)
    _refuse_contents(arguments, found)
    method = METHODS[arguments.method] if arguments.method else _gentlest(found)
    name = method.name.lower()
    if method in (EraseMethod.FORMAT, EraseMethod.CRYPTO):
        _refuse_format(arguments.uri, method, found)
    elif method is EraseMethod.DEALLOCATE and InfoFlag.DEALLOCATE not in found.flags:
        _refuse_method(arguments.uri, "it does not understand deallocate", "overwrite")
    if arguments.dry_run:
        return _would(arguments.uri, f"erase {arguments.uri}: {name}")
    device.erase(arguments.uri, method)
    data = {
        "uri": arguments.uri,
        "method": name,
        "size_bytes": found.size_bytes,
        "held": found.signature,
    }
    result = Result(data, [f"erased {arguments.uri} ({name})"])
    if method in WHAT_IS_LEFT:
        left = Problem("may-remain", arguments.uri, WHAT_IS_LEFT[method], severity=Severity.WARNING)
        result.problems.append(left)
    return result


def _gentlest(found: DeviceInfo) -> EraseMethod:
    """The one that wears the least of those that the device understands."""
    can_deallocate = InfoFlag.DEALLOCATE in found.flags
    return EraseMethod.DEALLOCATE if can_deallocate else EraseMethod.OVERWRITE


def _would(uri: str, step: str) -> Result:
    return Result({"uri": uri, "steps": [step]}, [f"would {step}"])


def _refuse_contents(arguments: argparse.Namespace, found: DeviceInfo) -> None:
    """A namespace of ours was confirmed; anything else wants --force as well."""
    if arguments.force:
        return
    if InfoFlag.UNREADABLE in found.flags:
        detail = "what is on it could not be read, so it may be anything"
    elif found.signature and "HiFC" not in found.signature:
        detail = f"it holds {found.signature}"
    else:
        return
    fix = "if nothing there is needed any more, repeat with --force"
    raise Failure(Exit.REFUSED, Problem("occupied", arguments.uri, detail, fix=fix))


def _refuse_format(uri: str, method: EraseMethod, found: DeviceInfo) -> None:
    """Format NVM, unless it is known to reach this one namespace and nothing else."""
    flags = found.flags
    if InfoFlag.FORMAT not in flags:
        _refuse_method(uri, "the device has no Format NVM command", "deallocate or overwrite")
    if method is EraseMethod.CRYPTO and InfoFlag.CRYPTO_ERASE not in flags:
        _refuse_method(uri, "the drive has no cryptographic erase", "format")
    if InfoFlag.WHOLE not in flags:
        _refuse_method(uri, "it is a part of an NVMe namespace", "deallocate or overwrite")
    if InfoFlag.SHARED in flags:
        _refuse_method(uri, "other controllers share the namespace", "deallocate or overwrite")
    if InfoFlag.FORMAT_ALL in flags and found.namespaces != 1:
        detail = f"Format NVM would erase all {found.namespaces} namespaces of the drive"
        _refuse_method(uri, detail, "deallocate or overwrite")


def _refuse_method(uri: str, detail: str, instead: str) -> None:
    problem = Problem("method-refused", uri, detail, fix=f"use --method {instead}")
    raise Failure(Exit.REFUSED, problem)
