# SPDX-License-Identifier: Apache-2.0
"""Functions between a cache, or staging, and the layer below. An exception can come as one of them
returns: what was submitted or taken is then known to nobody above. See tests/interrupts.py."""

from __future__ import annotations

from typing import Any

import pytest

from hifc import Namespace
from hifc.bar import BarMemory, PciBarProvider
from hifc.handle import Handle


def pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tickets, buffers and memory of devices come through functions of this file."""
    submit, buffer = Namespace.submit, Namespace.buffer
    map_bar, add_pool = PciBarProvider.map, Handle.add_pool

    def submitted(namespace: Namespace, requests: Any) -> Any:
        return submit(namespace, requests)

    def taken(namespace: Namespace, size_bytes: int) -> Any:
        return buffer(namespace, size_bytes)

    def mapped(provider: PciBarProvider, size_bytes: int) -> BarMemory:
        return map_bar(provider, size_bytes)

    def added(handle: Handle, base: int, size_bytes: int, flush: Any) -> int:
        return add_pool(handle, base, size_bytes, flush)

    monkeypatch.setattr(PciBarProvider, "map", mapped)
    monkeypatch.setattr(Handle, "add_pool", added)
    monkeypatch.setattr(Namespace, "submit", submitted)
    monkeypatch.setattr(Namespace, "buffer", taken)
