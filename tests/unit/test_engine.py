# SPDX-License-Identifier: Apache-2.0
"""HiFC: blocks stay within the memory budget, leave together, and come back exact."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small_engine import count_loaded, key, settings

from hifc import (
    BufferExhausted,
    ClosedError,
    ConfigError,
    DeviceBusy,
    FormatError,
    HiFC,
    HiFCPolicy,
    InvalidRequest,
    KVBlock,
    NoSpace,
)
from hifc_admin.engine import owner

BLOCK = (2, 3, 64, 40)  # 61440 bytes of float32 and a trailer: 16 pages
HELD = 64 << 10


def tensor(number: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(number).standard_normal(BLOCK).astype(dtype)


@pytest.fixture
def hifc() -> Iterator[HiFC]:
    with HiFC(settings()) as opened:
        yield opened


def test_more_blocks_than_memory_come_back_exact(hifc: HiFC) -> None:
    for i in range(100):
        hifc.store(key(i), tensor(i), sequence=i % 3, depth=i // 3)
        assert hifc.blocks.resident_bytes <= 1 << 20
    assert hifc.metrics["swap_out_blocks"] >= 80
    for i in range(100):
        found = hifc.load(key(i))
        assert found.dtype == np.float32
        assert found.shape == BLOCK
        assert found.tobytes() == tensor(i).tobytes()
        assert hifc.blocks.resident_bytes <= 1 << 20
    assert hifc.metrics["total_access"] == 100
    assert hifc.metrics["hit"] + hifc.metrics["swap_in_blocks"] == 100
    assert hifc.metrics["namespace_bounce_bytes"] == 0
    assert hifc.load(key(1000)) is None
    assert hifc.metrics["miss"] == 1


def test_blocks_leave_in_batches_with_one_submission(hifc: HiFC) -> None:
    for i in range(64):
        hifc.store(key(i), tensor(i))
    assert hifc.metrics["swap_out_blocks"] / hifc.metrics["swap_batches"] > 4


def test_watermark_starts_offload_on_its_own(hifc: HiFC) -> None:
    for i in range(14):  # 14 of 16 blocks: less than 15 % is free
        hifc.store(key(i), tensor(i))
    assert hifc.metrics["swap_out_blocks"] > 0
    assert hifc.metrics["policy_overruled"] == 0


def test_blocks_on_flash_already_leave_without_a_write(hifc: HiFC) -> None:
    for i in range(32):
        hifc.store(key(i), tensor(i))
    written = hifc.namespace.stats().put_count
    for i in range(32):
        hifc.load(key(i))
    for i in range(32):
        hifc.load(key(i))
    assert hifc.namespace.stats().put_count <= written + 16
    assert hifc.metrics["dropped_blocks"] > 16


def test_load_gives_memory_of_its_own(hifc: HiFC) -> None:
    original = tensor(1)
    hifc.store(key(1), original)
    original[:] = 0
    found = hifc.load(key(1))
    found[:] = 7
    assert hifc.load(key(1)).tobytes() == tensor(1).tobytes()


def test_store_replaces(hifc: HiFC) -> None:
    for i in range(40):
        hifc.store(key(i), tensor(i))
    for i in range(40):
        hifc.store(key(i), tensor(i + 1000))
    for i in range(40):
        assert hifc.load(key(i)).tobytes() == tensor(i + 1000).tobytes()
    assert len(hifc.blocks) == 40


def test_delete(hifc: HiFC) -> None:
    for i in range(40):
        hifc.store(key(i), tensor(i))
    for i in range(40):
        assert key(i) in hifc
        assert hifc.delete(key(i)) is True
        assert key(i) not in hifc
        assert hifc.load(key(i)) is None
        assert hifc.delete(key(i)) is False
    assert hifc.blocks.resident_bytes == 0
    assert hifc.namespace.stats().entries == 0


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("compressed", [False, True])
def test_torch_types(name: str, compressed: bool) -> None:
    torch = pytest.importorskip("torch")
    with HiFC(settings(enable_compression=compressed)) as hifc:
        blocks = [torch.randn(BLOCK).to(getattr(torch, name)) for _ in range(40)]
        blocks[7] = torch.zeros(BLOCK, dtype=getattr(torch, name))
        for i, block in enumerate(blocks):
            hifc.store(key(i), block)
        hifc.offload()
        assert hifc.blocks.resident_bytes == 0
        for i, block in enumerate(blocks):
            found = hifc.load(key(i))
            assert found.dtype == block.dtype
            assert torch.equal(found, block)
        if compressed:
            assert hifc.metrics["stored_bytes"] < hifc.metrics["raw_bytes"] + 40 * 128


def test_users_own_policy() -> None:
    class KeepEven(HiFCPolicy):
        def should_swap_out(self, kv_block: KVBlock) -> bool:
            return kv_block.depth % 2 == 1

    with HiFC(settings(), policy=KeepEven()) as hifc:
        for i in range(20):
            hifc.store(key(i), tensor(i), depth=i)
        resident = {block.depth for block in hifc.blocks.residents()}
        assert {i for i in range(20) if i % 2 == 0} <= resident
        assert hifc.metrics["policy_overruled"] == 0


def test_a_policy_that_keeps_all_is_overruled_by_the_budget() -> None:
    class KeepAll(HiFCPolicy):
        def should_swap_out(self, kv_block: KVBlock) -> bool:
            return False

    with HiFC(settings(), policy=KeepAll()) as hifc:
        for i in range(40):
            hifc.store(key(i), tensor(i))
            assert hifc.blocks.resident_bytes <= 1 << 20
        assert hifc.metrics["policy_overruled"] > 0
        for i in range(40):
            assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()


def test_reuse_survives_a_restart() -> None:
    config = settings(memory_budget="16MiB")
    with HiFC(config) as hifc:
        for i in range(20):
            hifc.store(key(i), tensor(i), cls="reuse")
        hifc.store(key(100), tensor(100))
    with HiFC(config) as hifc:
        for i in range(20):
            assert key(i) in hifc
            assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()
        assert hifc.load(key(100)) is None  # swap ends with its process


def test_prefetch_hits_are_counted(hifc: HiFC) -> None:
    for i in range(40):
        hifc.store(key(i), tensor(i))
    hifc.offload()
    assert hifc.prefetch([key(i) for i in range(6)]) == 6
    assert hifc.prefetch([key(i) for i in range(6)]) == 0  # under way already
    for i in range(8):
        assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()
    assert hifc.metrics["prefetch_issued"] == 6
    assert hifc.metrics["prefetch_hit"] == 6
    assert hifc.metrics["prefetch_hit"] / hifc.metrics["total_access"] == 0.75
    for i in range(8):
        hifc.load(key(i))
    assert hifc.metrics["prefetch_hit"] == 6  # a hit is counted once


def test_prefetch_stays_within_the_budget(hifc: HiFC) -> None:
    for i in range(60):
        hifc.store(key(i), tensor(i))
    hifc.offload()
    started = hifc.prefetch([key(i) for i in range(60)])
    assert 0 < started <= 16
    for i in range(60, 80):
        hifc.store(key(i), tensor(i))
        assert hifc.blocks.resident_bytes + hifc._pending_bytes <= 1 << 20
    for i in range(80):
        assert hifc.load(key(i)).tobytes() == tensor(i).tobytes()


def test_attention_drives_prefetch(hifc: HiFC) -> None:
    keys = [key(i) for i in range(30)]
    for i in range(30):
        hifc.store(keys[i], tensor(i))
    hifc.offload()
    mass = np.zeros((4, 30), dtype=np.float32)
    mass[:, 11] = 0.6
    mass[:, 23] = 0.3
    assert hifc.observe_attention(mass, keys) == 2
    hifc.load(keys[11])
    hifc.load(keys[23])
    assert hifc.metrics["prefetch_hit"] == 2


def test_full_device_keeps_everything() -> None:
    with HiFC(settings(device="ram://engine-full?size=6MiB", segment_size="256KiB")) as hifc:
        stored = 0
        with pytest.raises(NoSpace, match="is full"):
            for i in range(1000):
                hifc.store(key(i), tensor(i))
                stored += 1
        assert stored > 20
        for i in range(stored - 16, stored):
            assert key(i) in hifc
        hifc.delete(key(0))
        assert count_loaded(hifc, range(1, stored), tensor) > 10


def test_threads(hifc: HiFC) -> None:
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(40):
                number = thread * 1000 + i
                hifc.store(key(number), tensor(number))
                back = thread * 1000 + i // 2
                assert hifc.load(key(back)).tobytes() == tensor(back).tobytes()
        except BaseException as error:  # noqa: BLE001  (raised in the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures


def test_bad_arguments(hifc: HiFC) -> None:
    with pytest.raises(InvalidRequest, match="16 bytes"):
        hifc.store(b"short", tensor(1))
    with pytest.raises(InvalidRequest, match="array of object cannot be stored"):
        hifc.store(key(1), np.array([None]))
    with pytest.raises(InvalidRequest, match="swap"):
        hifc.store(key(1), tensor(1), cls="swop")
    with pytest.raises(BufferExhausted, match="memory_budget"):
        hifc.store(key(1), np.zeros(1 << 20, dtype=np.float32))
    assert len(hifc.blocks) == 0


def test_dtypes_come_back_equal(hifc: HiFC) -> None:
    """A big-endian array came back as other numbers."""
    for dtype in (">f4", ">i2", "<f8", ">c16", "?"):
        array = np.arange(5).astype(dtype)
        hifc.store(key(1), array)
        assert np.array_equal(hifc.load(key(1)), array)
        hifc.offload()
        assert np.array_equal(hifc.load(key(1)), array)


def test_foreign_values_are_refused_not_misread(hifc: HiFC) -> None:
    hifc.namespace.put(key(1), b"no tensor" * 100)
    with pytest.raises(FormatError, match=r"Namespace\.get"):
        hifc.load(key(1))


def test_configuration_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "hifc.yaml"
    path.write_text(yaml.safe_dump(settings()))
    with HiFC(path) as hifc:
        hifc.store(key(1), tensor(1))
        assert hifc.config.memory_budget == 1 << 20


def test_opening_without_a_device_or_a_namespace() -> None:
    with pytest.raises(ConfigError, match="device"):
        HiFC({})
    with pytest.raises(FormatError):
        HiFC(settings(format="never", device="ram://engine-empty?size=64MiB"))


def test_a_pool_too_small_for_the_budgets_is_raised_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with HiFC(settings(pool_size="2MiB")) as hifc:
        assert hifc.pool_size_bytes >= 5 << 20
    (record,) = caplog.records
    assert record.name == "hifc"
    assert "pool_size 2MiB is raised to 5MiB" in record.getMessage()
    caplog.clear()
    for size in (0, "8MiB"):
        with HiFC(settings(pool_size=size)) as hifc:
            assert hifc.pool_size_bytes >= (8 << 20 if size else 5 << 20)
    assert not caplog.records


def test_close_is_final_and_idempotent() -> None:
    hifc = HiFC(settings())
    hifc.store(key(1), tensor(1))
    hifc.close()
    hifc.close()
    with pytest.raises(ClosedError):
        hifc.store(key(2), tensor(2))
    assert "hifc_store_count_total 1" in hifc.metrics.prometheus()


def test_counters_are_shown_on_the_owner_socket(tmp_path: Path) -> None:
    device = f"file://{tmp_path}/kv?size=16MiB"
    with HiFC({"device": device, "format": "always", "segment_size": "256KiB"}) as engine:
        engine.store(b"k" * 16, np.ones(100, dtype=np.float32))
        engine.load(b"k" * 16)
        before = engine.publish({})
        assert (before["hit"], before["total_access"]) == (1, 1)
        path = owner.find(device)
        assert path is not None
        assert owner.ask(path, "stats")["published"]["hit"] == 1
        assert engine.publish(before) == before


def test_an_engine_that_nobody_keeps_goes(tmp_path: Path) -> None:
    device = f"file://{tmp_path}/kv?size=16MiB"
    config = {"device": device, "format": "always", "segment_size": "256KiB"}
    gone = weakref.ref(HiFC(config))
    end = time.monotonic() + 120
    while gone() is not None:  # its own thread may be publishing just now, and end it
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.001)
    while True:
        try:
            HiFC(config).close()
            break
        except DeviceBusy:
            assert time.monotonic() < end


def test_a_missing_file_is_made_and_formatted_if_missing(tmp_path: Path) -> None:
    device = f"file://{tmp_path}/new%20one.hifc?size=64MiB"
    for stored in (0, 1):
        with HiFC(settings(device=device)) as hifc:
            assert len(list(hifc.namespace.list())) == stored
            hifc.store(key(1), tensor(1), cls="reuse")
            hifc.sync()


def test_blocks_of_a_segment_each_wait_for_a_slow_device(tmp_path: Path) -> None:
    # Every block fills a segment, so seals and their flushes hold the next ones up.
    device = f"file://{tmp_path}/slow.hifc?size=128MiB"
    changes = {"segment_size": "2MiB", "memory_budget": "4MiB", "policy": "lru"}
    with HiFC(settings(device=device, **changes)) as hifc:
        blocks = {key(i): np.full((1 << 20) // 4 + 1, i, dtype=np.float32) for i in range(24)}
        for name, block in blocks.items():
            hifc.store(name, block)
        for name, block in blocks.items():
            loaded = hifc.load(name)
            assert loaded is not None
            assert np.array_equal(np.asarray(loaded), block)
