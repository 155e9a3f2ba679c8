# SPDX-License-Identifier: Apache-2.0
"""The main job on a short text: what tools/quickstart runs once everything is set up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hifc_admin.main import main

LIB = Path(__file__).parents[2] / "tools/lib"
KEYS = [
    "tokens_identical",
    "resident_kv_bytes",
    "total_kv_bytes",
    "tokens_per_s",
    "tokens_per_s_in_memory",
    "p99_ms",
    "p99_ms_in_memory",
    "bytes_written",
    "bytes_read",
    "prefetch_hit",
    "total_access",
    "ttft_cold_s",
    "ttft_warm_s",
    "device",
]
TEXT = "The owner of a device is one process. " * 60


def _run(checkpoint: Path, uri: str, text: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(LIB / "main_job.py"), "--model", str(checkpoint)]
    command += ["--uri", uri, "--format", "always", "--text", str(text), "--json", *options]
    paths = os.pathsep.join(sys.path)
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("device", ["file", "ram"])
def test_main_job(checkpoint: Path, tmp_path: Path, device: str) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    uri = f"file://{tmp_path}/kv?size=4GiB" if device == "file" else "ram://job?size=4GiB"
    done = _run(checkpoint, uri, text, "--new", "12", "--resident", "0.4")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    assert result["tokens_identical"] is True
    assert result["device"] == uri
    assert 0 < result["resident_kv_bytes"] <= 0.4 * result["total_kv_bytes"]
    assert 0 <= result["prefetch_hit"] <= result["total_access"]
    assert result["total_access"] > 0
    assert result["ttft_warm_s"] > 0
    assert result["ttft_cold_s"] > 0


@pytest.mark.slow
@pytest.mark.model
def test_verify_a_real_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_text(TEXT)
    words = ["verify", str(checkpoint), "--text", str(tmp_path / "text"), "--score", "48"]
    words += ["--device", f"file://{tmp_path}/kv?size=4GiB", "--report", f"{tmp_path}/report.html"]
    words += ["--resident", "0.4", "--generate", "16", "--json"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["verdict"] == "PASSED"
    assert data["read_bytes"] > data["total_bytes"]
    stages = {stage["stage"]: stage for stage in data["stages"]}
    assert stages["decode"]["bitwise_equal"]
    assert stages["prefix_and_computed"]["largest_logit_difference"] <= 1e-3
    assert stages["decode"]["perplexity"] < 10  # the text repeats itself
    assert (tmp_path / "report.html").read_text().count("data:image/png") == 3


@pytest.mark.model
def test_missing_text_names_the_fix(checkpoint: Path, tmp_path: Path) -> None:
    done = _run(checkpoint, "ram://job?size=64MiB", tmp_path / "none")
    assert done.returncode == 1
    assert "--text" in done.stderr
    assert "Traceback" not in done.stderr
