# SPDX-License-Identifier: Apache-2.0
"""docs/operating.md shows what really happens: its commands run in order, and say the same."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import transcript

from hifc_admin.host.accounts import HIFC_GROUP
from hifc_admin.host.install import DROP_IN, FILES, RUN_FOLDER, SERVICES, UNITS
from vm.pci import Drive

PARTS = ["list", "bind", "install", "hugepages", "format", "smart", "bench", "status", "unbind"]


@pytest.fixture
def nothing_done(free: Drive, used: Drive) -> Iterator[None]:
    """A host on which nobody has installed anything, with empty drives but the used one."""
    for name in (*FILES.values(), f"{UNITS}/{SERVICES}.d/50-{DROP_IN}"):
        Path(name).unlink(missing_ok=True)
    subprocess.run(["groupdel", HIFC_GROUP], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", RUN_FOLDER], check=True)
    subprocess.run(["blkdiscard", "-f", free.pci.block_device()], check=True)
    with transcript.data_in_use(Path(f"{used.pci.block_device()}p1")):
        yield


def shape(line: str) -> str:
    """Without what differs from run to run: numbers, and the spaces that align them."""
    return re.sub(r"\s+", " ", re.sub(r"[0-9][0-9.]*", "#", line)).strip()


def test_the_transcript_of_the_document_is_what_happens(nothing_done: None) -> None:
    steps = transcript.documented()
    assert [part for part in PARTS if not any(part in step.words for step in steps)] == []
    for step in steps:
        found = transcript.run(step)
        assert found.code == step.code, found.text
        first, shown = (next(shape(line) for line in s.lines if line) for s in (step, found))
        assert first == shown, found.text
