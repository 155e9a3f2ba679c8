# SPDX-License-Identifier: Apache-2.0
"""Options of HiFC.cache, for type checkers and for completion. It imports neither torch nor
transformers."""

from __future__ import annotations

from typing import Literal, TypedDict

from hifc.metrics.counters import Metrics
from hifc.sparse.plan import SparseSettings
from hifc.stream.recompute import LoadOrRecompute


class CacheOptions(TypedDict, total=False):
    """Options of HiFC.cache; those of HiFCCache, where each is described."""

    batch_size: int  # rows, beams counted
    resident: float | int | str  # may stay in memory: ratio (float), bytes (int), "90MiB"
    block_tokens: int | None  # tokens of a block
    slots: int  # rotating layers
    model_id: str | None  # names the weights where nothing else does
    lora: str  # names the adapter
    salt: bytes  # of a tenant's keys
    metrics: Metrics  # counters to add to
    load_or_recompute: Literal["auto", "load", "recompute"] | LoadOrRecompute
    save_prefix: bool  # the prompt of load_prefix is stored at the end
    sparse: SparseSettings  # with `attention: sparse` alone
