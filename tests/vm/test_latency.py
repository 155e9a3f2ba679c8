# SPDX-License-Identifier: Apache-2.0
"""What tools/bench/latency runs: both ways of reading work on the same drive, one after the other.
How long they take, it measures; no test judges that."""

from __future__ import annotations

import subprocess

from vm.pci import Drive


def qd1(*arguments: str) -> int:
    """What qd1.c prints; it fails where a read does."""
    return int(subprocess.check_output(["qd1", *arguments], text=True))


def test_both_ways_read_the_same_drive(free: Drive) -> None:
    for _ in range(2):
        assert qd1("kernel", str(free.pci.block_device())) > 0
        with free.pci.bound("vfio-pci"):
            assert qd1("hifc", free.uri, "2", "0") > 0
    assert 0 <= qd1("lost") <= 1000
