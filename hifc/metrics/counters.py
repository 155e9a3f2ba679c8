# SPDX-License-Identifier: Apache-2.0
"""Counters of what HiFC did, by name, and the same as Prometheus text.

    hifc.metrics["prefetch_hit"] / hifc.metrics["total_access"]

The text format of Prometheus is three line shapes, so it is written here and needs no package.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping

COUNTERS: dict[str, str] = {
    "total_access": "Loads of blocks",
    "hit": "Loads of blocks that were in memory",
    "prefetch_hit": "Loads of blocks that a prefetch had brought or was bringing",
    "prefetch_issued": "Blocks asked for ahead of their use",
    "prefetch_wasted": "Prefetched blocks that left memory, or where they landed, unused",
    "prefetch_landed": "Blocks that attention made expected, there and verified",
    "prefetch_lost": "Blocks not asked for: all landings were taken, or the ring was full",
    "prefetch_skipped": "Blocks expected as much, and in memory or on their way already",
    "prefetch_failed": "Blocks asked for that were missing, unreadable or taken back",
    "host_tier_hit": "Loads of blocks that were in the host tier",
    "host_tier_hit_bytes": "Bytes copied out of the host tier",
    "host_tier_in_blocks": "Blocks that left the pool for the host tier",
    "host_tier_in_bytes": "Bytes copied into the host tier",
    "miss": "Loads of blocks that were nowhere",
    "store_count": "Blocks stored",
    "swap_out_blocks": "Blocks that left memory for flash",
    "swap_out_bytes": "Bytes that left memory for flash",
    "swap_in_blocks": "Blocks that came back from flash",
    "swap_in_bytes": "Bytes that came back from flash",
    "swap_batches": "Submissions in which blocks left memory",
    "dropped_blocks": "Blocks that left memory and were on flash already",
    "policy_overruled": "Blocks that left memory although the policy wanted to keep them",
    "offload_failed": "Early moves to flash that the device had no room for",
    "rejected": "Blocks that admission declined to write",
    "prefix_loaded": "Stored prefixes that were loaded",
    "prefix_recomputed": "Stored prefixes that were computed again, since that was to be faster",
    "prefix_probed": "Stored prefixes that were loaded to measure it again",
    "prefix_predicted_us": "Time that prompts with a stored prefix were expected to take",
    "prefix_actual_us": "Time that the same prompts took",
    "raw_bytes": "Bytes of tensors before compression",
    "stored_bytes": "Bytes of tensors after compression",
}


class Metrics(Mapping[str, float]):
    """Counters, and gauges that are read when asked for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Counts; the name must be one of COUNTERS."""
        with self._lock:
            self._counters[name] += amount

    def gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """A value that read() gives whenever somebody looks; NaN while it is not known."""
        self._gauges[name] = (description, read)

    def __getitem__(self, name: str) -> float:
        if name in self._counters:
            return self._counters[name]
        return self._gauges[name][1]()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:g}" for name, value in self._known().items())
        return f"<Metrics {shown or 'all 0'}>"

    def __str__(self) -> str:
        """A line a value that is not 0, with what it is."""
        texts = COUNTERS | {name: text for name, (text, _) in self._gauges.items()}
        values = self._known()
        width = max(map(len, values), default=0)
        lines = [
            f"{name:{width}}  {value:>14,.10g}  {texts[name]}" for name, value in values.items()
        ]
        return "\n".join(lines) or "nothing was counted yet"

    def __iter__(self) -> Iterator[str]:
        return iter([*self._counters, *self._gauges])

    def __len__(self) -> int:
        return len(self._counters) + len(self._gauges)

    def snapshot(self) -> dict[str, float]:
        """All values as of now."""
        return {name: self[name] for name in self}

    def _known(self) -> dict[str, float]:
        """Those that are known and not 0."""
        return {
            name: value
            for name, value in self.snapshot().items()
            if value and not math.isnan(value)
        }

    def ratio(self, part: str, whole: str) -> float:
        """part / whole, 0.0 while whole is 0."""
        total = self[whole]
        return self[part] / total if total else 0.0

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """All values in the text exposition format 0.0.4, names beginning with hifc_. A value that
        is not known yet is left out."""
        marks = ",".join(f'{name}="{_escape(text)}"' for name, text in (labels or {}).items())
        suffix = f"{{{marks}}}" if marks else ""
        lines: list[str] = []
        for name, description in COUNTERS.items():
            lines += _family(f"hifc_{name}_total", "counter", description, suffix, self[name])
        for name, (description, read) in self._gauges.items():
            value = read()
            if not math.isnan(value):
                lines += _family(f"hifc_{name}", "gauge", description, suffix, value)
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, description: str, suffix: str, value: float) -> list[str]:
    text = description.replace("\\", "\\\\").replace("\n", "\\n")
    number = str(int(value)) if value == int(value) else f"{value:g}"
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{suffix} {number}"]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
