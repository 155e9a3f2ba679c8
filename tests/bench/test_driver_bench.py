# SPDX-License-Identifier: Apache-2.0
"""tools/bench/driver runs and prints what it promises. No timing is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RESULT_KEYS = {
    "op",
    "size_bytes",
    "queue_depth",
    "hifc",
    "spdk",
    "ratio",
    "cpu_ns_per_op_hifc",
    "cpu_ns_per_op_spdk",
}


def run(*arguments: str) -> Any:
    """The report of a quick run."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools/bench/driver", "--quick", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_report_without_spdk_has_every_key(tmp_path: Path) -> None:
    report = run("--no-spdk", "--files", str(tmp_path))
    assert report["results"] == []
    assert set(report["cost_ns_per_op"]) == {"c", "python"}
    assert report["cost_ns_per_op"]["c"] > 0
    assert report["cost_ns_per_op"]["python"] > 0
    assert 32 < report["index_bytes_per_entry"] <= 40
    assert report["lookup_ns"] > 0
    for found in report["reopen"].values():
        assert found["entries_found"] == found["entries"]
    assert report["throughput"][str(tmp_path)]["block_get_gb_s"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.spdk
def test_the_comparison_has_every_key(nvmf_uri: str) -> None:
    del nvmf_uri  # only to skip where there can be no target; the benchmark starts its own
    results = run()["results"]
    kinds = {(entry["op"], entry["size_bytes"]) for entry in results}
    assert kinds == {(op, size) for op in ("read", "write") for size in (4096, 131072)}
    for entry in results:
        assert set(entry) >= RESULT_KEYS
        assert entry["hifc"] > 0
        assert entry["spdk"] > 0
        assert entry["ratio"] > 0
        assert len(entry["ratio_iqr"]) == 2
