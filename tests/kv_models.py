# SPDX-License-Identifier: Apache-2.0
"""Small random models, caches with a wanted plan, and runs to compare bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hifc import Namespace
from hifc.integrations.transformers.cache import HiFCCache
from hifc.stream.plan import KVShape, StreamPlan, spread

# One thread: the other core is the reactor's, and idle torch threads would spin on it.
torch.set_num_threads(1)

VOCABULARY = 97
END = 96


def model(
    layers: int = 8,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
) -> Any:
    """Heads of 64 items: pieces of 16 tokens in 32 bit, of 32 in 16 bit, are whole pages. heads:
    of queries, of keys."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        max_position_embeddings=2048,
        dtype=dtype,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config).to(dtype).eval()


def tokens(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids of shape (rows, count), no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 90, (rows, count), generator=generator)


def shape_of(network: Any, rows: int = 1) -> KVShape:
    config = network.config
    item = torch.empty((), dtype=config.dtype).element_size()
    return KVShape(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, item, rows
    )


def cache_of(
    namespace: Namespace,
    network: Any,
    max_tokens: int,
    *,
    pinned: int = 2,
    slots: int = 2,
    block_tokens: int = 32,
    rows: int = 1,
    **options: Any,
) -> HiFCCache:
    """A cache whose budget is just what a plan with that many pinned layers takes.

    The budget is a ratio, so that it also fits another number of rows.
    """
    shape = shape_of(network, rows)
    layers = spread(pinned, shape.layers)
    wanted = StreamPlan(shape, max_tokens, block_tokens, layers, slots)
    options.setdefault("model_id", "random")
    cache = HiFCCache(
        namespace,
        network.config,
        max_tokens,
        batch_size=rows,
        resident=wanted.resident_bytes,
        slots=slots,
        block_tokens=block_tokens,
        **options,
    )
    assert cache.plan == wanted, "the plan is not the one that the test wants"
    return cache


def dynamic(network: Any) -> DynamicCache:
    return DynamicCache(config=network.config)


def run(
    network: Any, ids: torch.Tensor, cache: Any, new: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy, exactly new tokens. Returns sequences and the logits of every step."""
    result = network.generate(
        ids,
        cache=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return result.sequences, torch.stack(result.logits)


def assert_same(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Bitwise: also the sign of a zero counts."""
    assert torch.equal(found[0], wanted[0]), "tokens differ"
    kind = torch.int32 if wanted[1].dtype == torch.float32 else torch.int16
    assert torch.equal(found[1].view(kind), wanted[1].view(kind)), "logits differ"
