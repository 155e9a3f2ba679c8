# SPDX-License-Identifier: Apache-2.0
"""Shows the counters of an engine on the owner's socket, where hifc-admin top and doctor read them.

One daemon thread per engine wakes once a second and hands over what has changed. It holds neither
engine nor namespace between two looks, so an engine that nobody keeps goes as it would without;
a child of fork() has no such thread.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

from hifc.errors import HiFCError

INTERVAL_S = 1.0


class Source(Protocol):
    """What the thread looks at."""

    def publish(self, before: Mapping[str, float]) -> Mapping[str, float]:
        """Publishes what has changed since before, and returns what it published last."""


class Publisher:
    """Calls source.publish every interval_s seconds, until stop or until the source is gone."""

    def __init__(self, source: Source, interval_s: float = INTERVAL_S) -> None:
        # Both of C: a handler of a signal that raises leaves neither half done, as it could with
        # an Event or with join.
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._running = threading.Lock()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(source), self._stop, interval_s, self._running),
            name="hifc-publish",
            daemon=True,
        )
        self._running.acquire()
        self._thread.start()

    def stop(self) -> None:
        """Returns once the thread has ended, or is about to where it is the caller. Idempotent."""
        self._stop.put(None)
        if self._pid == os.getpid() and self._thread is not threading.current_thread():
            with self._running:
                pass


def _run(
    source: weakref.ref[Source],
    stop: queue.SimpleQueue[None],
    interval_s: float,
    running: threading.Lock,
) -> None:
    try:
        _publish(source, stop, interval_s)
    finally:
        running.release()


def _publish(source: weakref.ref[Source], stop: queue.SimpleQueue[None], interval_s: float) -> None:
    before: Mapping[str, float] = {}
    while not _is_told(stop, interval_s):
        engine = source()
        if engine is None:
            return
        try:
            before = engine.publish(before)
        except HiFCError:  # closed, or detached over the owner's socket: nobody asks any more
            return
        del engine


def _is_told(stop: queue.SimpleQueue[None], wait_s: float) -> bool:
    try:
        stop.get(timeout=wait_s)
    except queue.Empty:
        return False
    return True
