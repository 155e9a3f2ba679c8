# SPDX-License-Identifier: Apache-2.0
"""Sparse decode of a real model on a short text: what tools/bench/sparse runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

LIB = Path(__file__).parents[2] / "tools/lib"


@pytest.mark.slow
@pytest.mark.model
def test_sparse_bench(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(LIB / "sparse_bench.py"), "--model", str(checkpoint)]
    command += ["--uri", f"file://{tmp_path}/kv?size=4GiB", "--json", "--resident", "0.3"]
    command += ["--context", "1024", "--tokens", "80", "--budgets", "none", "--speed-tokens", "16"]
    command += ["--curve-tokens", "80", "--plot", str(tmp_path / "curve.png")]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    window, sparse = result["results"]
    assert window["method"] == "window + sink"
    assert sparse["method"] == "sparse"
    assert sparse["steps"] == 80
    assert sparse["resident_ratio"] <= 0.3
    assert sparse["ratio"] < 1.02
    assert sparse["ratio"] < window["ratio"]
    assert abs(sparse["checked_missed"] - sparse["checked_estimate"]) < 0.02
    assert result["speed"]["tokens"] == 8
    assert (tmp_path / "curve.png").stat().st_size > 1000
