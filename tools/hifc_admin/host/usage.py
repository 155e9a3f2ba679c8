# SPDX-License-Identifier: Apache-2.0
"""What uses a drive that the kernel has: the checks that stand between bind and somebody's data.

Each finding is a Use with its evidence and its fix. What could not be looked at is one as well, and
counts like a mount. Signatures are the only ones that may be overridden, by naming them; a boot or
root disk never is. A signature of HiFC itself is no obstacle.

Whoever acts on the answer holds the kernel's own, `System.claim` of each namespace, meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hifc_admin.host import boot
from hifc_admin.host.contents import Contents, look, short_name
from hifc_admin.host.drives import Drive
from hifc_admin.host.mounts import Mount, all_mounts, unescape
from hifc_admin.host.processes import Holder, holders_of
from hifc_admin.host.stack import Stack, stack_of
from hifc_admin.host.system import System
from hifc_admin.result import Problem

# udev and its like open a node for a moment when it appears.
_PROCESS_TRIES = 3
_PROCESS_WAIT_S = 0.3
_ZFS_POOLS = "/proc/spl/kstat/zfs"

_HOLDER_FIXES = {
    "md": "mdadm --stop /dev/{}",
    "dm-": "vgchange -an, cryptsetup close or multipath -f; what made it: dmsetup info /dev/{}",
    "bcache": "echo 1 > /sys/block/{}/bcache/stop",
    "loop": "losetup -d /dev/{}",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Use:
    """One thing that uses a drive, or that could not be looked at."""

    kind: str
    node: str  # the block device, partition or character device it is about
    detail: str
    evidence: str
    fix: str
    override: str = ""  # a signature's name for --signature

    def problem(self, subject: str) -> Problem:
        return Problem(self.kind, subject, self.detail, self.evidence, self.fix)


@dataclass
class Usage:
    """All uses of a drive, the most telling ones first, and what is written on it."""

    uses: list[Use] = field(default_factory=list)
    contents: list[Contents] = field(default_factory=list)

    def check(self, node: str, what: str, look_at: Callable[[], T]) -> T | None:
        """The answer; where it cannot be had, None and a Use that says so."""
        try:
            return look_at()
        except OSError as error:
            self.uses.append(not_checked(node, what, str(error)))
            return None

    def refusals(self, overridden: frozenset[str] = frozenset()) -> list[Use]:
        """Those that the names given for --signature leave."""
        return [use for use in self.uses if not use.override or use.override not in overridden]


def find_usage(system: System, drive: Drive, held: Mapping[str, int] | None = None) -> Usage:
    """held: descriptors of nodes to read through; the others are opened."""
    usage = Usage()
    if drive.driver is not None and (drive.controller is None or drive.state not in ("live", "")):
        usage.uses.append(_not_live(drive))
    for namespace in drive.namespaces:
        if namespace.is_hidden:
            detail = f"{namespace.node} has no block device here, so nothing on it can be seen"
            evidence = "a format with metadata or of zones that this kernel does not support"
            usage.uses.append(not_checked(namespace.node, "", evidence, detail))
            continue
        for node in namespace.nodes:
            read = functools.partial(look, system, node, held)
            found = usage.check(node, "its signatures", read)
            if found is not None:
                usage.contents.append(found)
    stack = usage.check(drive.bdf, "what is built on it", lambda: stack_of(system, drive))
    if stack is not None:
        pools = {found.zfs_pool: found.node for found in usage.contents if found.zfs_pool}
        _add_stack_uses(usage, system, drive, stack, pools)
    for contents in usage.contents:
        usage.uses += [_signature_use(contents.node, name) for name in contents.names]
    return usage


def _add_stack_uses(
    usage: Usage, system: System, drive: Drive, stack: Stack, pools: dict[str, str]
) -> None:
    checks: tuple[tuple[str, Callable[[], list[Use]]], ...] = (
        ("whether it is a boot or root disk", lambda: list(_boot_uses(system, stack, pools))),
        ("what is mounted", lambda: _mount_uses(system, stack, pools)),
        ("what is swap", lambda: list(_swap_uses(system, stack))),
        ("file systems over several devices", lambda: list(_pool_uses(system, stack, pools))),
        ("what is exported", lambda: list(_export_uses(system, stack))),
        ("which processes hold it", lambda: _process_uses(system, drive, stack)),
    )
    for what, look_at in checks:
        usage.uses += usage.check(drive.bdf, what, look_at) or []
    usage.uses += _holder_uses(stack)


def not_checked(node: str, what: str, evidence: str, detail: str = "", fix: str = "") -> Use:
    return Use(
        "not-checked",
        node,
        detail or f"{node}: could not check {what}, which counts as in use",
        evidence,
        fix or "run it as root on the host itself, and repeat",
    )


def _not_live(drive: Drive) -> Use:
    return not_checked(
        drive.bdf,
        "",
        f"its controller is {drive.state or 'missing'}",
        f"{drive.driver} has the drive and does not call it live: it could not be checked",
        f"dmesg | grep {drive.controller or drive.bdf}",
    )


# ---- one kind of use each


def _boot_uses(system: System, stack: Stack, pools: dict[str, str]) -> Iterator[Use]:
    for path, where in boot.named_devices(system):
        if path.startswith("ZFS="):
            node = pools.get(path.removeprefix("ZFS=").partition("/")[0])
        else:
            name = stack.find(system, path)
            node = None if name is None else stack.chains[name]
        if node is not None:
            yield _boot_use(node, f"{node} is named there to boot from", where)


def _boot_use(node: str, detail: str, evidence: str) -> Use:
    fix = "use another drive: the system's own is never bound"
    return Use(
        "boot-disk", node.partition(" ")[0], f"this is a boot or root disk: {detail}", evidence, fix
    )


def _mount_uses(system: System, stack: Stack, pools: dict[str, str]) -> list[Use]:
    found: dict[tuple[str, str], Use] = {}
    for mount in all_mounts(system):
        name = _mounted(system, stack, pools, mount)
        if name is None:
            continue
        chain = stack.chains.get(name, name)
        evidence = f"{mount.file}: {mount.device} {mount.folder} {mount.kind} {mount.source}"
        if mount.is_host and mount.folder in boot.FOLDERS:
            use = _boot_use(chain, f"{chain} is mounted on {mount.folder}", evidence)
        else:
            detail = f"{chain} is mounted on {mount.folder}"
            use = Use("mounted", stack.roots.get(name, name), detail, evidence, _mount_fix(mount))
        found.setdefault((name, mount.folder), use)
    return sorted(found.values(), key=lambda use: use.kind)  # boot disks first


def _mount_fix(mount: Mount) -> str:
    if mount.is_host:
        return f"umount {mount.folder}"
    pid = mount.file.split("/")[2]
    return f"nsenter -t {pid} -m umount {mount.folder}, or stop process {pid}: a container, say"


def _mounted(system: System, stack: Stack, pools: dict[str, str], mount: Mount) -> str | None:
    if mount.kind == "zfs":
        return pools.get(mount.source.partition("/")[0])
    if mount.device in stack.numbers:
        return stack.numbers[mount.device]
    # btrfs and bcachefs have a number of their own; bcachefs names all its devices.
    for source in mount.source.split(":") if ":/" in mount.source else [mount.source]:
        name = stack.find(system, source) if source.startswith("/") else None
        if name is not None:
            return name
    return None


def _swap_uses(system: System, stack: Stack) -> Iterator[Use]:
    for line in (system.get("/proc/swaps") or "").splitlines()[1:]:
        path = unescape(line.split()[0]) if line.split() else ""
        name = stack.find(system, path) if path else None
        if name is not None:
            detail = f"{stack.chains[name]} is active swap"
            yield Use("swap", stack.roots[name], detail, f"/proc/swaps: {line}", f"swapoff {path}")


def _holder_uses(stack: Stack) -> list[Use]:
    return [
        Use(
            "holder",
            stack.roots[name],
            f"{stack.roots[name]} is part of something larger: {stack.chains[name]}",
            f"/sys/class/block/{stack.roots[name]}/holders",
            _holder_fix(name),
        )
        for name in stack.upper
    ]


def _holder_fix(name: str) -> str:
    for prefix, fix in _HOLDER_FIXES.items():
        if name.startswith(prefix):
            return fix.format(name)
    return f"take it out of /dev/{name}"


def _pool_uses(system: System, stack: Stack, pools: dict[str, str]) -> Iterator[Use]:
    for uuid in system.names("/sys/fs/btrfs"):
        folder = f"/sys/fs/btrfs/{uuid}/devices"
        for name in system.names(folder):
            if name in stack.chains:
                detail = f"{stack.chains[name]} belongs to the mounted btrfs file system {uuid}"
                fix = f"umount it, or: btrfs device remove /dev/{name} FOLDER"
                yield Use("mounted", stack.roots[name], detail, f"{folder}/{name}", fix)
    imported = [name for name in system.names(_ZFS_POOLS) if system.names(f"{_ZFS_POOLS}/{name}")]
    for pool, node in pools.items():
        # A member whose pool cannot be told may belong to any of them.
        if pool in imported or (pool == "?" and imported):
            folder = f"{_ZFS_POOLS}/{pool if pool in imported else ''}"
            detail = f"{node} belongs to the imported ZFS pool {pool}"
            yield Use("mounted", node, detail, folder, f"zpool export {pool}")


def _export_uses(system: System, stack: Stack) -> Iterator[Use]:
    """The kernel's NVMe target opens a device without claiming it."""
    for name in system.glob("/sys/kernel/config/nvmet/subsystems/*/namespaces/*/device_path"):
        found = stack.find(system, system.read(name))
        if found is not None:
            detail = f"{stack.chains[found]} is exported by the kernel's NVMe target"
            fix = f"echo 0 > {name.rpartition('/')[0]}/enable"
            yield Use("exported", stack.roots[found], detail, name, fix)


def _process_uses(system: System, drive: Drive, stack: Stack) -> list[Use]:
    nodes = {*stack.chains, *drive.generic_nodes}
    if drive.controller is not None:
        nodes.add(drive.controller)
    for _ in range(_PROCESS_TRIES):
        holders = holders_of(system, nodes, stack.numbers)
        if not holders:
            return []
        system.wait_s(_PROCESS_WAIT_S)
    return [process_use(holder) for holder in holders]


def process_use(holder: Holder) -> Use:
    """A process that has a node open."""
    return Use(
        "process",
        holder.node,
        f"{holder} holds /dev/{holder.node} open",
        holder.evidence,
        f"stop that process: kill {holder.pid}",
    )


def _signature_use(node: str, name: str) -> Use:
    override = short_name(name)
    return Use(
        "signature",
        node,
        f"{node} has {name} on it",
        f"read from /dev/{node}",
        f"if its data is not needed any more, name it: --signature {override}",
        override,
    )
