# SPDX-License-Identifier: Apache-2.0
"""Which exit code and which problem an error of HiFC or of the system becomes."""

from __future__ import annotations

import errno
import shlex

from hifc import errors
from hifc_admin.result import Exit, Failure, Problem

# The first class that fits counts, so special ones come first.
_CODES: tuple[tuple[type[Exception], str, Exit], ...] = (
    (errors.NotPermitted, "not-permitted", Exit.PREREQUISITE),
    (errors.LibraryError, "library", Exit.PREREQUISITE),
    (errors.NotSupported, "not-supported", Exit.PREREQUISITE),
    (errors.BufferExhausted, "no-memory", Exit.PREREQUISITE),
    (errors.DeviceBusy, "in-use", Exit.REFUSED),
    (errors.ConfigError, "bad-argument", Exit.USAGE),
    (errors.CorruptionError, "corrupt", Exit.FAILED),
    (errors.FormatError, "no-namespace", Exit.FAILED),
    (errors.DeviceError, "device", Exit.FAILED),
    (errors.HiFCError, "failed", Exit.FAILED),
    (PermissionError, "not-permitted", Exit.PREREQUISITE),
    (OSError, "system", Exit.FAILED),
)
# By NVMe status: the drive fails every read and write.
_SANITIZE = {
    (0, 0x1C): ("sanitize-failed", "start another: hifc-admin erase --method sanitize"),
    (0, 0x1D): ("sanitizing", "wait for it: hifc-admin erase --method sanitize"),
}


def failure_of(error: Exception, subject: str) -> Failure:
    """The Failure for an exception out of the hifc package or the operating system."""
    detail = what_failed(error)
    if isinstance(error, errors.HiFCError) and error.code == -errno.EEXIST:
        fix = "if nothing there is needed any more, repeat with --force"
        return Failure(Exit.REFUSED, Problem("occupied", subject, detail, fix=fix))
    if isinstance(error, errors.HiFCError) and error.code == -errno.ENOENT:
        return Failure(Exit.FAILED, Problem("not-found", subject, detail, fix=error.fix))
    if isinstance(error, errors.DeviceError) and (error.sct, error.sc) in _SANITIZE:
        code, fix = _SANITIZE[error.sct, error.sc]
        return Failure(Exit.FAILED, Problem(code, subject, detail, fix=fix))
    for kind, code, exit_code in _CODES:
        if isinstance(error, kind):
            return Failure(exit_code, Problem(code, subject, detail, fix=_fix(error, subject)))
    raise error


def what_failed(error: Exception) -> str:
    """The message without what to do, which libhifc says in the same breath."""
    advice = error.fix if isinstance(error, errors.HiFCError) else ""
    return str(error).replace(f"; {advice}", "") if advice else str(error)


def _fix(error: Exception, subject: str) -> str:
    if isinstance(error, errors.DeviceBusy) and error.holders:
        owner = f" (process {', '.join(map(str, error.holders))})"
        stats = f"hifc-admin stats {shlex.quote(subject)}"
        return f"ask the process that owns it{owner}: {stats}, or stop it first"
    if isinstance(error, errors.BufferExhausted) and subject.startswith("spdk"):
        return "hifc-admin hugepages shows them; --count N reserves more"
    if isinstance(error, errors.HiFCError):
        return error.fix
    if isinstance(error, PermissionError):
        return "run it as root, or as a user who may"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there any more: hifc-admin status"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is missing: check the path, or what --sysroot names"
    return ""
