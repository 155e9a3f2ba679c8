# SPDX-License-Identifier: Apache-2.0
"""The one check before anything is done to what the kernel has: bind, format and erase ask here.

Each namespace is claimed, which the kernel grants only while nothing uses it, and under the claims
it is looked at what uses the drive and what is on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hifc_admin.host.drives import Drive
from hifc_admin.host.system import System
from hifc_admin.host.usage import Usage, Use, find_usage


@dataclass
class Claims:
    """Exclusive descriptors of a drive's namespaces: while they are open, nothing mounts them."""

    system: System
    held: dict[str, int] = field(default_factory=dict)

    def take(self, drive: Drive) -> list[Use]:
        """Claims all namespaces; a Use for each node where the kernel does not grant it."""
        blocked = []
        for namespace in drive.namespaces:
            if namespace.is_hidden:
                continue
            try:
                self.held[namespace.node] = self.system.claim(f"/dev/{namespace.node}")
            except OSError as error:
                # A claim of the whole bars its partitions, and is barred by theirs: say which.
                nodes = [node for node in namespace.partitions if not self._is_free(node)]
                blocked += [_claimed(node, error) for node in nodes or [namespace.node]]
        return blocked

    def release(self) -> None:
        while self.held:
            os.close(self.held.popitem()[1])

    def _is_free(self, node: str) -> bool:
        try:
            os.close(self.system.claim(f"/dev/{node}"))
        except OSError:
            return False
        return True


def claimed_usage(system: System, drive: Drive, claims: Claims) -> Usage:
    """Takes the claims, then looks at what uses the drive and at what is on it."""
    blocked = claims.take(drive)
    usage = find_usage(system, drive, claims.held)
    # Where it is told what uses a node, it is no news that the kernel refuses the claim.
    told = {use.node for use in usage.uses if not use.override}
    usage.uses += [use for use in blocked if use.node not in told]
    return usage


def _claimed(node: str, error: OSError) -> Use:
    return Use(
        "claimed",
        node,
        f"the kernel does not give /dev/{node} to this process alone: something has claimed it",
        f"open with O_EXCL: {error.strerror}",
        "lsblk and the kernel's log may tell what it is; a pool, an array or a target, say",
    )
