# SPDX-License-Identifier: Apache-2.0
"""Real signals, thousands of them, in a process that puts, gets, stores, loads and runs a model.

The process interrupts itself: a timer of the kernel sends SIGALRM at random moments, and its
handler raises. Each loop knows what every key may hold and checks each value that it reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run(loops: str, interrupts: int) -> dict[str, int]:
    """What the process of tests/signal_loops.py counted."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "signal_loops.py"), loops, str(interrupts)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{TESTS}"},
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    print(counts)
    return counts


@pytest.mark.parametrize("drive", ["reactor", "inline"])
def test_a_namespace_under_signals(drive: str) -> None:
    counts = run(f"namespace-{drive}", 10_000)
    assert counts["interrupts"] == 10_000
    assert counts["wrong"] == 0
    assert counts["lost"] == 0
    assert counts["loans"] == 0
    assert counts["inflight"] == 0
    assert counts["steps"] > 100


def test_an_engine_under_signals() -> None:
    counts = run("engine", 10_000)
    assert counts["interrupts"] == 10_000
    assert counts["inflight"] == 0
    assert counts["engine_operations"] > 1000


def test_a_model_under_signals() -> None:
    pytest.importorskip("torch")
    counts = run("cache", 1000)
    assert counts["interrupts"] == 1000
    assert counts["inflight"] == counts["loans"] == counts["entries"] == 0
    assert counts["rounds"] > 0
