# SPDX-License-Identifier: Apache-2.0
"""What all Python tests share: options, markers, the count of tests that need SPDK, a target."""

from __future__ import annotations

import importlib.machinery
import os
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from hifc import driver

REPOSITORY = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-spdk", action="store_true", help="skip what needs a real SPDK queue pair"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spdk") is None:
            continue
        # tools/lib/report.py fails CI unless a test with this property passed.
        item.user_properties.append(("needs", "spdk"))
        if config.getoption("--no-spdk"):
            item.add_marker(pytest.mark.skip(reason="needs SPDK; --no-spdk was given"))


@pytest.fixture(scope="module")
def nvmf_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URI of a real NVMe/TCP target on loopback, of 256 MiB; for tests marked spdk.

    Skips where SPDK or huge pages are missing; in CI that is an error.
    """
    if "spdk+tcp" not in driver.library().hifc_schemes().decode().split():
        pytest.skip("libhifc.so was built without SPDK: see tools/build_spdk")
    tool = REPOSITORY / "tools/nvmf_target"
    loader = importlib.machinery.SourceFileLoader("nvmf_target", str(tool))
    nvmf = types.ModuleType(loader.name)
    loader.exec_module(nvmf)
    backing = tmp_path_factory.mktemp("nvmf") / "disk.img"
    try:
        target = nvmf.start(backing, size_bytes=256 << 20, port=0, die_with_caller=True)
    except nvmf.TargetError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no NVMe/TCP target: {error}")
    yield target.uri
    nvmf.stop(target.port)
