# SPDX-License-Identifier: Apache-2.0
"""Attention maps of a model as it runs: softmax of queries against keys, as attention got them.

transformers looks its attention function up by name at every call; while a Recorder is attached,
that name leads to a function that computes the weights of single queries on the side and then
calls the one that was there. The model's result is not touched. Of a sparse step, the keys are
those that it chose.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hifc.integrations.transformers.attention import STEP_MARK

Weights = npt.NDArray[np.float32]

LAYERS_SHOWN = 3
COLUMNS_MAX = 192


class Recorder:
    """Takes the weights of the forwards that run while it is attached, one query each."""

    def __init__(self, model: Any, max_tokens: int) -> None:
        self._config = model.config.get_text_config(decoder=True)
        self.layers = self._config.num_hidden_layers
        self.column_tokens = -(-max_tokens // COLUMNS_MAX)
        self.columns = -(-max_tokens // self.column_tokens)
        # layer -> [head, column], of the latest forward
        self.weights: dict[int, Weights] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, forwards of one query leave their weights in `weights`."""
        name = self._config._attn_implementation
        before = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
        inner = ALL_ATTENTION_FUNCTIONS.get(name)
        ALL_ATTENTION_FUNCTIONS[name] = self._wrap(inner)
        try:
            yield
        finally:
            if before is None:
                del ALL_ATTENTION_FUNCTIONS[name]
            else:
                ALL_ATTENTION_FUNCTIONS[name] = before

    def _wrap(self, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        def attention(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # Eager attention has no entry: it is a function of the model's own module.
            call = inner or sys.modules[type(module).__module__].eager_attention_forward
            layer, step = module.layer_idx, getattr(key, STEP_MARK, None)
            if step is None:
                if query.shape[2] == 1:
                    self.weights[layer] = self._weights(query, key, mask, kwargs)
                return call(module, query, key, value, mask, *args, **kwargs)
            stream = step[0]
            stream.on_attend = lambda keys, positions: self.weights.update(
                {layer: self._sparse_weights(query, keys, positions, kwargs)}
            )
            try:
                return call(module, query, key, value, mask, *args, **kwargs)
            finally:
                stream.on_attend = None

        return attention

    def _weights(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> Weights:
        """[head, column] of the first row's query, in float32."""
        groups = query.shape[1] // key.shape[1]
        keys = key[0].float().repeat_interleave(groups, 0)
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        scores = (query[0].float() @ keys.transpose(1, 2))[:, 0] * scaling
        if mask is not None:
            kept = mask[0, 0, 0, : scores.shape[-1]]
            scores = scores + kept if kept.dtype.is_floating_point else scores.where(kept, -1e30)
        return self._by_column(scores, torch.arange(scores.shape[-1]).expand_as(scores))

    def _sparse_weights(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        positions: npt.NDArray[np.int64],
        options: dict[str, Any],
    ) -> Weights:
        """The same of chosen keys: [KV head, token, dim], at positions [KV head, token]."""
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        group = query.float().view(keys.shape[0], -1, query.shape[-1])
        scores = (group @ keys.float().transpose(1, 2)).flatten(0, 1) * scaling
        groups = group.shape[1]
        return self._by_column(scores, torch.from_numpy(positions).repeat_interleave(groups, 0))

    def _by_column(self, scores: torch.Tensor, positions: torch.Tensor) -> Weights:
        summed = torch.zeros(scores.shape[0], self.columns)
        summed.scatter_add_(1, positions // self.column_tokens, torch.softmax(scores, -1))
        taken: Weights = summed.numpy()
        return taken


def shown_layers(layers: int) -> list[int]:
    """The first, the middle and the last, or as many as there are."""
    return sorted({round(i * (layers - 1) / (LAYERS_SHOWN - 1)) for i in range(LAYERS_SHOWN)})
