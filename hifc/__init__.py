# SPDX-License-Identifier: Apache-2.0
"""HiFC keeps the key-value cache of a large language model on NVMe flash.

Names are loaded when they are first used: `import hifc` imports neither torch nor libhifc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hifc import verify as verify
    from hifc.blocks import BlockKeys as BlockKeys
    from hifc.blocks import BlockTable as BlockTable
    from hifc.blocks import KeyScheme as KeyScheme
    from hifc.blocks import KVBlock as KVBlock
    from hifc.classifier import HotColdClassifier as HotColdClassifier
    from hifc.config import Config as Config
    from hifc.engine import HiFC as HiFC
    from hifc.errors import BackPressure as BackPressure
    from hifc.errors import BufferExhausted as BufferExhausted
    from hifc.errors import ClosedError as ClosedError
    from hifc.errors import ConfigError as ConfigError
    from hifc.errors import CorruptionError as CorruptionError
    from hifc.errors import DeviceBusy as DeviceBusy
    from hifc.errors import DeviceError as DeviceError
    from hifc.errors import ForkError as ForkError
    from hifc.errors import FormatError as FormatError
    from hifc.errors import HiFCError as HiFCError
    from hifc.errors import InvalidRequest as InvalidRequest
    from hifc.errors import LibraryError as LibraryError
    from hifc.errors import NoSpace as NoSpace
    from hifc.errors import NotPermitted as NotPermitted
    from hifc.errors import NotSupported as NotSupported
    from hifc.errors import WaitTimeout as WaitTimeout
    from hifc.metrics import Metrics as Metrics
    from hifc.namespace import Namespace as Namespace
    from hifc.policy import HiFCPolicy as HiFCPolicy
    from hifc.policy import LRUPolicy as LRUPolicy
    from hifc.prefetch import HiFCPrefetcher as HiFCPrefetcher
    from hifc.request import REQUEST as REQUEST
    from hifc.request import Answer as Answer
    from hifc.request import BlockClass as BlockClass
    from hifc.request import EventKind as EventKind
    from hifc.request import Op as Op
    from hifc.request import make_requests as make_requests
    from hifc.reservation import Lease as Lease
    from hifc.reservation import Reservation as Reservation
    from hifc.ticket import Ticket as Ticket

_MODULES: dict[str, str] = {
    "blocks": "BlockKeys BlockTable KVBlock KeyScheme",
    "classifier": "HotColdClassifier",
    "config": "Config",
    "engine": "HiFC",
    "errors": "BackPressure BufferExhausted ClosedError ConfigError CorruptionError DeviceBusy "
    "DeviceError ForkError FormatError HiFCError InvalidRequest LibraryError NoSpace NotPermitted "
    "NotSupported WaitTimeout",
    "metrics": "Metrics",
    "namespace": "Namespace",
    "policy": "HiFCPolicy LRUPolicy",
    "prefetch": "HiFCPrefetcher",
    "request": "REQUEST Answer BlockClass EventKind Op make_requests",
    "reservation": "Lease Reservation",
    "ticket": "Ticket",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

_PACKAGES = {"verify"}

__all__ = sorted({*_HOME, *_PACKAGES})  # noqa: PLE0605  (computed from the one table)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"hifc.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'hifc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hifc.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
