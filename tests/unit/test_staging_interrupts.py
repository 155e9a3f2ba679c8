# SPDX-License-Identifier: Apache-2.0
"""An exception of a signal handler at each place of staging: no memory of a device is lost, or
given back while a device knows it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interrupts
import pytest
from conftest import Opener
from fake_bar import FakeBar
from interrupts import each_place, unraisable_kept

import hifc
from hifc import Namespace
from hifc.errors import HiFCError
from hifc.staging import staging

FILES = tuple(str(path) for path in Path(hifc.__file__).parent.rglob("*.py"))


@pytest.fixture
def bar(tmp_path: Path) -> Iterator[FakeBar]:
    gc.collect()
    gc.freeze()
    with unraisable_kept():
        yield FakeBar(tmp_path / "devices")
    gc.unfreeze()


def _open(ram: Opener, bar: FakeBar) -> Namespace:
    return Namespace.open(
        ram.uri, pool_size="1MiB", staging="gpu", staging_size="2MiB", bar=bar.provider()
    )


def _check_whole(ram: Opener, bar: FakeBar) -> None:
    """The device can be opened and all of the BAR be had."""
    gc.collect()
    assert not bar.enabled
    with _open(ram, bar) as ns:
        assert ns.staging.buffer(2 << 20).size == 2 << 20
        assert bar.enabled
    gc.collect()
    assert not bar.enabled


def test_attaching_memory_of_a_device(
    ram: Opener, bar: FakeBar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach() -> None:
        _open(ram, bar).close()

    # Not in what maps the memory of a device, and unmaps it in a finalizer: that is not safe at
    # every instruction yet. A mapping that is lost there stays until the process ends.
    monkeypatch.setattr(interrupts, "LIBRARY", ())
    only = tuple(name for name in FILES if not name.endswith(("/bar.py", "/libhifc.py")))
    assert each_place(attach, lambda _where: _check_whole(ram, bar), only=only) > 100


def test_a_buffer_is_had_or_its_room_is_free(ram: Opener, bar: FakeBar) -> None:
    with _open(ram, bar) as ns:
        kept: list[Any] = []

        def take() -> None:
            kept.append(ns.staging.buffer(1 << 20))

        def check(_where: str) -> None:
            kept.clear()
            gc.collect()
            halves = [ns.staging.buffer(1 << 20) for _ in range(2)]
            halves[0][:] = 1
            halves[1][:] = 2
            assert (halves[0] == 1).all()

        assert each_place(take, check) > 8
        kept.clear()
    gc.collect()
    assert not bar.enabled


def test_closing_while_an_array_lives(ram: Opener, bar: FakeBar) -> None:
    opened: list[Any] = []

    def prepare() -> None:
        opened[:] = [_open(ram, bar)]
        opened.append(opened[0].staging.buffer(4096))

    def check(_where: str) -> None:
        ns, array = opened
        ns.close()
        assert bar.enabled, "the array lives"
        array[:] = 7
        opened.clear()
        del ns, array
        _check_whole(ram, bar)
        prepare()

    def close() -> None:
        opened[0].close()

    prepare()
    assert each_place(close, check) >= 1
    opened[0].close()


class _Gpu:
    """Counts what is registered, and contexts."""

    def __init__(self, refuses: bool = False) -> None:
        self.registered = 0
        self.contexts = 1
        self.refuses = refuses

    def register(self, _address: int, _size_bytes: int) -> int:
        if self.refuses:
            raise HiFCError("it refuses")
        self.registered += 1
        return 4096

    def unregister(self, _address: int) -> None:
        if not self.registered:
            raise HiFCError("it is not registered")
        self.registered -= 1

    def close(self) -> None:
        self.contexts -= 1


@pytest.mark.parametrize("refuses", [False, True])
def test_pinning_the_pool(bar: FakeBar, refuses: bool) -> None:
    handle: Any = None
    gpu: Any = None

    def pin() -> None:
        nonlocal handle, gpu
        gpu = _Gpu(refuses)
        handle = SimpleNamespace(pool_base=0, pool_size_bytes=4096, before_close=[])
        with contextlib.suppress(HiFCError):
            staging.PinnedStaging(handle, "asked for", gpu)

    def check(where: str) -> None:
        # Nothing was begun before closing was to undo it.
        assert handle.before_close or not gpu.registered
        for release in handle.before_close:
            with contextlib.suppress(HiFCError):
                release()
                release()
        assert gpu.registered == 0
        assert gpu.contexts == 0 or not handle.before_close, where

    assert each_place(pin, check) >= 4
