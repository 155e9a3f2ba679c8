# SPDX-License-Identifier: Apache-2.0
"""Which devices this host boots from and has its system on, mounted or not."""

from __future__ import annotations

from collections.abc import Iterator

from hifc_admin.host.mounts import unescape
from hifc_admin.host.system import System

FOLDERS = ("/", "/usr", "/boot", "/boot/efi", "/boot/firmware", "/efi")
# systemd-boot and its like leave the partition that the firmware started them from.
_LOADER = "/sys/firmware/efi/efivars/LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
_LOADER_ATTRIBUTES_BYTES = 4
_BY = {
    "UUID": "by-uuid",
    "PARTUUID": "by-partuuid",
    "LABEL": "by-label",
    "PARTLABEL": "by-partlabel",
}


def named_devices(system: System) -> Iterator[tuple[str, str]]:
    """(path of a device, where it is named) of all that the host would boot from.

    A ZFS dataset comes as "ZFS=pool/dataset". Raises OSError.
    """
    for word in (system.get("/proc/cmdline") or "").split():
        name, _, value = word.partition("=")
        if name in ("root", "mount.usr") and value:
            yield device_path(value), f"/proc/cmdline: {word}"
    for line in (system.get("/etc/fstab") or "").splitlines():
        fields = line.split()
        if len(fields) >= 3 and not fields[0].startswith("#") and fields[1] in FOLDERS:
            is_zfs = fields[2] == "zfs"
            spec = f"ZFS={fields[0]}" if is_zfs else device_path(unescape(fields[0]))
            yield spec, f"/etc/fstab: {' '.join(fields[:3])}"
    if system.exists(_LOADER):
        loader = system.read_bytes(_LOADER)[_LOADER_ATTRIBUTES_BYTES:]
        uuid = loader.decode("utf-16-le", "replace").rstrip("\0").lower()
        yield device_path(f"PARTUUID={uuid}"), "the boot loader's LoaderDevicePartUUID"


def device_path(spec: str) -> str:
    """ "UUID=12ab" -> "/dev/disk/by-uuid/12ab"; what is a path already stays one."""
    kind, _, value = spec.partition("=")
    return f"/dev/disk/{_BY[kind]}/{value.strip(chr(34))}" if kind in _BY else spec
