# SPDX-License-Identifier: Apache-2.0
"""A drive's block devices and all that stands on them: partitions, volumes, arrays, loops."""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field

from hifc_admin.host.drives import BLOCK, Drive, partitions_of
from hifc_admin.host.system import System

STACK_MAX = 4096


@dataclass
class Stack:
    """Block devices by name, each with the way that leads from the drive to it."""

    # dm-1 -> "nvme0n1p3 > dm-0 > dm-1 (vg-kv)"
    chains: dict[str, str] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)  # dm-1 -> nvme0n1p3, the drive's own
    numbers: dict[str, str] = field(default_factory=dict)  # 259:1 -> nvme0n1p1

    @property
    def upper(self) -> list[str]:
        """Those that are not the drive's own."""
        return [name for name, root in self.roots.items() if name != root]

    def find(self, system: System, path: str) -> str | None:
        """The name of the device of the stack that a path ("/dev/mapper/x") leads to, or None."""
        real = system.resolve(path)
        folder, _, name = real.rpartition("/")
        if folder.startswith("/dev") and name in self.chains:
            return name
        number = system.device_number(real)
        return self.numbers.get(number) if number else None


def stack_of(system: System, drive: Drive) -> Stack:
    """Raises OSError where part of it cannot be looked at."""
    stack = Stack()
    loops = _loops(system)
    waiting = deque(
        (node, node, node)
        for namespace in drive.namespaces
        if not namespace.is_hidden
        for node in namespace.nodes
    )
    while waiting:
        name, chain, root = waiting.popleft()
        if name in stack.chains:
            continue
        if len(stack.chains) >= STACK_MAX:
            raise OSError(
                errno.EOVERFLOW, f"more than {STACK_MAX} block devices stand on the drive"
            )
        stack.chains[name] = chain
        stack.roots[name] = root
        number = system.get(f"{BLOCK}/{name}/dev")
        if number is not None:
            stack.numbers[number] = name
        above = [*system.names(f"{BLOCK}/{name}/holders"), *loops.get(name, [])]
        if name != root:
            above += partitions_of(system, name)
        for upper in above:
            waiting.append((upper, f"{chain} > {_label(system, upper)}", root))
    return stack


def _label(system: System, name: str) -> str:
    """dm-0 -> "dm-0 (vg-root)"."""
    mapped = system.attribute(f"{BLOCK}/{name}/dm/name")
    return f"{name} ({mapped})" if mapped else name


def _loops(system: System) -> dict[str, list[str]]:
    """Loop devices by the block device behind them; the kernel does not list them as holders."""
    found: dict[str, list[str]] = {}
    for name in system.names(BLOCK):
        backing = (
            system.get(f"{BLOCK}/{name}/loop/backing_file") if name.startswith("loop") else None
        )
        if backing:
            found.setdefault(system.resolve(backing).rpartition("/")[2], []).append(name)
    return found
