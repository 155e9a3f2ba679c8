# SPDX-License-Identifier: Apache-2.0
"""Latency at queue depth 1 against the kernel's own path, on the same drive in the same run.

The emulated drive is most of it, and both wait for it. By QEMU's own trace of reads (image in the
page cache, io_uring), medians: 17 us from the doorbell to QEMU's main loop, for HiFC 25; 12 us for
the read; 9 us to the completion entry. Then the kernel takes 12 us to its doorbell for that entry
and 20 us to the next command. HiFC polls and sees the entry at once, but that doorbell takes it
20 us, most likely for QEMU's lock. On two idle host cores a read took 98 to 112 us by the kernel
and 58 to 64 us by HiFC (0.56 to 0.60, with threads or io_uring below, with or without ioeventfd),
on busy ones 0.3 to 0.9 from round to round. So half of the kernel's time is not to be proven here.
This compares, prints the ratio, and fails where the kernel was faster.
"""

from __future__ import annotations

import subprocess

from vm.pci import Drive

ROUNDS = 3
TIMEOUT_S = 180


def median_us(*arguments: str) -> float:
    done = subprocess.run(
        ["qd1", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1e3


def test_a_read_is_faster_than_by_the_kernel(free: Drive) -> None:
    kernel_us, hifc_us = [], []
    for _ in range(ROUNDS):
        kernel_us.append(median_us("kernel", str(free.pci.block_device())))
        with free.pci.bound("vfio-pci"):
            hifc_us.append(median_us("hifc", free.uri))
    # Who else runs on the host only ever adds: the best round says most.
    kernel, hifc = min(kernel_us), min(hifc_us)
    print(f"kernel {kernel:.0f} us {kernel_us}, HiFC {hifc:.0f} us {hifc_us}: {hifc / kernel:.2f}")
    assert hifc < kernel
