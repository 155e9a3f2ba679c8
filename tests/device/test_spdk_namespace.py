# SPDX-License-Identifier: Apache-2.0
"""Namespaces on NVMe/TCP targets that stop, die and come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hifc import DeviceBusy, HiFCError, Namespace
from hifc.namespace.ring import make_descriptors

if TYPE_CHECKING:
    from conftest import Nvmf

pytestmark = pytest.mark.spdk

VALUE = bytes(range(256)) * 1024  # 256 KiB
OPTIONS = {"pool_size": "16MiB"}
NO_HANG_S = 300.0


class Target:
    """A target that a test stops, kills and starts again at the same address."""

    def __init__(self, nvmf: Nvmf, backing: Path) -> None:
        self._nvmf = nvmf
        self._started: Any = nvmf.start(backing, size_bytes=256 << 20)
        self.uri = str(self._started.uri)
        Namespace.format(self.uri, segment_size="2MiB")

    def signal(self, number: int) -> None:
        os.kill(self._nvmf.pid(self._started.port), number)

    def restart(self) -> None:
        self._nvmf.stop(self._started.port)
        self._nvmf.start(Path(self._started.backing), port=self._started.port)

    def stop(self) -> None:
        self._nvmf.stop(self._started.port)


@pytest.fixture
def target(nvmf: Nvmf, tmp_path: Path) -> Iterator[Target]:
    target = Target(nvmf, tmp_path / "disk.img")
    yield target
    target.stop()


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value(number: int) -> bytes:
    return number.to_bytes(8, "little") + VALUE[8:]


@pytest.mark.slow
@pytest.mark.parametrize("drive", ["reactor", "inline"])
def test_a_stopped_target_is_an_error(target: Target, drive: str) -> None:
    ns = Namespace.open(target.uri, drive=drive, command_timeout_ms=3000, **OPTIONS)
    ns.put(key(1), value(1))
    ns.sync()
    target.signal(signal.SIGSTOP)
    with pytest.raises(HiFCError):
        ns.get(key(1))
    with pytest.raises(HiFCError):
        ns.put(key(2), value(2))
        ns.sync()
    with pytest.raises(HiFCError):  # it could not be flushed
        ns.close()
    target.signal(signal.SIGCONT)
    with Namespace.open(target.uri, drive=drive, **OPTIONS) as ns:
        assert bytes(ns.get(key(1))) == value(1)


@pytest.mark.parametrize("drive", ["reactor", "inline"])
def test_a_target_killed_under_load_keeps_what_was_synced(target: Target, drive: str) -> None:
    ns = Namespace.open(target.uri, drive=drive, **OPTIONS)
    for number in range(20):
        ns.put(key(number), value(number))
    ns.sync()
    failures: list[HiFCError] = []
    at_work = threading.Barrier(3)

    def work(writes: bool) -> None:
        try:
            for number in range(100_000):
                if number == 50:
                    at_work.wait(NO_HANG_S)
                if writes:
                    ns.put(key(1000 + number), VALUE[:4096])  # not enough to evict anything
                else:
                    assert bytes(ns.get(key(number % 20))) == value(number % 20)
        except HiFCError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(writes,)) for writes in (True, False)]
    for thread in threads:
        thread.start()
    at_work.wait(NO_HANG_S)
    target.signal(signal.SIGKILL)
    for thread in threads:
        thread.join(NO_HANG_S)
        assert not thread.is_alive()
    assert len(failures) == 2
    with pytest.raises(HiFCError):
        ns.close()
    target.restart()
    with Namespace.open(target.uri, drive=drive, **OPTIONS) as ns:
        for number in range(20):
            assert bytes(ns.get(key(number))) == value(number)
        ns.put(key(5000), value(5000))


@pytest.mark.parametrize("drive", ["reactor", "inline"])
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_ring_is_answered_where_its_target_is_not(
    target: Target, drive: str, number: signal.Signals
) -> None:
    """Also reads of which the device has neither data nor an error to give, and close ends."""
    ns = Namespace.open(target.uri, drive=drive, command_timeout_ms=3000, **OPTIONS)
    count = 12
    for name in range(count):
        ns.put(key(name), value(name))
    ns.sync()
    arena = ns.buffer(count * len(VALUE))
    words = np.arange(count)
    keys = np.frombuffer(b"".join(map(key, range(count))), np.uint8).reshape(count, 16)
    wanted = make_descriptors(keys, words * (len(VALUE) // 4096), words)
    ring = ns.ring(arena, len(VALUE))
    assert ring.submit(wanted) == count
    assert ring.wait(words, NO_HANG_S)
    assert not ring.statuses[words].any()
    assert bytes(arena[: len(VALUE)]) == value(0)
    target.signal(number)
    assert ring.submit(wanted) == count
    assert ring.wait(words, NO_HANG_S)
    assert (ring.statuses[words] < 0).all()
    assert ring.submit(wanted) == count
    ring.close()  # in flight again, or not started
    with pytest.raises(HiFCError):
        ns.close()
    target.signal(signal.SIGCONT)


def test_a_namespace_survives_a_target_that_comes_back_at_once(target: Target) -> None:
    with Namespace.open(target.uri, **OPTIONS) as ns:
        ns.put(key(1), value(1))
        ns.sync()
        target.signal(signal.SIGKILL)
        target.restart()
        # The commands that find out about it may fail; those after them work on new queue pairs.
        for _ in range(5):
            try:
                assert bytes(ns.get(key(1))) == value(1)
                ns.put(key(2), value(2))
                ns.sync()
                break
            except HiFCError:
                continue
        else:
            pytest.fail("five attempts failed")
        assert bytes(ns.get(key(2))) == value(2)


def test_a_second_process_is_told_who_owns_it(target: Target) -> None:
    code = "import sys; from hifc import Namespace; Namespace.open(sys.argv[1], pool_size='8MiB')"
    with Namespace.open(target.uri, **OPTIONS):
        done = subprocess.run(
            [sys.executable, "-c", code, target.uri],
            capture_output=True,
            text=True,
            timeout=NO_HANG_S,
            check=False,
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert "DeviceBusy" in done.stderr
        assert f"pid {os.getpid()}" in done.stderr
        with pytest.raises(DeviceBusy) as caught:
            Namespace.open(target.uri, **OPTIONS)
        assert os.getpid() in caught.value.holders


def test_nothing_of_spdk_reaches_stdout_or_stderr(target: Target) -> None:
    code = """if True:
        import sys
        from hifc import Namespace
        with Namespace.open(sys.argv[1], pool_size="8MiB") as ns:
            ns.put(bytes(16), b"value")
            assert bytes(ns.get(bytes(16))) == b"value"
        try:
            Namespace.open(sys.argv[1].replace("hifc", "nobody"))
        except Exception as error:
            print(error)
        """
    done = subprocess.run(
        [sys.executable, "-c", code, target.uri],
        capture_output=True,
        text=True,
        timeout=NO_HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    assert "check the NQN" in done.stdout


@pytest.mark.slow
def test_an_idle_namespace_stays_connected(target: Target) -> None:
    with Namespace.open(target.uri, **OPTIONS) as ns:
        ns.put(key(1), value(1))
        time.sleep(13)  # a target hangs up after 10 s without a keep-alive
        assert bytes(ns.get(key(1))) == value(1)
