# SPDX-License-Identifier: Apache-2.0
"""tools/bench/kernels runs and prints what it promises. No timing is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hifc.kernels import backend as kernels
from hifc.kernels import packing

PROGRAM = Path(__file__).parents[2] / "tools/bench/kernels"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, "--quick", *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def test_report() -> None:
    done = run("--json", "--backend", "host", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "host"
    what = [entry["what"] for entry in report["moves"]]
    for verb in "pack", "unpack":
        for encoding in packing.ENCODINGS:
            assert {f"{verb} {encoding}", f"{verb} {encoding} with CRC-32C"} <= set(what)
    assert {"copy", "checksum in place"} <= set(what)
    assert all(entry["us"] > 0 and entry["gb_s"] > 0 for entry in report["moves"])
    assert report["classify"]["blocks"] == 1 << 20
    assert "bars" not in report


def test_table_says_that_there_is_no_gpu() -> None:
    done = run("--backend", "host", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "NO GPU" in done.stdout
    assert "NOT MET" not in done.stdout


@pytest.mark.skipif(kernels.backend().name == "cuda", reason="a GPU is here")
def test_gpu_that_is_missing_is_an_error() -> None:
    done = run("--backend", "cuda")
    assert done.returncode == 1
    assert "use the backend host" in done.stderr
