# SPDX-License-Identifier: Apache-2.0
"""HiFCCache: the KV cache of a Hugging Face transformers model, most of it on flash, exact.

    with hifc.HiFC({"device": "file:///var/lib/hifc/kv?size=8GiB"}) as engine:
        cache = engine.cache(model.config, max_tokens=8192)
        model.generate(**inputs, past_key_values=cache)

Logits are bitwise those of transformers' DynamicCache in a run with the same prefill partition,
dtype, attention function and batch. A cache serves one generate at a time, as a model does.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

import numpy as np
import torch
from transformers.cache_utils import Cache

from hifc.blocks.keys import KeyScheme
from hifc.errors import ConfigError, InvalidRequest, NotSupported
from hifc.integrations.transformers import attention as _registered  # noqa: F401 "hifc_sparse" is known then
from hifc.integrations.transformers.core import (
    DTYPES,
    Core,
    HiFCLayer,
    close_when_dropped,
    dtype_of,
    kv_shape,
)
from hifc.integrations.transformers.identity import identity_of, plain
from hifc.metrics.counters import Metrics
from hifc.namespace.namespace import Namespace
from hifc.stream import prefix
from hifc.stream.edits import KVStream
from hifc.stream.layers import check_pool
from hifc.stream.plan import RESIDENT_RATIO, SLOTS, KVShape, StreamPlan
from hifc.stream.recompute import Decision, LoadOrRecompute, Watch
from hifc.util.checking import flag, whole

INT64 = 1 << 63


class HiFCCache(Cache):  # type: ignore[misc]
    """A cache for model.generate(past_key_values=cache), and for forward.

    From 5.24 on transformers also takes it as cache=cache.

    namespace: where the KV goes. config: the model's. max_tokens: prompt and new tokens together,
    less one. batch_size: rows, beams counted; only a first check, the first forward decides.
    resident: what may stay in memory, as a ratio of the whole (float) or in bytes (int, "90MiB").
    block_tokens: tokens of a block (256, or fewer where the budget wants it); slots: rotating
    layers, 2 or more. model_id, lora, salt: see save_prefix. metrics: counters to add to.
    load_or_recompute: what load_prefix does, auto, load or recompute, or the measurements of
    earlier caches of this model. save_prefix: the prompt that load_prefix was given is stored when
    the cache is reset or closed, if it was computed; see save_prefix for what that needs.

    ConfigError: a model or a budget that this cannot do, with the reason and the least budget.
    BufferExhausted: the namespace's pool can never hold it, with the pool_size that would do.
    """

    def __init__(
        self,
        namespace: Namespace,
        config: Any,
        max_tokens: int,
        *,
        batch_size: int = 1,
        resident: float | int | str = RESIDENT_RATIO,
        block_tokens: int | None = None,
        slots: int = SLOTS,
        model_id: str | None = None,
        lora: str = "",
        salt: bytes = b"",
        metrics: Metrics | None = None,
        load_or_recompute: str | LoadOrRecompute = "auto",
        save_prefix: bool = False,
    ) -> None:
        text = config.get_text_config(decoder=True)
        self._shape = kv_shape(text, batch_size)
        self._dtype = dtype_of(text)
        self._identity = model_id, config
        self.metrics = Metrics() if metrics is None else metrics
        settings = {
            "max_tokens": max_tokens,
            "resident": resident,
            "block_tokens": block_tokens,
            "slots": slots,
        }
        scheme = {
            "model": "",
            "lora": lora,
            "position": plain(getattr(text, "rope_parameters", None)),
            "salt": salt,
        }
        self._core = self._new_core(namespace, settings, scheme)
        check_pool(namespace, self._core.plan(self._shape))
        self._saves = flag("save_prefix", save_prefix)
        self._prompt: prefix.Tokens | None = None  # that load_prefix was given
        self._last = self._shape.layers - 1
        self._counted = self._core.count()
        if isinstance(load_or_recompute, str):
            load_or_recompute = LoadOrRecompute(load_or_recompute, self.metrics)
        self._watch = Watch(load_or_recompute)
        super().__init__(layers=[HiFCLayer(self._core, i) for i in range(self._shape.layers)])
        close_when_dropped(self, self._core)

    # ---- what a model and generate call

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [rows, heads, new, dim] to a layer; returns all its keys and values.

        They are valid until the next layer's update. InvalidRequest: max_tokens is exceeded, and
        nothing has changed; or the model has more layers than the configuration told.
        """
        if layer_idx > self._last:
            raise InvalidRequest(
                f"layer {layer_idx} in a cache of {self._last + 1} layers: make it with the "
                "configuration of the model that generates"
            )
        stream = self._core.stream
        if layer_idx == 0 or stream is None:
            stream = self._ready(key_states, value_states)
            self._watch.forward_begins()
        if torch.is_grad_enabled():
            with torch.no_grad():
                found = stream.update(layer_idx, key_states.detach(), value_states.detach())
        else:
            found = stream.update(layer_idx, key_states, value_states)
        if layer_idx == self._last:
            self._count()
            if key_states.shape[0] == 1:
                new = key_states.shape[2]
                self._watch.forward_ends(new, stream.lengths[layer_idx] - new, self._last + 1)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held."""
        stream = self._core.stream
        return 0 if stream is None else stream.lengths[layer_idx]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens; 0 removes none."""
        tokens_to_remove = whole("tokens_to_remove", tokens_to_remove, -INT64)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give a negative count, how many tokens to remove"
            )
        if self._core.stream is not None and tokens_to_remove < 0:
            self._watch.forget()
            left = self.get_seq_length() + tokens_to_remove
            if self._prompt is not None and left < len(self._prompt):
                self._prompt = None  # other tokens may follow
            self._core.stream.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Empty, as new. Memory is kept for the next run. It mends a cache whatever it was
        interrupted in, and can be repeated."""
        self._watch.forget()
        try:
            self._save_prompt()
        finally:
            if self._core.stream is not None:
                self._core.stream.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues what was row beam_idx[i]: beam search."""
        if self._core.stream is not None:
            self._core.stream.reorder(beam_idx.to("cpu", torch.int64).numpy())

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Not supported."""
        raise NotSupported(
            "batch_repeat_interleave: a HiFC cache keeps its batch size; expand the input ids "
            "before the prefill, as generate does for beams"
        )

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Not supported."""
        raise NotSupported(
            "batch_select_indices: a HiFC cache keeps its batch size; use one cache a group"
        )

    # ---- prefixes

    def save_prefix(self, token_ids: Any) -> int:
        """Stores the KV of token_ids, the first tokens in this cache, to be found again by any
        process with the same model, dtype, block length, LoRA and salt.

        token_ids: ints of shape (n,) or (1, n). Returns how many can be found, see prefix.save.
        ConfigError: the model's weights have no name of their own; give model_id then.
        """
        stream = self._identified()
        return prefix.save(stream, token_array(token_ids))

    def load_prefix(self, token_ids: Any) -> int:
        """Begins this empty cache with the longest stored prefix of a prompt; returns its length,
        0 if there is none, or if computing it is expected to be faster (see `last_decision`). Give
        generate the whole prompt all the same."""
        tokens = token_array(token_ids)
        self._prompt = None
        found = prefix.load(self._identified(), tokens, self._watch)
        self._prompt = tokens
        self._count()
        return found

    @property
    def last_decision(self) -> Decision | None:
        """What load_prefix chose last, why, and what it expected; None before it found any."""
        return self._watch.decision

    def forget_prefix(self, token_ids: Any) -> None:
        """Deletes the stored KV of token_ids, also what other prefixes share with them. Call it
        when no cache uses them: one that does finds a block gone and raises."""
        prefix.forget(self._identified(), token_array(token_ids))

    # ---- memory and counters

    @property
    def plan(self) -> StreamPlan:
        """Which layers stay, and what that takes."""
        stream = self._core.stream
        return self._core.plan(self._shape) if stream is None else stream.plan

    @property
    def resident_bytes(self) -> int:
        """Memory for KV now: pinned layers, slots, tails, the namespace's pages."""
        stream = self._core.stream
        return 0 if stream is None else stream.resident_bytes()

    @property
    def resident_peak_bytes(self) -> int:
        """The highest that it was."""
        stream = self._core.stream
        return 0 if stream is None else stream.resident_peak_bytes()

    @property
    def total_kv_bytes(self) -> int:
        """KV of the tokens held now: what a cache in memory would take."""
        return self.get_seq_length() * self.plan.shape.token_bytes

    @property
    def counters(self) -> dict[str, int]:
        """total_access: loads of a layer that attention wanted, prefetch_hit: those that were
        there when it asked; wait_ns: that it waited for the others; written_bytes, read_bytes: of
        KV, to and from the device."""
        return self._core.count()

    def read_all(self) -> float:
        """Reads every streamed layer once with nothing to compute meanwhile; returns the seconds.

        No token can take less on this device.
        """
        stream = self._core.stream
        started = time.perf_counter()
        if stream is not None:
            stream.check_whole()
            for _ in stream.each_layer():
                pass
        return time.perf_counter() - started

    def close(self) -> None:
        """Deletes what is on the device and gives the memory back. Idempotent; one that was
        interrupted can be repeated."""
        try:
            self._save_prompt()
        finally:
            try:
                self._core.close()
            finally:
                self._core.closed = self._core.stream is None

    def __repr__(self) -> str:
        return f"<HiFCCache {self.get_seq_length()} tokens, {self.plan.describe()}>"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotSupported(
            "a HiFC cache cannot be copied: save_prefix(ids), then load_prefix(ids) in another"
        )

    def __reduce__(self) -> NoReturn:
        raise NotSupported("a HiFC cache cannot be pickled: use save_prefix and load_prefix")

    # ---- inside

    def _save_prompt(self) -> None:
        """Stores the prompt of load_prefix, where that is wanted and all of it is here."""
        prompt, self._prompt = self._prompt, None
        stream = self._core.stream
        if not self._saves or prompt is None or stream is None or stream.plan.shape.rows != 1:
            return
        if stream.broken is None and stream.lengths[self._last] >= len(prompt):
            prefix.save(stream, prompt)

    def _new_core(
        self, namespace: Namespace, settings: dict[str, Any], scheme: dict[str, Any]
    ) -> Core:
        return Core(namespace, settings, scheme)

    def _ready(self, keys: torch.Tensor, values: torch.Tensor) -> KVStream:
        shape = self._shape
        rows, heads, _, dim = keys.shape
        if keys.dtype not in DTYPES:
            raise ConfigError(f"dtype {keys.dtype}: a KV cache is {', '.join(DTYPES.values())}")
        if keys.device.type != "cpu":
            raise NotSupported(
                f"the model is on {keys.device}: this cache takes a model on the CPU so far"
            )
        if keys.shape != values.shape or (heads, dim) != (shape.heads, shape.head_dim):
            raise ConfigError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of the "
                f"{shape.heads} heads of {shape.head_dim} that the configuration tells"
            )
        return self._core.open(
            KVShape(shape.layers, heads, dim, keys.element_size(), rows), keys.dtype
        )

    def _identified(self) -> KVStream:
        """The stream, its keys bound to the identity of the model."""
        scheme = self._core.scheme
        if not scheme["model"]:
            scheme["model"], scheme["revision"] = identity_of(*self._identity)
        stream = self._core.stream
        if stream is None:
            stream = self._core.open(self._shape, self._dtype)
        if not stream.scheme.model:
            plan, dtype = stream.plan, stream.dtype
            stream.scheme = KeyScheme(
                **scheme,
                dtype=DTYPES[dtype],
                layout=self._core.layout,
                block_tokens=plan.block_tokens,
            )
        return stream

    def _count(self) -> None:
        counted = self._core.count()
        for name, counter in (
            ("total_access", "total_access"),
            ("prefetch_hit", "prefetch_hit"),
            ("read_bytes", "swap_in_bytes"),
            ("written_bytes", "swap_out_bytes"),
        ):
            if counted[name] != self._counted[name]:
                self.metrics.add(counter, counted[name] - self._counted[name])
        self._counted = counted


def token_array(token_ids: Any) -> prefix.Tokens:
    """int64 of shape (n,) of integers of shape (n,) or (1, n). InvalidRequest: something else."""
    ids = np.asarray(token_ids.cpu() if isinstance(token_ids, torch.Tensor) else token_ids)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest(
            f"token_ids are integers of shape (n,) or (1, n), not {ids.dtype} of {ids.shape}"
        )
    return ids.astype(np.int64)
