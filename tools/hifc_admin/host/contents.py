# SPDX-License-Identifier: Apache-2.0
"""What is written on a block device: signatures, a ZFS pool's name, a HiFC namespace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hifc.device.signature import edge_bytes, signatures, tail_offset
from hifc_admin.host.drives import size_of
from hifc_admin.host.system import System

_ZFS_LABEL_START = 16 << 10
_ZFS_LABEL_END = 128 << 10
# An XDR pair of the label's list: the length of its name, "name", type 9 (string), one element.
_ZFS_NAME = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01"
_ZFS_NAME_MAX_BYTES = 255


@dataclass(frozen=True)
class Contents:
    """Of one block device or partition."""

    node: str
    names: tuple[str, ...]  # "an ext4 file system"; without HiFC's own
    hifc: str  # "a HiFC namespace with label 'kv'", or nothing
    zfs_pool: str  # the pool that a ZFS member says it belongs to


def look(system: System, node: str, held: Mapping[str, int] | None = None) -> Contents:
    """Reads both ends of /dev/NODE, through the descriptor in `held` if it is there.

    Raises OSError where they cannot be read.
    """
    size = size_of(system, node)
    fd = held.get(node) if held else None
    own = system.open(f"/dev/{node}", os.O_RDONLY) if fd is None else None
    try:
        head, tail = (
            _read_at(own if fd is None else fd, edge_bytes(size), offset, node)
            for offset in (0, tail_offset(size))
        )
    finally:
        if own is not None:
            os.close(own)
    names = signatures(head, tail, size)
    return Contents(
        node=node,
        names=tuple(name for name in names if not is_hifc(name)),
        hifc=next(filter(is_hifc, names), ""),
        zfs_pool=_zfs_pool(head) if "a ZFS pool member" in names else "",
    )


def is_hifc(name: str) -> bool:
    return " HiFC namespace" in name


def short_name(name: str) -> str:
    """ "an ext4 file system" -> "ext4": what the user says to override it."""
    words = name.split()
    return words[1].lower() if len(words) > 1 else name.lower()


def _read_at(fd: int | None, count: int, offset: int, node: str) -> bytes:
    assert fd is not None
    data = bytearray()
    while len(data) < count:
        piece = os.pread(fd, count - len(data), offset + len(data))
        if not piece:
            raise OSError(f"/dev/{node} ends at {offset + len(data)}, before its size")
        data += piece
    return bytes(data)


def _zfs_pool(head: bytes) -> str:
    """From the list in the first label; "?" where it has none, since a member has a pool."""
    at = head.find(_ZFS_NAME, _ZFS_LABEL_START, _ZFS_LABEL_END)
    if at < 0:
        return "?"
    at += len(_ZFS_NAME)
    length = int.from_bytes(head[at : at + 4], "big")
    if not 0 < length <= _ZFS_NAME_MAX_BYTES:
        return "?"
    return head[at + 4 : at + 4 + length].decode("utf-8", "replace")
