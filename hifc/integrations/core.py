# SPDX-License-Identifier: Apache-2.0
"""What a HiFCCache is made of: the core that it shares with its layers, the layers as transformers
looks at them, and what a model's configuration tells about its KV.

A core outlives its cache where requests are in flight: finalizers must not wait, so a dropped
stream is closed by whoever opens the next one.
"""

from __future__ import annotations

import collections
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from hifc.blocks import KeyScheme
from hifc.errors import InvalidRequest, NotSupported
from hifc.layer_plan import KVShape, StreamPlan, make_plan
from hifc.namespace import Namespace
from hifc.stream_edits import KVStream

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LAYOUT = "layer-major [layer][K|V][head][token][dim]"

# Streams whose cache was dropped while requests were in flight.
_orphans: collections.deque[KVStream] = collections.deque()


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
        if stream is not None:
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
        reap_orphans(wait=True)
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
        self.totals = self.count()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def abandon(self) -> None:
        """The cache was dropped. Finalizers must not wait, so somebody else may have to."""
        stream, self.stream = self.stream, None
        if stream is not None:
            _orphans.append(stream)
            reap_orphans(wait=False)


def reap_orphans(wait: bool) -> None:
    """Closes streams whose cache was dropped; without wait only those with nothing in flight."""
    for _ in range(len(_orphans)):
        try:
            stream = _orphans.popleft()
        except IndexError:
            return
        if wait or stream.namespace.closed or all(ticket.done() for ticket in stream.in_flight()):
            stream.close()
        else:
            _orphans.append(stream)


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
