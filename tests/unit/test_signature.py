# SPDX-License-Identifier: Apache-2.0
"""hifc.device.signature: what is on a device, from the bytes at its ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from hifc import Namespace
from hifc.device.signature import edge_bytes, signatures, tail_offset

SIZE_BYTES = 16 << 20


def ends(image: bytes) -> tuple[bytes, bytes, int]:
    size = len(image)
    start = tail_offset(size)
    return image[: edge_bytes(size)], image[start : start + edge_bytes(size)], size


def test_nothing_is_on_an_empty_device() -> None:
    assert signatures(*ends(bytes(SIZE_BYTES + 512))) == []
    assert signatures(b"", b"", 512) == []


def test_all_that_is_there_is_named() -> None:
    image = bytearray(SIZE_BYTES)
    image[:4] = b"XFSB"
    image[-512:-504] = b"EFI PART"
    assert signatures(*ends(bytes(image))) == [
        "an xfs file system",
        "a GPT partition table (its copy at the end)",
    ]


def test_a_namespace_is_named_with_its_label(tmp_path: Path) -> None:
    path = tmp_path / "kv.hifc"
    Namespace.format(f"file://{path}?size=16MiB", label="left shelf")
    assert signatures(*ends(path.read_bytes())) == ["a HiFC namespace with label 'left shelf'"]


def test_parts_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="1048576"):
        signatures(bytes(4096), bytes(4096), SIZE_BYTES)
