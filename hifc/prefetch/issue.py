# SPDX-License-Identifier: Apache-2.0
"""From what a prefetcher expects to descriptors in a request ring, and back to blocks that landed.

Three launches choose the candidates, take room in the ring and write the descriptors, by the GPU
into memory of the host where kernels run on one; no Python object is made per block, and nothing is
waited for. `settle` looks at the answers later.

    issuer = Issuer(namespace.ring(arena, block_bytes), keys, rows=1)
    prefetcher = HiFCPrefetcher(num_heads, issuer=issuer, degree=4)
    ...
    prefetcher.update(attn_weights)     # issues what is expected and not resident
    landed = issuer.settle()
    for landing, block in zip(landed.landings, landed.blocks, strict=True):
        attend_to(block, issuer.bytes_of(landing))
    issuer.release(landed.landings)     # or resident=True once they have been copied to their place
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hifc.errors import ClosedError, InvalidRequest, NotSupported
from hifc.kernels.backend import Backend, address_of, backend, strided
from hifc.native_lib.layouts import PAGE_BYTES, RingHeader
from hifc.native_lib.memory import ByteArray
from hifc.staging import cuda
from hifc.util.checking import items, number, whole
from hifc.util.scoped import Scoped

if TYPE_CHECKING:
    from hifc.namespace.ring import Ring

DEGREE_MAX = 1024  # of native/trend.cu
ITEMS_MAX = (1 << 32) - 32
_NO_OWNER = 0xFFFFFFFF  # of native/issue.cu
_TOTALS = ("issued", "overflowed", "no_landing", "failed", "skipped")
_ISSUE_THREADS = 256


@dataclass(frozen=True, slots=True)
class Landed:
    """What settle found, as numpy arrays of one length.

    landings: uint32, where the bytes are (Issuer.bytes_of). rows, blocks: int64, what they are.
    on_their_way: how many others are not answered yet.
    """

    landings: npt.NDArray[np.uint32]
    rows: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    on_their_way: int


class Issuer(Scoped):
    """Issues prefetches into a ring. Not thread-safe; on a GPU all calls are to be on one stream.

    keys: uint8 (rows or 1, blocks, 16), block keys by row and block; a caller may write into it.
    resident: bits, uint32 (rows, blocks / 32, rounded up), what need not be fetched; block i is bit
    i % 32 of word i / 32, and the caller keeps it. Both are where the kernels run.

    The ring's arena is cut into landings, each as large as the ring's longest read; the status word
    of a landing has its number. On a GPU the issuer has to be the ring's only producer.
    """

    def __init__(
        self,
        ring: Ring,
        keys: Any,
        *,
        rows: int | None = None,
        parts: tuple[int, int, int] = (0, 0, 0),
        where: Backend | None = None,
    ) -> None:
        """keys: (rows, blocks, 16), or (blocks, 16) where all rows have the same; rows is then to
        be given. parts: the first part that row 0 wants of a value, how many parts further each
        next row begins, and how many it wants; (0, 0, 0) is the whole value.
        """
        self.where = backend() if where is None else where
        self.ring = ring
        self._keys, self.rows = self._own_keys(keys, rows)
        self.blocks = int(self._keys.shape[1])
        self.parts = tuple(whole("parts", part, 0, 0xFFFF) for part in items("parts", parts))
        header = ring.header
        self.landing_pages = -(-header.read_max_bytes // PAGE_BYTES)
        room = header.arena_bytes // (self.landing_pages * PAGE_BYTES)
        self.landings = min(room, header.statuses)
        if len(self.parts) != 3:
            raise InvalidRequest(f"parts {parts}: three numbers are wanted")
        last = self.parts[0] + self.parts[1] * (self.rows - 1) + self.parts[2]
        if last > 0xFFFF or (not self.parts[2] and self.parts[:2] != (0, 0)):
            raise InvalidRequest(f"parts {parts} of {self.rows} rows: numbers below 65536, or none")
        if self.landings < 1:
            raise InvalidRequest(
                f"the ring's arena of {header.arena_bytes} bytes has no room for a read of "
                f"{header.read_max_bytes}"
            )
        xp = self.where.xp
        self._words = -(-self.blocks // 32)
        self._resident = xp.zeros((self.rows, self._words), dtype="uint32")
        self._in_flight = xp.zeros((self.rows, self._words), dtype="uint32")
        self._owners = xp.full(self.landings, _NO_OWNER, dtype="uint32")
        self._free = xp.empty(self.landings, dtype="uint32")
        self._landed = xp.empty((2, self.landings), dtype="uint32")
        self._counts = xp.zeros(2, dtype="uint32")
        self._totals = xp.zeros(len(_TOTALS), dtype="uint64")
        self._own_tail = xp.full(1, header.tail, dtype="uint64")
        self._candidates: Any = None
        self._candidate_counts = xp.empty(self.rows, dtype="uint32")
        self._undo = contextlib.ExitStack()
        self._closed = False
        base = self._region()
        self._in_ring = {
            "slots": base + header.slots_offset,
            "statuses": base + header.statuses_offset,
            "head": base + RingHeader.head.offset,
            "overflowed": base + RingHeader.overflowed.offset,
        }
        # The host's threads share the tail in the header; a GPU has one of its own.
        self._share_ring(self.where.name == "host")

    def _own_keys(self, keys: Any, rows: int | None) -> tuple[Any, int]:
        if rows is not None:
            rows = whole("rows", rows, 1)
        if str(getattr(keys, "dtype", "")).removeprefix("torch.") != "uint8":
            raise InvalidRequest(f"keys: {type(keys).__name__} is no array of uint8")
        shape = tuple(keys.shape)
        if len(shape) == 2:
            shape = (1, *shape)
        elif rows is None and len(shape) == 3:
            rows = shape[0]
        fits = len(shape) == 3 and shape[2] == 16 and shape[0] in {1, rows} and shape[1] > 0
        if not fits or rows is None or rows < 1 or rows * (shape[1] + 31) > ITEMS_MAX:
            raise InvalidRequest(
                f"keys of shape {tuple(keys.shape)} for {rows} rows: (rows, blocks, 16), or "
                "(blocks, 16) and rows, are wanted"
            )
        xp = self.where.xp
        room = xp.empty(shape[0] * shape[1] * 16 + 16, dtype="uint8")
        own = room[-address_of(room, self.where) % 16 :][: shape[0] * shape[1] * 16].reshape(shape)
        own[...] = xp.asarray(keys, dtype="uint8").reshape(shape)
        return own, rows

    def _region(self) -> int:
        """Where the kernels see the ring."""
        if self.where.name == "host":
            return int(self.ring.address)
        gpu = cuda.running()
        if gpu is None:
            raise NotSupported("no GPU of this process is in use: give the backend host")
        self._undo.callback(gpu.close)
        seen = gpu.register(self.ring.address, self.ring.header.region_bytes)
        self._undo.callback(gpu.unregister, self.ring.address)
        return seen

    def _share_ring(self, shared: bool) -> None:
        """Whether others produce into the ring as well."""
        shared_tail = self._in_ring["head"] + RingHeader.tail.offset - RingHeader.head.offset
        self._in_ring |= {
            "tail": shared_tail if shared else address_of(self._own_tail, self.where),
            "shares_ring": shared,
        }

    def issue(self, scores: Any, degree: int, *, score_min: float = 0.0) -> None:
        """Asks for the blocks of the highest scores in each row that are neither resident nor on
        their way: at most `degree` a row, none that scores score_min or less. Among equal scores
        the first blocks go first, and the best of each row before the second of any.

        scores: float32 (rows, up to blocks), contiguous, in the backend's memory. What finds no
        landing or no room in the ring is lost, and counted in `totals`.
        """
        self._check()
        degree = whole("degree", degree, 0, DEGREE_MAX)
        score_min = number("score_min", score_min)
        found = strided(scores, self.where)
        shape_fits = len(found.shape) == 2 and found.shape[0] == self.rows
        if not shape_fits or found.shape[1] > self.blocks or found.dtype != "float32":
            raise InvalidRequest(
                f"scores are {found.dtype} {found.shape}: float32 ({self.rows}, up to "
                f"{self.blocks}) is wanted"
            )
        if self.rows * degree > ITEMS_MAX:
            raise InvalidRequest(f"degree {degree} of {self.rows} rows: at most {ITEMS_MAX} in all")
        if degree == 0 or found.shape[1] == 0:
            return
        if self._candidates is None or self._candidates.shape[1] != degree:
            self._candidates = self.where.xp.empty((self.rows, degree), dtype="uint32")
        candidates = address_of(self._candidates, self.where)
        counts = address_of(self._candidate_counts, self.where)
        self.where.launch(
            "hifc_trend_candidates",
            self.rows,
            scores=address_of(scores, self.where),
            resident=address_of(self._resident, self.where),
            in_flight=address_of(self._in_flight, self.where),
            candidates=candidates,
            counts=counts,
            skipped=address_of(self._totals[_TOTALS.index("skipped") :], self.where),
            token_blocks=found.shape[1],
            words=self._words,
            degree=degree,
            score_min=score_min,
        )
        self.where.launch(
            "hifc_prefetch_issue",
            1,
            candidates=candidates,
            counts=counts,
            keys=address_of(self._keys, self.where),
            in_flight=address_of(self._in_flight, self.where),
            owners=address_of(self._owners, self.where),
            free_landings=address_of(self._free, self.where),
            totals=address_of(self._totals, self.where),
            rows=self.rows,
            degree=degree,
            words=self._words,
            key_row_stride=self.blocks if self._keys.shape[0] > 1 else 0,
            landings=self.landings,
            landing_pages=self.landing_pages,
            slot_count=len(self.ring.descriptors),
            part_first=self.parts[0],
            part_step=self.parts[1],
            part_count=self.parts[2],
            **self._in_ring,
        )
        if self.where.name == "host":
            self.ring.kick()

    def settle(self) -> Landed:
        """What has landed and was not released; those that failed (missed, cancelled, refused) are
        given up and counted. Looks once; on a GPU it is a transfer of what was found.
        """
        self._check()
        self.where.launch(
            "hifc_prefetch_settle",
            1,
            in_flight=address_of(self._in_flight, self.where),
            owners=address_of(self._owners, self.where),
            statuses=self._in_ring["statuses"],
            landed=address_of(self._landed[0], self.where),
            items=address_of(self._landed[1], self.where),
            counts=address_of(self._counts, self.where),
            totals=address_of(self._totals, self.where),
            landings=self.landings,
        )
        count, on_their_way = _on_host(self._counts).tolist()
        landings, items = _on_host(self._landed[:, :count])
        rows, blocks = np.divmod(items.astype(np.int64), 32 * self._words)
        return Landed(landings.copy(), rows, blocks, on_their_way)

    def release(self, landings: Any, *, resident: bool = False) -> None:
        """Gives landings back; resident: their blocks are in their place now, and not to be fetched
        again. Landings that are free, or whose bytes are still to come, stay as they are,
        and numbers that are none are passed over. InvalidRequest: no integers.
        """
        self._check()
        released = self.where.xp.asarray(landings).ravel()
        if released.size and released.dtype.kind not in "iu":
            raise InvalidRequest(f"landings are integers, not {released.dtype}")
        released = released.astype("int64")
        known = (released >= 0) & (released < self.landings)
        released = self.where.xp.where(known, released, _NO_OWNER).astype("uint32")
        self.where.launch(
            "hifc_prefetch_release",
            -(-released.size // _ISSUE_THREADS),
            released=address_of(released, self.where),
            in_flight=address_of(self._in_flight, self.where),
            resident=address_of(self._resident, self.where) if resident else 0,
            owners=address_of(self._owners, self.where),
            statuses=self._in_ring["statuses"],
            count=released.size,
            landings=self.landings,
        )

    def held(self) -> npt.NDArray[np.int64]:
        """What each landing is taken for, whether it has landed or not: row * blocks + block, -1
        for none; shape (landings,). On a GPU it waits for the stream."""
        items = _on_host(self._owners).astype(np.int64)
        rows, blocks = np.divmod(items, 32 * self._words)
        return np.where(items == _NO_OWNER, -1, rows * self.blocks + blocks)

    def bytes_of(self, landing: int) -> ByteArray:
        """The memory of a landing, as long as the ring's longest read: a view of the arena."""
        landing = whole("landing", landing, 0, self.landings - 1)
        size = self.landing_pages * PAGE_BYTES
        memory: ByteArray = self.ring.arena[landing * size : (landing + 1) * size]
        return memory

    @property
    def keys(self) -> Any:
        """See the class; another array cannot take its place."""
        return self._keys

    @property
    def resident(self) -> Any:
        """See the class; another array cannot take its place."""
        return self._resident

    @property
    def totals(self) -> dict[str, int]:
        """Since the issuer was made: descriptors issued; lost since the ring was full (overflowed)
        or all landings in use (no_landing); failed, as settle saw; skipped: of a row, expected more
        than the last block that was chosen, or at all if fewer than `degree` were, and resident or
        on their way."""
        return dict(zip(_TOTALS, _on_host(self._totals).tolist(), strict=True))

    def close(self) -> None:
        """Lets a GPU forget the ring's memory; before the ring is closed. Idempotent."""
        self._closed = True
        self._undo.close()

    def _check(self) -> None:
        if self._closed or self.ring.closed:
            raise ClosedError("this issuer, or its ring, is closed: make new ones")

    def _end(self) -> None:
        self.close()


def _on_host(array: Any) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = array if isinstance(array, np.ndarray) else array.get()
    return found
