# SPDX-License-Identifier: Apache-2.0
"""QEMU's monitor, from inside the guest: unplugs drives and makes them fail.

QEMU's monitor socket ends in a virtio port of the guest. The port outlives whoever has it open, so
a new client cannot count on a greeting, and answers to an earlier client may still arrive: each
command has an id of its own, and answers to other ids, as well as events, are dropped.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import time
from pathlib import Path
from typing import Any

from vm.drives import DriveSpec
from vm.machine import QMP_PORT, device
from vm.pci import wait_until

ANSWER_TIMEOUT_S = 180.0  # bounds a hang
UNPLUG_TIMEOUT_S = 180.0  # bounds a hang; on a busy host the guest takes long to let go


class QmpError(RuntimeError):
    """QEMU refused a command, or gave no answer."""


def find_port() -> Path:
    for port in Path("/sys/class/virtio-ports").iterdir():
        if (port / "name").read_text().strip() == QMP_PORT:
            return Path("/dev") / port.name
    raise QmpError(f"no virtio port named {QMP_PORT}: is this the machine of tools/vm/run?")


class Qmp:
    """One connection. Not for several threads."""

    def __init__(self, port: Path | None = None) -> None:
        self._fd = os.open(port or find_port(), os.O_RDWR | os.O_CLOEXEC)
        self._ids = (f"{os.getpid()}-{number}" for number in itertools.count())
        self._pending = b""
        try:
            self.command("qmp_capabilities")
        except QmpError as error:
            # An earlier client has done it.
            if "CommandNotFound" not in str(error):
                raise

    def close(self) -> None:
        os.close(self._fd)

    def command(self, name: str, **arguments: Any) -> Any:
        """What the command returns."""
        request = {"execute": name, "id": next(self._ids), "arguments": arguments}
        os.write(self._fd, json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (message := self._next(deadline)) is not None:
            if message.get("id") == request["id"]:
                if "error" in message:
                    raise QmpError("{class}: {desc}".format(**message["error"]) + f" ({name})")
                return message["return"]
        raise QmpError(f"no answer to {name} within {ANSWER_TIMEOUT_S:.0f} s")

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None when the deadline passes first."""
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                return None
            self._pending += os.read(self._fd, 1 << 16)
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    # ---- drives

    def addresses(self) -> dict[str, str]:
        """The bdf of each PCI device of the machine by its name, whichever driver has it."""
        found = {}

        def walk(functions: list[dict[str, Any]]) -> None:
            for one in functions:
                found[one["qdev_id"]] = "0000:{bus:02x}:{slot:02x}.{function}".format(**one)
                walk(one.get("pci_bridge", {}).get("devices", []))

        for bus in self.command("query-pci"):
            walk(bus["devices"])
        return found

    def unplug(self, spec: DriveSpec) -> None:
        """Asks the guest to let the drive go, as a button at the slot would. Does not wait."""
        self.command("device_del", id=spec.name)

    def wait_unplugged(self, spec: DriveSpec) -> None:
        """Until the drive is off its bus. QEMU 7.2's own event for that may never come: a drive
        that is reset while a command completes keeps a reference to itself, and its hold on its
        disk, which machine.device therefore lets it share."""
        wait_until(
            lambda: spec.name not in self.addresses(),
            f"{spec.name} unplugged",
            UNPLUG_TIMEOUT_S,
        )

    def plug(self, spec: DriveSpec) -> None:
        """Puts an unplugged drive back."""
        self.command("device_add", **device(spec))

    def fail_drive(self, spec: DriveSpec, failing: bool) -> None:
        """Makes every read and write of the drive end in an error, or work again."""
        below = f"{spec.name}-broken" if failing else f"{spec.name}-file"
        option = {"driver": "raw", "node-name": f"{spec.name}-disk", "file": below,
                  "discard": "unmap"}  # fmt: skip
        self.command("blockdev-reopen", options=[option])
