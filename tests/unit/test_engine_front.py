# SPDX-License-Identifier: Apache-2.0
"""What a script meets first: keywords, policies, what is printed and what is logged."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_engine import key, settings

import hifc
from hifc import ConfigError, HiFC, HiFCPolicy, LRUPolicy
from hifc.config import Config
from hifc.integrations.transformers.cache import HiFCCache
from hifc.stream.plan import RESIDENT_RATIO
from hifc.stream.recompute import Decision

# ---- keywords


def test_settings_as_keywords() -> None:
    with HiFC(**settings(memory_budget="2MiB")) as engine:
        assert engine.config.memory_budget == 2 << 20


def test_keywords_take_the_place_of_settings(tmp_path: Path) -> None:
    base = settings(memory_budget="2MiB", policy="lfu")
    file = tmp_path / "hifc.yaml"
    file.write_text(Config.load(base).to_yaml())
    for source in (base, Config.load(base), file, str(file)):
        with HiFC(source, memory_budget="3MiB", **{"lambda": 0.5}) as engine:
            expected = Config.load({**base, "memory_budget": "3MiB", "lambda": 0.5})
            assert engine.config == expected
    assert Config.load(base, {}) == Config.load(base)


def test_an_unknown_keyword() -> None:
    with pytest.raises(ConfigError, match="'memory_budgt'; did you mean memory_budget"):
        HiFC(**settings(), memory_budgt="1MiB")
    with pytest.raises(ConfigError, match="'formt'; did you mean format"):
        HiFC(settings(), formt="always")


def test_no_device() -> None:
    with pytest.raises(ConfigError, match="device: missing"):
        HiFC()


def test_a_device_is_not_a_configuration() -> None:
    with pytest.raises(ConfigError, match=r"give device='ram://kv\?size=64MiB'"):
        HiFC("ram://kv?size=64MiB")


@pytest.mark.parametrize(
    "line", ["salt: 83", "label: 83", "salt: 0x53", "device: 7", "label: 2026-12-01", "salt: 1.5"]
)
def test_yaml_makes_numbers_of_what_has_no_quotes(line: str) -> None:
    with pytest.raises(ConfigError, match=r'not a text: write it in quotes.*: "'):
        Config.from_yaml(line)
    name, _, value = line.partition(": ")
    if name == "salt" and value == "83":
        assert Config.from_yaml(f'{name}: "{value}"').salt == "83"


def test_every_default_can_be_written_out() -> None:
    """What is written is what would have been without it."""
    assert Config.from_mapping(Config().to_mapping()) == Config()
    assert Config().resident_ratio == RESIDENT_RATIO
    assert HiFCCache.__init__.__kwdefaults__["resident"] == RESIDENT_RATIO


@pytest.mark.parametrize(("written", "found"), [(None, None), (0, None), (256, 256), (64, 64)])
def test_block_tokens_are_what_was_written(
    written: int | None, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 written was taken for the default, which may be less."""
    given: dict[str, Any] = {}

    def cache(_namespace: Any, _config: Any, _max_tokens: int, **options: Any) -> None:
        given.update(options)

    class Model:
        def get_text_config(self) -> Any:
            return self

        def to_dict(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("hifc.integrations.transformers.cache.HiFCCache", cache)
    changes = {} if written is None else {"block_tokens": written}
    with HiFC(settings(**changes)) as engine:
        engine.cache(Model(), 100)
    assert given.get("block_tokens") == found


# ---- policies


def test_a_policy_by_name_and_by_instance() -> None:
    with HiFC(settings(policy="lfu"), policy="lru") as engine:
        assert type(engine.policy) is LRUPolicy
        assert engine.config.policy == "lru"
    own = LRUPolicy()
    with HiFC(settings(policy="lfu"), policy=own) as engine:
        assert engine.policy is own


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (LRUPolicy, r"LRUPolicy is a class; give an instance of it, LRUPolicy\(\)"),
        (HiFCPolicy, r"HiFCPolicy\(\)"),
        ("lro", "none of default"),
        (7, "int is not a HiFCPolicy: derive it from"),
    ],
)
def test_what_is_no_policy(policy: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HiFC(settings(), policy=policy)


# ---- what is printed


def test_what_is_printed() -> None:
    with HiFC(settings(policy="lru")) as engine:
        assert str(engine.metrics)
        engine.store(key(1), np.zeros(1000, np.float32))
        engine.load(key(1))
        shown = repr(engine)
        assert engine.config.device in shown
        assert "1 blocks, 1 of them in memory (8 KiB of 1 MiB), policy <LRUPolicy lru>" in shown
        assert "total_access 1" in repr(engine.metrics)
        lines = str(engine.metrics).splitlines()
        (line,) = [line for line in lines if line.startswith("total_access ")]
        assert line.split()[1] == "1"
        assert line.endswith("Loads of blocks")
        lease = engine.namespace.lease([key(1)])
        assert repr(lease) == "<Lease of 0 of 1 keys, held>"
        lease.release()
        with engine.namespace.reserve(key(2), 4096) as reservation:
            assert repr(reservation) == f"<Reservation of key {key(2).hex()}, 4096 bytes, open>"
        assert repr(reservation).endswith("over, OK>")
    assert repr(engine).endswith("closed>")
    assert repr(lease).endswith("over>")


def test_a_closed_engine_says_what_to_do() -> None:
    engine = HiFC(settings())
    engine.close()
    with pytest.raises(hifc.ClosedError, match=r"closed: make a new hifc\.HiFC"):
        engine.load(key(1))
    namespace = hifc.Namespace.open(engine.config.device)
    namespace.close()
    with pytest.raises(hifc.ClosedError, match=r"open it again with Namespace\.open"):
        namespace.get(key(1))


# ---- metrics


def test_what_is_not_known_is_left_out() -> None:
    with HiFC(settings()) as engine:
        assert math.isnan(engine.metrics["break_even_tokens"])
        assert "break_even_tokens" not in engine.metrics.prometheus()
        assert "break_even_tokens" not in engine.publish({})
        assert "nan" not in engine.metrics.prometheus().lower()


# ---- what is logged


def test_opening_and_closing_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = settings()
    with HiFC(config) as engine:
        engine.store(key(1), np.zeros(1000, np.float32), cls="reuse")
    caplog.set_level(logging.INFO, "hifc")
    with HiFC(config, policy=LRUPolicy()) as engine:
        caplog.clear()
        for _ in range(3):
            assert engine.load(key(1)) is not None
            engine.store(key(2), np.zeros(1000, np.float32))
            engine.offload()
        assert not caplog.records, "nothing is logged for a block"
    assert [record.message.partition(" in ")[0] for record in caplog.records] == [
        f"closed {config['device']}"
    ]
    caplog.clear()
    with HiFC(config | {"policy": "lfu"}, policy=LRUPolicy()):
        pass
    messages = [record.message for record in caplog.records]
    assert messages[0] == "policy <LRUPolicy lru> is used, not lfu of the configuration"
    assert messages[1].startswith(f"opened {config['device']} in ")
    assert ": 1 entries recovered in " in messages[1]
    assert {record.name for record in caplog.records} == {"hifc"}


def test_a_decision_in_words() -> None:
    decision = Decision(True, "measured", 90, 100, 0.25, 3.0)
    assert str(decision) == (
        "load 90 stored of 100 tokens (measured; loading 0.250 s, computing 3.000 s)"
    )
    decision = Decision(False, "forced", 90, 100, None, None)
    assert str(decision) == (
        "compute 90 stored of 100 tokens (forced; loading not measured, computing not measured)"
    )
