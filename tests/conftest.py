# SPDX-License-Identifier: Apache-2.0
"""What all Python tests share: options, markers, and the record of which tests needed SPDK."""

from __future__ import annotations

import pytest


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
