# SPDX-License-Identifier: Apache-2.0
"""Every error that HiFC raises, and the one place where an errno of libhifc becomes one of them.

A message says what failed, where, and what to do. Miss, exists, pending, rejected, retry and no
space are answers of a request (`hifc.Answer`), not errors; they become errors only where a call
has no answer to give.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

# NVMe opcodes of the NVM command set that HiFC sends.
_COMMANDS = {0x00: "flush", 0x01: "write", 0x02: "read", 0x09: "deallocate"}


class HiFCError(Exception):
    """Base of all errors of HiFC.

    code: the negative errno of libhifc, or 0; fix: what to do about it where libhifc says so, which
    stands in the message as well.
    """

    code: int = 0
    fix: str = ""


class DeviceError(HiFCError):
    """The device failed a command.

    sct, sc: NVMe status code type and status code (0, 0 where the failure is not an NVMe status);
    command: "read", "write", ...; lba: first logical block; blocks: count of logical blocks.
    """

    def __init__(
        self,
        message: str,
        *,
        sct: int = 0,
        sc: int = 0,
        command: str = "",
        lba: int = 0,
        blocks: int = 0,
    ) -> None:
        super().__init__(message)
        self.sct = sct
        self.sc = sc
        self.command = command
        self.lba = lba
        self.blocks = blocks


class CorruptionError(HiFCError):
    """Stored bytes do not match their checksum; the destination buffer was zeroed."""

    def __init__(
        self,
        message: str,
        *,
        what: str = "",
        where: str = "",
        expected: int | None = None,
        found: int | None = None,
    ) -> None:
        super().__init__(message)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found


class FormatError(HiFCError):
    """The device holds no HiFC namespace, another one, a damaged one or one of a newer version."""


class ConfigError(HiFCError, ValueError):
    """A setting, a device URI or an option makes no sense."""


class InvalidRequest(HiFCError, ValueError):
    """An argument of a call makes no sense: a key of the wrong length, a strided buffer, ..."""


class NoSpace(HiFCError):
    """Nothing that may be evicted is left on the device, or the file system has no room for it."""


class BufferExhausted(HiFCError, MemoryError):
    """The buffer pool has no room for this buffer: free some, or open with a larger pool_size."""


class BackPressure(HiFCError):
    """A bounded queue stayed full for longer than a synchronous call waits."""


class WaitTimeout(HiFCError, TimeoutError):
    """A bounded wait ran out."""


class DeviceBusy(HiFCError):
    """Another process owns the device. `holders`: their process ids, as far as known."""

    def __init__(self, message: str, *, holders: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.holders = holders


class NotPermitted(HiFCError, PermissionError):
    """The operating system refused. `fix`: what gives this user the right."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class MissingPackage(HiFCError, ImportError):
    """An optional package is not installed, or its release is too old.

    package: its name; extra: the extra of HiFC that brings it.
    """

    def __init__(self, message: str, *, package: str = "", extra: str = "") -> None:
        super().__init__(message)
        self.package = package
        self.extra = extra
        self.fix = f"pip install 'hifc[{extra}]'" if extra else ""


class NotSupported(HiFCError):
    """This device or this build cannot do it."""


class ClosedError(HiFCError):
    """The handle was closed, or the device was detached from it."""


class ForkError(ClosedError):
    """The handle belongs to the parent of this process: open the namespace after fork()."""


class LibraryError(HiFCError, ImportError):
    """libhifc.so is missing or does not fit this package."""


@dataclass(frozen=True)
class Detail:
    """What libhifc knows about a failure: struct hifc_error."""

    code: int = 0
    sct: int = 0
    sc: int = 0
    opcode: int = 0
    lba: int = 0
    blocks: int = 0
    checksums: tuple[int, int] | None = None  # expected and found
    message: str = ""
    fix: str = ""  # the end of message that says what to do
    holders: tuple[int, ...] = ()  # process ids


def _name(code: int) -> str:
    return errno.errorcode.get(-code, str(code))


def error_of(code: int, detail: Detail | None, *, doing: str, where: str = "") -> HiFCError:
    """The exception for a negative errno that libhifc returned while `doing` something at `where`.

    `detail` counts only where it tells of the same failure, that is, has the same code.
    """
    known = detail if detail is not None and detail.code == code else Detail(code=code)
    place = f" on {where}" if where and where not in known.message else ""
    text = known.message or os.strerror(-code)
    error = _classify(code, known, f"{doing}{place}: {text} [{_name(code)}]", doing, where)
    error.code = code
    error.fix = known.fix or error.fix
    return error


def _classify(code: int, known: Detail, message: str, doing: str, where: str) -> HiFCError:
    opening = doing in ("open", "format")
    match -code:
        case errno.EIO | errno.ENODEV | errno.ENXIO | errno.ECANCELED | errno.EREMOTEIO:
            return DeviceError(
                message,
                sct=known.sct,
                sc=known.sc,
                command=_COMMANDS.get(known.opcode, f"opcode {known.opcode:#04x}"),
                lba=known.lba,
                blocks=known.blocks,
            )
        case errno.EBADMSG:
            expected, found = known.checksums or (None, None)
            return CorruptionError(message, what=doing, where=where, expected=expected, found=found)
        case errno.ENOSPC:
            return NoSpace(message)
        case errno.EBUSY:
            return DeviceBusy(message, holders=known.holders)
        case errno.EPERM | errno.EACCES:
            return NotPermitted(message)
        case errno.EROFS:
            return NotPermitted(message, fix="open the namespace without read_only")
        case errno.ESHUTDOWN:
            return ClosedError(message)
        case errno.ECHILD:
            return ForkError(message)
        case errno.ENOMEM:
            return BufferExhausted(message)
        case errno.ETIMEDOUT:
            return WaitTimeout(message)
        case errno.EAGAIN:
            return BackPressure(message)
        case errno.EOPNOTSUPP | errno.ENOSYS:
            return NotSupported(message)
        case errno.ENOMEDIUM | errno.EPROTONOSUPPORT | errno.EEXIST | errno.EUCLEAN:
            return FormatError(message)
        case errno.EFBIG if opening:  # a size that cannot be, or a truncated image
            return ConfigError(message) if doing == "format" else FormatError(message)
        case errno.EINVAL | errno.ENOENT | errno.ENAMETOOLONG if opening:
            return ConfigError(message)
        case errno.EINVAL | errno.EFBIG | errno.ENOENT | errno.EMSGSIZE | errno.ERANGE:
            return InvalidRequest(message)
        case _:
            return HiFCError(message)
