# SPDX-License-Identifier: Apache-2.0
"""The layers of one KV cache, pinned or streamed: memory, loads ahead, writes, exact order.

A value is one block of tokens, layer-major: [layer][K|V][row * head][token][dim]; each (layer, K|V,
row * head) piece is a part of its own, so one layer, or one head of it, is read and verified
alone. Values written here (class swap) hold the streamed layers only; those of a loaded prefix
(class reuse, see prefix.py) hold all. A slot and a pinned layer are [K|V][row * head][token]
[dim] over the whole capacity: attention reads them as they are, and a block's piece lies in them
as it does in its value.

Invariants:
- Layers come in order, each once a forward; `lengths[i]` is the token count of layer i, also while
  a forward is under way. Whatever breaks that marks the stream broken until reset.
- A slot is free, being loaded or loaded for a coming layer (`_ahead`), or attended to (`_current`).
  Attention is over only when the next layer comes, so a slot is freed then and not before.
- A slot is loaded into only once the writes out of it have completed.
- A block is read only once it is committed, which is when all its layers have been written.
- No buffer is allocated after the first moment, whatever the length of a forward.
- An exception may come after any call (a signal handler's, such as Ctrl-C). What a change leaves
  undone is therefore noted before it and cleared by its last assignment: `broken` where tokens may
  be lost, which reset mends; `_unsettled` where only copies and reservations are concerned, which
  the next operation puts in order. Assignments with no call between them are one change.

Used by one thread at a time, as a model is. The reads and writes go on in the namespace's reactor.
"""

from __future__ import annotations

import collections
import secrets
import time

import numpy as np
import numpy.typing as npt
import torch

from hifc.blocks.keys import KeyScheme
from hifc.errors import BufferExhausted, ConfigError, InvalidRequest
from hifc.namespace.namespace import Namespace
from hifc.namespace.reservation import Lease
from hifc.native_lib.handle import RESERVE_SHARE
from hifc.native_lib.layouts import KEY_BYTES
from hifc.native_lib.request import Answer, BlockClass, KeyArray, Op, make_requests
from hifc.stream.buffers import Batch, InFlight, KVBuffer, Requests, Slot
from hifc.stream.plan import StreamPlan

# Of a segment that holds one value: headers, checksum table, summary. More than there is.
SEGMENT_METADATA_BYTES = 128 << 10
# Where the bytes of a token of a head are no multiple of this, attention gets a packed copy.
ALIGNMENT_BYTES = 16
# A lease on the entries of a stored prefix, and when it is renewed.
LEASE_S = 600.0
LEASE_RENEW_S = 200.0
# Of `broken`: between two layers of a forward, and within one.
UNDER_WAY = "a forward was interrupted between two layers"
WITHIN_LAYER = "a forward was interrupted within a layer"


class LayerStream:
    """The KV of one batch of sequences, in a namespace."""

    wraps = True  # after the last layer the first ones are loaded for the next forward

    def __init__(
        self, namespace: Namespace, plan: StreamPlan, dtype: torch.dtype, scheme: KeyScheme
    ) -> None:
        self.namespace = namespace
        self.plan = plan
        self.scheme = scheme
        self.dtype = dtype
        shape = plan.shape
        self.lengths = [0] * shape.layers
        self.streamed = plan.streamed
        self.last = shape.layers - 1
        self._packs = shape.head_token_bytes % ALIGNMENT_BYTES != 0
        self.total_access = 0
        self.prefetch_hit = 0
        self.wait_ns = 0  # that attention waited for loads
        self.written_bytes = 0
        self.read_bytes = 0
        self.broken: str | None = None  # what was not completed, also while it is under way
        self.flights = InFlight(namespace)
        self.committed = 0  # blocks that can be read
        self.borrowed = 0  # leading blocks that are entries of a stored prefix, not ours
        self.closed = False
        self.lease: Lease | None = None  # on the entries of a prefix that is here or being loaded
        self._lease_until = 0.0
        self._part_of = {layer: part for part, layer in enumerate(self.streamed)}
        self._reserved = 0  # blocks committed or reserved
        self._parts_written = 0  # layers written of the blocks reserved
        self._handles: npt.NDArray[np.uint64] = np.zeros(plan.blocks, dtype=np.uint64)
        self._commit: Batch | None = None
        self._unsettled = False
        self._sequence = secrets.token_bytes(16)
        self._version = 0
        self.keys: KeyArray = np.zeros((plan.blocks, KEY_BYTES), dtype=np.uint8)
        self._rows: npt.NDArray[np.int64] | None = None  # [block, row] -> row in its value
        self._free: collections.deque[Slot] = collections.deque()
        self._ahead: collections.deque[Slot] = collections.deque()
        self._current: Slot | None = None
        self._next = 0  # the part that is attended to next
        self.pinned: dict[int, KVBuffer] = {}
        self.tails: list[KVBuffer] = []
        self.slots: list[Slot] = []
        stats = namespace.stats()
        self._pool_before_bytes = stats.buffer_used_bytes
        _check(namespace, plan, stats.segment_size_bytes)
        try:
            self._allocate()
        except BufferExhausted as error:
            raise _too_small(namespace, plan, stats.buffer_used_bytes) from error

    # ---- memory

    def _allocate(self) -> None:
        plan, namespace = self.plan, self.namespace
        tokens = plan.capacity_tokens
        for layer in plan.pinned:
            self.pinned[layer] = KVBuffer(namespace, plan, tokens, self.dtype)
        for _ in self.streamed:
            self.tails.append(KVBuffer(namespace, plan, plan.block_tokens, self.dtype))
        for _ in range(plan.slots):
            buffer = KVBuffer(namespace, plan, tokens, self.dtype)
            slot = Slot(buffer, self.block_requests(Op.GET, buffer.offset, tokens, 0, plan.blocks))
            self.slots.append(slot)
            self._free.append(slot)

    def block_requests(self, op: Op, offset: int, tokens: int, first: int, end: int) -> Requests:
        """One request a block [first, end) between its share of one layer and a buffer of that
        many tokens at offset. Key or handle, and value_offset, are left to the caller."""
        plan = self.plan
        requests = make_requests(end - first, op)
        blocks = np.arange(first, end, dtype=np.uint64)
        requests["buffer_offset"] = offset + blocks * np.uint64(plan.piece_bytes)
        requests["length"] = plan.share_bytes
        requests["piece_bytes"] = plan.piece_bytes
        requests["piece_stride"] = tokens * plan.shape.head_token_bytes
        return requests

    def resident_bytes(self) -> int:
        """Pool memory now: buffers of ours, and what the namespace took for headers and tables
        since. Includes what others took from the pool of a shared namespace meanwhile."""
        grown = self.namespace.stats().buffer_used_bytes - self._pool_before_bytes
        return max(self.plan.buffer_bytes, grown)

    def resident_peak_bytes(self) -> int:
        """The same at its highest since the namespace was opened."""
        grown = self.namespace.stats().buffer_peak_bytes - self._pool_before_bytes
        return max(self.plan.buffer_bytes, grown)

    # ---- one layer of one forward

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values, [rows, heads, new, dim]; returns all of the layer's.

        The result, two views [rows, heads, tokens, dim], is valid until the next layer's update.
        In a cache that packs its tokens, as transformers' DynamicCache does, a head begins wherever
        the head before it ends. Kernels may sum in another order where that is not on 16 bytes (MKL
        on processors without AVX2 does), so for head sizes that can come to lie so the result is a
        packed copy: only equal places give equal bits.
        """
        start = self.lengths[layer]
        end = start + keys.shape[2]
        if layer == 0:
            self._begin(end)
        elif self.broken is not UNDER_WAY:
            self._refuse_broken()
        self.broken = WITHIN_LAYER
        try:
            current = self._current
            if current is not None:
                self._current = None
                self._free.append(current)
            part = self._part_of.get(layer, -1)
            if part < 0:
                buffer = self.pinned[layer]
                buffer.keys.narrow(2, start, end - start).copy_(keys)
                buffer.values.narrow(2, start, end - start).copy_(values)
            else:
                buffer = self._append(part, start, end, keys, values)
            self.lengths[layer] = end
            self._fill()
            found = buffer.keys.narrow(2, 0, end), buffer.values.narrow(2, 0, end)
        except Exception as error:
            self.broken = f"layer {layer} failed: {error}"
            raise
        self.broken = None if layer == self.last else UNDER_WAY
        return (found[0].contiguous(), found[1].contiguous()) if self._packs else found

    def _begin(self, end: int) -> None:
        """A forward starts: nothing has changed yet, so this is where it is refused."""
        self.check_whole()
        if end > self.plan.max_tokens:
            raise InvalidRequest(
                f"the cache is full: {end} tokens, max_tokens is {self.plan.max_tokens}. Nothing "
                "was changed; make the cache with max_tokens = prompt + new tokens - 1 or more"
            )
        if self.lease is not None and time.monotonic() > self._lease_until:
            self._renew_lease()

    def check_whole(self) -> None:
        """Raises unless every layer holds the same tokens, and puts in order what an interrupted
        operation left that cost none."""
        self._refuse_broken()
        if self._unsettled or (self._commit is None and self.flights.reserved):
            self.recover()

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise InvalidRequest(
                f"this cache is incomplete, {self.broken}; call reset() and run the prompt again"
            )

    def recover(self) -> None:
        """After an operation that was interrupted and cost no tokens: ends what is in flight,
        forgets what was read ahead, gives back what was reserved. May be repeated."""
        self._unsettled = True
        self._quiesce()
        if self._commit is not None:
            self.finish_commit()
        else:
            self.flights.abort()
        if self.lengths[0] == 0:  # a prefix was being loaded
            self._forget_blocks()
        self._unsettled = False

    def _append(
        self, part: int, start: int, end: int, keys: torch.Tensor, values: torch.Tensor
    ) -> KVBuffer:
        """Streamed layer: blocks from the device, tail from memory, then what is new."""
        block = self.plan.block_tokens
        slot = self._take(part)
        buffer, tail = slot.buffer, self.tails[part]
        first, full = start // block, end // block
        held = first * block  # tokens that came from the device
        if full == first:
            # The usual token: into the tail, and the tail as a whole behind the blocks.
            tail.keys.narrow(2, start - held, end - start).copy_(keys)
            tail.values.narrow(2, start - held, end - start).copy_(values)
            buffer.kv.narrow(2, held, end - held).copy_(tail.kv.narrow(2, 0, end - held))
            return buffer
        if start > held:
            buffer.kv.narrow(2, held, start - held).copy_(tail.kv.narrow(2, 0, start - held))
        buffer.keys.narrow(2, start, end - start).copy_(keys)
        buffer.values.narrow(2, start, end - start).copy_(values)
        rest = end - full * block
        if rest:
            tail.kv.narrow(2, 0, rest).copy_(buffer.kv.narrow(2, full * block, rest))
        requests = self.block_requests(
            Op.WRITE, buffer.offset, self.plan.capacity_tokens, first, full
        )
        slot.writes.append(self.write(part, first, full, requests))
        return buffer

    # ---- loads

    def _take(self, part: int) -> Slot:
        """The slot that holds part's blocks, waited for. It becomes the current one."""
        if part != self._next:
            self._drop_ahead()
            self._next = part
        ahead = bool(self._ahead)
        slot = self._ahead.popleft() if ahead else self._load(part)
        self._current = slot
        self._next = part + 1 if part + 1 < len(self.streamed) else 0
        load = slot.load
        if load is None:
            return slot
        self.total_access += 1
        if ahead and not slot.status.any():  # all are there, all OK
            self.prefetch_hit += 1
            self.flights.ended(load)
        else:
            started = time.perf_counter_ns()
            self.flights.settle(load, "read")
            self.wait_ns += time.perf_counter_ns() - started
        slot.load = None
        return slot

    def _load(self, part: int) -> Slot:
        """Starts to load part into a free slot."""
        slot = self._free.popleft()
        if slot.writes:
            self._settle_writes(slot)
        slot.part = part
        blocks = self.lengths[self.streamed[part]] // self.plan.block_tokens
        if blocks == 0:
            slot.load = None
            return slot
        if blocks > self.committed:
            self.finish_commit()
        share = self.plan.share_bytes
        if self._rows is not None:
            requests = self._gather(slot.buffer.offset, self.plan.capacity_tokens, 0, blocks)
            requests["value_offset"] += np.uint32(part * share)
            slot.use(requests)
        else:
            if slot.prepared != blocks:
                slot.use(slot.loads[:blocks], blocks)
            slot.value_offset[: self.borrowed] = self.streamed[part] * share
            slot.value_offset[self.borrowed :] = part * share
        slot.load = self.flights.send(slot.requests)
        self.read_bytes += blocks * share
        return slot

    def _fill(self) -> None:
        """Loads the layers that come next into every slot that is free."""
        while self._free:
            part = self._next + len(self._ahead)
            if len(self._ahead) >= len(self.streamed):
                return
            if part >= len(self.streamed):
                if not self.wraps:
                    return
                part -= len(self.streamed)
            blocks = self.lengths[self.streamed[part]] // self.plan.block_tokens
            if blocks == 0 or (blocks > self.committed and self._commit is None):
                return  # nothing to load, or a block that later layers have not written yet
            self._ahead.append(self._load(part))

    def _drop_ahead(self) -> None:
        """Forgets loads under way, once they have ended."""
        while self._ahead:
            slot = self._ahead[0]
            if slot.load is not None:
                self.flights.await_end(slot.load, "reading ahead")
                slot.load = None
            self._free.append(self._ahead.popleft())

    def _idle(self) -> None:
        """Nothing is in flight, every slot is free."""
        self._unsettled = True
        for slot in self.slots:
            self._settle_writes(slot)
        self._quiesce()
        self._unsettled = False

    def _quiesce(self) -> None:
        """Waits for all that is in flight, whatever comes of it. All slots are free then."""
        self.flights.await_all()
        for slot in self.slots:
            slot.load = None
            slot.writes.clear()
        free: collections.deque[Slot] = collections.deque(self.slots)
        ahead: collections.deque[Slot] = collections.deque()
        self._free, self._ahead, self._current, self._next = free, ahead, None, 0

    def _gather(self, offset: int, tokens: int, first: int, end: int) -> Requests:
        """Requests that read the blocks [first, end) row by row, each from the row of its value
        that the row map names; the first block lands at offset. value_offset is of the layer."""
        plan, shape = self.plan, self.plan.shape
        assert self._rows is not None
        row_bytes = shape.heads * plan.piece_bytes
        stride = tokens * shape.head_token_bytes
        requests = make_requests((end - first) * 2 * shape.rows, Op.GET)
        grid = requests.reshape(end - first, 2, shape.rows)
        blocks = np.arange(end - first)[:, None, None]
        side = np.arange(2)[:, None]
        grid["key"] = self.keys[first:end, None, None]
        grid["length"] = row_bytes
        grid["piece_bytes"] = plan.piece_bytes
        grid["piece_stride"] = stride
        grid["value_offset"] = (side * shape.rows + self._rows[first:end, None]) * row_bytes
        lanes = (side * shape.rows + np.arange(shape.rows)) * (shape.heads * stride)
        grid["buffer_offset"] = offset + blocks * plan.piece_bytes + lanes
        return requests

    # ---- writes

    def write(self, part: int, first: int, end: int, requests: Requests) -> Batch:
        """Writes part's share of the blocks [first, end), which have become full: requests, which
        name the memory. What they read must stay as it is until the batch has ended."""
        share = self.plan.share_bytes
        if part == 0:
            self.finish_commit()
            self._reserve(first, end)
        requests["handle"] = self._handles[first:end]
        requests["value_offset"] = part * share
        batch = self.flights.send(requests)
        if (requests["status"] == Answer.RETRY).any():
            # The commit that follows must find every write on its way.
            self.flights.settle(batch, "write")
        self.written_bytes += (end - first) * share
        self._parts_written += 1
        if self._parts_written == len(self.streamed):
            commit = make_requests(end - first, Op.COMMIT)
            commit["handle"] = self._handles[first:end]
            self._commit = self.flights.send(commit)
        return batch

    def _reserve(self, first: int, end: int) -> None:
        """Room for the blocks [first, end), all streamed layers."""
        plan = self.plan
        requests = make_requests(end - first, Op.RESERVE)
        requests["cls"] = BlockClass.SWAP
        requests["key"] = self.keys[first:end] = self._swap_keys(first, end)
        requests["length"] = len(self.streamed) * plan.share_bytes
        requests["part_count"] = len(self.streamed) * plan.layer_parts
        self._reserved = end
        self._parts_written = 0
        self.flights.settle(self.flights.send(requests, reserves=True), "reserve")
        self._handles[first:end] = requests["handle"]

    def finish_commit(self) -> None:
        """Waits until the blocks that all layers have written can be read."""
        if self._commit is None:
            return
        self.flights.settle(self._commit, "commit")
        self.publish(self.committed, self._reserved)
        self.flights.reserved.clear()
        self._commit = None

    def publish(self, first: int, end: int) -> None:
        """The blocks [first, end) are stored under `keys`: loads ask for them from now on."""
        for slot in self.slots:
            slot.loads["key"][first:end] = self.keys[first:end]
        if self._rows is not None:
            self._rows[first:end] = np.arange(self.plan.shape.rows)
        self.committed = self._reserved = end

    def _settle_writes(self, slot: Slot) -> None:
        for batch in slot.writes:
            self.flights.settle(batch, "write")
        slot.writes.clear()

    def _swap_keys(self, first: int, end: int) -> KeyArray:
        """No other sequence has them, and no earlier content of these blocks had."""
        name = self._sequence + self._version.to_bytes(8, "little")
        keys = b"".join(self.scheme.swap_key(name, block) for block in range(first, end))
        return np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)

    # ---- lease

    def borrow(self, blocks: int) -> None:
        """The leading blocks are entries of a stored prefix, kept by the lease."""
        until = time.monotonic() + LEASE_RENEW_S
        self.borrowed, self._lease_until = blocks, until

    def _renew_lease(self) -> None:
        earlier = self.lease
        self.lease = self.namespace.lease(self.keys[: self.borrowed], LEASE_S)
        self.borrow(self.borrowed)
        if earlier is not None:
            earlier.release()

    def end_lease(self) -> None:
        """Entries that it kept may be evicted."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def _forget_blocks(self) -> None:
        """No block is read from the namespace any more."""
        self.end_lease()
        self.committed = self._reserved = self.borrowed = 0


def check_pool(namespace: Namespace, plan: StreamPlan) -> None:
    """Raises BufferExhausted for a plan that the pool could not hold if it were empty."""
    size = namespace.stats().buffer_size_bytes
    if plan.pool_bytes > size - size // RESERVE_SHARE:
        raise _too_small(namespace, plan, 0)


def _too_small(namespace: Namespace, plan: StreamPlan, used_bytes: int) -> BufferExhausted:
    wanted = used_bytes + plan.resident_bytes
    return BufferExhausted(
        f"the pool of {namespace.uri} has no room for {plan.pool_bytes} bytes of pinned "
        f"layers, slots and tails: open it with a pool_size of {wanted * 16 // 15} or more"
    )


def _check(namespace: Namespace, plan: StreamPlan, segment_bytes: int) -> None:
    """Said before a prompt is computed, not when its first block is full."""
    uri = namespace.uri
    if not namespace.reactor:
        raise ConfigError(
            f"{uri} is driven inline, so nothing would be loaded while the model computes: open it "
            'with drive="reactor"'
        )
    room = segment_bytes - SEGMENT_METADATA_BYTES
    value = plan.block_tokens * plan.shape.token_bytes
    if plan.blocks == 0 or value <= room:
        return
    unit = plan.shape.page_tokens
    fitting = room // plan.shape.token_bytes // unit * unit
    advice = f"use block_tokens={fitting} or less, or " if fitting else ""
    raise ConfigError(
        f"a block of {plan.block_tokens} tokens is {value} bytes, segments of {uri} have "
        f"{segment_bytes}: {advice}format it with a larger segment_size (64MiB)"
    )
