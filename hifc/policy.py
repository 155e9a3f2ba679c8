# SPDX-License-Identifier: Apache-2.0
"""What stays in memory: a policy ranks blocks from cold to hot and may veto single ones.

State stands in numpy arrays, a slot a block; ranking is vectorised. A user's policy derives from
HiFCPolicy and overrides `should_swap_out`. Not thread-safe: the engine holds its lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from hifc.blocks import KVBlock
from hifc.errors import ConfigError

_SLOTS_MIN = 64
Clock = Callable[[], float]


class HiFCPolicy:
    """Decayed frequency: weight = sum over accesses of exp(-lambda * age), age in seconds.

    Kept incrementally: an access multiplies the weight by exp(-lambda * time since the last one)
    and adds 1. Blocks of one attention head cluster: a block's score is drawn half way to the mean
    of its head, so that cold heads leave together. A chain's tail goes before its head: a block
    never ranks colder than a deeper block of its sequence.
    """

    name = "hifc"

    def __init__(
        self,
        decay_lambda: float = 0.1,
        *,
        cluster_pull: float = 0.5,
        clock: Clock = time.monotonic,
    ) -> None:
        if decay_lambda < 0 or not math.isfinite(decay_lambda):
            raise ConfigError(f"lambda: {decay_lambda} is no number from 0 up")
        if not 0 <= cluster_pull <= 1:
            raise ConfigError(f"cluster_pull: {cluster_pull} is not from 0 to 1")
        self.decay_lambda = decay_lambda
        self.cluster_pull = cluster_pull
        self.clock = clock
        self._free: list[int] = []
        self._chains: dict[object, int] = {}
        self._chain_users: dict[int, int] = {}
        self._chain_free: list[int] = []
        self._count = 0
        self._weight = np.zeros(_SLOTS_MIN)
        self._time = np.zeros(_SLOTS_MIN)
        self._depth = np.zeros(_SLOTS_MIN, dtype=np.int64)
        self._head = np.zeros(_SLOTS_MIN, dtype=np.int64)
        self._chain = np.zeros(_SLOTS_MIN, dtype=np.int64)

    # ---- what the engine tells

    def add(self, block: KVBlock) -> None:
        """A new block; this is its first access."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        block.slot = slot
        self._weight[slot] = 0.0
        self._depth[slot] = block.depth
        self._head[slot] = block.head
        self._chain[slot] = self._chain_of(block.sequence)
        self._time[slot] = self.clock()
        self.access(block)

    def access(self, block: KVBlock) -> None:
        """The block was used now."""
        now = self.clock()
        slot = block.slot
        age = max(0.0, now - float(self._time[slot]))
        self._weight[slot] = self._weight[slot] * math.exp(-self.decay_lambda * age) + 1.0
        self._time[slot] = now
        block.access_count += 1
        block.last_access = now

    def remove(self, block: KVBlock) -> None:
        """The block is gone for good."""
        if block.slot < 0:
            return
        chain = int(self._chain[block.slot])
        if block.sequence is not None:
            self._chain_users[chain] -= 1
            if self._chain_users[chain] == 0:
                del self._chain_users[chain], self._chains[block.sequence]
                self._chain_free.append(chain)
        self._free.append(block.slot)
        block.slot = -1

    # ---- what the engine asks

    def weights(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Decayed frequency of each slot as of now."""
        age = np.maximum(0.0, self.clock() - self._time[slots])
        return self._weight[slots] * np.exp(-self.decay_lambda * age)

    def scores(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What the ranking goes by, higher is hotter: weights, heads drawn together."""
        weights = self.weights(slots)
        heads = self._head[slots]
        known = heads >= 0
        if self.cluster_pull == 0 or not known.any():
            return weights
        groups, member = np.unique(heads[known], return_inverse=True)
        means = np.bincount(member, weights[known], len(groups)) / np.bincount(member)
        scores = weights.copy()
        scores[known] += self.cluster_pull * (means[member] - weights[known])
        return scores

    def rank(self, blocks: list[KVBlock]) -> list[int]:
        """Indices into blocks, coldest first. Sets each block's weight."""
        slots = np.fromiter((block.slot for block in blocks), np.int64, len(blocks))
        if not slots.size:
            return []
        for block, weight in zip(blocks, self.weights(slots).tolist(), strict=True):
            block.weight = weight
        scores = _tail_first(self.scores(slots), self._chain[slots], self._depth[slots])
        order: list[int] = np.lexsort((-self._depth[slots], scores)).tolist()
        return order

    def should_swap_out(self, kv_block: KVBlock) -> bool:
        """Whether this block may leave memory now; asked from cold to hot.

        Override it for a policy of your own. kv_block: weight, hot, access_count, last_access,
        depth, head, sequence, size_bytes are set. The default gives up what the classifier's
        split calls cold.
        """
        return not kv_block.hot

    # ---- inside

    def _grow(self) -> None:
        size = max(_SLOTS_MIN, 2 * self._count)
        for name in ("_weight", "_time", "_depth", "_head", "_chain"):
            array = getattr(self, name)
            grown = np.zeros(size, dtype=array.dtype)
            grown[: min(len(array), size)] = array[:size]
            setattr(self, name, grown)
        self._free.extend(range(size - 1, self._count - 1, -1))
        self._count = size

    def _chain_of(self, sequence: object) -> int:
        if sequence is None:
            return -1
        if sequence not in self._chains:
            new = self._chain_free.pop() if self._chain_free else len(self._chains)
            self._chains[sequence] = new
            self._chain_users[new] = 0
        chain = self._chains[sequence]
        self._chain_users[chain] += 1
        return chain


def _tail_first(
    scores: npt.NDArray[np.float64], chain: npt.NDArray[np.int64], depth: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Raises each score to the highest of the deeper blocks of its chain."""
    linked = np.flatnonzero(chain >= 0)
    if linked.size < 2:
        return scores
    order = linked[np.lexsort((-depth[linked], chain[linked]))]  # by chain, deepest first
    levels, rank = np.unique(scores[order], return_inverse=True)
    # The running maximum restarts at each chain, since every chain ranks above those before it.
    step = np.cumsum(np.diff(chain[order], prepend=chain[order[0]]) != 0) * len(levels)
    raised = np.maximum.accumulate(rank + step) - step
    result = scores.copy()
    result[order] = levels[raised]
    return result


class LRUPolicy(HiFCPolicy):
    """The block used longest ago goes first, within a chain the tail."""

    name = "lru"

    def scores(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Time of the last access."""
        return self._time[slots].copy()


_POLICIES: dict[str, type[HiFCPolicy]] = {"hifc": HiFCPolicy, "lru": LRUPolicy}


def make_policy(name: str, decay_lambda: float, clock: Clock = time.monotonic) -> HiFCPolicy:
    """A built-in policy by the name that the configuration uses."""
    if name not in _POLICIES:
        raise ConfigError(f"policy: {name!r} is none of {', '.join(_POLICIES)}")
    return _POLICIES[name](decay_lambda, clock=clock)


def victims(policy: HiFCPolicy, blocks: list[KVBlock], hot_count: int, limit: int) -> list[KVBlock]:
    """Up to limit blocks that the policy gives up, coldest first; the hot_count hottest are hot."""
    chosen: list[KVBlock] = []
    order = policy.rank(blocks)
    for place, index in enumerate(order):
        block = blocks[index]
        block.hot = place >= len(order) - hot_count
        if policy.should_swap_out(block):
            chosen.append(block)
            if len(chosen) == limit:
                break
    return chosen


def coldest(policy: HiFCPolicy, blocks: Iterable[KVBlock], limit: int) -> list[KVBlock]:
    """The limit coldest blocks, whatever should_swap_out says."""
    known = list(blocks)
    return [known[index] for index in policy.rank(known)[:limit]]
