# SPDX-License-Identifier: Apache-2.0
"""QEMU's command line: an IOMMU, drives behind root ports, a BAR of memory, the host's root.

/dev/kvm is never used: where it exists it may hang, and the machine has to be the same everywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vm.drives import DRIVES, DriveSpec
from vm.kernel import Kernel

CPUS = 2
MEMORY_MIB = 2560
BAR_MIB = 16
HUGE_PAGES = 384  # of 2 MiB

# Names of the two virtio ports in the guest.
OUTPUT_PORT = "hifc.output"
QMP_PORT = "hifc.qmp"


@dataclass(frozen=True)
class Machine:
    """What one run boots."""

    kernel: Kernel
    initramfs: Path
    work: Path  # holds drives, sockets and the console's log
    share: Path  # the folder shared for writing
    guest: Path  # the program that takes over from init
    tsc_khz: int  # of this host

    @property
    def console(self) -> Path:
        return self.work / "console.log"

    @property
    def messages(self) -> Path:
        """QEMU's own; among them one for each error that a failing drive was told to make."""
        return self.work / "qemu.log"

    def image(self, spec: DriveSpec) -> Path:
        return self.work / f"{spec.name}.img"

    def command(self) -> list[str]:
        return [
            "qemu-system-x86_64",
            "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
            "-machine", "q35,kernel-irqchip=split",
            "-accel", "tcg,thread=multi",
            "-cpu", "max",
            "-smp", str(CPUS),
            "-m", f"{MEMORY_MIB}M",
            "-kernel", str(self.kernel.image),
            "-initrd", str(self.initramfs),
            "-append", self.kernel_arguments(),
            "-serial", f"file:{self.console}",
            *self.iommu(),
            *self.folders(),
            *self.ports(),
            *self.bar(),
            *(word for index, spec in enumerate(DRIVES) for word in self.drive(index, spec)),
        ]  # fmt: skip

    def kernel_arguments(self) -> str:
        return " ".join(
            [
                "console=ttyS0 loglevel=5 panic=-1 oops=panic",
                # No secrets in here, and page tables per mode cost an emulated CPU dearly.
                "nokaslr",
                # The emulated clock is slow, not broken.
                f"nowatchdog no_timer_check tsc=reliable tsc_early_khz={self.tsc_khz}",
                "intel_iommu=on",
                f"hugepagesz=2M hugepages={HUGE_PAGES}",
                f"hifc.guest={self.guest}",
            ]
        )

    @staticmethod
    def iommu() -> list[str]:
        return ["-device", "intel-iommu,intremap=on,caching-mode=on,aw-bits=48"]

    def folders(self) -> list[str]:
        return [
            # The host's root spans file systems, whose inode numbers collide.
            "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
            "-fsdev", f"local,id=job,path={self.share},security_model=none",
            "-device", "virtio-9p-pci,fsdev=job,mount_tag=job",
        ]  # fmt: skip

    def ports(self) -> list[str]:
        """Output to our stdout, and QEMU's monitor led back into the guest: QEMU is the server and
        the client of that socket, so nothing on the host has to pass messages on."""
        socket = self.work / "qmp"
        return [
            "-device", "virtio-serial-pci",
            "-chardev", "stdio,id=output,signal=off",
            "-device", f"virtserialport,chardev=output,name={OUTPUT_PORT}",
            "-chardev", f"socket,id=monitor,path={socket},server=on,wait=off",
            "-mon", "chardev=monitor,mode=control",
            "-chardev", f"socket,id=monitor-client,path={socket}",
            "-device", f"virtserialport,chardev=monitor-client,name={QMP_PORT}",
        ]  # fmt: skip

    @staticmethod
    def bar() -> list[str]:
        """A PCI device whose BAR 2 is memory: stands in for a GPU's."""
        return [
            "-object", f"memory-backend-ram,size={BAR_MIB}M,share=on,id=bar",
            "-device", "pcie-root-port,id=port-bar,chassis=100,slot=100",
            "-device", "ivshmem-plain,id=bar-device,memdev=bar,bus=port-bar",
        ]  # fmt: skip

    def drive(self, index: int, spec: DriveSpec) -> list[str]:
        words = ["-device", f"pcie-root-port,id=port-{spec.name},chassis={index},slot={index}"]
        for node in block_nodes(spec, self.image(spec)):
            words += ["-blockdev", json.dumps(node)]
        return [*words, "-device", json.dumps(device(spec))]


def block_nodes(spec: DriveSpec, image: Path) -> list[dict[str, object]]:
    """From the file up. A drive that can fail has a second way to its file on which every read and
    write ends in EIO; which one is used is switched at run time."""
    file: dict[str, object] = {
        "driver": "file", "node-name": f"{spec.name}-file", "filename": str(image),
        "discard": "unmap",
    }  # fmt: skip
    nodes = [file]
    below = f"{spec.name}-file"
    if spec.can_fail:
        nodes.append(
            {
                "driver": "blkdebug", "node-name": f"{spec.name}-broken", "image": below,
                "inject-error": [
                    {"event": "none", "iotype": "read", "errno": 5},
                    {"event": "none", "iotype": "write", "errno": 5},
                ],
            }
        )  # fmt: skip
    nodes.append(
        {"driver": "raw", "node-name": f"{spec.name}-disk", "file": below, "discard": "unmap"}
    )
    return nodes


def device(spec: DriveSpec) -> dict[str, object]:
    """The controller with its namespace, as device_add takes it as well. A namespace of its own
    (nvme-ns) could not be plugged in again: its bus takes none at run time."""
    return {
        "driver": "nvme", "id": spec.name, "serial": spec.serial, "bus": f"port-{spec.name}",
        "drive": f"{spec.name}-disk", "share-rw": True,  # see Qmp.wait_unplugged
        "logical_block_size": spec.lba_bytes, "physical_block_size": spec.lba_bytes,
    }  # fmt: skip
