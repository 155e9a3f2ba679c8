# SPDX-License-Identifier: Apache-2.0
"""Heat of many blocks where the kernels run: decayed mass, hot and cold, and who leaves.

weight = sum over steps of mass * exp(-lambda * age), kept incrementally, as HiFCPolicy keeps it for
the blocks of a HiFC; here for up to millions of blocks at once, without an object or a transfer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hifc.errors import ConfigError, InvalidRequest
from hifc.kernels.backend import Backend, address_of, backend, strided
from hifc.util.checking import number, whole

VICTIMS_MAX = 1 << 16
BLOCKS_MAX = 1 << 30
# Of native/heat.cu and native/victims.cu.
_TILE = 2048
_RANGES_MAX = 512
_STATE_WORDS = 12810
_RANGE_WORDS = 2 * 258
_ORDER_WORDS = 5
_VICTIM_THREADS = 128


@dataclass(frozen=True, slots=True)
class Split:
    """What a split found, in the backend's memory; the next split of its table overwrites it.

    hot: bits, uint32 (blocks / 32), block i is bit i % 32 of word i / 32; blocks that are not
    eligible are not hot. victims: uint32 (victims_max), of which the first counts[2] are valid, by
    index. counts: uint32, how many blocks are eligible, cold, and victims. Not to be written to: on
    the host they are read-only; what a caller writes on a GPU makes the next order wrong, no more.
    """

    hot: Any
    victims: Any
    counts: Any


class HeatTable:
    """Heat of `blocks` blocks. Not thread-safe; on a GPU all calls are to be on one stream.

    heat: float32 (blocks), which has to stay finite; a caller may write into it, for a block that
    is new, but not replace it.
    """

    def __init__(
        self,
        blocks: int,
        decay_lambda: float = 0.1,
        *,
        victims_max: int = 4096,
        where: Backend | None = None,
    ) -> None:
        blocks = whole("blocks of a heat table", blocks, 1, BLOCKS_MAX, ConfigError)
        victims_max = whole("victims_max", victims_max, 1, VICTIMS_MAX, ConfigError)
        decay_lambda = number("lambda", decay_lambda, 0, ConfigError)
        self.blocks = blocks
        self.decay_lambda = decay_lambda
        self.victims_max = victims_max
        self.where = backend() if where is None else where
        xp = self.where.xp
        # Half as many blocks of 512 threads as of 256 keep a backend busy, half of those suffice.
        ranges = max(1, min(_RANGES_MAX, self.where.wide // 4))
        self._range_blocks = -(-blocks // ranges // _TILE) * _TILE
        self._ranges = -(-blocks // self._range_blocks)
        self.heat = _aligned(xp, blocks, "float32")
        self._state = xp.zeros(_STATE_WORDS, dtype="uint32")
        self._range_counts = xp.empty(self._ranges * _RANGE_WORDS, dtype="uint32")
        self._orders = xp.empty(victims_max * _ORDER_WORDS, dtype="uint32")
        self._ordered = xp.zeros(victims_max, dtype="uint32")
        self.result = Split(
            _read_only(xp.zeros(-(-blocks // 32), dtype="uint32")),
            _read_only(xp.zeros(victims_max, dtype="uint32")),
            _read_only(xp.zeros(3, dtype="uint32")),
        )
        shared = {
            name: address_of(array, self.where)
            for name, array in (
                ("heat", self.heat),
                ("victims", self.result.victims),
                ("counts", self.result.counts),
            )
        } | {"victims_max": victims_max}
        # Looked up once: a split is four launches, and on a GPU shorter than its preparation.
        self._fixed: dict[str, Any] = shared | {
            "state": address_of(self._state, self.where),
            "ranges": address_of(self._range_counts, self.where),
            "hot": address_of(self.result.hot, self.where),
            "hot_ratio": 0.0,
            "threshold": 0.0,
            "count": blocks,
            "range_blocks": self._range_blocks,
        }
        self._fixed_order: dict[str, Any] = shared | {
            "orders": address_of(self._orders, self.where),
            "ordered": address_of(self._ordered, self.where),
            "blocks": blocks,
        }

    def update(self, mass: Any = None, elapsed_s: float = 0.0) -> None:
        """heat = heat * exp(-lambda * elapsed_s) + mass. mass: float32 (blocks) in the backend's
        memory, or None.
        """
        arguments = self._arguments(mass, elapsed_s, None)
        self.where.launch("hifc_heat_update", self._ranges, **(arguments | {"state": 0}))

    def split(
        self,
        *,
        hot_ratio: float | None = None,
        threshold: float | None = None,
        eligible: Any = None,
        mass: Any = None,
        elapsed_s: float = 0.0,
    ) -> Split:
        """Updates as `update` does, and splits in the same pass.

        hot_ratio: the hottest such share of the eligible blocks is hot, rounded as round() does;
        threshold: those of at least this heat; one of both. The victims are the coldest of the cold
        ones, victims_max at most; among blocks of the same heat those of a higher index are colder.
        eligible: bits as of Split.hot, of the blocks that may leave (resident, not pinned); None:
        all. Nothing is transferred and, on a GPU, nothing is waited for.
        """
        if (hot_ratio is None) == (threshold is None):
            raise InvalidRequest("split: give either hot_ratio or threshold")
        if hot_ratio is not None and number("hot_ratio", hot_ratio, 0) > 1:
            raise InvalidRequest(f"split: hot_ratio {hot_ratio} is not from 0 to 1")
        if threshold is not None and math.isnan(threshold):
            raise InvalidRequest("split: threshold is no number")
        arguments = self._arguments(mass, elapsed_s, eligible)
        arguments["hot_ratio"] = -1.0 if hot_ratio is None else hot_ratio
        arguments["threshold"] = 0.0 if threshold is None else threshold
        for kernel in ("hifc_heat_update", "hifc_heat_middle", "hifc_heat_low", "hifc_heat_split"):
            self.where.launch(kernel, self._ranges, **arguments)
        return self.result

    def order(self, head: Any = None, chain: Any = None, depth: Any = None) -> Any:
        """The victims of the latest split in the order in which they leave: uint32 (victims_max),
        the first counts[2] of them valid; the next call overwrites it.

        head, chain, depth: int32 (blocks) in the backend's memory, or None where all blocks have
        the same. Victims of a head stand together, the head with the coldest victim first; in it
        chain by chain, and in a chain the deepest first, or without depth the one of the highest
        index.
        """
        arguments = self._fixed_order | {
            "head": self._per_block("head", head, "int32"),
            "chain": self._per_block("chain", chain, "int32"),
            "depth": self._per_block("depth", depth, "int32"),
        }
        for kernel in ("hifc_victims_group", "hifc_victims_order"):
            self.where.launch(kernel, -(-self.victims_max // _VICTIM_THREADS), **arguments)
        return self._ordered

    def _arguments(self, mass: Any, elapsed_s: float, eligible: Any) -> dict[str, Any]:
        elapsed_s = number("elapsed_s", elapsed_s, 0)
        found = self._per_block("mass", mass, "float32")
        if found % 16:
            raise InvalidRequest("mass begins at no multiple of 16 bytes: copy it")
        return self._fixed | {
            "mass": found,
            "eligible": self._per_block("eligible", eligible, "uint32", -(-self.blocks // 32)),
            "decay": math.exp(-self.decay_lambda * elapsed_s),
        }

    def _per_block(self, name: str, array: Any, dtype: str, size: int | None = None) -> int:
        """Its address; 0 for None."""
        if array is None:
            return 0
        found = strided(array, self.where)
        size = self.blocks if size is None else size
        if found.shape != (size,) or found.dtype != dtype:
            raise InvalidRequest(
                f"{name} is {found.dtype} {found.shape}: {dtype} ({size},) is wanted"
            )
        return address_of(array, self.where)


def _aligned(xp: Any, count: int, dtype: str) -> Any:
    """Zeros that begin at a multiple of 16 bytes."""
    room = xp.zeros(count + 4, dtype=dtype)
    start = -(room.ctypes.data if xp is np else room.data.ptr) % 16 // 4
    return room[start : start + count]


def _read_only(array: Any) -> Any:
    """A view that refuses to be written to; CuPy has none."""
    view = array.view()
    if isinstance(view, np.ndarray):
        view.flags.writeable = False
    return view


def to_bits(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """A mask of numpy (..., blocks) as bits: uint32 (..., blocks / 32, rounded up)."""
    room = np.zeros((*mask.shape[:-1], -(-mask.shape[-1] // 32) * 4), dtype=np.uint8)
    packed = np.packbits(mask, axis=-1, bitorder="little")
    room[..., : packed.shape[-1]] = packed
    return room.view("<u4").astype(np.uint32)


def from_bits(bits: npt.NDArray[np.uint32], blocks: int) -> npt.NDArray[np.bool_]:
    """The mask (..., blocks) of bits (..., blocks / 32)."""
    raw = np.ascontiguousarray(bits, dtype="<u4").view(np.uint8)
    return np.unpackbits(raw, axis=-1, count=blocks, bitorder="little").astype(bool)
