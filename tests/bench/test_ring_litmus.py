# SPDX-License-Identifier: Apache-2.0
"""Descriptors through a wrapped ring from a kernel to the host: none is torn, one would be seen."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from kernel_backends import make_backend

from hifc.kernels import backend as kernels
from hifc.native_lib.layouts import RingHeader

TOOL = Path(__file__).parents[2] / "tools/bench/ring"


@pytest.fixture(scope="module")
def ring() -> Any:
    loader = importlib.machinery.SourceFileLoader("bench_ring", str(TOOL))
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["host", "cuda"])
@pytest.mark.parametrize(
    ("count", "slots", "producers"), [(10_000_000, 4096, 1), (2_000_000, 1024, 2), (50_000, 16, 1)]
)
def test_none_is_torn(ring: Any, name: str, count: int, slots: int, producers: int) -> None:
    found = ring.litmus(make_backend(name), count, slots, producers, 256)
    assert found["count"] >= count
    assert found["laps"] >= count // slots
    assert (found["torn"], found["stale"], found["early"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("what", "expected"),
    [("word", "torn"), ("lap", "stale"), ("status", "early"), ("nothing", "count")],
)
def test_a_fault_is_seen(ring: Any, what: str, expected: str) -> None:
    """The consumer finds what is wrong with the third of five descriptors."""
    host = kernels.backend("host")
    memory = ring.Memory(16)
    seen = ring.np.zeros(4, ring.np.uint64)
    tail = memory.address + RingHeader.tail.offset
    produced = ring.np.zeros(4, ring.np.uint64)
    host.launch(
        "hifc_litmus_produce",
        1,
        **memory.arguments(memory.address, tail, produced.ctypes.data, 5),
    )
    third = ring.PAGE_BYTES + 2 * 32
    if what == "word":
        memory.region[third + 9] ^= 4
    elif what == "lap":
        memory.region[third + 28] = 7
    elif what == "status":
        memory.region[memory.statuses_offset + 2 * 4] = 0
    host.launch(
        "hifc_litmus_consume", 1, **memory.arguments(memory.address, 0, seen.ctypes.data, 50)
    )
    found = dict(zip(ring.RESULTS, seen.tolist(), strict=True))
    assert found == {"count": 5, "torn": 0, "stale": 0, "early": 0} | (
        {expected: 1} if what != "nothing" else {}
    )
    assert memory.header.head == 5


def test_the_tool() -> None:
    done = subprocess.run(
        [sys.executable, TOOL, "--backend", "host", "--count", "20000", "--slots", "64", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["count"] >= 20000
    assert found["torn"] == 0
    refused = subprocess.run(
        [sys.executable, TOOL, "--slots", "63"], check=False, capture_output=True, text=True
    )
    assert refused.returncode == 2
