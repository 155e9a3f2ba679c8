# SPDX-License-Identifier: Apache-2.0
"""A PCI device whose memory BAR is a file, for the tests of staging."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hifc.staging.bar import PciBarProvider

BDF = "0000:5e:00.0"
BAR_BYTES = 8 << 20


class FakeBar:
    """The folder of a PCI device in sysfs with a memory BAR 2."""

    def __init__(self, devices: Path) -> None:
        self.devices = devices
        self.folder = devices / BDF
        self.folder.mkdir(parents=True)
        lines = ["0x0 0x0 0x0", "0x0 0x0 0x0", "0xf000000000 0xf0007fffff 0x14220c"]
        (self.folder / "resource").write_text("\n".join(lines) + "\n")
        (self.folder / "resource2").write_bytes(bytes(BAR_BYTES))
        (self.folder / "enable").write_text("0\n")

    def provider(self, resource: str = "resource2") -> PciBarProvider:
        return PciBarProvider(BDF, resource, devices=self.devices)

    @property
    def enabled(self) -> bool:
        return (self.folder / "enable").read_text() == "1\n"

    def peer_view(self) -> np.ndarray:
        """The memory as the device itself sees it."""
        return np.memmap(self.folder / "resource2", dtype=np.uint8, mode="r+")
