# SPDX-License-Identifier: Apache-2.0
"""What a sequence goes through beside growing: beams are reordered, tokens are taken back, it ends.

Same invariants and the same single thread as hifc/stream/layers.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from hifc.errors import InvalidRequest, WaitTimeout
from hifc.native_lib.request import KeyArray, Op
from hifc.stream.buffers import Batch, KVBuffer
from hifc.stream.layers import LayerStream


class KVStream(LayerStream):
    """The KV of one batch of sequences, with all that may happen to it."""

    # ---- beams: which row of a value a row reads

    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        """Row i continues what was row order[i]. What is on the device stays where it is: a map per
        block tells which row of a value to read."""
        rows = self.plan.shape.rows
        if order.shape != (rows,) or ((order < 0) | (order >= rows)).any():
            raise InvalidRequest(f"reorder: {order.tolist()} does not name rows of {rows}")
        if (order == np.arange(rows)).all():
            return
        self.check_whole()
        self.finish_commit()
        self._idle()
        self.broken = "a reorder of its rows was interrupted"
        if self._rows is None:
            self._rows = np.tile(np.arange(rows), (self.plan.blocks, 1))
        self._rows[: self.committed] = self._rows[: self.committed, order]
        length = self.lengths[0]
        rest = length - self.committed * self.plan.block_tokens
        for buffer in self.pinned.values():
            self._permute(buffer, order, length)
        for tail in self.tails:
            self._permute(tail, order, rest)
        self._fill()
        self.broken = None

    def _permute(self, buffer: KVBuffer, order: npt.NDArray[np.int64], tokens: int) -> None:
        """Row by row through a slot, which is free now and large enough."""
        scratch = self.slots[0].buffer if self.slots else None
        for side in ("keys", "values"):
            data: torch.Tensor = getattr(buffer, side).narrow(2, 0, tokens)
            if scratch is None:
                data.copy_(data[torch.from_numpy(order)])
                continue
            room: torch.Tensor = getattr(scratch, side).narrow(2, 0, tokens)
            for row, source in enumerate(order.tolist()):
                room[row].copy_(data[source])
            data.copy_(room)

    # ---- all of it, to be stored

    def each_layer(self) -> Iterator[tuple[int, KVBuffer, list[Batch]]]:
        """Every layer in order, whole in memory, while the next one is loaded. Comes after
        check_whole.

        Yields (layer, buffer, writes). Writes out of the buffer that the caller starts belong
        into the list: the buffer is used again once they have ended.
        """
        self._refuse_broken()
        self.finish_commit()
        self._idle()
        self._unsettled = True
        counted = self.total_access, self.prefetch_hit, self.wait_ns
        length = self.lengths[0]
        held = length // self.plan.block_tokens * self.plan.block_tokens
        pinned_writes: list[Batch] = []
        for layer in range(len(self.lengths)):
            part = self._part_of.get(layer, -1)
            if part < 0:
                yield layer, self.pinned[layer], pinned_writes
                continue
            if self._current is not None:
                self._free.append(self._current)
                self._current = None
            slot = self._take(part)
            tail = self.tails[part]
            slot.buffer.kv.narrow(2, held, length - held).copy_(tail.kv.narrow(2, 0, length - held))
            self._fill()
            yield layer, slot.buffer, slot.writes
        self._idle()
        self._unsettled = True
        for batch in pinned_writes:
            self.flights.settle(batch, "write")
        self.total_access, self.prefetch_hit, self.wait_ns = counted
        self._fill()
        self._unsettled = False

    # ---- shorter, empty, gone

    def crop(self, count: int) -> None:
        """Removes the last count tokens, all of them at most."""
        self.check_whole()
        length = self.lengths[0]
        target = max(0, length - count)
        block = self.plan.block_tokens
        keep, full = target // block, length // block
        lengths = [target] * len(self.lengths)
        if not (self.streamed and keep < full):
            self.lengths = lengths
            self._unsettled = True
            self._fill()
            self._unsettled = False
            return
        self.finish_commit()
        self._idle()
        self.broken = "a crop of it was interrupted"
        if target % block:
            self._read_tails(keep)
        borrowed = min(self.borrowed, keep)
        self._delete(max(keep, self.borrowed), full)
        # In this order: what reset deletes is never a block of a stored prefix.
        self.committed = self._reserved = keep
        self.borrowed = borrowed
        self._version += 1  # a block of that number is written again, with other content
        self.lengths = lengths
        self._fill()
        self.broken = None

    def _read_tails(self, block: int) -> None:
        """The tails become that block, which was full."""
        plan = self.plan
        batches = []
        for part, tail in enumerate(self.tails):
            if self._rows is not None:
                requests = self._gather(tail.offset, plan.block_tokens, block, block + 1)
            else:
                requests = self.block_requests(Op.GET, tail.offset, plan.block_tokens, 0, 1)
                requests["key"] = self.keys[block]
            index = self.streamed[part] if block < self.borrowed else part
            requests["value_offset"] += np.uint32(index * plan.share_bytes)
            batches.append(requests)
        requests = np.concatenate(batches)
        self.flights.settle(self.flights.send(requests), "read")
        self.read_bytes += len(self.tails) * plan.share_bytes

    def check_empty(self) -> None:
        """Raises unless a stored prefix can be the beginning."""
        self.check_whole()
        if self.lengths[0]:
            raise InvalidRequest("load_prefix: the cache is not empty, call reset() first")

    def expect_prefix(self) -> None:
        """A stored prefix is about to be read into this empty stream: if it is not adopted, the
        next operation finds it empty."""
        self._unsettled = True

    def adopt(self, names: KeyArray, tokens: int) -> None:
        """An empty stream begins with the entries of a stored prefix, kept by its lease; pinned
        layers and tails are in place. Comes after expect_prefix."""
        blocks = len(names)
        if self.streamed and blocks:
            self.keys[:blocks] = names
            self.borrow(blocks)
            self.publish(0, blocks)
        else:
            self.end_lease()
        self.lengths = [tokens] * len(self.lengths)
        self._fill()
        self._unsettled = False

    def reset(self) -> None:
        """Empty, as new. Mends a stream whatever it was interrupted in, this included."""
        if self.closed:
            return
        self.broken = "a reset was interrupted"
        self._clear()
        self.broken = None

    def _clear(self) -> None:
        """Empty: nothing is in flight, nothing is on the device. May be repeated."""
        self._quiesce()
        self.flights.abort()
        self._delete(self.borrowed, self._reserved)
        self._forget_blocks()
        self._version += 1
        self._rows = None
        self._commit = None
        self.lengths = [0] * len(self.lengths)
        self._unsettled = False

    def close(self) -> None:
        """Deletes what is on the device and gives all memory back. Idempotent; one that was
        interrupted, or ended in WaitTimeout as the device may still write, can be repeated."""
        if self.closed:
            return
        self.broken = "a close was interrupted"
        if not self.namespace.closed:
            try:
                self._clear()
            except WaitTimeout:
                raise
            except Exception:
                self._let_go()
                raise
        self._let_go()

    def _let_go(self) -> None:
        """Of all memory."""
        self.broken = "it was closed"
        self.pinned.clear()
        self.tails.clear()
        self.slots.clear()
        self._free.clear()
        self._ahead.clear()
        self._current = None
        self.closed = True

    def _delete(self, first: int, end: int) -> None:
        self.flights.discard(Op.DELETE, "key", self.keys[first:end])
