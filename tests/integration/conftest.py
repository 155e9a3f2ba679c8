# SPDX-License-Identifier: Apache-2.0
"""Namespaces for the integrations, on more than one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hifc import Namespace

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
