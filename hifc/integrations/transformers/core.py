# SPDX-License-Identifier: Apache-2.0
"""What a HiFCCache is made of: the core that it shares with its layers, the layers as transformers
looks at them, and what a model's configuration tells about its KV.

A core outlives its cache where requests are in flight: finalizers must not wait, so a dropped
stream is closed by whoever opens the next one. So is one whose finalizer, or whose close, was
interrupted by an exception of a signal handler.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from hifc.blocks.keys import KeyScheme
from hifc.errors import InvalidRequest, NotSupported
from hifc.namespace.namespace import Namespace
from hifc.stream.edits import KVStream
from hifc.stream.plan import KVShape, StreamPlan, make_plan

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LAYOUT = "layer-major [layer][K|V][head][token][dim]"


class Core:
    """What the cache and its layers share; it outlives them where requests are in flight."""

    layout = LAYOUT

    def __init__(
        self, namespace: Namespace, settings: dict[str, Any], scheme: dict[str, Any]
    ) -> None:
        self.namespace = namespace
        self.settings = settings
        self.scheme = scheme
        self.stream: KVStream | None = None
        self.max_tokens: int = settings["max_tokens"]
        self.closed = False
        self.totals: dict[str, int] = dict.fromkeys(
            ("total_access", "prefetch_hit", "wait_ns", "written_bytes", "read_bytes"), 0
        )

    def plan(self, shape: KVShape) -> StreamPlan:
        """Memory for a batch of that shape."""
        return make_plan(shape, **self.settings)

    def new_stream(self, plan: Any, dtype: torch.dtype, scheme: KeyScheme) -> KVStream:
        """An empty stream of that plan."""
        return KVStream(self.namespace, plan, dtype, scheme)

    def open(self, shape: KVShape, dtype: torch.dtype) -> KVStream:
        """The stream for a batch of that shape; a new one if it is another shape."""
        stream = self.stream
        if stream is not None and not stream.closed:
            if stream.plan.shape == shape and stream.dtype == dtype:
                return stream
            if stream.lengths[0]:
                raise InvalidRequest(
                    f"the cache holds {stream.lengths[0]} tokens of {stream.plan.shape.rows} rows "
                    f"in {DTYPES[stream.dtype]}, now {shape.rows} rows in {DTYPES[dtype]} came: "
                    "call reset() first (a loaded prefix serves one row, no beams)"
                )
        self.close()
        if self.closed:
            raise InvalidRequest("this cache is closed: make a new one")
        plan = self.plan(shape)
        close_dropped(self.namespace)
        scheme = KeyScheme(
            **self.scheme, dtype=DTYPES[dtype], layout=self.layout, block_tokens=plan.block_tokens
        )
        self.stream = self.new_stream(plan, dtype, scheme)
        return self.stream

    def count(self) -> dict[str, int]:
        """Totals over all streams so far."""
        stream = self.stream
        if stream is None:
            return self.totals
        return {name: value + getattr(stream, name) for name, value in self.totals.items()}

    def close(self) -> None:
        """Deletes what is on the device, gives the memory back."""
        stream = self.stream
        if stream is None:
            return
        try:
            stream.close()
        finally:
            if stream.closed:
                totals = self.count()
                self.totals, self.stream = totals, None

    def is_idle(self) -> bool:
        """Whether close would not wait for a device."""
        stream = self.stream
        return stream is None or stream.namespace.closed or stream.flights.done()


class _Watched(weakref.ref[Any]):
    """A cache, for as long as its core is not closed."""

    __slots__ = ("core",)
    core: Core


_watched: set[_Watched] = set()
# Which thread closes the core of a dropped cache. One that was interrupted does so when it comes
# again.
_closing: dict[_Watched, int] = {}


def close_when_dropped(cache: object, core: Core) -> None:
    """Closes the core of a cache that nobody uses any more: at once if nothing is in flight, and
    otherwise before the next stream opens."""
    watched = _Watched(cache, _dropped)
    watched.core = core
    _watched.add(watched)


def close_dropped(namespace: Namespace) -> None:
    """Closes the cores of all caches that were dropped; waits for those in that namespace only."""
    for watched in list(_watched):
        core = watched.core
        if watched() is None and (core.namespace is namespace or core.is_idle()):
            _close_once(watched)


def _dropped(watched: _Watched) -> None:
    if watched.core.is_idle():
        _close_once(watched)


def _close_once(watched: _Watched) -> None:
    """Listed until it is done, so that nothing is lost where an exception comes before."""
    thread = threading.get_ident()
    if _closing.setdefault(watched, thread) == thread:
        watched.core.close()
        _watched.discard(watched)
        _closing.pop(watched, None)


class HiFCLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer, as transformers looks at it. The work is done by the cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, core: Core, index: int) -> None:
        self._core = core
        self._index = index

    @property
    def is_initialized(self) -> bool:
        """True once there is memory for the layer."""
        return self._core.stream is not None

    @property
    def keys(self) -> NoReturn:
        """Not there: they are on flash."""
        raise AttributeError("HiFC keeps keys on flash: a layer's `keys` are not available")

    @property
    def values(self) -> NoReturn:
        """Not there: they are on flash."""
        raise AttributeError("HiFC keeps values on flash: a layer's `values` are not available")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the whole cache gets its memory at once."""

    def update(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not alone."""
        self._refuse("update")

    def get_seq_length(self) -> int:
        """Tokens of this layer."""
        stream = self._core.stream
        return 0 if stream is None else stream.lengths[self._index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens after this query, offset 0)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """max_tokens."""
        return self._core.max_tokens

    def reset(self) -> NoReturn:
        """Not alone."""
        self._refuse("reset")

    def crop(self, *_args: Any) -> NoReturn:
        """Not alone."""
        self._refuse("crop")

    def reorder_cache(self, *_args: Any) -> NoReturn:
        """Not alone."""
        self._refuse("reorder_cache")

    def _refuse(self, name: str) -> NoReturn:
        raise NotSupported(f"{name} of one layer: layers are streamed together, call cache.{name}")


def kv_shape(config: Any, rows: int) -> KVShape:
    """What a model of this (text) configuration keeps. NotSupported: layers of other kinds."""
    kinds = sorted(set(get_layer_types_and_kwargs(config)[0]) - {"full_attention"})
    if kinds:
        raise NotSupported(
            f"{config.model_type} has layers of {', '.join(kinds)}: this cache streams models "
            "whose layers are all full attention; use transformers' DynamicCache for this one"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = torch.empty((), dtype=dtype_of(config)).element_size()
    return KVShape(config.num_hidden_layers, heads, dim, item, rows)


def dtype_of(config: Any) -> torch.dtype:
    """The dtype that a model of this configuration keeps its KV in."""
    dtype = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
