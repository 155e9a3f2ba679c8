# SPDX-License-Identifier: Apache-2.0
"""format, and what it has in common with erase, the other verb that destroys what it finds.

Both want the medium named once more with --confirm, refuse what the kernel uses, and refuse what
is on it already unless --force is given. A file that does not exist yet holds nothing that could be
lost, so `format` makes it without --confirm.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil

from hifc.errors import ConfigError, HiFCError
from hifc.namespace.namespace import Namespace
from hifc.util.units import parse_size
from hifc_admin import scan, target
from hifc_admin.engine.stats_text import namespace_lines
from hifc_admin.failures import failure_of
from hifc_admin.host.system import System
from hifc_admin.parsing import Parser, Verbs, add_uri, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result
from hifc_admin.target import Target


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "format",
        format_namespace,
        "lay an empty namespace on a device; what is there is lost",
        "hifc-admin format 'file:///var/tmp/kv.hifc?size=8GiB'",
        honours=("dry_run",),
    )
    add_medium(parser)
    parser.add_argument(
        "--segment-size",
        metavar="SIZE",
        type=size,
        default=0,
        help="a power of two from 256KiB to 256MiB (default: by the size of the device)",
    )
    parser.add_argument("--label", default="", help="up to 31 bytes that info shows")


def add_medium(parser: Parser) -> None:
    """The arguments of a verb that overwrites."""
    add_uri(parser)
    parser.add_argument(
        "--confirm",
        metavar="ID",
        help="names the medium once more: the path of a file; SERIAL/NSID, EUI-64 or NGUID of a "
        "drive; NQN/NSID of a fabrics namespace. Not needed by format for a file that does not "
        "exist yet",
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
    if arguments.confirm is None and _is_new_file(medium):
        # What another program puts there from now on was confirmed by nobody.
        arguments.force = False
    else:
        target.require_confirmation(medium, arguments.confirm, command)
    target.refuse_if_in_use(medium, System())
    if arguments.dry_run:
        _check_format(arguments, medium)
        return would(arguments.uri, f"lay an empty namespace on {arguments.uri}")
    _format(arguments, arguments.uri)
    with scan.look(arguments.uri) as namespace:
        data = {"uri": arguments.uri, **dataclasses.asdict(namespace.stats())}
    return Result(data, [f"formatted {arguments.uri}", *namespace_lines(data)])


def _is_new_file(medium: Target) -> bool:
    return medium.path is not None and not os.path.lexists(medium.name) and not medium.path.exists()


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
    is_device = str(path).startswith("/dev/") and not str(path).startswith("/dev/shm/")
    if path is None or path.exists() or is_device or "size" not in medium.parameters:
        _format(arguments, arguments.uri, check_only=True)
        return
    size_bytes = parse_size(medium.parameters["size"], "size")
    if not path.parent.is_dir():
        detail, fix = f"{path.parent}: there is no such folder", "make it, or name another one"
        raise Failure(Exit.FAILED, Problem("not-found", arguments.uri, detail, fix=fix))
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


def would(uri: str, step: str) -> Result:
    """The result of --dry-run."""
    return Result({"uri": uri, "steps": [step]}, [f"would {step}"])
