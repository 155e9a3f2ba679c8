# SPDX-License-Identifier: Apache-2.0
"""What stays in memory: a policy ranks blocks from cold to hot and may veto single ones.

The policies themselves are in C (driver/policy), the same that `replay.py` runs traces through:
an integer slot a block, no object. Here stands what a user's own policy derives from, and what all
of them have in common: heads cluster, and a chain's tail goes before its head. Not thread-safe: the
engine holds its lock.
"""

from __future__ import annotations

import ctypes
import math
import time
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from hifc.blocks.keys import KVBlock
from hifc.errors import ConfigError
from hifc.native_lib import libhifc

_SLOTS_MIN = 64
Clock = Callable[[], float]


class _Closer(weakref.ref["NativePolicy"]):
    """Calls a function of C with what `_as_parameter_` holds once its referent is gone. It is made
    before there is anything to close, and its call is no Python, so that an exception of a signal
    handler finds no place in which it would be forgotten."""

    __slots__ = ("_as_parameter_",)
    _as_parameter_: ctypes.c_void_p


_closers: set[_Closer] = set()


class NativePolicy:
    """struct hifc_policy: a policy of driver/policy over slots. Slots are arrays of integers."""

    def __init__(self, name: str, capacity_blocks: int, decay_lambda: float) -> None:
        self._lib = libhifc.library()
        self.pointer = ctypes.c_void_p()
        closer = _Closer(self, self._lib.hifc_policy_close)
        closer._as_parameter_ = self.pointer
        for other in list(_closers):
            if other() is None:  # it has closed
                _closers.discard(other)
        _closers.add(closer)
        self._lib.hifc_policy_open(
            name.encode(), capacity_blocks, decay_lambda, ctypes.byref(self.pointer)
        )

    def use(self, now_s: float, slots: npt.NDArray[np.uint32]) -> None:
        """A request used these, a chain with its head first."""
        self._lib.hifc_policy_use(self.pointer, now_s, slots.ctypes.data, slots.size)

    def leave(self, slots: npt.NDArray[np.uint32]) -> None:
        """They left the cache and are remembered."""
        self._lib.hifc_policy_leave(self.pointer, slots.ctypes.data, slots.size)

    def forget(self, slots: npt.NDArray[np.uint32]) -> None:
        """They are gone for good."""
        self._lib.hifc_policy_forget(self.pointer, slots.ctypes.data, slots.size)

    def scores(self, now_s: float, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Higher leaves later."""
        ids = slots.astype(np.uint32)
        scores = np.empty(ids.size)
        self._lib.hifc_policy_scores(
            self.pointer, now_s, ids.ctypes.data, ids.size, scores.ctypes.data
        )
        return scores


class HiFCPolicy:
    """Decayed frequency: weight = sum over accesses of exp(-lambda * age), age in seconds.

    Blocks of one attention head cluster: a block's score is drawn half way to the mean of its
    head, so that cold heads leave together. A chain's tail goes before its head: a block never
    ranks colder than a deeper block of its sequence.
    """

    name = "frequency"

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
        self._native = NativePolicy(self.name, 0, decay_lambda)
        self._free: list[int] = []
        self._chains: dict[object, int] = {}
        self._chain_users: dict[int, int] = {}
        self._chain_free: list[int] = []
        self._count = 0
        self._depth = np.zeros(_SLOTS_MIN, dtype=np.int64)
        self._head = np.zeros(_SLOTS_MIN, dtype=np.int64)
        self._chain = np.zeros(_SLOTS_MIN, dtype=np.int64)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # ---- what the engine tells

    def add(self, block: KVBlock) -> None:
        """A new block; this is its first access."""
        if not self._free:
            self._grow()
        block.slot = self._free.pop()
        self._describe(block)
        self.access(block)

    def access(self, block: KVBlock) -> None:
        """The block was used now."""
        now = self.clock()
        self._native.use(now, np.array([block.slot], np.uint32))
        block.access_count += 1
        block.last_access = now

    def leave(self, blocks: Iterable[KVBlock]) -> None:
        """The blocks left memory; what is known of them stays."""
        self._native.leave(np.array([block.slot for block in blocks], np.uint32))

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
        self._native.forget(np.array([block.slot], np.uint32))
        self._free.append(block.slot)
        block.slot = -1

    def restore(self, blocks: Iterable[KVBlock]) -> None:
        """Exactly these blocks are there, whatever of `add`, `access`, `leave` and `remove` an
        exception cut short; those that have no memory have left it."""
        known = list(blocks)
        users: dict[int, KVBlock] = {}
        for block in known:
            if block.access_count and 0 <= block.slot < self._count and block.slot not in users:
                users[block.slot] = block
            else:
                block.slot = -1
        self._free = [slot for slot in range(self._count - 1, -1, -1) if slot not in users]
        self._chains, self._chain_users, self._chain_free = {}, {}, []
        self._native.forget(np.array(self._free, np.uint32))
        for block in known:
            if block.slot < 0:
                self.add(block)
            else:
                self._describe(block)
        self.leave([block for block in known if not block.resident])

    # ---- what the engine asks

    def weights(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The policy's own score of each slot as of now, higher is hotter: here, its decayed
        frequency."""
        return self._native.scores(self.clock(), slots)

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

    def _describe(self, block: KVBlock) -> None:
        self._depth[block.slot] = block.depth
        self._head[block.slot] = block.head
        self._chain[block.slot] = self._chain_of(block.sequence)

    def _grow(self) -> None:
        size = max(_SLOTS_MIN, 2 * self._count)
        for name in ("_depth", "_head", "_chain"):
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


class _ByScore(HiFCPolicy):
    """Ranks by the policy's own score alone."""

    def scores(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The weights as they are."""
        return self.weights(slots)


class DefaultPolicy(HiFCPolicy):
    """Expected returns a second, learnt; falls back to whichever other policy does better."""

    name = "default"


class ReturnTimePolicy(HiFCPolicy):
    """Expected returns a second, learnt from when blocks came back, without the fall-back."""

    name = "return_time"


class LRUPolicy(_ByScore):
    """The block used longest ago goes first, within a chain the tail."""

    name = "lru"


class LFUPolicy(_ByScore):
    """The block used least often since it came in goes first."""

    name = "lfu"


class ARCPolicy(_ByScore):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003)."""

    name = "arc"


class S3FIFOPolicy(_ByScore):
    """S3-FIFO (Yang et al., SOSP 2023)."""

    name = "s3fifo"


POLICIES: dict[str, type[HiFCPolicy]] = {
    policy.name: policy
    for policy in (
        DefaultPolicy,
        ReturnTimePolicy,
        HiFCPolicy,
        LRUPolicy,
        LFUPolicy,
        ARCPolicy,
        S3FIFOPolicy,
    )
}


def make_policy(name: str, decay_lambda: float, clock: Clock = time.monotonic) -> HiFCPolicy:
    """A built-in policy by the name that the configuration uses."""
    if name not in POLICIES:
        raise ConfigError(f"policy: {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name](decay_lambda, clock=clock)


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
