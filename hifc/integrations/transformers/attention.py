# SPDX-License-Identifier: Apache-2.0
"""The attention function "hifc_sparse" of transformers, registered as this is imported.

    model.set_attn_implementation("hifc_sparse")

For keys that a SparseCache marked it is the stream's own, for all others transformers' sdpa. Marked
keys are those of a step alone, not what a model may attend to, so that all else that computes with
them gets an error that names the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hifc.errors import ConfigError, NotSupported
from hifc.sparse.stream import SparseStream

ATTENTION = "hifc_sparse"
STEP_MARK = "_hifc_sparse_step"
# What some models ask of attention beside a scale.
_REFUSED = ("softcap", "s_aux", "position_bias", "sliding_window")


class _Marked(torch.Tensor):  # type: ignore[misc]
    """Keys of a step: they have a shape, and only `sparse_attention` knows what else to do."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "stride"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ConfigError(
            "a sparse cache's keys reached an attention function that is not its own, or a model "
            f'changed them before: call model.set_attn_implementation("{ATTENTION}") first, or use '
            "attention: exact"
        )


def mark(keys: torch.Tensor, stream: SparseStream, layer: int) -> torch.Tensor:
    """Keys of a step of one token, [1, heads, 1, dim], by which attention finds the stream."""
    marked: torch.Tensor = keys.detach().as_subclass(_Marked)
    setattr(marked, STEP_MARK, (stream, layer))
    return marked


def sparse_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, or, for keys that a SparseCache marked, its own.

    query: [1, heads, 1, dim]. Returns ([1, 1, heads, dim], None).
    """
    step: tuple[SparseStream, int] | None = getattr(key, STEP_MARK, None)
    if step is None:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    asked = [name for name in _REFUSED if kwargs.get(name) is not None]
    if asked or (attention_mask is not None and not _sees_all(attention_mask)):
        raise NotSupported(
            f"sparse attention with {' and '.join(asked) or 'padding or a mask'}: set cache.exact "
            "or use an exact cache for this"
        )
    stream, layer = step
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.no_grad():
        output = stream.attend(layer, query.detach(), scale)
    return output.transpose(1, 2).contiguous(), None


def _sees_all(mask: torch.Tensor) -> bool:
    """Whether a mask, boolean or added to logits, hides nothing."""
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())


AttentionInterface.register(ATTENTION, sparse_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
