# SPDX-License-Identifier: Apache-2.0
"""The verb that takes everything off a device.

A sanitize outlives this command: who runs it again while the drive is at it waits for the end, and
every other method is refused until then.
"""

from __future__ import annotations

import argparse
import shlex

from hifc.device import device
from hifc.device.device import DeviceInfo, InfoFlag, SanitizeState, SanitizeStatus
from hifc.errors import WaitTimeout
from hifc_admin import erase_methods, progress, target
from hifc_admin.erase_methods import SANITIZE
from hifc_admin.host.system import System
from hifc_admin.parsing import Verbs, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result, Severity
from hifc_admin.verbs import medium as medium_verbs

PROGRESS_TOTAL = 100


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "erase",
        erase,
        "take everything off a device",
        "hifc-admin erase 'spdk://0000:3b:00.0?ns=1' --confirm S5GXNX0T/1 --method crypto",
        honours=("dry_run",),
    )
    medium_verbs.add_medium(parser)
    parser.add_argument(
        "--method",
        choices=erase_methods.NAMES,
        help="deallocate: tell the drive that nothing is needed; overwrite: write zeros; format: "
        "NVMe Format NVM with user data erase; crypto: the same with cryptographic erase; "
        "sanitize: NVMe Sanitize of the whole drive, or wait for one that runs "
        "(default: deallocate, or overwrite where the device does not understand that)",
    )


def erase(arguments: argparse.Namespace) -> Result:
    uri = arguments.uri
    medium = target.parse(uri)
    command = f"hifc-admin erase {shlex.quote(uri)}"
    if arguments.method:
        command += f" --method {arguments.method}"
    target.require_confirmation(medium, arguments.confirm, command)
    target.refuse_if_in_use(medium, System())
    found = device.device_info(uri)
    method = arguments.method or erase_methods.gentlest(found)
    state = found.sanitize.state
    waits = method == SANITIZE and state is SanitizeState.RUNNING
    if not waits:
        if method != SANITIZE:
            _refuse_closed(uri, found.sanitize)
        erase_methods.refuse(uri, method, found)
        if state is not SanitizeState.FAILED:  # after which there is nothing to be read
            _refuse_contents(arguments, found)
    if arguments.dry_run:
        what = f"wait for the sanitize of {uri}" if waits else f"erase {uri}: {method}"
        return medium_verbs.would(uri, what)
    data = {"uri": uri, "method": method, "size_bytes": found.size_bytes, "held": found.signature}
    if method == SANITIZE:
        data |= {"action": _action(found, waits), "waited_only": waits}
        _sanitize(arguments)
    else:
        device.erase(uri, erase_methods.ONE_NAMESPACE[method])
    result = Result(data, [f"erased {uri} ({method})"])
    if method in erase_methods.WHAT_IS_LEFT:
        detail = erase_methods.WHAT_IS_LEFT[method]
        result.problems.append(Problem("may-remain", uri, detail, severity=Severity.WARNING))
    return result


def _action(found: DeviceInfo, waits: bool) -> str:
    """What the drive is to do: the driver takes block erase where there is a choice."""
    if waits:
        return found.sanitize.action
    return "block erase" if InfoFlag.SANITIZE_BLOCK in found.flags else "crypto erase"


def _sanitize(arguments: argparse.Namespace) -> None:
    try:
        with progress.of(arguments, "sanitize", PROGRESS_TOTAL, is_bytes=False) as bar:
            device.sanitize(
                arguments.uri, lambda status: bar.at(int(status.progress * PROGRESS_TOTAL))
            )
    except (KeyboardInterrupt, WaitTimeout):
        detail = "no longer waited for; the drive goes on with it and cannot be used meanwhile"
        fix = "to wait for its end: the same command again"
        problem = Problem("sanitizing", arguments.uri, detail, fix=fix)
        raise Failure(Exit.PARTLY, problem) from None


def _refuse_closed(uri: str, status: SanitizeStatus) -> None:
    """Every other method, while a sanitize keeps the drive from being read and written."""
    if status.state is SanitizeState.RUNNING:
        detail = f"a sanitize ({status.action}) runs, {status.progress:.0%} done"
        fix = "wait for it: --method sanitize"
        raise Failure(Exit.REFUSED, Problem("sanitizing", uri, detail, fix=fix))
    if status.state is SanitizeState.FAILED:
        detail = (
            f"a sanitize ({status.action}) failed; until another one succeeds, the drive is closed"
        )
        fix = "start another: --method sanitize"
        raise Failure(Exit.REFUSED, Problem("sanitize-failed", uri, detail, fix=fix))


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
