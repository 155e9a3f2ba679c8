# SPDX-License-Identifier: Apache-2.0
"""SparseCache: decode that attends to the blocks which the current query wants most.

    model.set_attn_implementation("hifc_sparse")
    with hifc.HiFC({"device": "file:///var/lib/hifc/kv?size=8GiB", "attention": "sparse"}) as e:
        cache = e.cache(model.config, max_tokens=8192)
        model.generate(**inputs, past_key_values=cache)

transformers hands keys to the cache before attention sees the query. So in a step of one token the
cache returns the new keys with a mark, by which the attention function of
hifc/integrations/attention.py finds the stream; keys without it are all keys, and attention is
transformers' own. Another attention function, or a model that does something to the keys, gets a
ConfigError; a step that attention did not take is noticed at the next layer.
"""

from __future__ import annotations

from typing import Any

import torch

from hifc.blocks.keys import KeyScheme
from hifc.errors import ConfigError
from hifc.integrations.transformers.attention import ATTENTION, mark
from hifc.integrations.transformers.cache import HiFCCache
from hifc.integrations.transformers.core import Core
from hifc.namespace.namespace import Namespace
from hifc.sparse.plan import SparsePlan, SparseSettings, make_sparse_plan
from hifc.sparse.quality import Quality
from hifc.sparse.stream import SparseStream
from hifc.stream.plan import KVShape


class _SparseCore(Core):
    layout = "layer-major [layer][head][K|V][token][dim]"

    def __init__(
        self,
        namespace: Namespace,
        settings: dict[str, Any],
        scheme: dict[str, Any],
        sparse: SparseSettings,
    ) -> None:
        super().__init__(namespace, settings, scheme)
        self.sparse = sparse

    def plan(self, shape: KVShape) -> SparsePlan:
        return make_sparse_plan(
            shape, self.settings["max_tokens"], self.settings["resident"], self.sparse
        )

    def new_stream(self, plan: Any, dtype: torch.dtype, scheme: KeyScheme) -> SparseStream:
        return SparseStream(self.namespace, plan, dtype, scheme, self.sparse)


class SparseCache(HiFCCache):
    """A HiFCCache whose steps of one token are sparse. One sequence: no batches, no beams.

    sparse: see SparseSettings, whose block length it has; slots has no meaning here. The model's
    attention function must be "hifc_sparse". exact: set it, and the forwards that follow are exact.

    ConfigError, NotSupported: as HiFCCache, and rows, a budget or a model that this cannot do.
    """

    def __init__(
        self,
        namespace: Namespace,
        config: Any,
        max_tokens: int,
        *,
        sparse: SparseSettings | None = None,
        **options: Any,
    ) -> None:
        if options.get("block_tokens") is not None:
            raise ConfigError("block_tokens: a sparse cache has sparse_block_tokens instead")
        self._sparse = SparseSettings() if sparse is None else sparse
        self._text = config.get_text_config(decoder=True)
        self.exact = False
        self._in_step = False
        super().__init__(namespace, config, max_tokens, **options)

    def _new_core(
        self, namespace: Namespace, settings: dict[str, Any], scheme: dict[str, Any]
    ) -> Core:
        return _SparseCore(namespace, settings, scheme, self._sparse)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As HiFCCache.update; in a sparse step the new keys come back, marked for attention."""
        stream = self._core.stream
        if layer_idx == 0:
            self._check_attention()
            self._in_step = (
                isinstance(stream, SparseStream)
                and key_states.shape[2] == 1
                and self._ready(key_states, value_states) is stream
                and stream.lengths[0] > 0
                and not self.exact
                and stream.begin()
            )
        if not self._in_step:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        assert isinstance(stream, SparseStream)
        with torch.no_grad():
            stream.append(layer_idx, key_states, value_states)
            marked = mark(key_states, stream, layer_idx)
        if layer_idx == self._last:
            self._count()
        return marked, value_states

    def _check_attention(self) -> None:
        found = self._text._attn_implementation
        if found != ATTENTION:
            raise ConfigError(
                f"the model's attention function is {found}, which would see a sparse cache's keys "
                f'in part: call model.set_attn_implementation("{ATTENTION}") first'
            )

    @property
    def quality(self) -> dict[str, Any]:
        """What sparse steps did since the last reset.

        steps, exact_steps: of one token. missed: share of attention that steps miss now, which
        sparse_missed_max bounds; missed_mean: over all steps, by the sketch alone. checks: exact
        checks of single heads, checked_missed: what they found missed, checked_estimate: what the
        sketch had said of the same, checked_error: norm of the difference of their outputs over
        that of the exact one, as means. prefetch_accuracy: share of the prefetched blocks that the
        next query wanted. widened: times that the budget was; resident: blocks of a head. exact:
        why all is exact from now on, or None.
        """
        stream = self._core.stream
        found = Quality(1.0)
        reason = None
        if isinstance(stream, SparseStream):
            found, reason = stream.quality, stream.exact_reason
        checks = max(1, found.checks)
        plan = self.plan
        assert isinstance(plan, SparsePlan)
        return {
            "steps": found.steps,
            "exact_steps": found.exact_steps,
            "exact_heads": found.exact_heads,
            "missed": found.missed,
            "missed_mean": found.missed_sum / max(1, found.steps),
            "checks": found.checks,
            "checked_missed": found.checked_missed / checks,
            "checked_estimate": found.checked_estimate / checks,
            "checked_error": found.checked_error / checks,
            "prefetched": found.prefetched,
            "prefetch_accuracy": found.prefetch_wanted / max(1, found.prefetched),
            "widened": found.widened,
            "resident": plan.resident_blocks,
            "exact": reason,
        }
