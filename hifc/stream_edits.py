# SPDX-License-Identifier: Apache-2.0
"""What a sequence goes through beside growing: beams are reordered, tokens are taken back, it ends.

Same invariants and the same single thread as hifc/streaming.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from hifc.errors import InvalidRequest
from hifc.request import KeyArray, Op
from hifc.reservation import Lease
from hifc.stream_buffers import KVBuffer, Requests, await_end, discard, settle
from hifc.streaming import LayerStream
from hifc.ticket import Ticket


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
        self._check_whole()
        self._finish_commit()
        self._idle()
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

    def each_layer(self) -> Iterator[tuple[int, KVBuffer, list[tuple[Ticket, Requests]]]]:
        """Every layer in order, whole in memory, while the next one is loaded.

        Yields (layer, buffer, writes). Writes out of the buffer that the caller starts belong
        into the list: the buffer is used again once they have ended.
        """
        self._check_whole()
        self._finish_commit()
        self._idle()
        counted = self.total_access, self.prefetch_hit, self.wait_ns
        length = self.lengths[0]
        held = length // self.plan.block_tokens * self.plan.block_tokens
        pinned_writes: list[tuple[Ticket, Requests]] = []
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
        for ticket, requests in pinned_writes:
            settle(self.namespace, ticket, requests, "write")
        self.total_access, self.prefetch_hit, self.wait_ns = counted
        self._fill()

    # ---- shorter, empty, gone

    def crop(self, count: int) -> None:
        """Removes the last count tokens, all of them at most."""
        self._check_whole()
        length = self.lengths[0]
        target = max(0, length - count)
        block = self.plan.block_tokens
        keep, full = target // block, length // block
        if self.streamed and keep < full:
            self._finish_commit()
            self._idle()
            if target % block:
                self._read_tails(keep)
            self._delete(max(keep, self.borrowed), full)
            self.borrowed = min(self.borrowed, keep)
            self.committed = self._reserved = keep
            self._version += 1  # a block of that number is written again, with other content
        self.lengths = [target] * len(self.lengths)
        self._fill()

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
        settle(self.namespace, self.namespace.submit(requests), requests, "read")
        self.read_bytes += len(self.tails) * plan.share_bytes

    def adopt(self, names: KeyArray, tokens: int, lease: Lease) -> None:
        """An empty stream begins with the entries of a stored prefix, kept by the lease; pinned
        layers and tails are in place."""
        blocks = len(names)
        if self.streamed and blocks:
            self.keys[:blocks] = names
            self.publish(0, blocks)
            self.borrow(lease, blocks)
        else:
            lease.release()
        self.lengths = [tokens] * len(self.lengths)
        self._fill()

    def reset(self) -> None:
        """Empty, as new. Also mends a stream that broke."""
        self._quiesce()
        held = self._handles[self.committed : self._reserved]
        discard(self.namespace, Op.ABORT, "handle", held[held != 0])
        self._delete(self.borrowed, self._reserved)
        self.committed = self._reserved = self.borrowed = self._next = 0
        self._version += 1
        self._rows = None
        self._commit = None
        self.lengths = [0] * len(self.lengths)
        self.broken = None
        self._end_lease()

    def close(self) -> None:
        """Deletes what is on the device and gives all memory back. Idempotent."""
        if self.closed:
            return
        try:
            if not self.namespace.closed:
                self.reset()
        finally:
            self.broken = "it was closed"
            self.closed = True
            self.pinned.clear()
            self.tails.clear()
            self.slots.clear()
            self._free.clear()
            self._ahead.clear()
            self._current = None

    def in_flight(self) -> list[Ticket]:
        """Tickets that may not be done."""
        found = [slot.ticket for slot in self.slots if slot.ticket is not None]
        found += [ticket for slot in self.slots for ticket, _ in slot.writes]
        if self._commit is not None:
            found.append(self._commit[0])
        return found

    def _quiesce(self) -> None:
        """Waits for all that is in flight, whatever comes of it. All slots are free then."""
        for ticket in self.in_flight():
            await_end(self.namespace, ticket, "what was in flight")
        self._current = None
        self._ahead.clear()
        self._free.clear()
        for slot in self.slots:
            slot.ticket = None
            slot.writes.clear()
            self._free.append(slot)

    def _delete(self, first: int, end: int) -> None:
        discard(self.namespace, Op.DELETE, "key", self.keys[first:end])
