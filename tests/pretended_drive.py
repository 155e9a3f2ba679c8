# SPDX-License-Identifier: Apache-2.0
"""What a pretended drive behind SPDK says of itself: two namespaces, Format NVM, no sanitize."""

from __future__ import annotations

from hifc.device.device import DeviceInfo, InfoFlag, SanitizeState, SanitizeStatus

SIZE = 16 << 20
INFO = DeviceInfo(
    size_bytes=SIZE,
    lba_bytes=4096,
    flags=InfoFlag.NVME | InfoFlag.WHOLE | InfoFlag.FORMAT | InfoFlag.CRYPTO_ERASE,
    nsid=2,
    namespaces=2,
    eui64="0011223344556677",
    nguid="",
    model="a drive",
    serial="S5GX",
    firmware="1",
    signature="a HiFC namespace",
    health=None,
    health_problem="",
    sanitize=SanitizeStatus(SanitizeState.NONE, "", 0.0, None),
)
