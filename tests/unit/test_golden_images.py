# SPDX-License-Identifier: Apache-2.0
"""Images that an earlier build wrote are read as they were meant: the format did not change.

Both hold the same values. One was closed, the other left by kill -9, so that it is read by a scan.
Made by 0.1.0 before driver/ was divided into floors; a new version of the format adds images and
keeps these.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hifc import Answer, Namespace

IMAGES = Path(__file__).parents[1] / "golden"
DELETED = set(range(0, 60, 7))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value(number: int) -> bytes:
    return bytes([number]) * [700, 4096, 30000, 40960][number % 4]


@pytest.mark.parametrize("name", ["closed", "killed"])
def test_an_earlier_image_opens(name: str, tmp_path: Path) -> None:
    image = tmp_path / f"{name}.img"
    image.write_bytes(gzip.decompress((IMAGES / f"{name}.img.gz").read_bytes()))
    with Namespace.open(image, pool_size="4MiB", owner_socket=False) as ns:
        assert ns.stats().label == "golden"
        for number in range(60):
            found = ns.get(key(number))
            if number in DELETED:
                assert found is None
            else:
                assert found is not None
                assert bytes(found) == value(number)
            if number % 4 == 3 and number not in DELETED:  # stored in ten parts
                part = ns.get_range(key(number), 8192, 4096)
                assert part is not None
                assert bytes(part) == value(number)[8192:12288]
        assert ns.get(key(100)) is None, "a swap entry outlived its process"
        assert ns.check(payload=True).problems == 0
        assert ns.put(key(1000), b"new") == Answer.OK
