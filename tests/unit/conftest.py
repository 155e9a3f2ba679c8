# SPDX-License-Identifier: Apache-2.0
"""What keeps the clock out of all unit tests: hypothesis judges no example by its time, and reads
ahead that take long are waited for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from hifc.prefetch import ahead

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load waits for the block that is on its way, however little of the processor the reactor
    has; by default it gives up after a quarter of a second and reads the block itself."""
    monkeypatch.setattr(ahead, "LANDING_WAIT_S", 120.0)
