# SPDX-License-Identifier: Apache-2.0
"""The optional tier in host memory between resident blocks and flash.

Resident blocks lie in the buffer pool, memory that is locked and that the device reaches. The tier
holds blocks that left it, in ordinary memory: one copy down, one copy up, and a block that is
wanted again soon, or deleted, never meets the device. A block is in the pool or in the tier, not in
both. What has been in the tier longest leaves for flash first.

Not thread-safe: HiFC calls all of it under its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hifc.blocks import KVBlock
from hifc.memory import ByteArray


class HostTier:
    """limit_bytes: what the blocks in it may take together; 0: it holds none."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: dict[bytes, KVBlock] = {}  # the one that came first, first
        self.used_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def blocks(self) -> list[KVBlock]:
        """Those in it, the one that came first, first."""
        return list(self._blocks.values())

    def share(self, blocks: Sequence[KVBlock]) -> list[KVBlock]:
        """Those of them that could be in here together; the later ones come first."""
        room = self._limit_bytes
        taken: list[KVBlock] = []
        for block in reversed(blocks):
            if block.size_bytes <= room:
                taken.append(block)
                room -= block.size_bytes
        return taken[::-1]

    def overflow(self, coming: Iterable[KVBlock], batch: int) -> list[KVBlock]:
        """Those that have to leave before a share fits; if any has to, at least `batch`, so that
        they leave together. Moves nothing."""
        excess = self.used_bytes + sum(block.size_bytes for block in coming) - self._limit_bytes
        leaving: list[KVBlock] = []
        for block in self._blocks.values():
            if excess <= 0 and (not leaving or len(leaving) >= batch):
                break
            leaving.append(block)
            excess -= block.size_bytes
        return leaving

    def put(self, block: KVBlock, memory: ByteArray) -> None:
        """Takes a copy of its bytes. Those that `overflow` named have left."""
        block.memory = memory.copy()
        self._blocks[block.key] = block
        self.used_bytes += block.size_bytes

    def drop(self, block: KVBlock) -> None:
        """Takes it out, if it is in here; its bytes stay in block.memory."""
        if self._blocks.pop(block.key, None) is not None:
            self.used_bytes -= block.size_bytes

    def restore(self, block: KVBlock) -> None:
        """Puts it back where drop took it from, as the next one to leave."""
        self._blocks = {block.key: block, **self._blocks}
        self.used_bytes += block.size_bytes
