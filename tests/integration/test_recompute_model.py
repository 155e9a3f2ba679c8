# SPDX-License-Identifier: Apache-2.0
"""A stored prefix is loaded or computed again by what a real model and device measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_models as kv
from hifc import ConfigError, HiFC, Namespace
from hifc.stream.recompute import LoadOrRecompute

PROMPT = kv.tokens(400)
CONFIG = {
    "device": "ram://recompute?size=256MiB",
    "format": "always",
    "pool_size": "32MiB",
    "memory_budget": "2MiB",
    "swap_buffer_size": 0,
    "resident_ratio": 0.65,
    "block_tokens": 32,
    "owner_socket": False,
}


@pytest.fixture
def engine() -> Iterator[HiFC]:
    with HiFC(CONFIG) as opened:
        yield opened


def cache_of(engine: HiFC, network: Any, **options: Any) -> Any:
    return engine.cache(network.config, 460, model_id="random", **options)


def store(engine: HiFC, network: Any, ids: torch.Tensor) -> None:
    cache = cache_of(engine, network)
    kv.run(network, ids, cache, 2)
    assert cache.save_prefix(ids) == ids.shape[1]
    cache.close()


def costs(load_per_token_s: float, compute_per_token_s: float) -> LoadOrRecompute:
    """As if that had been measured."""
    taught = LoadOrRecompute()
    for tokens in (50, 500):
        taught.loaded(tokens, tokens * load_per_token_s)
        taught.computed(tokens, 0, tokens * compute_per_token_s)
        taught.computed(1, tokens, compute_per_token_s)
    return taught


def test_what_is_faster_is_done_and_both_are_right(engine: HiFC) -> None:
    network = kv.model()
    store(engine, network, PROMPT)
    for measured, loads in ((costs(1e-5, 1e-3), True), (costs(1e-2, 1e-3), False)):
        cache = cache_of(engine, network, load_or_recompute=measured)
        loaded = cache.load_prefix(PROMPT)
        assert loaded == (399 if loads else 0)
        decision = cache.last_decision
        assert (decision.load, decision.reason) == (loads, "measured")
        assert (decision.stored_tokens, decision.prompt_tokens) == (399, 400)
        reference = kv.dynamic(network)
        if loads:
            with torch.no_grad():
                network(PROMPT, cache=reference)
            reference.crop(-1)
        kv.assert_same(*(kv.run(network, PROMPT, one, 20) for one in (cache, reference)))
        assert measured.error() > 0, "what came was compared with what was foreseen"
        cache.close()


@pytest.mark.parametrize(("mode", "loaded"), [("load", 399), ("recompute", 0)])
def test_either_can_be_forced(mode: str, loaded: int) -> None:
    network = kv.model()
    with HiFC(CONFIG | {"load_or_recompute": mode}) as engine:
        store(engine, network, PROMPT)
        cache = cache_of(engine, network)
        assert cache.load_prefix(PROMPT) == loaded
        assert cache.last_decision.reason == "forced"
        assert engine.metrics["prefix_loaded"] == (1 if loaded else 0)
        assert engine.metrics["prefix_recomputed"] == (0 if loaded else 1)
        cache.close()
    with pytest.raises(ConfigError, match="load_or_recompute"):
        HiFC(CONFIG | {"load_or_recompute": "always"})


def test_nothing_stored_is_no_decision(engine: HiFC) -> None:
    cache = cache_of(engine, kv.model())
    assert cache.load_prefix(PROMPT) == 0
    assert cache.last_decision is None
    assert engine.metrics["prefix_recomputed"] == 0


def test_measurements_stay_from_cache_to_cache(engine: HiFC) -> None:
    """And not from model to model. This device is memory, so the decisions are the machine's."""
    network = kv.model()
    for count in (40, 150, 400):
        store(engine, network, PROMPT[:, :count])
        for _ in range(3):
            cache = cache_of(engine, network)
            cache.load_prefix(PROMPT[:, :count])
            kv.run(network, PROMPT[:, :count], cache, 3)
            cache.close()
    assert cache.last_decision.reason in ("measured", "probe")
    assert cache.last_decision.load_s > 0
    assert cache.last_decision.compute_s > 0
    assert engine.metrics["prefix_predicted_us"] > 0
    assert engine.metrics["prefix_actual_us"] > 0
    assert engine.metrics["prefix_load_tokens_per_s"] > 0
    assert engine.metrics["prefix_compute_tokens_per_s"] > 0
    text = engine.metrics.prometheus()
    for name in ("hifc_break_even_tokens", "hifc_prefix_error", "hifc_prefix_loaded_total"):
        assert f"\n{name} " in text
    other = cache_of(engine, kv.model(5))
    assert math.isnan(engine.metrics["break_even_tokens"])
    other.close()


def test_rows_and_beams_are_not_measured(engine: HiFC) -> None:
    network = kv.model()
    measured = LoadOrRecompute()
    cache = engine.cache(network.config, 200, batch_size=2, load_or_recompute=measured)
    kv.run(network, kv.tokens(100, rows=2), cache, 3)
    assert all(math.isnan(rate) for rate in measured.tokens_per_s())
    cache.close()


class WorkClock:
    """Time as the work that was done: a millisecond for each token that the network computes, and
    one for each MiB that the device reads or writes."""

    def __init__(self, network: torch.nn.Module, namespace: Namespace) -> None:
        self._tokens, self._namespace = 0, namespace
        # Before a layer stores its keys, so that a forward's work lies between its two ends.
        network.model.layers[-1].register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _layer: object, words: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = words[0] if words else named["hidden_states"]
        self._tokens += hidden.shape[0] * hidden.shape[1]

    def __call__(self) -> float:
        stats = self._namespace.stats()
        moved_bytes = stats.device_read_bytes + stats.device_write_bytes
        return 1e-3 * (self._tokens + moved_bytes / (1 << 20))


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_foresees_its_prompts(checkpoint: Path, tmp_path: Path) -> None:
    """By the work that it takes, which is the same on every machine."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    config = CONFIG | {
        "device": f"file://{tmp_path}/kv?size=4GiB",
        "pool_size": "128MiB",
        "block_tokens": 256,
    }
    with HiFC(config) as engine, torch.inference_mode():
        engine._costs_of(network.config).clock = WorkClock(network, engine.namespace)
        for count in (100, 300, 900):
            ids = torch.randint(10, 40_000, (1, count), generator=torch.Generator().manual_seed(0))
            for prompt in (ids, ids, torch.cat([ids, ids[:, :30]], 1)):
                cache = engine.cache(network.config, 1000, block_tokens=32)
                cache.load_prefix(prompt)
                start = cache.get_seq_length()
                network(prompt[:, start:], cache=cache, logits_to_keep=1)
                network(prompt[:, :1], cache=cache, logits_to_keep=1)
                cache.save_prefix(prompt)
                decision = cache.last_decision
                cache.close()
        assert decision is not None
        assert decision.load
        assert engine.metrics["prefix_loaded"] == 9 - 1  # all but the first of all
        assert decision.reason == "measured"
        assert decision.load_s < decision.compute_s
        assert engine.metrics["break_even_tokens"] > 0
        assert engine.metrics["prefix_error"] < 0.2
