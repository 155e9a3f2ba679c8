# SPDX-License-Identifier: Apache-2.0
"""HiFC: the facade that a script holds. KV blocks go in, stay in memory while they are hot, leave
for flash together when they are not, and come back exact.

A stored tensor is copied once, into pool memory, from where the device reads it; a loaded one is
copied once, out of it. Resident blocks never exceed `memory_budget - memory_reserved`; once less
than the watermark of that is free, `swap_batch_size` blocks at a time leave with one submission.
Thread-safe: one lock, which a call keeps while it waits for its own blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hifc import codec, gauges
from hifc import policy as policies
from hifc.ahead import Ahead
from hifc.bar import BarProvider
from hifc.blocks import BlockTable, KVBlock
from hifc.calls import DELAY_MAX_S, DELAY_MIN_S, RETRY_WAIT_S
from hifc.checking import items, whole
from hifc.classifier import HotColdClassifier
from hifc.config import Config
from hifc.errors import (
    BackPressure,
    BufferExhausted,
    ConfigError,
    FormatError,
    InvalidRequest,
    NoSpace,
)
from hifc.memory import ByteArray
from hifc.metrics import Metrics
from hifc.opening import open_namespace
from hifc.policy import HiFCPolicy
from hifc.prefetch import HiFCPrefetcher
from hifc.publish import Publisher
from hifc.recompute import LoadOrRecompute
from hifc.request import Answer, BlockClass, class_of, key_bytes, keys_array
from hifc.scoped import Scoped
from hifc.sparse_plan import SparseSettings
from hifc.ticket import Ticket
from hifc.units import format_size, page_up

if TYPE_CHECKING:
    from hifc.integrations.transformers import HiFCCache

# Reuse blocks that left memory are remembered for their heat, the last so many of them.
ABSENT_MAX = 65536
# Of depths and heads.
INT_MAX = (1 << 31) - 1
# Models whose load and compute times are remembered.
MODELS_MAX = 16


class HiFC(Scoped):
    """Opens the namespace that the configuration names and keeps KV blocks in it and in memory.

    config: a Config, a mapping, or the path of a YAML file. policy: what decides which blocks
    leave memory; by default the one that the configuration names. bar: where staging gpu takes its
    memory from, by default GDRCopy. What staging auto came to stands in `namespace.staging`.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path,
        policy: HiFCPolicy | None = None,
        bar: BarProvider | None = None,
    ) -> None:
        self.config = Config.load(config)
        self.policy = (
            policies.make_policy(self.config.policy, self.config.decay_lambda)
            if policy is None
            else policy
        )
        if not callable(getattr(self.policy, "should_swap_out", None)):
            raise ConfigError(f"policy: {type(policy).__name__} is no HiFCPolicy")
        self.classifier = HotColdClassifier(
            hot_ratio=self.config.hot_ratio,
            hot_ratio_min=self.config.hot_ratio_min,
            hot_ratio_max=self.config.hot_ratio_max,
            hit_rate_target=self.config.hit_rate_target,
            watermark=self.config.watermark,
        )
        self.metrics = Metrics()
        self.prefetcher: HiFCPrefetcher | None = None
        self._compression = (
            codec.compression(self.config.compression_algorithm)
            if self.config.enable_compression
            else None
        )
        self._lock = threading.RLock()
        self._prefetches: dict[bytes, tuple[Ticket, int, ByteArray]] = {}
        self._prefetched: set[bytes] = set()
        self._pending_bytes = 0  # of prefetches under way
        self._absent: dict[bytes, None] = {}  # reuse blocks known and not resident, oldest first
        self._costs: dict[str, LoadOrRecompute] = {}
        self.costs: LoadOrRecompute | None = None  # of the model that was used last
        self._limit_bytes = self.config.memory_budget - self.config.memory_reserved
        self.namespace = open_namespace(self.config, bar)
        self.ahead = Ahead(
            self.namespace, self.config.prefetch_degree, self.metrics, self._spare, self._is_here
        )
        self.blocks = BlockTable(self.ahead.changed)
        gauges.register(self)
        self._publisher = Publisher(self)

    # ---- blocks in and out

    def store(
        self,
        key: Any,
        tensor: Any,
        *,
        cls: str | BlockClass = "swap",
        sequence: str | int | None = None,
        depth: int = 0,
        head: int = -1,
        dtype: str | None = None,
    ) -> None:
        """Takes a copy of a KV block under key, in place of an earlier one.

        tensor: numpy array or torch CPU tensor of float32, float16, bfloat16, int8 or uint8, of
        any shape. sequence, depth and head tell the policy where the block belongs. May move
        other blocks to flash. NoSpace: the device is full, and nothing was taken.
        """
        name = key_bytes(key)
        kind = BlockClass(class_of(cls)).name.lower()
        depth, head = whole("depth", depth, 0, INT_MAX), whole("head", head, -1, INT_MAX)
        if not (sequence is None or isinstance(sequence, str | int)):
            raise InvalidRequest(f"sequence: {sequence!r} is neither a text nor a whole number")
        info = codec.describe(tensor, dtype)
        with self._lock:
            memory = self._encode(tensor, info)
            self._replace(name)
            block = KVBlock(
                key=name,
                size_bytes=memory.size,
                sequence=sequence,
                depth=depth,
                head=head,
                cls=kind,
                resident=True,
                memory=memory,
            )
            self.blocks.add(block)
            self.policy.add(block)
            self.metrics.add("store_count")
            self._make_room(0)

    def load(self, key: Any) -> Any | None:
        """The tensor that was stored under key, in memory of its own, or None.

        A block that is on flash comes back and is resident again.
        """
        name = key_bytes(key)
        with self._lock:
            self.metrics.add("total_access")
            self._collect_prefetches()
            self._await_prefetch(name)
            block = self.blocks.get(name) or self._find(name)
            if block is None:
                self.metrics.add("miss")
                return None
            if not block.resident:
                self._land(block)
            resident = block.resident
            self.classifier.observe(resident, self.blocks.resident_count)
            if resident:
                self.metrics.add("hit")
                if name in self._prefetched:
                    self._prefetched.discard(name)
                    self.metrics.add("prefetch_hit")
                self.policy.access(block)
                return codec.decode(block.memory)
            memory = self._bring_back(block)
            if memory is None:
                self._forget(block)
                self.metrics.add("miss")
                return None
            self.policy.access(block)
            return codec.decode(memory)

    def delete(self, key: Any) -> bool:
        """Forgets the block everywhere. True if it was there."""
        name = key_bytes(key)
        with self._lock:
            self._await_prefetch(name)
            self.ahead.drop(name)
            block = self.blocks.get(name)
            if block is not None:
                self._forget(block)
                if not block.on_flash:
                    return True
            return self.namespace.delete(name) or block is not None

    def __contains__(self, key: Any) -> bool:
        name = key_bytes(key)
        with self._lock:
            block = self.blocks.get(name)
            return (block is not None and block.resident) or self.namespace.exists(name)

    def prefetch(self, keys: Sequence[Any]) -> int:
        """Starts to bring blocks back from flash ahead of their use; returns how many.

        Takes as many as swap_buffer_size and the memory budget have room for.
        """
        with self._lock:
            self._collect_prefetches()
            room = min(
                self._limit_bytes - self.blocks.resident_bytes - self._pending_bytes,
                self._spare(),
            )
            wanted: list[KVBlock] = []
            for key in items("keys", keys):
                name = key_bytes(key)
                block = self.blocks.get(name) or self._find(name)
                if block is None or self._is_here(name) or name in self.ahead:
                    continue
                room -= block.held_bytes
                if room < 0:
                    break
                wanted.append(block)
            return self._start_prefetch(wanted)

    def observe_attention(self, attn_weights: Any, keys: Sequence[Any]) -> int:
        """Feeds the prefetcher with the attention of one step over the blocks named by keys. Of
        those that are not in memory, kernels choose the prefetch_degree that are expected most
        and write them into a request ring. Returns how many. A load uses what has landed.

        attn_weights: as HiFCPrefetcher.update takes it, with one column a block. keys: of one
        sequence, which may grow; where other keys come, the trend begins anew. Prefetched blocks
        take memory of swap_buffer_size. ConfigError: drive inline, where nothing would read.
        """
        if len(getattr(attn_weights, "shape", ())) < 2:
            raise InvalidRequest(
                f"attn_weights: {type(attn_weights).__name__} is no attention, which "
                "is an array of shape (heads, blocks) or (..., heads, queries, blocks)"
            )
        names = keys_array(keys)
        with self._lock:
            if self.prefetcher is None:
                heads = int(attn_weights.shape[0 if len(attn_weights.shape) == 2 else -3])
                self.prefetcher = HiFCPrefetcher(
                    heads, self.config.prefetch_window, degree=self.config.prefetch_degree
                )
            return self.ahead.observe(self.prefetcher, attn_weights, names, self.blocks)

    def offload(self) -> int:
        """Moves every resident block to flash; returns how many left memory."""
        with self._lock:
            count = 0
            size = self.config.swap_batch_size
            while batch := policies.coldest(self.policy, self.blocks.residents(), size):
                self._swap_out(batch)
                count += len(batch)
            return count

    def sync(self) -> None:
        """What is resident and of class reuse goes to flash, too, and survives a crash."""
        with self._lock:
            self._write([b for b in self.blocks.residents() if b.cls == "reuse"])
            self.namespace.sync()

    @property
    def pool_size_bytes(self) -> int:
        """The pool that was made: pool_size, or what the budgets need where that is more."""
        return self.namespace.stats().buffer_size_bytes

    # ---- models

    def cache(self, model_config: Any, max_tokens: int, **options: Any) -> HiFCCache:
        """A KV cache for model.generate(past_key_values=cache) of transformers, in this namespace.

        model_config: the model's. max_tokens: prompt and new tokens together, less one. options:
        those of HiFCCache; resident, slots, block_tokens and salt come from the configuration
        unless given. With `attention: sparse` it is a SparseCache.
        """
        from hifc.integrations.transformers import HiFCCache

        if not hasattr(model_config, "get_text_config"):
            raise ConfigError(
                f"model_config is {type(model_config).__name__}, not the configuration of a model "
                "of transformers: give model.config"
            )
        options.setdefault("resident", self.config.resident_ratio)
        options.setdefault("slots", self.config.staging_layers)
        options.setdefault("salt", bytes.fromhex(self.config.salt))
        options.setdefault("metrics", self.metrics)
        options.setdefault("save_prefix", self.config.save_prefix)
        options.setdefault("load_or_recompute", self._costs_of(model_config))
        if self.config.attention == "sparse":
            from hifc.integrations.sparse import SparseCache

            options.setdefault("sparse", SparseSettings.of(self.config))
            return SparseCache(self.namespace, model_config, max_tokens, **options)
        if self.config.block_tokens != Config.block_tokens:
            options.setdefault("block_tokens", self.config.block_tokens)
        return HiFCCache(self.namespace, model_config, max_tokens, **options)

    def _costs_of(self, model_config: Any) -> LoadOrRecompute:
        """The measurements of a model, kept from cache to cache."""
        from hifc.integrations.identity import fingerprint

        name = fingerprint(model_config)
        with self._lock:
            costs = self._costs.pop(name, None)
            if costs is None:
                costs = LoadOrRecompute(self.config.load_or_recompute, self.metrics)
            self._costs[name] = costs  # the latest is the last
            if len(self._costs) > MODELS_MAX:
                del self._costs[next(iter(self._costs))]
            self.costs = costs
            return costs

    # ---- the end

    def close(self) -> None:
        """Writes resident blocks of class reuse, then closes the namespace. Idempotent."""
        self._publisher.stop()
        with self._lock:
            try:
                if not self.namespace.closed:
                    for name in list(self._prefetches):
                        self._await_prefetch(name)
                    self._write([b for b in self.blocks.residents() if b.cls == "reuse"])
            finally:
                self.blocks = BlockTable()
                try:
                    self.ahead.close()
                finally:
                    self.namespace.close()

    def _end(self) -> None:
        self.close()

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

    def _swap_out(self, blocks: list[KVBlock]) -> None:
        """All of them leave memory, with one submission of those that are not on flash yet."""
        self.metrics.add("dropped_blocks", sum(block.on_flash for block in blocks))
        self._write(blocks)
        for block in blocks:
            if block.key in self._prefetched:
                self._prefetched.discard(block.key)
                self.metrics.add("prefetch_wasted")
            self.blocks.set_resident(block, None)
            self.policy.leave([block])
            self.metrics.add("swap_out_blocks")
            self.metrics.add("swap_out_bytes", block.size_bytes)
            if not block.on_flash:  # admission declined it: it is gone
                self._forget(block)
            elif block.cls == "reuse":
                self._absent[block.key] = None
        while len(self._absent) > ABSENT_MAX:
            oldest = self.blocks.get(next(iter(self._absent)))
            assert oldest is not None
            self._forget(oldest)

    def _write(self, blocks: list[KVBlock]) -> None:
        """Puts what is not on flash yet, one submission a class. Raises if one cannot be written;
        all of them are still in memory then."""
        for cls in ("swap", "reuse"):
            left = [block for block in blocks if block.cls == cls and not block.on_flash]
            deadline, delay_s = time.monotonic() + RETRY_WAIT_S, DELAY_MIN_S
            while left and (left := self._put(left, cls)):
                if time.monotonic() > deadline:
                    raise BackPressure(
                        f"{len(left)} blocks were answered Retry for {RETRY_WAIT_S:.0f} s on "
                        f"{self.config.device}: the device does not keep up; use fewer threads, "
                        "larger segments, or a larger memory_budget"
                    )
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, DELAY_MAX_S)

    def _put(self, blocks: list[KVBlock], cls: str) -> list[KVBlock]:
        """One submission. Returns the blocks that were answered Retry."""
        ticket = self.namespace.put_many(
            [block.key for block in blocks], [block.memory for block in blocks], cls=cls
        )
        ticket.wait()
        again: list[KVBlock] = []
        full = False
        for block, status in zip(blocks, ticket.answers.tolist(), strict=True):
            if status in (Answer.OK, Answer.EXISTS):
                block.on_flash = True
            elif status == Answer.REJECTED:
                self.metrics.add("rejected")
            elif status in (Answer.RETRY, Answer.PENDING):
                again.append(block)
            elif status == Answer.NO_SPACE:
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
            self._pending_bytes += block.held_bytes
            self.ahead.changed(block)
        self.metrics.add("prefetch_issued", len(blocks))
        return len(blocks)

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
        self._pending_bytes -= page_up(memory.size)
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

    def _replace(self, name: bytes) -> None:
        """An earlier block of this key goes, also from flash."""
        self._await_prefetch(name)
        self.ahead.drop(name)
        block = self.blocks.get(name)
        if block is not None:
            self._forget(block)
        if block is None or block.on_flash:
            self.namespace.delete(name)

    def _is_here(self, name: bytes) -> bool:
        """In memory, or on its way there by `prefetch`."""
        block = self.blocks.get(name)
        return name in self._prefetches or (block is not None and block.resident)

    def _spare(self) -> int:
        """What is left of swap_buffer_size."""
        return self.config.swap_buffer_size - self._pending_bytes - self.ahead.arena_bytes

    def _forget(self, block: KVBlock) -> None:
        self.ahead.drop(block.key)
        self.policy.remove(block)
        self.blocks.remove(block.key)
        self._prefetched.discard(block.key)
        self._absent.pop(block.key, None)
        block.memory = None

    def publish(self, before: Mapping[str, float]) -> Mapping[str, float]:
        """What hifc.publish calls: shows the counters beside the namespace's own statistics."""
        values = {
            name: self.metrics[name] for name in self.metrics if not name.startswith("namespace_")
        }
        if values != before:
            self.namespace.publish(values)
        return values


__all__ = ["HiFC", "InvalidRequest"]
