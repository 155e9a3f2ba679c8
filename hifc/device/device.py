# SPDX-License-Identifier: Apache-2.0
"""A device as a whole, whatever stands on it: what it says of itself, and erasing it."""

from __future__ import annotations

import ctypes
import enum
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hifc.errors import ConfigError, HiFCError
from hifc.native_lib import layouts, libhifc
from hifc.util.checking import text

_ACTIONS = {2: "block erase", 3: "overwrite", 4: "crypto erase"}  # SANACT
_NO_ESTIMATE = 0xFFFFFFFF
_PATH = re.compile(r"/|\.{1,2}(/|$)")
_PARAMETERS = re.compile(r"[a-z_]+=[^&?/]*(&[a-z_]+=[^&?/]*)*")


def device_uri(device: str | os.PathLike[str]) -> str:
    """The URI of a device that is named by a URI, which is returned as it is, or by a path.

    A path is a PathLike, or a text that begins with / or ./ or ../, and becomes file://PATH; a
    relative one is resolved against the working directory at once. Behind a path in a text
    parameters may stand as in a URI: ./kv.hifc?size=8GiB. ConfigError: neither URI nor path, with
    what to write.
    """
    if isinstance(device, os.PathLike):
        path, query = text("device", os.fspath(device)), ""
    else:
        given = text("device", device)
        if "://" in given:
            return given
        if not _PATH.match(given):
            advice = f"write ./{given} for a file in this folder, or " if given else ""
            raise ConfigError(
                f"{given!r} is not a device URI: {advice}a URI such as "
                "file:///var/lib/hifc.img?size=8GiB"
            )
        path, mark, query = given.rpartition("?")
        if not mark or not _PARAMETERS.fullmatch(query):
            path, query = given, ""
    place = os.path.abspath(path).replace("%", "%25").replace("?", "%3F")  # noqa: PTH100
    return f"file://{place}?{query}" if query else f"file://{place}"


class EraseMethod(enum.IntEnum):
    """enum hifc_erase_method."""

    DEALLOCATE = 1  # the drive is told that nothing is needed; its cells may keep it
    OVERWRITE = 2  # zeros everywhere; spare cells may keep it
    FORMAT = 3  # Format NVM with user data erase
    CRYPTO = 4  # Format NVM with cryptographic erase


class InfoFlag(enum.IntFlag):
    """enum hifc_info_flag."""

    NVME = 0x1
    DEALLOCATE = 0x2
    WRITE_CACHE = 0x4
    HEALTH = 0x8
    UNREADABLE = 0x10
    WHOLE = 0x20
    SHARED = 0x40
    FORMAT = 0x80
    FORMAT_ALL = 0x100
    CRYPTO_ERASE = 0x200
    RESERVED = 0x400
    RESERVED_UNKNOWN = 0x800
    SANITIZE_BLOCK = 0x1000
    SANITIZE_CRYPTO = 0x2000


class SanitizeState(enum.IntEnum):
    """enum hifc_sanitize_state."""

    NONE = 0
    DONE = 1
    RUNNING = 2  # reads and writes fail until it has ended
    FAILED = 3  # reads and writes fail until another one succeeds
    UNKNOWN = 4  # the drive would not say


@dataclass(frozen=True)
class SanitizeStatus:
    """What the drive tells of its last sanitize: struct hifc_sanitize_status."""

    state: SanitizeState
    action: str  # "block erase", "overwrite", "crypto erase"; "" if there was none
    progress: float  # 0 to 1, while it runs
    estimate_s: int | None  # what the whole of it takes, where the drive says so


@dataclass(frozen=True)
class DeviceInfo:
    """struct hifc_device_info."""

    size_bytes: int
    lba_bytes: int
    flags: InfoFlag
    nsid: int  # 0: no NVMe namespace
    namespaces: int  # of the whole drive, those that this controller cannot see included
    eui64: str  # hexadecimal, "" where the drive has none
    nguid: str
    model: str
    serial: str
    firmware: str
    signature: str  # what stands on it; "" if nothing is known
    health: bytes | None  # the SMART / health log page, 512 bytes
    health_problem: str  # why there is none
    sanitize: SanitizeStatus


def device_info(uri: str | os.PathLike[str]) -> DeviceInfo:
    """What the device that uri names says of itself. Changes nothing. uri: as device_uri takes it.

    DeviceBusy: a process owns it. NotPermitted, ConfigError: as for Namespace.open.
    """
    raw = layouts.DeviceInfo()
    libhifc.library().hifc_device_info(device_uri(uri).encode(), ctypes.byref(raw))
    flags = InfoFlag(raw.flags)
    return DeviceInfo(
        size_bytes=raw.size_bytes,
        lba_bytes=raw.lba_bytes,
        flags=flags,
        nsid=raw.nsid,
        namespaces=raw.namespaces,
        eui64=_hex(raw.eui64),
        nguid=_hex(raw.nguid),
        model=_text(raw.model),
        serial=_text(raw.serial),
        firmware=_text(raw.firmware),
        signature=_text(raw.signature),
        health=bytes(raw.health) if InfoFlag.HEALTH in flags else None,
        health_problem=_text(raw.health_problem),
        sanitize=_sanitize_status(raw.sanitize),
    )


def erase(uri: str | os.PathLike[str], method: EraseMethod) -> None:
    """Takes everything off the device, whatever it is: nobody is asked here.

    NotSupported: the device has no such method. NotPermitted: it would reach beyond this
    namespace, or another host has it reserved.
    """
    libhifc.library().hifc_erase(device_uri(uri).encode(), int(method))


def sanitize(uri: str | os.PathLike[str], watch: Callable[[SanitizeStatus], None]) -> None:
    """Sanitizes the drive, all of it, or waits for a sanitize that runs already.

    watch is called about once a second; what it raises ends the waiting and is raised here, while
    the drive goes on. DeviceError: it failed. NotSupported, NotPermitted: as for erase.
    """
    raised: list[BaseException] = []

    def call(status: Any, _argument: Any) -> int:
        try:
            watch(_sanitize_status(status.contents))
        except BaseException as error:  # noqa: BLE001 - an interrupt, too: C cannot hand it on
            raised.append(error)
        return len(raised)

    try:
        libhifc.library().hifc_sanitize(
            device_uri(uri).encode(), layouts.SANITIZE_WATCH(call), None
        )
    except HiFCError:
        if raised:
            raise raised[0] from None
        raise


def _sanitize_status(raw: Any) -> SanitizeStatus:
    return SanitizeStatus(
        state=SanitizeState(raw.state),
        action=_ACTIONS.get(raw.action, ""),
        progress=raw.progress / 65536,
        estimate_s=None if raw.estimate_s == _NO_ESTIMATE else raw.estimate_s,
    )


def _hex(field: Any) -> str:
    found = bytes(field)
    return found.hex() if any(found) else ""


def _text(field: bytes) -> str:
    return field.decode("utf-8", "replace")
