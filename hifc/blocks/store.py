# SPDX-License-Identifier: Apache-2.0
"""Blocks between memory and flash: room within the budget, batches that leave, blocks that return.

A stored tensor is copied once, into pool memory, from where the device reads it; a loaded one is
copied once, out of it. Resident blocks never exceed `memory_budget - memory_reserved`; once less
than the watermark of that is free, `swap_batch_size` blocks at a time leave with one submission.
With a host tier (host_tier.py) they go there, and flash gets what has to leave it for them.

What is true, however an operation ended: which block a key names, each block's memory and on_flash,
the copies in the tier, the prefetches under way. Each changes by one store, in an order in which a
block's bytes are always found where one of these says. `_recover` derives the rest.

Not thread-safe: HiFC calls all of it under its lock.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hifc.blocks import codec
from hifc.blocks import policy as policies
from hifc.blocks.classifier import HotColdClassifier
from hifc.blocks.host_tier import HostTier, gate_bytes
from hifc.blocks.keys import BlockTable, KVBlock
from hifc.blocks.policy import HiFCPolicy
from hifc.config import Config
from hifc.errors import BackPressure, BufferExhausted, FormatError, HiFCError, NoSpace
from hifc.metrics.counters import Metrics
from hifc.namespace.calls import DELAY_MAX_S, DELAY_MIN_S, RETRY_WAIT_S
from hifc.namespace.opening import open_namespace
from hifc.namespace.ticket import Ticket
from hifc.native_lib.memory import ByteArray
from hifc.native_lib.request import Answer
from hifc.prefetch.ahead import Ahead
from hifc.staging.bar import BarProvider
from hifc.util.settled import Settled
from hifc.util.units import format_size, page_up

# Reuse blocks that left memory are remembered for their heat, the last so many of them.
ABSENT_MAX = 65536


class Residency:
    """What HiFC builds on: the namespace, the blocks known, and which of them are in memory."""

    def __init__(self, config: Config, policy: HiFCPolicy, bar: BarProvider | None) -> None:
        self.config = config
        self.policy = policy
        self.classifier = HotColdClassifier(
            hot_ratio=config.hot_ratio,
            hot_ratio_min=config.hot_ratio_min,
            hot_ratio_max=config.hot_ratio_max,
            hit_rate_target=config.hit_rate_target,
            watermark=config.watermark,
        )
        self.metrics = Metrics()
        self._compression = (
            codec.compression(config.compression_algorithm) if config.enable_compression else None
        )
        self._prefetches: dict[bytes, tuple[Ticket, int, ByteArray]] = {}
        self._prefetched: set[bytes] = set()
        self._absent: dict[bytes, None] = {}  # reuse blocks on flash alone, oldest first
        self._limit_bytes = config.memory_budget - config.memory_reserved
        self._settled = Settled(self._recover)
        self.namespace = open_namespace(config, bar)
        try:
            self.tier = self._make_tier()
            self.ahead = Ahead(
                self.namespace, config.prefetch_degree, self.metrics, self._spare, self._is_here
            )
            self.blocks = BlockTable(self.ahead.changed)
        except BaseException:
            self.namespace.close()
            raise

    def _make_tier(self) -> HostTier:
        size_bytes = gate_bytes(self.config)
        gate = self.namespace.buffer(size_bytes) if size_bytes else None
        return HostTier(self.config.host_tier_bytes, gate)

    def _recover(self) -> None:
        """Derives anew all that follows from what is true (see above), in time linear in the blocks
        known. Called before an operation that comes after one that an exception ended."""
        self.ahead.reset()
        blocks = self.blocks
        self.tier.recount(lambda block: not block.resident and blocks.get(block.key) is block)
        for block in list(blocks):
            if not block.resident and block.key not in self.tier and block.on_flash is False:
                blocks.name(block.key, None)  # on its way out: admission had declined it
        blocks.recount()
        self.policy.restore(blocks)
        here = {block.key for block in blocks.residents()}
        self._prefetched &= here
        left = {
            block.key: None
            for block in blocks
            if block.cls == "reuse" and block.key not in here and block.key not in self.tier
        }
        self._absent = {name: None for name in self._absent if name in left} | left

    # ---- memory

    def _encode(self, tensor: Any, info: codec.TensorInfo) -> ByteArray:
        """The encoded tensor in pool memory, room made for it."""
        self.metrics.add("raw_bytes", info.raw_bytes)
        packed = None
        if self._compression is not None:
            packed = codec.compress(tensor, info, self._compression, self.config.compression_level)
        if packed is not None:
            info, payload = packed
            memory = self._room(codec.encoded_size(info))
            codec.fill(payload, info, memory)
        else:
            memory = self._room(codec.encoded_size(info))
            codec.encode_into(tensor, info, memory)
        self.metrics.add("stored_bytes", memory.size)
        return memory

    def _room(self, size_bytes: int) -> ByteArray:
        """Pool memory of that size within the budget; other blocks leave for it."""
        held = page_up(size_bytes)
        if held > self._limit_bytes:
            raise BufferExhausted(
                f"a block of {format_size(size_bytes)} is larger than memory_budget less "
                f"memory_reserved ({format_size(self._limit_bytes)}): raise memory_budget"
            )
        self._make_room(held)
        while True:
            try:
                return self.namespace.buffer(size_bytes)
            except BufferExhausted:  # fragmented, or prefetches hold it
                if not self._give_up(self.config.swap_batch_size):
                    raise

    def _make_room(self, size_bytes: int) -> None:
        """Cold blocks leave until size_bytes fit, and at the watermark on their own."""
        limit = self._limit_bytes
        size_bytes += self._pending_bytes
        while self.blocks.resident_bytes + size_bytes > limit:
            if not self._give_up(self.config.swap_batch_size):
                break
        if self.classifier.should_offload(self.blocks.resident_bytes + size_bytes, limit):
            self._give_up_cold()

    def _give_up_cold(self) -> None:
        """One batch of what the policy gives up by itself; none if it gives up none."""
        resident = self.blocks.residents()
        hot = self.classifier.hot_count(len(resident))
        chosen = policies.victims(self.policy, resident, hot, self.config.swap_batch_size)
        try:
            self._swap_out(chosen)
        except (NoSpace, BackPressure):  # early, so there is no need: they stay in memory
            self.metrics.add("offload_failed")

    def _give_up(self, limit: int) -> bool:
        """A batch leaves memory, also against the policy's will. False: nothing is resident."""
        resident = self.blocks.residents()
        if not resident:
            return False
        hot = self.classifier.hot_count(len(resident))
        chosen = policies.victims(self.policy, resident, hot, limit)
        if not chosen:
            chosen = policies.coldest(self.policy, resident, limit)
            self.metrics.add("policy_overruled", len(chosen))
        self._swap_out(chosen)
        return True

    # ---- to flash

    def _swap_out(self, blocks: list[KVBlock], to_flash: bool = False) -> None:
        """All of them leave the pool: for the host tier, unless to_flash. What does not fit there,
        or leaves it for them, goes to flash."""
        down = [] if to_flash else self.tier.share(blocks)
        names = {block.key for block in down}
        out = self.tier.overflow(down, self.config.swap_batch_size) if down else []
        out += [block for block in blocks if block.key not in names]
        self.metrics.add("dropped_blocks", sum(block.on_flash is True for block in out))
        self._write(out)
        for block in out:
            self._depart(block)
        for block in down:
            self.tier.put(block)
            self._leave_pool(block)
            self.metrics.add("host_tier_in_blocks")
            self.metrics.add("host_tier_in_bytes", block.size_bytes)
        while len(self._absent) > ABSENT_MAX:
            oldest = self.blocks.get(next(iter(self._absent)))
            assert oldest is not None
            self._forget(oldest)

    def _leave_pool(self, block: KVBlock) -> None:
        if block.key in self._prefetched:
            self._prefetched.discard(block.key)
            self.metrics.add("prefetch_wasted")
        self.blocks.set_resident(block, None)
        self.policy.leave([block])

    def _depart(self, block: KVBlock) -> None:
        """Its bytes leave memory, after _write."""
        self.tier.drop(block)
        if block.resident:
            self._leave_pool(block)
        else:
            self.ahead.changed(block)
        self.metrics.add("swap_out_blocks")
        self.metrics.add("swap_out_bytes", block.size_bytes)
        if not block.on_flash:  # admission declined it: it is gone
            self._forget(block)
        elif block.cls == "reuse":
            self._absent[block.key] = None

    def _in_memory(self) -> list[KVBlock]:
        """Blocks whose bytes are in the pool or in the host tier, not on flash alone."""
        below = [block for block in self.tier.blocks() if not block.resident]
        return [*self.blocks.residents(), *below]

    def _write_reuse(self) -> None:
        """Puts what is to survive the process."""
        self._write([block for block in self._in_memory() if block.cls == "reuse"])

    def _write(self, blocks: list[KVBlock]) -> None:
        """Puts what is not on flash yet: out of the pool one submission a class, out of the host
        tier one for each time that its gate is full. Raises if one cannot be written; all of them
        are still in memory then."""
        self._look_on_flash([block for block in blocks if block.on_flash is None])
        for cls in ("swap", "reuse"):
            left = [block for block in blocks if block.cls == cls and not block.on_flash]
            resident = [block for block in left if block.resident]
            self._write_from(resident, [block.memory for block in resident])
            self.tier.pass_gate([b for b in left if not b.resident], self._write_from)

    def _look_on_flash(self, blocks: list[KVBlock]) -> None:
        """Sees what is there of blocks in memory whose way to flash, or from it, was cut short.
        What is not their bytes is deleted, so that it never comes back in their place."""
        if self.tier.gate_in_use:
            self.namespace.drain()
            self.tier.gate_in_use = False
        for block in blocks:
            memory = block.memory if block.resident else self.tier.bytes_of(block)
            if not self.namespace.is_value(block.key, memory):
                self.namespace.delete(block.key)
                block.on_flash = False
            else:
                block.on_flash = True

    def _write_from(self, blocks: list[KVBlock], memories: list[ByteArray]) -> None:
        """Puts blocks of one class, trying again those answered Retry while some get through."""
        left = list(zip(blocks, memories, strict=True))
        deadline, delay_s = time.monotonic() + RETRY_WAIT_S, DELAY_MIN_S
        while left:
            before = len(left)
            left = self._put(left)
            if len(left) < before:
                deadline, delay_s = time.monotonic() + RETRY_WAIT_S, DELAY_MIN_S
            elif time.monotonic() > deadline:
                raise BackPressure(
                    f"{len(left)} blocks were answered Retry for {RETRY_WAIT_S:.0f} s on "
                    f"{self.config.device}: the device does not keep up; use fewer threads, "
                    "larger segments, or a larger memory_budget"
                )
            if left:
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, DELAY_MAX_S)

    def _put(self, left: list[tuple[KVBlock, ByteArray]]) -> list[tuple[KVBlock, ByteArray]]:
        """One submission. Returns those that were answered Retry."""
        cls = left[0][0].cls
        for block, _ in left:
            block.on_flash = None
        ticket = self.namespace.put_many(
            [block.key for block, _ in left], [memory for _, memory in left], cls=cls
        )
        ticket.wait()
        again: list[tuple[KVBlock, ByteArray]] = []
        full = False
        for (block, memory), status in zip(left, ticket.answers.tolist(), strict=True):
            if status in (Answer.OK, Answer.EXISTS):
                block.on_flash = True
            elif status == Answer.REJECTED:
                block.on_flash = False
                self.metrics.add("rejected")
            elif status == Answer.RETRY:
                block.on_flash = False
                again.append((block, memory))
            elif status == Answer.PENDING:
                again.append((block, memory))
            elif status == Answer.NO_SPACE:
                block.on_flash = False
                full = True
        self.metrics.add("swap_batches")
        ticket.raise_for_errors()
        if full:
            raise NoSpace(
                f"{self.config.device} is full: {cls} blocks stay in memory; delete sequences, "
                "use a larger device, or raise memory_budget"
            )
        if again:
            self.namespace.drain()
        return again

    # ---- from flash

    def _find(self, name: bytes) -> KVBlock | None:
        """A block of an earlier process, or one that was put by other means."""
        lengths = np.zeros(1, dtype=np.uint32)
        answer = self.namespace.lookup([name], lengths)[0]
        if answer == Answer.PENDING:  # put by other means a moment ago
            self.namespace.drain()
            answer = self.namespace.lookup([name], lengths)[0]
        if answer != Answer.OK:
            return None
        block = KVBlock(key=name, size_bytes=int(lengths[0]), cls="reuse", on_flash=True)
        self.blocks.add(block)
        self.policy.add(block)
        self.policy.leave([block])
        self._absent[name] = None
        return block

    def _bring_back(self, block: KVBlock) -> ByteArray | None:
        """Reads a block into memory, where it stays; None if it is gone."""
        memory = self._room_for(block)
        found = self.namespace.get(block.key, out=memory)
        if found is None:
            return None
        if found.size != block.size_bytes:
            raise FormatError(
                f"block {block.key.hex()} has {found.size} bytes on flash, {block.size_bytes} "
                "were stored: another process wrote it"
            )
        self._returned(block, memory)
        return memory

    def _climb(self, block: KVBlock) -> ByteArray:
        """Copies a block of the host tier into the pool, where it stays."""
        with self.tier.climbing(block) as held:
            memory = self._room(block.size_bytes)
            memory[:] = held
            self.blocks.set_resident(block, memory)
        self.metrics.add("host_tier_hit")
        self.metrics.add("host_tier_hit_bytes", block.size_bytes)
        return memory

    def _room_for(self, block: KVBlock) -> ByteArray:
        if block.key in self._absent:  # the newest of them, so that making room keeps it
            self._absent[block.key] = self._absent.pop(block.key)
        return self._room(block.size_bytes)

    def _land(self, block: KVBlock) -> None:
        """A block that attention made expected is resident, if its bytes have come."""
        found = self.ahead.find(block)
        if found is not None:
            memory = self._room_for(block)
            memory[:] = found
            self.ahead.use(block.key)
            self._returned(block, memory)
            self._prefetched.add(block.key)

    def _returned(self, block: KVBlock, memory: ByteArray) -> None:
        self.blocks.set_resident(block, memory)
        self._absent.pop(block.key, None)
        self.metrics.add("swap_in_blocks")
        self.metrics.add("swap_in_bytes", block.size_bytes)

    def _start_prefetch(self, blocks: list[KVBlock]) -> int:
        memories: list[ByteArray] = []
        for block in blocks:
            try:
                memories.append(self.namespace.buffer(block.size_bytes))
            except BufferExhausted:
                break
        blocks = blocks[: len(memories)]
        if not blocks:
            return 0
        ticket = self.namespace.get_many([block.key for block in blocks], memories)
        for index, (block, memory) in enumerate(zip(blocks, memories, strict=True)):
            self._prefetches[block.key] = (ticket, index, memory)
            self.ahead.changed(block)
        self.metrics.add("prefetch_issued", len(blocks))
        return len(blocks)

    @property
    def _pending_bytes(self) -> int:
        """Of prefetches under way."""
        if not self._prefetches:
            return 0
        return sum(page_up(memory.size) for _, _, memory in self._prefetches.values())

    def _collect_prefetches(self) -> None:
        for name, (ticket, _, _) in list(self._prefetches.items()):
            if ticket.done():
                self._await_prefetch(name)

    def _await_prefetch(self, name: bytes) -> None:
        """A prefetch of this block, if there is one, ends: its bytes are resident if it went
        well; otherwise load reads them itself and reports what is wrong."""
        entry = self._prefetches.pop(name, None)
        if entry is None:
            return
        ticket, index, memory = entry
        ticket.wait()
        block = self.blocks.get(name)
        if block is not None:
            self.ahead.changed(block)
        arrived = int(ticket.answers[index]) == Answer.OK
        if block is not None and not block.resident and arrived:
            self._make_room(block.held_bytes)
            self._returned(block, memory)
            self._prefetched.add(name)

    # ---- the table

    def _replace(self, block: KVBlock) -> None:
        """The block comes in. An earlier one of its key goes, also from flash, where no load sees
        it from the moment on in which the key names the new one."""
        name = block.key
        self._await_prefetch(name)
        self.ahead.drop(name)
        earlier = self.blocks.get(name)
        if earlier is None or earlier.on_flash is not False:
            self._replace_on_flash(block, earlier)
        else:
            self.blocks.name(name, block)
        if earlier is not None:
            self._forget(earlier)
        self.blocks.count(block)
        self.policy.add(block)

    def _replace_on_flash(self, block: KVBlock, earlier: KVBlock | None) -> None:
        block.on_flash = None
        if earlier is not None:
            earlier.on_flash = None
        self.blocks.name(block.key, block)
        try:
            self.namespace.delete(block.key)
        except HiFCError:  # nothing was taken
            self.blocks.name(block.key, earlier)
            raise
        block.on_flash = False

    def _is_here(self, name: bytes) -> bool:
        """In memory, or on its way there by `prefetch`."""
        return name in self._prefetches or self._is_held(name)

    def _is_held(self, name: bytes) -> bool:
        """In the pool or in the host tier."""
        block = self.blocks.get(name)
        return (block is not None and block.resident) or name in self.tier

    def _spare(self) -> int:
        """What is left of swap_buffer_size."""
        return self.config.swap_buffer_size - self._pending_bytes - self.ahead.arena_bytes

    def _forget(self, block: KVBlock) -> None:
        self.ahead.drop(block.key)
        self.blocks.drop(block)
        self.tier.drop(block)
        self.policy.remove(block)
        self._prefetched.discard(block.key)
        self._absent.pop(block.key, None)
        block.memory = None
