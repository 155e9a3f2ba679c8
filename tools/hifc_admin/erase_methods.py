# SPDX-License-Identifier: Apache-2.0
"""The ways to erase a device, which of them one understands, and whom else they would hit.

The driver refuses the same on its own; here it is said before anything is asked of the device, with
what may be used instead.
"""

from __future__ import annotations

from hifc.device.device import DeviceInfo, EraseMethod, InfoFlag, SanitizeState
from hifc_admin.result import Exit, Failure, Problem

SANITIZE = "sanitize"
ONE_NAMESPACE = {method.name.lower(): method for method in EraseMethod}
NAMES = (*ONE_NAMESPACE, SANITIZE)
WHAT_IS_LEFT = {
    "deallocate": "the drive may keep the contents in its cells until it reuses them",
    "overwrite": "the drive may keep older contents in cells that it has put aside",
}


def gentlest(found: DeviceInfo) -> str:
    """The one that wears the least of those that the device understands."""
    return "deallocate" if InfoFlag.DEALLOCATE in found.flags else "overwrite"


def refusal(method: str, found: DeviceInfo) -> str:
    """Why the device cannot be erased so, or must not be; "" if it may be."""
    return _missing(method, found.flags) or _beyond(method, found)


def refuse(uri: str, method: str, found: DeviceInfo) -> None:
    """Raises Failure if the device cannot be erased so, naming the methods that are left."""
    detail = refusal(method, found)
    if detail:
        left = [f"--method {name}" for name in NAMES if not refusal(name, found)]
        problem = Problem("method-refused", uri, detail, fix=f"use {' or '.join(left)}")
        raise Failure(Exit.REFUSED, problem)


def _missing(method: str, flags: InfoFlag) -> str:
    match method:
        case "deallocate" if InfoFlag.DEALLOCATE not in flags:
            return "it does not understand deallocate"
        case "format" | "crypto" if InfoFlag.FORMAT not in flags:
            return "the device has no Format NVM command"
        case "crypto" if InfoFlag.CRYPTO_ERASE not in flags:
            return "the drive has no cryptographic erase"
        case "sanitize" if not flags & (InfoFlag.SANITIZE_BLOCK | InfoFlag.SANITIZE_CRYPTO):
            return "the device has no NVMe Sanitize with block or cryptographic erase"
    return ""


def _beyond(method: str, found: DeviceInfo) -> str:
    """Format NVM and sanitize, unless they are known to reach this namespace and nobody else."""
    flags = found.flags
    if method in WHAT_IS_LEFT:
        return ""
    if InfoFlag.WHOLE not in flags:
        return "it is a part of an NVMe namespace"
    if InfoFlag.SHARED in flags:
        return "other controllers share the namespace"
    if InfoFlag.RESERVED in flags:
        return "another host has the namespace reserved, or has registered to"
    if InfoFlag.RESERVED_UNKNOWN in flags:
        return "the drive did not tell whether another host has the namespace reserved"
    is_whole_drive = method == SANITIZE or InfoFlag.FORMAT_ALL in flags
    if is_whole_drive and found.namespaces != 1:
        command = "sanitize" if method == SANITIZE else "Format NVM"
        return f"{command} would erase all {found.namespaces} namespaces of the drive"
    if method == SANITIZE and found.sanitize.state is SanitizeState.UNKNOWN:
        return "the drive did not tell whether a sanitize runs (Sanitize Status log page)"
    return ""
