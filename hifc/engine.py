# SPDX-License-Identifier: Apache-2.0
"""HiFC: the facade that a script holds. KV blocks go in, stay in memory while they are hot, leave
for flash together when they are not, and come back exact.

hifc/blocks/store.py moves them between memory and flash. Thread-safe: one lock, which a call keeps
while it waits for its own blocks. A call that an exception ends at any of its instructions, such as
KeyboardInterrupt, costs no other key its value, and its own has the old value, the new one or none.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import numpy.typing as npt

from hifc.blocks import codec
from hifc.blocks import policy as policies
from hifc.blocks.host_tier import HostTier
from hifc.blocks.keys import BlockTable, KVBlock
from hifc.blocks.policy import HiFCPolicy
from hifc.blocks.store import Residency
from hifc.config import Config, ConfigDict
from hifc.errors import ConfigError, InvalidRequest
from hifc.metrics import gauges
from hifc.metrics.publish import Publisher
from hifc.native_lib.request import ClassLike, class_name, key_bytes, keys_array
from hifc.prefetch.trend import HiFCPrefetcher
from hifc.sparse.plan import SparseSettings
from hifc.staging.bar import BarProvider
from hifc.stream.recompute import LoadOrRecompute
from hifc.util.checking import items, whole
from hifc.util.packages import need
from hifc.util.scoped import Scoped
from hifc.util.units import shown_size

if TYPE_CHECKING:
    import torch

    from hifc.integrations.transformers.cache import HiFCCache
    from hifc.integrations.transformers.options import CacheOptions

# What load returns: a torch tensor where the block was stored from one.
BlockTensor: TypeAlias = "npt.NDArray[Any] | torch.Tensor"

_LOG = logging.getLogger("hifc")

# Of depths and heads.
INT_MAX = (1 << 31) - 1
# Models whose load and compute times are remembered.
MODELS_MAX = 16


class HiFC(Residency, Scoped):
    """Opens the namespace that the configuration names and keeps KV blocks in it and in memory.

    config: a Config, a mapping, or the path of a YAML file. settings: by name, as in a
    configuration, and instead of what stands in config: `HiFC(device="./kv.hifc?size=8GiB",
    format="if_missing")` needs no config. policy: what decides which blocks leave memory, an
    instance of HiFCPolicy or the name of a built-in one; whichever it is, it takes the place of the
    one that the configuration names. bar: where staging gpu takes its memory from, by default
    GDRCopy. What staging auto came to stands in `namespace.staging`. ConfigError: a setting that
    is unknown or makes no sense, with what is meant or allowed.
    """

    def __init__(
        self,
        config: Config | ConfigDict | str | Path | None = None,
        policy: HiFCPolicy | str | None = None,
        bar: BarProvider | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(policy, str):
            settings["policy"] = policy
            policy = None
        loaded = Config.load(config, settings)
        if policy is None:
            policy = policies.make_policy(loaded.policy, loaded.decay_lambda)
        elif isinstance(policy, type):
            raise ConfigError(
                f"policy: {policy.__name__} is a class; give an instance of it, {policy.__name__}()"
            )
        elif not callable(getattr(policy, "should_swap_out", None)):
            raise ConfigError(
                f"policy: {type(policy).__name__} is not a HiFCPolicy: derive it from "
                f"hifc.HiFCPolicy, or name one of {', '.join(policies.POLICIES)}"
            )
        elif loaded.policy != Config.policy:
            _LOG.info("policy %r is used, not %s of the configuration", policy, loaded.policy)
        super().__init__(loaded, policy, bar)
        self.prefetcher: HiFCPrefetcher | None = None
        self._lock = threading.RLock()
        self._costs: collections.OrderedDict[str, LoadOrRecompute] = collections.OrderedDict()
        self.costs: LoadOrRecompute | None = None  # of the model that was used last
        try:
            gauges.register(self)
            self._publisher = Publisher(self)
        except BaseException:
            self.namespace.close()
            raise

    # ---- blocks in and out

    def store(
        self,
        key: Any,
        tensor: Any,
        *,
        cls: ClassLike = "swap",
        sequence: str | int | None = None,
        depth: int = 0,
        head: int = -1,
        dtype: str | None = None,
    ) -> None:
        """Takes a copy of a KV block under key, in place of an earlier one.

        tensor: numpy array or torch CPU tensor of numbers or booleans, of any shape; it comes back
        equal (a numpy array in the byte order of the machine), or is refused with what to do.
        dtype: "bfloat16" for an array of uint16 that holds bfloat16. sequence, depth and head tell
        the policy where the block belongs. May move other blocks to flash. NoSpace: the device is
        full, and nothing was taken.
        """
        name = key_bytes(key)
        kind = class_name(cls)
        depth, head = whole("depth", depth, 0, INT_MAX), whole("head", head, -1, INT_MAX)
        if not (sequence is None or isinstance(sequence, str | int)):
            raise InvalidRequest(f"sequence: {sequence!r} is neither a text nor a whole number")
        info = codec.describe(tensor, dtype)
        with self._lock, self._settled:
            memory = self._encode(tensor, info)
            block = KVBlock(
                key=name,
                size_bytes=memory.size,
                sequence=sequence,
                depth=depth,
                head=head,
                cls=kind,
                memory=memory,
            )
            self._replace(block)
            self.metrics.add("store_count")
            self._make_room(0)

    def load(self, key: Any) -> BlockTensor | None:
        """The tensor that was stored under key, in memory of its own, or None.

        A block that is on flash or in the host tier comes back and is resident again.
        """
        name = key_bytes(key)
        with self._lock, self._settled:
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
            memory = self._climb(block) if name in self.tier else self._bring_back(block)
            if memory is None:
                self._forget(block)
                self.metrics.add("miss")
                return None
            self.policy.access(block)
            return codec.decode(memory)

    def delete(self, key: Any) -> bool:
        """Forgets the block everywhere. True if it was there."""
        name = key_bytes(key)
        with self._lock, self._settled:
            self._await_prefetch(name)
            self.ahead.drop(name)
            block = self.blocks.get(name)
            found = False
            if block is None or block.on_flash is not False:
                if block is not None:
                    block.on_flash = None
                found = self.namespace.delete(name)
            if block is not None:
                self._forget(block)
            return found or block is not None

    def __contains__(self, key: Any) -> bool:
        name = key_bytes(key)
        with self._lock, self._settled:
            return self._is_held(name) or self.namespace.exists(name)

    def prefetch(self, keys: Sequence[Any]) -> int:
        """Starts to bring blocks back from flash ahead of their use; returns how many.

        Takes as many as swap_buffer_size and the memory budget have room for.
        """
        with self._lock, self._settled:
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
        take memory of swap_buffer_size. Columns without a key, keys without a column and
        unknown keys are ignored. For a duplicate key only the first column counts. ConfigError:
        drive inline, where nothing would read. InvalidRequest: no attention, no keys.
        """
        if len(getattr(attn_weights, "shape", ())) < 2:
            raise InvalidRequest(
                f"attn_weights: {type(attn_weights).__name__} is no attention, which "
                "is an array of shape (heads, blocks) or (..., heads, queries, blocks)"
            )
        names = keys_array(keys)
        with self._lock, self._settled:
            if self.prefetcher is None:
                heads = int(attn_weights.shape[0 if len(attn_weights.shape) == 2 else -3])
                self.prefetcher = HiFCPrefetcher(
                    heads, self.config.prefetch_window, degree=self.config.prefetch_degree
                )
            return self.ahead.observe(self.prefetcher, attn_weights, names, self.blocks)

    def offload(self) -> int:
        """Moves every block that is in memory to flash; returns how many left."""
        with self._lock, self._settled:
            count = 0
            size = self.config.swap_batch_size
            while batch := policies.coldest(self.policy, self.blocks.residents(), size):
                self._swap_out(batch, to_flash=True)
                count += len(batch)
            held = self.tier.blocks()
            for at in range(0, len(held), size):
                self._swap_out(held[at : at + size], to_flash=True)
            return count + len(held)

    def sync(self) -> None:
        """What is in memory and of class reuse goes to flash, too, and survives a crash."""
        with self._lock, self._settled:
            self._write_reuse()
            self.namespace.sync()

    @property
    def pool_size_bytes(self) -> int:
        """The pool that was made: pool_size, or what the budgets need where that is more."""
        return self.namespace.stats().buffer_size_bytes

    # ---- models

    def cache(
        self, model_config: Any, max_tokens: int, **options: Unpack[CacheOptions]
    ) -> HiFCCache:
        """A KV cache for model.generate(past_key_values=cache) of transformers, in this namespace.

        model_config: the model's. max_tokens: prompt and new tokens together, less one. options:
        see CacheOptions of hifc/integrations/options.py; resident, slots, block_tokens, salt and
        save_prefix come from the configuration unless given. With `attention: sparse` it is a
        SparseCache. MissingPackage: torch or transformers is not installed, or too old.
        """
        need("HiFC.cache", "transformers", "torch", "transformers")
        from hifc.integrations.transformers.cache import HiFCCache

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
            from hifc.integrations.transformers.sparse import SparseCache

            options.setdefault("sparse", SparseSettings.of(self.config))
            return SparseCache(self.namespace, model_config, max_tokens, **options)
        if self.config.block_tokens:
            options.setdefault("block_tokens", self.config.block_tokens)
        # Not checked by type here: `sparse` is in it, which a SparseCache alone takes.
        exact: dict[str, Any] = {**options}
        return HiFCCache(self.namespace, model_config, max_tokens, **exact)

    def _costs_of(self, model_config: Any) -> LoadOrRecompute:
        """The measurements of a model, kept from cache to cache."""
        from hifc.integrations.transformers.identity import fingerprint

        name = fingerprint(model_config)
        with self._lock, self._settled:
            costs = self._costs.get(name)
            if costs is None:
                costs = LoadOrRecompute(self.config.load_or_recompute, self.metrics)
                self._costs[name] = costs
            self._costs.move_to_end(name)  # the latest is the last
            while len(self._costs) > MODELS_MAX:
                self._costs.popitem(last=False)
            self.costs = costs
            return costs

    def __repr__(self) -> str:
        if self.namespace.closed:
            return f"<HiFC {self.config.device} closed>"
        resident = self.blocks.resident_count
        return (
            f"<HiFC {self.config.device}: {len(self.blocks)} blocks, {resident} of them in memory "
            f"({shown_size(self.blocks.resident_bytes)} of {shown_size(self._limit_bytes)}), "
            f"policy {self.policy!r}>"
        )

    # ---- the end

    def close(self) -> None:
        """Writes what is in memory and of class reuse, then closes the namespace, also after an
        error. Interrupted while it writes, it leaves the engine open: close it again. Idempotent.
        """
        self._publisher.stop()
        with self._lock:
            try:
                with self._settled:
                    if not self.namespace.closed:
                        for name in list(self._prefetches):
                            self._await_prefetch(name)
                        self._write_reuse()
            except Exception:
                self._shut()
                raise
            self._shut()

    def _shut(self) -> None:
        try:
            self.ahead.close()
        finally:
            self.blocks = BlockTable()
            self.tier = HostTier(0, None)
            self.namespace.close()

    def _recover(self) -> None:
        self.prefetcher = None  # it may have seen a part of a step
        super()._recover()

    def _end(self) -> None:
        self.close()

    def publish(self, before: Mapping[str, float]) -> Mapping[str, float]:
        """Called by metrics/publish.py: counters to show beside the namespace's own statistics."""
        values = {
            name: value
            for name, value in self.metrics.snapshot().items()
            if not name.startswith("namespace_") and not math.isnan(value)
        }
        if values != before:
            self.namespace.publish(values)
        return values
