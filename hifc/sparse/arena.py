# SPDX-License-Identifier: Apache-2.0
"""The memory of a sparse cache: an arena of blocks of single heads, tails and sketches of all keys.

A forward of more than one token is exact and goes the way of stream/layers.py: whole layers rotate
through slots, which lie in the arena. For steps of one token the arena holds, for each layer and
head, the tail and resident blocks, side by side as attention reads them; what is not there is read
from the namespace, K and V of one block of one head by one read.

Invariants, beside those of the stream:
- The arena holds either slots or blocks (`_holds_blocks`). Both are copies: tails are kept beside
  it, all else is in the namespace.
- The tail of a step has 1 to block_tokens tokens. It stands backwards and ends where the blocks
  begin, so that what is attended to is one range without holes.
- A tail that is full is written from where it is kept, and written over once that has ended.
- A sketch holds the keys of all tokens of its layer, or fewer: then all are sketched anew before
  blocks are chosen.
- `_holds_blocks` is set by the last assignment of what makes it true, and maps are emptied then.
  After an interrupted change of the arena there is none, until `recover` or `reset` makes it.

Same single thread.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from hifc.blocks.keys import KeyScheme
from hifc.kernels.backend import backend
from hifc.kernels.mass import mass_from_digest, mass_from_sketch
from hifc.kernels.sketch import Digest, Sketch
from hifc.namespace.namespace import Namespace
from hifc.native_lib.request import Op, make_requests
from hifc.sparse.blocks import HeadBlocks, Mass, Moves
from hifc.sparse.plan import CHECK_BLOCKS, SparsePlan, SparseSettings
from hifc.stream.buffers import Batch, KVBuffer, Requests, Slot
from hifc.stream.edits import KVStream


class ArenaStream(KVStream):
    """The KV of one sequence, whose blocks can be resident head by head."""

    wraps = False
    plan: SparsePlan

    def __init__(
        self,
        namespace: Namespace,
        plan: SparsePlan,
        dtype: torch.dtype,
        scheme: KeyScheme,
        settings: SparseSettings,
    ) -> None:
        self.settings = settings
        self.arena: list[KVBuffer] = []  # by layer
        self.maps: list[HeadBlocks] = []  # by layer: what is where in it
        self._holds_blocks = False
        self._sketches: list[Sketch | Digest] = _new_sketches(plan, dtype)
        layers = range(plan.shape.layers)
        self._tail_writes: list[Batch | None] = [None for _ in layers]
        self._prefetch: tuple[Batch, Moves] | None = None
        super().__init__(namespace, plan, dtype, scheme)

    # ---- memory

    def _allocate(self) -> None:
        plan, namespace = self.plan, self.namespace
        for _ in range(plan.shape.layers):
            self.tails.append(KVBuffer(namespace, plan, plan.block_tokens, self.dtype))
        memory = namespace.buffer(plan.check_bytes)
        self._check_offset = namespace.offset(memory)
        with torch.inference_mode(False):
            flat = torch.from_numpy(memory).view(self.dtype)
            tokens = CHECK_BLOCKS * plan.block_tokens
            self._check_kv = flat.view(2, tokens, plan.shape.head_dim)
        self._allocate_arena(plan)

    def _allocate_arena(self, plan: SparsePlan) -> None:
        """The arena of that plan, as blocks of every head and as slots of whole layers."""
        shape = plan.shape
        memory = self.namespace.buffer(plan.arena_bytes)
        size = plan.arena_bytes // shape.layers

        def piece(index: int, size_bytes: int, tokens: int) -> KVBuffer:
            part = memory[index * size_bytes : (index + 1) * size_bytes]
            return KVBuffer(self.namespace, plan, tokens, self.dtype, part)

        heads = shape.layers * shape.heads
        all_maps = HeadBlocks(heads, plan.all_blocks, plan.resident_blocks)
        arena, maps, slots = [], [], []
        for layer in range(shape.layers):
            arena.append(piece(layer, size, plan.arena_tokens))
            maps.append(all_maps.part(layer * shape.heads, (layer + 1) * shape.heads))
        for index in range(plan.slots):
            buffer = piece(index, plan.layer_bytes, plan.capacity_tokens)
            loads = self.block_requests(Op.GET, buffer.offset, plan.capacity_tokens, 0, plan.blocks)
            loads["key"] = self.keys
            slots.append(Slot(buffer, loads))
        room = self.part_requests(shape.heads * plan.resident_blocks, plan)
        free = collections.deque(slots)
        self.plan, self.all_maps, self.maps, self.room = plan, all_maps, maps, room
        self.arena, self.slots, self._free = arena, slots, free

    def replace_arena(self, plan: SparsePlan) -> None:
        """Gives its memory back and takes that of plan. BufferExhausted: there is no arena."""
        self._to_slots()
        self._idle()
        self._unsettled = True
        self._drop_arena()
        self._allocate_arena(plan)
        self._unsettled = False

    def recover(self) -> None:
        """As of any stream; an arena that was being replaced is made."""
        self._make_arena()
        super().recover()

    def _make_arena(self) -> None:
        """Where a change of the arena was interrupted there is none."""
        if not self.arena:
            self._drop_arena()
            self._allocate_arena(self.plan)

    def _drop_arena(self) -> None:
        self.arena.clear()
        self.maps.clear()
        self.slots.clear()
        self._free.clear()
        self._ahead.clear()
        self._current = None

    def part_requests(self, count: int, plan: SparsePlan | None = None) -> Requests:
        """Reads of blocks of single heads into the arena; key, offsets are left to the caller."""
        plan = self.plan if plan is None else plan
        requests = make_requests(count, Op.GET)
        requests["length"] = plan.part_bytes
        requests["piece_bytes"] = plan.piece_bytes
        requests["piece_stride"] = plan.arena_tokens * plan.shape.head_token_bytes
        return requests

    def resident_bytes(self) -> int:
        """As of any stream, and sketches, trend and heat."""
        return self._resident(self.namespace.stats().buffer_used_bytes)

    def resident_peak_bytes(self) -> int:
        """The same at its highest since the namespace was opened."""
        return self._resident(self.namespace.stats().buffer_peak_bytes)

    def _resident(self, used_bytes: int) -> int:
        grown = (
            used_bytes - self._pool_before_bytes + self.plan.sketch_bytes + self.plan.trend_bytes
        )
        return max(self.plan.buffer_bytes, grown)

    # ---- what the arena holds

    def _to_slots(self) -> None:
        """Whole layers rotate through the arena from here on. Blocks in it are forgotten."""
        if not self._holds_blocks:
            return
        self._end_reads()
        for layer, write in enumerate(self._tail_writes):
            if write is not None:
                self._end_tail_write(layer, write)
        self._holds_blocks = False

    def _to_blocks(self) -> None:
        """Blocks of single heads stand in the arena from here on: none as yet, but the tails."""
        if self._holds_blocks:
            return
        if any(sketch.length != self.lengths[0] for sketch in self._sketches):
            self._sketch_all()
        self._idle()
        self.all_maps.clear()
        tokens, length = self.plan.block_tokens, self.lengths[0]
        tail = length % tokens
        for layer, arena in enumerate(self.arena):
            arena.kv[:, :, tokens - tail : tokens] = self.tails[layer].kv[:, :, :tail].flip(2)
        self._holds_blocks = True

    def _sketch_all(self) -> None:
        """Sketches what came without a forward (a stored prefix), or was cut: reads all once."""
        for layer, buffer, _ in self.each_layer():
            sketch = self._sketches[layer]
            _forget(sketch)
            sketch.append(buffer.keys[0, :, : self.lengths[layer]])

    def _end_reads(self) -> None:
        """Waits for a prefetch, whatever came of it."""
        if self._prefetch is not None:
            self.flights.await_end(self._prefetch[0], "reading ahead")
            self._prefetch = None

    def _end_tail_write(self, layer: int, write: Batch) -> None:
        self.flights.settle(write, "write")
        self._tail_writes[layer] = None

    # ---- tokens come

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As LayerStream.update; the sketch takes the keys, too."""
        if layer == 0:
            self.check_whole()
            self._to_slots()
        start = self.lengths[layer]
        found = super().update(layer, keys, values)
        sketch = self._sketches[layer]
        if sketch.length == start:
            sketch.append(keys[0])
        return found

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The token of a step, [1, heads, 1, dim], joins the tail; a full one is written."""
        plan = self.plan
        place = self.lengths[layer]
        block, at = divmod(place, plan.block_tokens)
        tail, arena = self.tails[layer], self.arena[layer]
        write = self._tail_writes[layer]
        if write is not None:
            self._end_tail_write(layer, write)
        for buffer, index in ((tail, at), (arena, plan.block_tokens - 1 - at)):
            buffer.keys.narrow(2, index, 1).copy_(keys)
            buffer.values.narrow(2, index, 1).copy_(values)
        self._sketches[layer].append(keys[0])
        self.lengths[layer] = place + 1
        if at == plan.block_tokens - 1:
            requests = self.block_requests(Op.WRITE, tail.offset, plan.block_tokens, 0, 1)
            self._tail_writes[layer] = self.write(layer, block, block + 1, requests)

    # ---- what attention sees

    def estimate(self, layer: int, query: torch.Tensor, scale: float) -> Mass:
        """Attention by block and KV head, [heads, blocks and tail], as the sketch has it."""
        sketch = self._sketches[layer]
        if isinstance(sketch, Digest):
            found = mass_from_digest(query, sketch, scale=scale)
        else:
            found = mass_from_sketch(query, sketch, self.plan.block_tokens, scale=scale)
        mass: Mass = found
        return mass

    def attended(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [1, heads, tokens, dim]: the tail, which ends where the blocks begin."""
        plan, arena = self.plan, self.arena[layer]
        length = self.lengths[layer]
        blocks = (length - 1) // plan.block_tokens
        tail = length - blocks * plan.block_tokens
        count = tail + min(blocks, plan.resident_blocks) * plan.block_tokens
        start = plan.block_tokens - tail
        return arena.keys.narrow(2, start, count), arena.values.narrow(2, start, count)

    def positions(self, layer: int) -> npt.NDArray[np.int64]:
        """Which tokens `attended` gives: [heads, tokens]."""
        plan, length = self.plan, self.lengths[layer]
        blocks = (length - 1) // plan.block_tokens
        tail = np.arange(length - 1, blocks * plan.block_tokens - 1, -1)  # it lies backwards
        count = min(blocks, plan.resident_blocks)
        firsts = self.maps[layer].block_in[:, :count, None].astype(np.int64) * plan.block_tokens
        chosen = (firsts + np.arange(plan.block_tokens)).reshape(len(firsts), -1)
        return np.concatenate([np.broadcast_to(tail, (len(firsts), len(tail))), chosen], axis=1)

    def read(self, first_head: int, moves: Moves, room: Requests) -> Batch | None:
        """Starts to read moves into the arena, by requests of room. first_head: of all layers'
        heads, the one that moves call 0. None: there are none."""
        count = moves.heads.size
        requests = room[:count]
        if not count:
            return None
        plan = self.plan
        if moves.blocks.max() >= self.committed:
            self.finish_commit()
        requests["key"] = self.keys[moves.blocks]
        heads = first_head + moves.heads
        requests["value_offset"] = heads * plan.part_bytes
        lanes = heads * (2 * plan.arena_tokens * plan.shape.head_token_bytes)
        requests["buffer_offset"] = (
            self.arena[0].offset + lanes + (moves.slots + 1) * plan.piece_bytes
        )
        self.read_bytes += count * plan.part_bytes
        return self.flights.send(requests)

    def read_absent(
        self, layer: int, head: int, blocks: npt.NDArray[np.intp]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [tokens, dim], of blocks of one head, in the check buffer."""
        plan = self.plan
        if blocks.max() >= self.committed:
            self.finish_commit()
        requests = self.part_requests(blocks.size)
        requests["piece_stride"] = CHECK_BLOCKS * plan.piece_bytes
        requests["key"] = self.keys[blocks]
        requests["value_offset"] = layer * plan.share_bytes + head * plan.part_bytes
        requests["buffer_offset"] = self._check_offset + np.arange(blocks.size) * plan.piece_bytes
        self.flights.settle(self.flights.send(requests), "read")
        self.read_bytes += blocks.size * plan.part_bytes
        tokens = blocks.size * plan.block_tokens
        return self._check_kv[0, :tokens], self._check_kv[1, :tokens]

    # ---- shorter, empty, gone, stored

    def each_layer(self) -> Iterator[tuple[int, KVBuffer, list[Batch]]]:
        """As of any stream."""
        self._to_slots()
        yield from super().each_layer()

    def crop(self, count: int) -> None:
        """Removes the last count tokens, all of them at most."""
        self.check_whole()
        self._to_slots()
        super().crop(count)
        for sketch in self._sketches:
            if isinstance(sketch, Sketch):
                sketch.truncate(min(sketch.length, self.lengths[0]))

    def reset(self) -> None:
        """Empty, as new."""
        if not self.closed:
            self._make_arena()
        super().reset()

    def _clear(self) -> None:
        super()._clear()
        for sketch in self._sketches:
            _forget(sketch)
        for layer in range(len(self._sketches)):
            self._tail_writes[layer] = None
        self._prefetch = None
        self._holds_blocks = False

    def _let_go(self) -> None:
        self._drop_arena()
        self._check_kv = torch.empty(0)
        super()._let_go()


def _new_sketches(plan: SparsePlan, dtype: torch.dtype) -> list[Sketch | Digest]:
    """Empty ones, a layer each."""
    shape, where = plan.shape, backend("host")
    layers, capacity = range(shape.layers), plan.all_blocks * plan.block_tokens
    if plan.sketch == "digest":
        name = str(dtype).removeprefix("torch.")
        return [
            Digest(shape.heads, shape.head_dim, capacity, plan.block_tokens, name, where)
            for _ in layers
        ]
    return [Sketch(shape.heads, shape.head_dim, capacity, where) for _ in layers]


def _forget(sketch: Sketch | Digest) -> None:
    if isinstance(sketch, Digest):
        sketch.reset()
    else:
        sketch.truncate(0)
