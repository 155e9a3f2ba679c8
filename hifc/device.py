# SPDX-License-Identifier: Apache-2.0
"""A device as a whole, whatever stands on it: what it says of itself, and erasing it."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Any

from hifc import driver


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


@dataclass(frozen=True)
class DeviceInfo:
    """struct hifc_device_info."""

    size_bytes: int
    lba_bytes: int
    flags: InfoFlag
    nsid: int  # 0: no NVMe namespace
    namespaces: int  # active ones of the whole drive
    eui64: str  # hexadecimal, "" where the drive has none
    nguid: str
    model: str
    serial: str
    firmware: str
    signature: str  # what stands on it; "" if nothing is known
    health: bytes | None  # the SMART / health log page, 512 bytes
    health_problem: str  # why there is none


def device_info(uri: str) -> DeviceInfo:
    """What the device that uri names says of itself. Changes nothing.

    DeviceBusy: a process owns it. NotPermitted, ConfigError: as for Namespace.open.
    """
    raw = driver.DeviceInfo()
    driver.library().hifc_device_info(uri.encode(), ctypes.byref(raw))
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
    )


def erase(uri: str, method: EraseMethod) -> None:
    """Takes everything off the device, whatever it is: nobody is asked here.

    NotSupported: the device has no such method. NotPermitted: it would reach beyond this namespace.
    """
    driver.library().hifc_erase(uri.encode(), int(method))


def _hex(field: Any) -> str:
    found = bytes(field)
    return found.hex() if any(found) else ""


def _text(field: bytes) -> str:
    return field.decode("utf-8", "replace")
