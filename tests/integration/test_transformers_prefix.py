# SPDX-License-Identifier: Apache-2.0
"""A prefix is stored under its token ids, found by another process, and never mistaken."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_models as kv
from hifc import (
    Answer,
    ConfigError,
    CorruptionError,
    HiFC,
    HiFCError,
    InvalidRequest,
    Namespace,
    NoSpace,
)
from hifc.integrations.transformers.identity import identity_of
from hifc.stream import layers as streaming

PROMPT = kv.tokens(100)


def _continue(network: Any, cache: Any, prompt: torch.Tensor, loaded: int, new: int = 40) -> None:
    """The run from a loaded prefix is that of a reference that was computed as the stored prefix
    was, in one forward over PROMPT, and cut at the loaded length."""
    reference = kv.dynamic(network)
    if loaded:
        with torch.no_grad():
            network(PROMPT, cache=reference)
        reference.crop(loaded - PROMPT.shape[1])
    kv.assert_same(*(kv.run(network, prompt, one, new) for one in (cache, reference)))
    for one in (cache, reference):
        one.crop(-(new + 5))
    longer = kv.tokens(cache.get_seq_length() + 4, seed=5)
    kv.assert_same(*(kv.run(network, longer, one, 20) for one in (cache, reference)))


@pytest.mark.parametrize("saved", [31, 32, 33, 64, 96, 100])
def test_save_then_load(namespace: Namespace, saved: int) -> None:
    network = kv.model()
    cache = kv.cache_of(namespace, network, 260)
    kv.run(network, PROMPT, cache, 20)
    assert cache.save_prefix(PROMPT[:, :saved]) == saved
    assert cache.save_prefix(PROMPT[0, :saved].tolist()) == saved  # all of it is there
    longer = torch.cat([PROMPT, kv.tokens(30, seed=2)], 1)
    cache.close()
    for prompt, pinned, slots in (
        (PROMPT, 2, 2),
        (PROMPT[:, :saved], 1, 3),
        (PROMPT[:, : saved - 7], 0, 2),
        (longer, 3, 2),
    ):
        cache = kv.cache_of(namespace, network, 260, pinned=pinned, slots=slots)
        loaded = cache.load_prefix(prompt)
        length = prompt.shape[1]
        assert loaded == (min(saved, length - 1) if length >= saved else length // 32 * 32)
        assert cache.get_seq_length() == loaded
        _continue(network, cache, prompt, loaded)
        cache.close()
    assert all(entry.cls.name == "REUSE" for entry in namespace.list())


def test_cache_goes_on_after_saving(namespace: Namespace) -> None:
    network = kv.model()
    cache, reference = kv.cache_of(namespace, network, 260), kv.dynamic(network)
    first = [kv.run(network, PROMPT, one, 45) for one in (cache, reference)]
    ids = first[0][0][:, :-1]
    assert cache.save_prefix(ids) == ids.shape[1] == 144
    longer = torch.cat([first[0][0], kv.tokens(9, seed=1)], 1)
    kv.assert_same(*(kv.run(network, longer, one, 30) for one in (cache, reference)))


def test_prefix_grows_from_a_loaded_one(memory: Namespace) -> None:
    network = kv.model()
    cache = kv.cache_of(memory, network, 260)
    kv.run(network, PROMPT, cache, 5)
    cache.save_prefix(PROMPT)
    cache.close()
    cache = kv.cache_of(memory, network, 260)
    assert cache.load_prefix(PROMPT) == 99
    sequence = kv.run(network, PROMPT, cache, 60)[0][:, :-1]
    assert cache.save_prefix(sequence) == 159
    cache.close()
    cache = kv.cache_of(memory, network, 260, pinned=1)
    assert cache.load_prefix(sequence) == 158


def test_other_identity_never_matches(memory: Namespace) -> None:
    network = kv.model()
    cache = kv.cache_of(memory, network, 260)
    kv.run(network, PROMPT, cache, 5)
    cache.save_prefix(PROMPT)
    cache.close()
    other = kv.model(seed=1)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5000.0}
    half = kv.model(dtype=torch.bfloat16)
    for one, options in (
        (network, {"model_id": "another"}),
        (network, {"lora": "adapter"}),
        (network, {"salt": b"tenant"}),
        (network, {"block_tokens": 48}),
        (other, {}),
    ):
        cache = kv.cache_of(memory, one, 260, **options)
        assert cache.load_prefix(PROMPT) == 0
        cache.close()
    assert kv.cache_of(memory, half, 460).load_prefix(PROMPT) == 0


def test_weights_without_a_name_are_refused(memory: Namespace, tmp_path: Path) -> None:
    network = kv.model()
    cache = kv.cache_of(memory, network, 260, model_id=None)
    network(PROMPT, cache=cache)
    with pytest.raises(ConfigError, match="model_id"):
        cache.save_prefix(PROMPT)
    network.save_pretrained(tmp_path / "one")
    kv.model(seed=1).save_pretrained(tmp_path / "two")
    names = set()
    for folder in ("one", "two", "one"):
        config = kv.LlamaConfig.from_pretrained(tmp_path / folder)
        config._name_or_path = str(tmp_path / folder)
        names.add(identity_of(None, config))
    assert len(names) == 2


def test_bad_requests(memory: Namespace) -> None:
    network = kv.model()
    cache = kv.cache_of(memory, network, 260, rows=2)
    network(kv.tokens(40, rows=2), cache=cache)
    with pytest.raises(InvalidRequest, match="one row"):
        cache.save_prefix(PROMPT)
    cache.close()
    cache = kv.cache_of(memory, network, 260)
    network(PROMPT, cache=cache)
    with pytest.raises(InvalidRequest, match="holds 100"):
        cache.save_prefix(kv.tokens(101))
    with pytest.raises(InvalidRequest, match="reset"):
        cache.load_prefix(PROMPT)
    with pytest.raises(InvalidRequest, match="shape"):
        cache.save_prefix([[1, 2], [3, 4]])
    with pytest.raises(InvalidRequest, match="one token"):
        cache.save_prefix([])


def test_loaded_prefix_leaves_one_token(memory: Namespace) -> None:
    """A cache as long as the prompt makes generate run the whole prompt again, in silence."""
    network = kv.model()
    cache = kv.cache_of(memory, network, 260)
    kv.run(network, PROMPT, cache, 30)
    cache.save_prefix(PROMPT)
    cache.close()
    cache = kv.cache_of(memory, network, 260)
    assert cache.load_prefix(PROMPT[:, :1]) == 0
    assert cache.load_prefix(PROMPT[:, :64]) == 63
    seen = []
    hook = network.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    kv.run(network, PROMPT[:, :64], cache, 5)
    hook.remove()
    assert seen == [1] * 5


def test_forgotten_prefix_is_gone(namespace: Namespace) -> None:
    network = kv.model()
    cache = kv.cache_of(namespace, network, 260)
    network(PROMPT, cache=cache)
    cache.save_prefix(PROMPT)
    cache.save_prefix(PROMPT[:, :40])
    cache.reset()
    assert len(list(namespace.list())) == 5
    cache.forget_prefix(PROMPT)
    cache.forget_prefix(PROMPT)
    (left,) = namespace.list()  # the eight tokens after the first block of the shorter one
    assert cache.load_prefix(PROMPT) == 0
    cache.forget_prefix(PROMPT[:, :40])
    assert left.key not in {entry.key for entry in namespace.list()}


def test_a_prefix_that_could_not_be_forgotten_is_told(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = kv.model()
    cache = kv.cache_of(namespace, network, 260)
    network(PROMPT, cache=cache)
    cache.save_prefix(PROMPT)
    submit = namespace.submit

    def full(requests: Any) -> Any:
        ticket = submit(requests)
        ticket.wait()
        requests["status"][1:] = Answer.NO_SPACE
        return ticket

    with monkeypatch.context() as patch:
        patch.setattr(namespace, "submit", full)
        with pytest.raises(NoSpace, match="3 of 4 blocks are still there"):
            cache.forget_prefix(PROMPT)
    cache.close()


def test_prefixes_are_logged(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    network = kv.model()
    cache = kv.cache_of(namespace, network, 260)
    caplog.set_level(logging.INFO, "hifc")
    assert cache.load_prefix(PROMPT) == 0
    network(PROMPT, cache=cache)
    cache.save_prefix(PROMPT)
    cache.reset()
    caplog.clear()
    assert cache.load_prefix(PROMPT) == 99
    uri = namespace.uri
    messages = [record.message for record in caplog.records]
    assert messages[0].startswith(f"prefix on {uri}: load 99 stored of 100 tokens (unmeasured; ")
    assert messages[1:] == [f"prefix loaded from {uri}: 99 of 100 tokens"]
    caplog.clear()
    kv.run(network, PROMPT, cache, 5)
    assert not caplog.records, "nothing is logged for a token"
    cache.save_prefix(PROMPT)
    cache.reset()
    cache.load_prefix(kv.tokens(50, seed=9))
    assert [record.message for record in caplog.records] == [
        f"prefix saved on {uri}: 100 of 100 tokens",
        f"prefix of 50 tokens: none is stored on {uri}",
    ]
    cache.close()


def test_prompts_are_kept_where_the_configuration_says_so() -> None:
    network = kv.model()
    config = {
        "device": "ram://keeps?size=64MiB",
        "format": "always",
        "block_tokens": 32,
        "resident_ratio": 0.65,
        "load_or_recompute": "load",
    }
    other = torch.cat([PROMPT[:, :50], kv.tokens(60, seed=4)], 1)
    with HiFC(config | {"save_prefix": True}) as engine:

        def turn(prompt: torch.Tensor, new: int, how: str) -> int:
            cache = engine.cache(network.config, 460, model_id="random")
            loaded = cache.load_prefix(prompt)
            kv.run(network, prompt, cache, new)
            if how == "cropped":
                cache.crop(-(new + 5))
            if how == "reset":
                cache.reset()
                cache.load_prefix(kv.tokens(20, seed=9))  # of which nothing is computed
            cache.close()
            return loaded

        assert turn(PROMPT, 3, "closed") == 0
        assert turn(PROMPT, 3, "closed") == 99
        assert turn(other, 3, "cropped") == 32, "the first block is the same"
        assert turn(other, 3, "reset") == 32, "what was cropped into was not stored"
        assert turn(other, 3, "closed") == 109
        stored = len(list(engine.namespace.list()))
    with HiFC(config | {"format": "never"}) as engine:
        cache = engine.cache(network.config, 460, model_id="random")
        assert cache.load_prefix(torch.cat([PROMPT, PROMPT], 1)) == 100
        network(torch.cat([PROMPT, PROMPT], 1)[:, 100:], cache=cache)
        cache.close()
        assert len(list(engine.namespace.list())) == stored, "nothing is kept by default"


def test_beams_do_not_take_a_loaded_prefix(memory: Namespace) -> None:
    network = kv.model()
    cache = kv.cache_of(memory, network, 260)
    kv.run(network, PROMPT, cache, 2)
    cache.save_prefix(PROMPT)
    cache.close()
    cache = kv.cache_of(memory, network, 260)
    cache.load_prefix(PROMPT)
    with pytest.raises(InvalidRequest, match="one row, no beams"):
        kv.run(network, PROMPT, cache, 4, num_beams=2)


def _flip(path: Path, needle: bytes) -> None:
    """Damages every place of a file that holds needle: the stored prefix, and blocks deleted."""
    data = path.read_bytes()
    at = data.index(needle)
    with path.open("r+b") as file:
        while at >= 0:
            file.seek(at)
            file.write(bytes([data[at] ^ 1]))
            at = data.find(needle, at + 1)


@pytest.mark.parametrize(("block", "loaded"), [(0, 0), (1, 32), (2, 64), (3, 96)])
def test_damaged_block_shortens_the_prefix(tmp_path: Path, block: int, loaded: int) -> None:
    network = kv.model()
    path = tmp_path / "kv"
    uri = f"file://{path}?size=64MiB"
    Namespace.format(uri)
    reference = kv.dynamic(network)
    with torch.no_grad():
        network(PROMPT, cache=reference)
    with Namespace.open(uri, pool_size="32MiB") as namespace:
        cache = kv.cache_of(namespace, network, 260, pinned=3)
        network(PROMPT, cache=cache)
        cache.save_prefix(PROMPT)
        pinned = cache.plan.pinned[1]
        cache.close()
    needle = reference.layers[pinned].keys[0, 1, block * 32 : block * 32 + 4]
    _flip(path, needle.detach().numpy().tobytes())
    with Namespace.open(uri, pool_size="32MiB") as namespace:
        cache = kv.cache_of(namespace, network, 260, pinned=3)
        assert cache.load_prefix(PROMPT) == loaded
        _continue(network, cache, PROMPT, loaded)
        cache.close()


def test_damage_in_a_streamed_layer_is_an_error(tmp_path: Path) -> None:
    network = kv.model()
    path = tmp_path / "kv"
    uri = f"file://{path}?size=64MiB"
    Namespace.format(uri)
    reference = kv.dynamic(network)
    with torch.no_grad():
        network(PROMPT, cache=reference)
    with Namespace.open(uri, pool_size="32MiB") as namespace:
        cache = kv.cache_of(namespace, network, 260, pinned=1)
        network(PROMPT, cache=cache)
        cache.save_prefix(PROMPT)
        streamed = cache.plan.streamed[-1]
        cache.close()
    needle = reference.layers[streamed].values[0, 1, 40:44]
    _flip(path, needle.detach().numpy().tobytes())
    with Namespace.open(uri, pool_size="32MiB") as namespace:
        cache = kv.cache_of(namespace, network, 260, pinned=1)
        assert cache.load_prefix(PROMPT) == 99
        with pytest.raises(Exception, match="reset"):
            kv.run(network, PROMPT, cache, 3)
        with pytest.raises(InvalidRequest, match="reset"):
            kv.run(network, PROMPT, cache, 3)
        cache.reset()
        assert cache.load_prefix(PROMPT) == 32, "the damaged block is quarantined"
        _continue(network, cache, PROMPT, 32)
        cache.close()


def test_damage_of_a_swapped_block_is_an_error(tmp_path: Path) -> None:
    network = kv.model()
    path = tmp_path / "kv"
    uri = f"file://{path}?size=64MiB"
    Namespace.format(uri, segment_size="2MiB")
    reference = kv.dynamic(network)
    with Namespace.open(uri, pool_size="32MiB") as namespace:
        cache = kv.cache_of(namespace, network, 260, pinned=1)
        for one in (cache, reference):
            kv.run(network, PROMPT, one, 5)
        layer = cache.plan.streamed[3]
        needle = reference.layers[layer].keys[0, 0, 40:44]
        _flip(path, needle.detach().numpy().tobytes())
        with pytest.raises(CorruptionError):
            kv.run(network, kv.tokens(110), cache, 3)
        with pytest.raises(InvalidRequest, match="reset"):
            network(kv.tokens(1), cache=cache)
        cache.reset()
        kv.assert_same(
            kv.run(network, PROMPT, cache, 5), kv.run(network, PROMPT, kv.dynamic(network), 5)
        )


def test_lease_is_renewed_and_a_lost_entry_is_an_error(
    memory: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = kv.model()
    cache = kv.cache_of(memory, network, 260)
    kv.run(network, PROMPT, cache, 2)
    cache.save_prefix(PROMPT)
    cache.close()
    monkeypatch.setattr(streaming, "LEASE_RENEW_S", 0.0)
    cache = kv.cache_of(memory, network, 260)
    assert cache.load_prefix(PROMPT) == 99
    kv.run(network, PROMPT, cache, 10)
    assert memory.stats().leases == 1
    for entry in memory.list():
        if entry.cls.name == "REUSE":
            memory.delete(entry.key)
    with pytest.raises(HiFCError, match="reset"):
        kv.run(network, kv.tokens(112), cache, 5)
    cache.reset()
    assert memory.stats().leases == 0
    assert cache.load_prefix(PROMPT) == 0


CHILD = """
import sys
import torch
import kv_models as kv
from hifc import Namespace
uri, what = sys.argv[1:]
network, prompt = kv.model(), kv.tokens(100)
with Namespace.open(uri, pool_size="32MiB") as namespace:
    cache = kv.cache_of(namespace, network, 260)
    if what == "save":
        kv.run(network, prompt, cache, 20)
        print(cache.save_prefix(prompt))
    else:
        loaded = cache.load_prefix(prompt)
        reference = kv.dynamic(network)
        with torch.no_grad():
            network(prompt, cache=reference)
        reference.crop(loaded - 100)
        kv.assert_same(*(kv.run(network, prompt, one, 40) for one in (cache, reference)))
        print(loaded)
    cache.close()
"""


def test_prefix_survives_a_restart_of_the_process(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/kv?size=64MiB"
    Namespace.format(uri)
    paths = os.pathsep.join([str(Path(kv.__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    for what, wanted in (("save", "100"), ("load", "99"), ("load", "99")):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, uri, what],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-2000:]
        assert child.stdout.split()[-1] == wanted
