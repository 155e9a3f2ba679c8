# SPDX-License-Identifier: Apache-2.0
"""Sparse decode: exact where all is resident or exactness is asked for, the right blocks otherwise,
and clear about what it cannot do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import kv_models as kv
from hifc import BufferExhausted, ConfigError, HiFCError, InvalidRequest, Namespace, NotSupported
from hifc.integrations.transformers import attention
from hifc.integrations.transformers.sparse import SparseCache
from hifc.sparse import blocks as sparse_blocks
from hifc.sparse.plan import SparseSettings
from hifc.sparse.quality import CHECKS_MIN, SETTLE_STEPS
from hifc.sparse.stream import SparseStream

PROMPT = kv.tokens(300)
# Blocks stand elsewhere than their tokens did, and sums are taken in another order.
TOLERANCE = 2e-6


def model(**options: Any) -> Any:
    return kv.model(4, attention="hifc_sparse", **options)


def cache_of(
    namespace: Namespace, network: Any, resident: float | str = "2200KiB", **settings: Any
) -> SparseCache:
    # A small random model looks everywhere: a bound that suits real ones would make it exact.
    settings.setdefault("missed_max", 1.0)
    return SparseCache(
        namespace,
        network.config,
        400,
        resident=resident,
        model_id="random",
        sparse=SparseSettings(**settings),
    )


def stream_of(cache: SparseCache) -> SparseStream:
    stream = cache._core.stream
    assert isinstance(stream, SparseStream)
    return stream


def exact(network: Any, new: int, prompt: torch.Tensor = PROMPT) -> Any:
    return kv.run(network, prompt, kv.dynamic(network), new)


def assert_near(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    assert torch.equal(found[0], wanted[0]), "tokens differ"
    assert (found[1].float() - wanted[1].float()).abs().max() <= tolerance


@pytest.mark.parametrize("sketch", ["4bit", "digest"])
def test_with_all_resident_it_is_exact(namespace: Namespace, sketch: str) -> None:
    network = model()
    cache = cache_of(namespace, network, 1.0 if sketch == "4bit" else "8MiB", sketch=sketch)
    assert_near(kv.run(network, PROMPT, cache, 60), exact(network, 60))
    quality = cache.quality
    assert quality["steps"] == 59
    assert quality["exact_steps"] == 0
    assert quality["missed"] < 1e-6
    assert quality["checked_error"] < 1e-5
    cache.close()
    assert not list(namespace.list()), "closing left blocks on the device"
    assert namespace.stats().reservations == 0


def test_sixteen_bit(memory: Namespace) -> None:
    network = model(dtype=torch.bfloat16)
    cache = cache_of(memory, network, "8MiB")
    assert cache.plan.block_tokens == 32
    found, wanted = kv.run(network, PROMPT, cache, 2), exact(network, 2)
    assert (found[1].float() - wanted[1].float()).abs().max() <= 0.02


class Watch:
    """Queries and results of one layer's sparse attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        inner = SparseStream.attend

        def attend(stream: Any, index: int, query: torch.Tensor, scale: float) -> torch.Tensor:
            found = inner(stream, index, query, scale)
            if index == layer:
                self.seen.append((query, found))
            return found

        monkeypatch.setattr(SparseStream, "attend", attend)


def test_it_attends_to_the_blocks_with_the_most_mass(
    memory: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = model()
    with torch.no_grad():  # attention that prefers some
        network.model.layers[0].self_attn.q_proj.weight *= 200
    cache = cache_of(memory, network, check_every=1)
    watch = Watch(monkeypatch, layer=0)
    kv.run(network, PROMPT, cache, 2)
    reference = kv.dynamic(network)
    sequence, _ = exact(network, 1)
    with torch.no_grad():
        network(sequence[:, :301], cache=reference)
    keys, values = reference.layers[0].keys[0], reference.layers[0].values[0]
    (query, output), plan = watch.seen[0], cache.plan
    tokens, blocks = plan.block_tokens, 300 // plan.block_tokens
    resident = stream_of(cache).maps[0].resident(blocks)
    assert (resident.sum(axis=1) == plan.resident_blocks).all()
    assert plan.resident_blocks < blocks
    for head in range(2):
        group = query[0, 2 * head : 2 * head + 2, 0]
        logits = group @ keys[head].T * 64**-0.5
        mass = logits.softmax(-1).mean(0)[: blocks * tokens].view(blocks, tokens).sum(-1).numpy()
        always = {0, blocks - 1, blocks - 2}
        rest = [block for block in np.argsort(-mass) if block not in always]
        count = plan.resident_blocks - len(always)
        # The sketch rounds: only what is clearly above the last chosen must be among the chosen.
        limit = mass[rest[count]]
        sure = {block for block in rest[:count] if mass[block] > 1.2 * limit}
        assert len(sure) >= 3
        assert always | sure <= set(np.flatnonzero(resident[head]).tolist())
        seen = torch.from_numpy(np.append(np.repeat(resident[head], tokens), [True] * 13))
        chosen = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ values[head]
        assert (output[0, 2 * head : 2 * head + 2, 0] - chosen).abs().max() < 1e-5
    missed = cache.quality["checked_missed"]
    assert 0.0 < missed < 1.0
    assert missed == pytest.approx(cache.quality["checked_estimate"], rel=0.15)


def test_exact_when_asked(namespace: Namespace) -> None:
    network = model()
    cache = cache_of(namespace, network)
    cache.exact = True
    wanted = exact(network, 40)
    kv.assert_same(kv.run(network, PROMPT, cache, 40), wanted)
    assert cache.quality["exact_steps"] == 39
    cache.reset()
    cache.exact = False
    kv.run(network, PROMPT, cache, 40)
    assert cache.quality["steps"] == 39
    cache.exact = True  # the blocks give way to whole layers, and the tail is still there
    cache.crop(-40)
    assert_near(kv.run(network, PROMPT, cache, 40), wanted, 1e-5)


def test_turns_of_exact_and_sparse(memory: Namespace) -> None:
    network = model()
    cache, reference = cache_of(memory, network, "8MiB"), kv.dynamic(network)
    ids, new = PROMPT, (7, 20, 16)
    for count, turn in enumerate(new):
        cache.exact = count == 1
        found = kv.run(network, ids, cache, turn)
        assert_near(found, kv.run(network, ids, reference, turn), 1e-5)
        ids = torch.cat([found[0], kv.tokens(11, seed=count)], 1)
    assert cache.quality["steps"] == 6 + 15
    for one in (cache, reference):
        one.crop(-21)
    assert_near(kv.run(network, ids[:, :-9], cache, 8), kv.run(network, ids[:, :-9], reference, 8))


def test_chunks_and_prefixes(memory: Namespace) -> None:
    network = model()
    cache = cache_of(memory, network, "8MiB")
    wanted = kv.run(network, PROMPT, kv.dynamic(network), 40, prefill_chunk_size=77)
    assert_near(kv.run(network, PROMPT, cache, 40, prefill_chunk_size=77), wanted)
    assert cache.save_prefix(PROMPT) == 300
    cache.close()
    again = cache_of(memory, network, "8MiB")
    assert again.load_prefix(PROMPT) == 299
    assert_near(kv.run(network, PROMPT, again, 40), wanted)
    assert again.quality["steps"] == 40, "the sketch was built from what was stored"


def test_memory_is_what_the_plan_says() -> None:
    uri = "ram://sparse-memory?size=64MiB"
    Namespace.format(uri, segment_size="2MiB", force=True)
    with Namespace.open(uri, pool_size="32MiB") as namespace:
        network = model()
        cache = cache_of(namespace, network)
        kv.run(network, PROMPT, cache, 60)
        assert cache.resident_peak_bytes <= cache.plan.resident_bytes
        assert cache.plan.resident_blocks < 300 // cache.plan.block_tokens


# ---- when too much is missed


def test_the_budget_widens_on_its_own(memory: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hifc")
    network = model()
    cache = cache_of(memory, network, missed_max=0.01, resident_max=2.0)
    before = cache.plan.resident_blocks
    kv.run(network, PROMPT, cache, 3 * SETTLE_STEPS)
    quality = cache.quality
    assert quality["widened"] >= 1
    assert quality["resident"] > before
    assert quality["exact"] is None
    assert quality["missed"] <= 0.01
    said = [record.message for record in caplog.records]
    assert len(said) == quality["widened"], "each time is logged, and nothing else"
    assert all(line.startswith(f"sparse attention on {memory.uri} widens to ") for line in said)


def test_where_widening_ends_it_is_exact(memory: Namespace) -> None:
    network = model()
    cache = cache_of(memory, network, missed_max=0.01, resident_max=0.7)
    with pytest.warns(UserWarning, match="sparse_resident_max"):
        kv.run(network, PROMPT, cache, 2 * SETTLE_STEPS)
    assert cache.quality["exact_steps"] == 2 * SETTLE_STEPS - 1 - cache.quality["steps"] > 0
    assert "sparse_resident_max" in cache.quality["exact"]
    cache.reset()
    assert cache.quality["exact"] is None


def test_where_the_pool_is_full_it_is_exact(memory: Namespace) -> None:
    network = model()
    cache = cache_of(memory, network, missed_max=0.01, resident_max=2.0)
    kv.run(network, PROMPT, cache, 2)
    filler = []
    with contextlib.suppress(BufferExhausted):
        while True:
            filler.append(memory.buffer(64 << 10))
    del filler[::100]  # room for the namespace's own pages
    with pytest.warns(UserWarning, match="the pool has no room"), torch.no_grad():
        for step in range(2 * SETTLE_STEPS):
            network(kv.tokens(1, seed=step), cache=cache)
    assert cache.quality["exact_steps"] > 0
    assert cache.quality["widened"] == 0


def test_a_sketch_that_misjudges_is_noticed(
    memory: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upside_down(stream: Any, layer: int, query: torch.Tensor, scale: float) -> Any:
        found = inner(stream, layer, -query, scale)
        found[:, :-1] **= 8  # and sure of it
        return found / found.sum(axis=1, keepdims=True)

    inner = SparseStream.estimate
    monkeypatch.setattr(SparseStream, "estimate", upside_down)
    network = model()
    cache = cache_of(memory, network, check_every=1)
    with pytest.warns(UserWarning, match="exact checks found"):
        kv.run(network, PROMPT, cache, CHECKS_MIN + 4)
    assert cache.quality["exact_steps"] > 0


def test_a_sketch_that_tells_nothing_costs_time_only(
    memory: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(stream: Any, layer: int, query: torch.Tensor, scale: float) -> Any:
        return inner(stream, layer, query, scale) * (np.nan if layer == 1 else 1.0)

    inner = SparseStream.estimate
    monkeypatch.setattr(SparseStream, "estimate", nothing)
    network = model()
    cache = cache_of(memory, network)
    watch = Watch(monkeypatch, layer=1)
    kv.run(network, PROMPT, cache, 2)
    query, output = watch.seen[0]
    stream = stream_of(cache)
    cache.exact = True
    whole = [buffer.kv[:, :, :301].clone() for _, buffer, _ in stream.each_layer()][1]
    keys, values = whole[None, :, 0], whole[None, :, 1]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, scale=64**-0.5, enable_gqa=True
    )
    assert (output - wanted).abs().max() < 1e-5
    assert cache.quality["exact_heads"] == 2


# ---- prefetch


def test_prefetches_are_counted(memory: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_blocks, "STAY", 1.0)  # attention of this model hardly moves
    network = model()
    plain = cache_of(memory, network, prefetch_degree=0)
    wanted = kv.run(network, PROMPT, plain, 2)
    plain.close()
    cache = cache_of(memory, network, prefetch_degree=4)
    assert_near(kv.run(network, PROMPT, cache, 2), wanted)
    stream = stream_of(cache)
    for step in range(1, 30):
        with torch.no_grad():
            network(kv.tokens(1, seed=step), cache=cache)
    assert 0 < stream.quality.prefetch_wanted <= stream.quality.prefetched
    assert cache.counters["prefetch_hit"] <= cache.counters["total_access"]
    assert stream.heat.heat.max() > 0


# ---- what it refuses


def test_another_attention_function_is_refused(memory: Namespace) -> None:
    network = kv.model(4)
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        kv.run(network, PROMPT, cache_of(memory, network), 2)


def test_batches_and_beams_are_refused(memory: Namespace) -> None:
    network = model()
    with pytest.raises(ConfigError, match="one sequence"):
        kv.run(network, kv.tokens(40, rows=2), cache_of(memory, network), 2)
    with pytest.raises(ConfigError, match="one sequence"):
        network.generate(PROMPT, cache=cache_of(memory, network), num_beams=2, max_new_tokens=4)


def test_padding_is_refused_in_a_step(memory: Namespace) -> None:
    network = model()
    mask = torch.ones_like(PROMPT)
    mask[0, :20] = 0
    with pytest.raises(NotSupported, match="mask"):
        kv.run(network, PROMPT, cache_of(memory, network), 4, attention_mask=mask)


def test_block_tokens_has_another_name(memory: Namespace) -> None:
    with pytest.raises(ConfigError, match="sparse_block_tokens"):
        SparseCache(memory, model().config, 400, block_tokens=32)


def test_a_step_that_attention_does_not_take_is_noticed(
    memory: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        whole = torch.zeros(key.shape, dtype=query.dtype) if key.shape[2] == 1 else key
        return attention.sparse_attention(module, query, whole, whole, *args[1:], **kwargs)

    network = model()
    cache = cache_of(memory, network)
    monkeypatch.setitem(AttentionInterface._global_mapping, "hifc_sparse", changed)
    with pytest.raises(NotSupported, match="layer 0 did not reach"):
        kv.run(network, PROMPT, cache, 2)
    with pytest.raises(NotSupported, match="layer 0 did not reach"):
        network(kv.tokens(1), cache=cache)
    monkeypatch.undo()
    cache.reset()
    kv.run(network, PROMPT, cache, 4)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_configuration_that_is_not_the_models_is_noticed(memory: Namespace, name: str) -> None:
    network, other = kv.model(4, attention=name), model()
    with pytest.raises(ConfigError, match=r'model.set_attn_implementation\("hifc_sparse"\)'):
        kv.run(network, PROMPT, cache_of(memory, other), 2)


def test_the_attention_function_is_known_before_a_cache_is_made() -> None:
    code = (
        "import hifc.integrations.transformers, transformers as t;"
        "assert 'hifc_sparse' in t.AttentionInterface().valid_keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_block_that_is_gone_is_an_error_until_reset(memory: Namespace) -> None:
    network = model()
    cache = cache_of(memory, network)
    kv.run(network, PROMPT, cache, 2)
    stream = stream_of(cache)
    absent = np.flatnonzero(~stream.maps[0].resident(18).any(axis=0))
    memory.delete(stream.keys[absent[0]])
    stream.maps[0].choose = lambda mass, *_: np.arange(mass.shape[1])[None] == [[absent[0]]] * 2
    with pytest.raises(HiFCError, match="reset"):
        network(kv.tokens(1), cache=cache)
    with pytest.raises(InvalidRequest, match="reset"):
        network(kv.tokens(1), cache=cache)
    cache.reset()
    del stream.maps[0].choose
    kv.run(network, PROMPT, cache, 4)
