# SPDX-License-Identifier: Apache-2.0
"""The optional tier in host memory between resident blocks and flash.

Resident blocks lie in the buffer pool, memory that is locked and that the device reaches. The tier
holds copies of blocks that left it, in ordinary memory: one copy down, one copy up, and a block
that is wanted again soon, or deleted, never meets the device. What has been here longest leaves for
flash first, through the gate: pool memory of the tier's own, so that it can leave however full the
pool is.

Invariants:
  - a block's bytes are copied to where they go before they are let go of where they were, so that
    what goes wrong half-way leaves it in two places and never in none;
  - the copies do not exceed the limit, but by the one block whose way up failed;
  - what is true is which copies are held; what they take is counted from it, see `recount`;
  - a process that dies loses them, like resident blocks: what is to survive, `sync` writes.

Not thread-safe: HiFC calls all of it under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from hifc.blocks.keys import KVBlock
from hifc.config import Config
from hifc.errors import HiFCError
from hifc.native_lib.memory import ByteArray
from hifc.util.units import page_up


def gate_bytes(config: Config) -> int:
    """Pool memory of the gate; blocks that do not fit through go to flash from the pool."""
    return page_up(min(config.host_tier_bytes, config.swap_buffer_size))


class HostTier:
    """limit_bytes: what the copies may take together; 0: it holds none. gate: pool memory."""

    def __init__(self, limit_bytes: int, gate: ByteArray | None) -> None:
        self._limit_bytes = limit_bytes
        self._gate = gate
        self._held: dict[bytes, tuple[KVBlock, ByteArray]] = {}  # the one that came first, first
        self._climbing: KVBlock | None = None
        self.gate_in_use = False  # a write out of it may be in flight
        self.used_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def blocks(self) -> list[KVBlock]:
        """Those in it, the one that came first, first."""
        return [block for block, _ in self._held.values()]

    # ---- down

    def share(self, blocks: Sequence[KVBlock]) -> list[KVBlock]:
        """Those of them that could be in here together. Room is for the later ones first: callers
        name the coldest first."""
        room = self._limit_bytes
        widest = 0 if self._gate is None else self._gate.size
        taken: list[KVBlock] = []
        for block in reversed(blocks):
            if block.size_bytes <= room and block.held_bytes <= widest:
                taken.append(block)
                room -= block.size_bytes
        return taken[::-1]

    def overflow(self, coming: Iterable[KVBlock], batch: int) -> list[KVBlock]:
        """Those that have to leave before a share fits; if any has to, at least `batch`, so that
        they leave together. They are still here afterwards."""
        excess = self.used_bytes + sum(block.size_bytes for block in coming) - self._limit_bytes
        if self._climbing is not None:
            excess -= self._climbing.size_bytes  # it makes its own room
        leaving: list[KVBlock] = []
        twice: list[KVBlock] = []
        for block, _ in self._held.values():
            if excess <= 0 and (not leaving or len(leaving) >= batch):
                break
            if block is self._climbing:
                continue
            excess -= block.size_bytes
            (twice if block.resident else leaving).append(block)
        for block in twice:  # something went wrong half-way up or down
            self.drop(block)
        return leaving

    def put(self, block: KVBlock) -> None:
        """Copies the bytes of a resident block. Those that `overflow` named have left."""
        copy = block.memory.copy()
        self.drop(block)
        self._held[block.key] = block, copy
        self.used_bytes += block.size_bytes

    # ---- up, and out

    def climbing(self, block: KVBlock) -> _Climb:
        """Its bytes, for the length of a with statement in which room is made for it elsewhere and
        others come down; it does not leave for them, and does not count. Then it is dropped, or
        stays if that failed."""
        return _Climb(self, block)

    def bytes_of(self, block: KVBlock) -> ByteArray:
        """The copy of a block that is here."""
        return self._held[block.key][1]

    def drop(self, block: KVBlock) -> None:
        """Forgets its copy, if there is one."""
        if self._held.pop(block.key, None) is not None:
            self.used_bytes -= block.size_bytes

    def recount(self, belongs: Callable[[KVBlock], bool]) -> None:
        """Keeps the copies of blocks that belong here, and counts them anew: an exception may have
        come in between."""
        self._climbing = None
        self._held = {key: held for key, held in self._held.items() if belongs(held[0])}
        self.used_bytes = sum(block.size_bytes for block, _ in self._held.values())

    def pass_gate(
        self, blocks: Sequence[KVBlock], write: Callable[[list[KVBlock], list[ByteArray]], None]
    ) -> None:
        """Calls write for as many at a time as fit into the gate, with their bytes there. Nothing
        that was written out of it before may be in flight: see gate_in_use."""
        left = list(blocks)
        while left:
            together: list[KVBlock] = []
            memories: list[ByteArray] = []
            at = 0
            for block in left:
                assert self._gate is not None
                if at + block.held_bytes > self._gate.size:
                    break
                memory = self._gate[at : at + block.size_bytes]
                memory[:] = self._held[block.key][1]
                together.append(block)
                memories.append(memory)
                at += block.held_bytes
            self.gate_in_use = True
            try:
                write(together, memories)
            except HiFCError:  # raised once nothing is in flight
                self.gate_in_use = False
                raise
            self.gate_in_use = False
            del left[: len(together)]


class _Climb:
    """What HostTier.climbing gives. No generator: an interrupted one would end at any time."""

    def __init__(self, tier: HostTier, block: KVBlock) -> None:
        self._tier = tier
        self._block = block

    def __enter__(self) -> ByteArray:
        copy = self._tier.bytes_of(self._block)
        self._tier._climbing = self._block
        return copy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tier._climbing = None
        if kind is None:
            self._tier.drop(self._block)
