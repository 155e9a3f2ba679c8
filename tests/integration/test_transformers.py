# SPDX-License-Identifier: Apache-2.0
"""A streamed cache gives bitwise the logits of transformers' DynamicCache, in every mode."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import kv_models as kv
from hifc import (
    BufferExhausted,
    ConfigError,
    InvalidRequest,
    Metrics,
    Namespace,
    NoSpace,
    NotSupported,
    WaitTimeout,
)
from hifc.integrations.transformers.cache import HiFCCache
from hifc.stream import buffers as stream_buffers
from hifc.stream.buffers import Slot
from hifc.stream.layers import LayerStream

SHAPES = [(6, 0, 2), (7, 1, 2), (7, 0, 3), (8, 2, 3), (8, 1, 4)]  # layers, pinned, slots


@pytest.mark.parametrize(("layers", "pinned", "slots"), SHAPES)
@pytest.mark.parametrize("chunk", [None, 23, 64])
def test_generate(
    namespace: Namespace, layers: int, pinned: int, slots: int, chunk: int | None
) -> None:
    network, ids = kv.model(layers), kv.tokens(100)
    cache = kv.cache_of(namespace, network, 180, pinned=pinned, slots=slots)
    wanted = kv.run(network, ids, kv.dynamic(network), 70, prefill_chunk_size=chunk)
    kv.assert_same(kv.run(network, ids, cache, 70, prefill_chunk_size=chunk), wanted)
    assert cache.counters["total_access"] > 0
    assert cache.get_seq_length() == 169
    cache.close()
    assert not list(namespace.list()), "closing left blocks on the device"
    assert namespace.stats().reservations == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 57])
def test_sixteen_bit(namespace: Namespace, dtype: torch.dtype, chunk: int | None) -> None:
    network, ids = kv.model(7, dtype), kv.tokens(330)
    cache = kv.cache_of(namespace, network, 400, pinned=1)
    wanted = kv.run(network, ids, kv.dynamic(network), 60, prefill_chunk_size=chunk)
    kv.assert_same(kv.run(network, ids, cache, 60, prefill_chunk_size=chunk), wanted)


def test_eager_attention(memory: Namespace) -> None:
    network, ids = kv.model(attention="eager"), kv.tokens(100)
    found = kv.run(network, ids, kv.cache_of(memory, network, 160), 40)
    kv.assert_same(found, kv.run(network, ids, kv.dynamic(network), 40))


# With the instructions of a processor without AVX2, whose kernels look at how memory is aligned.
HEAD_SIZES = """
import torch, kv_models as kv
from hifc import Namespace
from hifc.integrations.transformers import HiFCCache

uri = "ram://heads?size=256MiB"
Namespace.format(uri, segment_size="8MiB", force=True)
with Namespace.open(uri, pool_size="128MiB") as namespace:
    for dim in (6, 10, 18, 30, 8, 12):
        for heads in ((4, 4), (4, 2)):
            for attention in ("sdpa", "eager"):
                network = kv.model(4, torch.float32, attention, heads=heads, head_dim=dim)
                ids = kv.tokens(97)
                cache = HiFCCache(namespace, network.config, max_tokens=120, resident=1.0)
                found, wanted = (
                    kv.run(network, ids, one, 20) for one in (cache, kv.dynamic(network))
                )
                cache.close()
                same = all(torch.equal(*pair) for pair in zip(found, wanted))
                print(dim, *heads, attention, "same" if same else "differs")
"""


def test_every_head_size_whatever_the_processor() -> None:
    """Steps after the prefill differed by 1e-7 where a head is 8 bytes modulo 16 long."""
    folders = [str(Path(kv.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ) | {
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }
    child = subprocess.run(
        [sys.executable, "-c", HEAD_SIZES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    lines = child.stdout.splitlines()
    assert len(lines) == 24
    assert [line for line in lines if not line.endswith("same")] == []


@pytest.mark.parametrize(("head_dim", "packed"), [(6, True), (10, True), (12, False), (64, False)])
def test_attention_sees_heads_where_a_packed_cache_has_them(
    memory: Namespace, head_dim: int, packed: bool
) -> None:
    network = kv.model(2, head_dim=head_dim)
    cache = HiFCCache(memory, network.config, 40, resident=1.0)
    states = torch.randn(1, 2, 33, head_dim)
    keys, values = cache.update(states, states, 0)
    for found in (keys, values):
        assert torch.equal(found, states)
        assert found.is_contiguous() == packed, "it is a copy only where that matters"
        step = found.stride(1) * found.element_size()
        assert packed or step % 16 == 0


def test_whole_cache_in_memory_when_the_budget_allows(memory: Namespace) -> None:
    network, ids = kv.model(4), kv.tokens(50)
    cache = HiFCCache(memory, network.config, 80, resident=1.0)
    assert not cache.plan.streamed
    kv.assert_same(kv.run(network, ids, cache, 20), kv.run(network, ids, kv.dynamic(network), 20))
    cache.crop(-30)
    cache.reset()
    kv.assert_same(kv.run(network, ids, cache, 20), kv.run(network, ids, kv.dynamic(network), 20))


def test_old_name_and_new_name(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(40)
    wanted = network.generate(ids, max_new_tokens=20, do_sample=False)
    for name in ("past_key_values", "cache"):
        cache = kv.cache_of(memory, network, 200)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            found = network.generate(ids, max_new_tokens=20, do_sample=False, **{name: cache})
        assert torch.equal(found, wanted)
        cache.close()


def test_forward_with_gradients_and_in_inference_mode(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache = kv.cache_of(memory, network, 300)
    found = network(ids, cache=cache).logits
    assert torch.equal(found, network(ids, cache=kv.dynamic(network)).logits)
    other, reference = kv.cache_of(memory, network, 300), kv.dynamic(network)
    with torch.inference_mode():
        network(ids, cache=other)
        network(ids, cache=reference)
    longer = torch.cat([ids, kv.tokens(7, seed=1)], 1)
    kv.assert_same(kv.run(network, longer, other, 30), kv.run(network, longer, reference, 30))


# ---- batches, beams, speculation


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = kv.tokens(80, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    mask[2, :40] = 0
    ids[mask == 0] = 0
    return ids, mask


def test_batch_padded_on_the_left(namespace: Namespace) -> None:
    network = kv.model()
    ids, mask = _batch()
    cache = kv.cache_of(namespace, network, 130, rows=3)
    found = kv.run(network, ids, cache, 40, attention_mask=mask)
    kv.assert_same(found, kv.run(network, ids, kv.dynamic(network), 40, attention_mask=mask))


@pytest.mark.parametrize("beams", [2, 3])
def test_beam_search(namespace: Namespace, beams: int) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache = kv.cache_of(namespace, network, 200, rows=beams)
    found = kv.run(network, ids, cache, 60, num_beams=beams)
    kv.assert_same(found, kv.run(network, ids, kv.dynamic(network), 60, num_beams=beams))


def test_beams_over_a_batch(memory: Namespace) -> None:
    network = kv.model()
    ids, mask = _batch()
    cache = kv.cache_of(memory, network, 130, rows=6, slots=3)
    options = {"attention_mask": mask, "num_beams": 2}
    found = kv.run(network, ids, cache, 40, **options)
    kv.assert_same(found, kv.run(network, ids, kv.dynamic(network), 40, **options))


def test_reorder_then_crop_reads_the_right_rows(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100, rows=3)
    cache, reference = kv.cache_of(memory, network, 200, rows=3), kv.dynamic(network)
    orders = [[2, 0, 0], [1, 1, 2], [0, 2, 1]]
    with torch.no_grad():
        for turn, order in enumerate(orders):
            step = ids if turn == 0 else kv.tokens(20, rows=3, seed=turn)
            for one in (cache, reference):
                network(step, cache=one)
                one.reorder_cache(torch.tensor(order))
        for one in (cache, reference):
            one.crop(-50)
        step = kv.tokens(40, rows=3, seed=9)
        found, wanted = (network(step, cache=one).logits for one in (cache, reference))
    assert torch.equal(found, wanted)


def test_prompt_lookup_and_assisted_generation(memory: Namespace) -> None:
    network, assistant = kv.model(), kv.model(3, seed=1)
    ids = kv.tokens(20).repeat(1, 5)
    for options in ({"prompt_lookup_num_tokens": 8}, {"assistant_model": assistant}):
        found, wanted = (
            network.generate(
                ids, cache=cache, max_new_tokens=60, min_new_tokens=60, do_sample=False, **options
            )
            for cache in (kv.cache_of(memory, network, 260), kv.dynamic(network))
        )
        assert torch.equal(found, wanted)


# ---- turns, crop, reset


def test_second_turn_on_the_same_cache(namespace: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache, reference = kv.cache_of(namespace, network, 260), kv.dynamic(network)
    first = [kv.run(network, ids, one, 30) for one in (cache, reference)]
    kv.assert_same(*first)
    longer = torch.cat([first[0][0], kv.tokens(17, seed=1)], 1)
    kv.assert_same(*(kv.run(network, longer, one, 40) for one in (cache, reference)))


@pytest.mark.parametrize("count", [0, 1, 5, 8, 9, 20, 33, 64, 65, 90, 1000])
def test_crop_and_go_on(memory: Namespace, count: int) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache, reference = kv.cache_of(memory, network, 260), kv.dynamic(network)
    for one in (cache, reference):
        kv.run(network, ids, one, 38)
        one.crop(-count)
    length = cache.get_seq_length()
    assert length == reference.get_seq_length() == max(0, 137 - count)
    step = kv.tokens(length + 50, seed=count)
    kv.assert_same(*(kv.run(network, step, one, 40) for one in (cache, reference)))


def test_crop_deletes_what_it_takes_back(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache = kv.cache_of(memory, network, 260)
    kv.run(network, ids, cache, 2)
    assert len(list(memory.list())) == 3
    before = {entry.key for entry in memory.list()}
    cache.crop(-40)
    assert len(list(memory.list())) == 1
    kv.run(network, kv.tokens(100, seed=1), cache, 2)
    after = {entry.key for entry in memory.list()}
    assert len(after) == 3
    assert len(before & after) == 1, "a block that was written again has a key of its own"


def test_crop_wants_a_negative_count(memory: Namespace) -> None:
    cache = kv.cache_of(memory, kv.model(), 260)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(1)
    for wrong in (None, "x", 1.5, []):
        with pytest.raises(InvalidRequest, match="tokens_to_remove"):
            cache.crop(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="save_prefix"):
        kv.cache_of(memory, kv.model(), 260, save_prefix="yes")


def test_reset_also_to_another_batch(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache = HiFCCache(memory, network.config, 260, resident=0.6)
    for rows in (1, 1, 3, 2):
        batch = kv.tokens(100, rows=rows)
        kv.assert_same(
            kv.run(network, batch, cache, 30), kv.run(network, batch, kv.dynamic(network), 30)
        )
        cache.reset()
        assert cache.get_seq_length() == 0
        assert not list(memory.list())
    kv.run(network, ids, cache, 3)
    with pytest.raises(InvalidRequest, match="reset"):
        kv.run(network, kv.tokens(104, rows=2), cache, 3)


# ---- refusals


def test_capacity_is_checked_before_anything_changes(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache, reference = kv.cache_of(memory, network, 129), kv.dynamic(network)
    kv.assert_same(*(kv.run(network, ids, one, 30) for one in (cache, reference)))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        network(kv.tokens(1), cache=cache)
    assert cache.get_seq_length() == 129
    for one in (cache, reference):
        one.crop(-40)
    step = kv.tokens(95, seed=3)
    kv.assert_same(*(kv.run(network, step, one, 20) for one in (cache, reference)))


def test_a_model_of_more_layers_is_refused(memory: Namespace) -> None:
    cache, ids = kv.cache_of(memory, kv.model(), 129), kv.tokens(100)
    with pytest.raises(InvalidRequest, match="layer 8 in a cache of 8 layers"):
        kv.run(kv.model(9), ids, cache, 2)
    cache.reset()
    network = kv.model()
    kv.assert_same(*(kv.run(network, ids, one, 5) for one in (cache, kv.dynamic(network))))


def test_copies_are_refused(memory: Namespace) -> None:
    cache = kv.cache_of(memory, kv.model(), 260)
    with pytest.raises(NotSupported, match="save_prefix"):
        copy.deepcopy(cache)
    with pytest.raises(NotSupported, match="save_prefix"):
        pickle.dumps(cache)
    with pytest.raises(NotSupported, match="batch size"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(NotSupported, match="batch size"):
        cache.batch_select_indices(torch.tensor([0]))


def test_bad_settings_name_the_fix(memory: Namespace) -> None:
    config = kv.model().config
    for options, match in (
        ({"resident": 0.1}, "the least for 260 tokens"),
        ({"resident": 2.0}, "ratio"),
        ({"block_tokens": 33}, "multiple of 16"),
        ({"slots": 1}, "2 or more"),
    ):
        with pytest.raises(ConfigError, match=match):
            HiFCCache(memory, config, 260, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_tokens"):
        HiFCCache(memory, config, 0)
    config.sliding_window = 16
    with pytest.raises(NotSupported, match="sliding"):
        HiFCCache(memory, config, 260)


def test_block_larger_than_a_segment_is_refused_at_once() -> None:
    uri = "ram://small-integration?size=4325376"
    Namespace.format(uri, segment_size="256KiB", force=True)
    network = kv.model()
    with Namespace.open(uri, pool_size="32MiB") as small:
        cache = kv.cache_of(small, network, 260, block_tokens=64)
        with pytest.raises(ConfigError, match="block_tokens=16 or less"):
            network(kv.tokens(4), cache=cache)
        kv.cache_of(small, network, 260, block_tokens=16).close()


def test_pool_that_others_fill_is_said_at_the_first_forward() -> None:
    uri = "ram://small-integration?size=4325376"
    Namespace.format(uri, segment_size="256KiB", force=True)
    network = kv.model()
    with Namespace.open(uri, pool_size="4MiB") as small:
        first, second = (kv.cache_of(small, network, 600, block_tokens=16) for _ in range(2))
        network(kv.tokens(4), cache=first)
        with pytest.raises(BufferExhausted, match="pool_size of"):
            network(kv.tokens(4), cache=second)
        first.close()
        network(kv.tokens(4), cache=second)
        second.close()


def test_pool_too_small_names_the_size() -> None:
    uri = "ram://small-integration?size=4325376"
    Namespace.format(uri, segment_size="256KiB", force=True)
    network = kv.model()
    with (
        Namespace.open(uri, pool_size="2MiB") as small,
        pytest.raises(BufferExhausted, match="pool_size of") as caught,
    ):
        kv.cache_of(small, network, 1200, block_tokens=16)
    wanted = str(caught.value).split("pool_size of ")[1].split()[0]
    with Namespace.open(uri, pool_size=int(wanted)) as small:
        cache = kv.cache_of(small, network, 1200, block_tokens=16)
        network(kv.tokens(4), cache=cache)
        cache.close()


def test_inline_drive_is_refused() -> None:
    uri = "ram://small-integration?size=4325376"
    Namespace.format(uri, segment_size="256KiB", force=True)
    network = kv.model()
    with Namespace.open(uri, pool_size="32MiB", drive="inline") as small:
        cache = kv.cache_of(small, network, 260, block_tokens=16)
        with pytest.raises(ConfigError, match="reactor"):
            network(kv.tokens(4), cache=cache)


def test_double_precision_is_refused(memory: Namespace) -> None:
    network = kv.model().to(torch.float64)
    with pytest.raises(ConfigError, match="float64"):
        network(kv.tokens(4), cache=HiFCCache(memory, network.config, 400, resident=1.0))


def test_interrupted_forward_is_noticed_and_reset_mends(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100)
    cache = kv.cache_of(memory, network, 260)
    hook = network.model.layers[5].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        network(ids, cache=cache)
    hook.remove()
    with pytest.raises(InvalidRequest, match="reset"):
        network(kv.tokens(1), cache=cache)
    cache.reset()
    assert memory.stats().reservations == 0
    kv.assert_same(kv.run(network, ids, cache, 40), kv.run(network, ids, kv.dynamic(network), 40))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_full_device_is_an_error_and_reset_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    # While reservations keep all segments open the answer is Retry, which is asked again a while.
    monkeypatch.setattr(stream_buffers, "RETRY_WAIT_S", 0.5)
    uri = "ram://small-integration?size=4325376"
    Namespace.format(uri, segment_size="256KiB", force=True)
    network = kv.model()
    with Namespace.open(uri, pool_size="32MiB") as small:
        cache = kv.cache_of(small, network, 1200, pinned=1, block_tokens=16)
        with pytest.raises((NoSpace, WaitTimeout), match="larger"):
            network(kv.tokens(1100), cache=cache)
        cache.reset()
        assert not list(small.list())
        cache.close()


# ---- memory


@pytest.mark.parametrize("chunk", [None, 100])
def test_resident_memory_is_bounded_in_a_prefill(namespace: Namespace, chunk: int | None) -> None:
    network, ids = kv.model(12), kv.tokens(1500)
    cache = HiFCCache(namespace, network.config, 1520, resident=0.45, block_tokens=64)
    wanted = kv.run(network, ids, kv.dynamic(network), 20, prefill_chunk_size=chunk)
    kv.assert_same(kv.run(network, ids, cache, 20, prefill_chunk_size=chunk), wanted)
    assert cache.total_kv_bytes == 1519 * cache.plan.shape.token_bytes
    peak = namespace.stats().buffer_peak_bytes  # all that the pool ever gave out
    assert cache.plan.buffer_bytes <= peak <= cache.plan.resident_bytes
    assert cache.resident_bytes <= cache.resident_peak_bytes <= 0.45 * cache.plan.total_bytes
    assert namespace.stats().bounce_bytes == 0, "KV moves without a copy"


def test_memory_comes_back(memory: Namespace) -> None:
    network, ids = kv.model(), kv.tokens(100)
    before = memory.stats().buffer_used_bytes
    for end in ("close", "drop"):
        cache = kv.cache_of(memory, network, 260)
        kv.run(network, ids, cache, 10)
        if end == "close":
            cache.close()
            cache.close()
            with pytest.raises(InvalidRequest, match="closed"):
                network(ids, cache=cache)
        del cache
        gc.collect()
        memory.drain()
    HiFCCache(memory, network.config, 260, resident=1.0).load_prefix  # noqa: B018
    other = kv.cache_of(memory, network, 260)
    network(ids, cache=other)
    other.close()
    assert not list(memory.list())
    # The namespace keeps a few pages of its own for later.
    assert memory.stats().buffer_used_bytes - before <= 64 * 4096


# ---- counters


def test_prefetch_is_counted(memory: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    take = LayerStream._take

    def take_late(stream: LayerStream, part: int) -> Slot:
        """Attention asks once all that is read ahead is there."""
        for slot in stream._ahead:
            load = slot.load
            assert load is None or load.ticket is None or load.ticket.wait(120)
        return take(stream, part)

    monkeypatch.setattr(LayerStream, "_take", take_late)
    network, ids = kv.model(), kv.tokens(100)
    metrics = Metrics()
    cache = kv.cache_of(memory, network, 260, pinned=2, metrics=metrics)
    kv.run(network, ids, cache, 11)
    assert metrics["total_access"] == 6 * 10  # streamed layers, forwards after the prefill
    assert metrics["prefetch_hit"] == 6 * 10
    assert metrics["swap_out_bytes"] == 3 * 6 * cache.plan.share_bytes
    assert metrics["swap_in_bytes"] >= 60 * 3 * cache.plan.share_bytes
