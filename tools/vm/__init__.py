# SPDX-License-Identifier: Apache-2.0
"""A virtual machine with an IOMMU and emulated NVMe drives, in which tests/vm runs.

On the host: kernel.py fetches Debian's kernel, initramfs.py packs what it boots with, drives.py
makes the drives, machine.py is QEMU's command line, and __main__.py runs it and waits.
In the guest: `init` puts a root together, `guest` starts the tests, qmp.py talks to QEMU and pci.py
to the kernel's PCI devices.
"""
