# SPDX-License-Identifier: Apache-2.0
"""Which blocks of each head are in which slot of the arena, and which take whose place.

Invariants: `slot_of[head, block] == slot` if and only if `block_in[head, slot] == block`; slots are
filled from the first on, as many in each head. All heads at once, in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Mass = npt.NDArray[np.float32]  # [heads, blocks]
Mask = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]


# With 2, half as much is read as with 1, and 0.001 more of SmolLM2's attention is missed.
STAY = 2.0


class Moves(NamedTuple):
    """Blocks to be loaded, one an element: into slot `slots[i]` of head `heads[i]`."""

    heads: Index
    blocks: Index
    slots: Index


def most_of(mass: Mass, count: int) -> Mask:
    """The count blocks of each head with the most mass; all where there are no more."""
    heads, blocks = mass.shape
    if blocks <= count:
        return np.ones((heads, blocks), dtype=np.bool_)
    top = np.argpartition(mass, blocks - count, axis=1)[:, blocks - count :]
    chosen = np.zeros(heads * blocks, dtype=np.bool_)
    top += np.arange(0, heads * blocks, blocks)[:, None]
    chosen[top.ravel()] = True
    return chosen.reshape(heads, blocks)


class HeadBlocks:
    """Of all heads, or of some (`part`). Memory: 8 bytes a head and block, 4 a head and slot."""

    def __init__(self, heads: int, blocks: int, slots: int) -> None:
        self.slot_of: npt.NDArray[np.int32] = np.full((heads, blocks), -1, dtype=np.int32)
        self.block_in: npt.NDArray[np.int32] = np.full((heads, slots), -1, dtype=np.int32)
        self._weight: Mass = np.ones((heads, blocks), dtype=np.float32)  # STAY of what is in a slot
        self._rows = np.arange(heads)[:, None]

    def part(self, first: int, end: int) -> HeadBlocks:
        """The heads [first, end): a change of the one is a change of the other."""
        found = HeadBlocks(end - first, 0, 0)
        found.slot_of, found.block_in = self.slot_of[first:end], self.block_in[first:end]
        found._weight = self._weight[first:end]
        return found

    def clear(self) -> None:
        """Nothing is in a slot."""
        self.slot_of.fill(-1)
        self.block_in.fill(-1)
        self._weight.fill(1.0)

    def resident(self, blocks: int) -> Mask:
        """Which of the first blocks are in a slot: [heads, blocks]."""
        return self.slot_of[:, :blocks] >= 0

    def choose(self, mass: Mass, sinks: int, recent: int) -> Mask:
        """Which blocks are to be in slots, for that much attention each: the first sinks and the
        last recent ones, then those with the most mass. A block that is in a slot stays unless
        another has STAY times its mass."""
        blocks = mass.shape[1]
        ranked = mass * self._weight[:, :blocks]
        ranked[:, :sinks] = np.inf
        ranked[:, blocks - recent :] = np.inf
        return most_of(ranked, self.block_in.shape[1])

    def place(self, wanted: Mask, keep: Mask, mass: Mass) -> Moves:
        """Gives a slot to every wanted block that has none, in place of blocks that are not in
        keep, those with the least mass first. Returns what is to be loaded.

        There must be as many slots that are free or hold a block outside keep.
        """
        missing = wanted & (self.slot_of[:, : wanted.shape[1]] < 0)
        heads, blocks = missing.nonzero()
        if not heads.size:
            return Moves(heads, blocks, blocks)
        # Of an empty slot the block reads as -1, the last one: what is found there does not count.
        value = np.where(keep, np.inf, mass)[self._rows, self.block_in]
        value[self.block_in < 0] = -1.0
        order = value.argsort(axis=1, kind="stable")
        slots = order[heads, missing.cumsum(axis=1)[heads, blocks] - 1]
        old = self.block_in[heads, slots]
        gone = old >= 0
        gone_from, old = heads[gone], old[gone]
        self.slot_of[gone_from, old] = -1
        self._weight[gone_from, old] = 1.0
        self._weight[heads, blocks] = STAY
        self.block_in[heads, slots] = blocks
        self.slot_of[heads, blocks] = slots
        return Moves(heads, blocks, slots)
