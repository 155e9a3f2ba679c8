# SPDX-License-Identifier: Apache-2.0
"""HiFC keeps the key-value (KV) cache of a large language model on NVMe flash, exact to the bit.

A model of transformers, most of whose KV is on flash:

    settings = {"device": "file:///var/tmp/kv.hifc?size=8GiB", "format": "if_missing"}
    with hifc.HiFC(settings) as engine:
        cache = engine.cache(model.config, max_tokens=8192)
        model.generate(**inputs, past_key_values=cache)

Blocks of bytes under keys of 16 bytes, without a model:

    hifc.Namespace.format("file:///var/tmp/blocks.hifc?size=256MiB")
    with hifc.Namespace.open("file:///var/tmp/blocks.hifc") as namespace:
        namespace.put(b"sixteen byte key", block)

What a program needs:

    HiFC         the engine: KV blocks in memory and on flash, and caches for models
    HiFCCache    what HiFC.cache returns: the KV cache of a transformers model
    Namespace    the store below it: put, get, leases, batches
    Config       all settings, as keywords, a mapping or a YAML file
    KeyScheme    keys of blocks from tokens
    HiFCPolicy   which blocks leave memory first; derive from it for a policy of your own
    HiFCError    base of every error, each of which says what to do
    verify       compares a model with and without HiFC

Programs that integrate HiFC also find REQUEST, Op, make_requests, EventKind, BlockKeys,
BlockTable, HotColdClassifier and HiFCPrefetcher here. `dir(hifc)` leaves these out, and
`hifc.__all__` ends with them.

Names are loaded when they are first used: `import hifc` imports neither torch nor libhifc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hifc import verify as verify
    from hifc.blocks.classifier import HotColdClassifier as HotColdClassifier
    from hifc.blocks.keys import BlockKeys as BlockKeys
    from hifc.blocks.keys import BlockTable as BlockTable
    from hifc.blocks.keys import KeyScheme as KeyScheme
    from hifc.blocks.keys import KVBlock as KVBlock
    from hifc.blocks.policy import HiFCPolicy as HiFCPolicy
    from hifc.blocks.policy import LRUPolicy as LRUPolicy
    from hifc.config import Config as Config
    from hifc.config import ConfigDict as ConfigDict
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
    from hifc.errors import MissingPackage as MissingPackage
    from hifc.errors import NoSpace as NoSpace
    from hifc.errors import NotPermitted as NotPermitted
    from hifc.errors import NotSupported as NotSupported
    from hifc.errors import WaitTimeout as WaitTimeout
    from hifc.integrations.transformers.cache import HiFCCache as HiFCCache
    from hifc.metrics.counters import Metrics as Metrics
    from hifc.namespace.digest import key as key
    from hifc.namespace.namespace import Namespace as Namespace
    from hifc.namespace.reservation import Lease as Lease
    from hifc.namespace.reservation import Reservation as Reservation
    from hifc.namespace.ticket import Ticket as Ticket
    from hifc.native_lib.request import REQUEST as REQUEST
    from hifc.native_lib.request import Answer as Answer
    from hifc.native_lib.request import BlockClass as BlockClass
    from hifc.native_lib.request import EventKind as EventKind
    from hifc.native_lib.request import Op as Op
    from hifc.native_lib.request import make_requests as make_requests
    from hifc.prefetch.trend import HiFCPrefetcher as HiFCPrefetcher

    __version__: str

# Home of each name. First what a program needs that calls HiFC ...
_FOR_USERS: dict[str, str] = {
    "engine": "HiFC",
    "namespace.namespace": "Namespace",
    "config": "Config ConfigDict",
    "blocks.keys": "KeyScheme KVBlock",
    "namespace.digest": "key",
    "blocks.policy": "HiFCPolicy LRUPolicy",
    "metrics.counters": "Metrics",
    "native_lib.request": "Answer BlockClass",
    "namespace.ticket": "Ticket",
    "namespace.reservation": "Lease Reservation",
    "errors": "HiFCError BackPressure BufferExhausted ClosedError ConfigError CorruptionError "
    "DeviceBusy DeviceError ForkError FormatError InvalidRequest LibraryError MissingPackage "
    "NoSpace NotPermitted NotSupported WaitTimeout",
}
# ... then what a program needs besides that integrates HiFC into an inference engine.
_FOR_INTEGRATORS: dict[str, str] = {
    "native_lib.request": "Op REQUEST make_requests EventKind",
    "blocks.keys": "BlockKeys BlockTable",
    "blocks.classifier": "HotColdClassifier",
    "prefetch.trend": "HiFCPrefetcher",
}
_HOME = {
    name: module
    for table in (_FOR_USERS, _FOR_INTEGRATORS)
    for module, names in table.items()
    for name in names.split()
}
# Not in __all__: `from hifc import *` and help(hifc) look at all of it, and this one needs torch.
_HOME_OF_CACHE = "hifc.integrations.transformers.cache"

_PACKAGES = ("verify",)

_USER_NAMES = [*" ".join(_FOR_USERS.values()).split(), *_PACKAGES]

__all__ = [  # noqa: PLE0604  (computed from the tables, in their order)
    *_USER_NAMES,
    *" ".join(_FOR_INTEGRATORS.values()).split(),
]


if not TYPE_CHECKING:  # a type checker would take every name for known

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"hifc.{name}")
        if name == "__version__":
            value: Any = _version()
        elif name == "HiFCCache":
            from hifc.util.packages import need

            need("hifc.HiFCCache", "transformers", "torch", "transformers")
            value = importlib.import_module(_HOME_OF_CACHE).HiFCCache
        elif name in _HOME:
            value = getattr(importlib.import_module(f"hifc.{_HOME[name]}"), name)
        else:
            raise AttributeError(f"module 'hifc' has no attribute {name!r}")
        globals()[name] = value
        return value


def _version() -> str:
    from importlib import metadata  # which takes longer to import than all the rest here

    try:
        return metadata.version("hifc")
    except metadata.PackageNotFoundError:  # the sources are used as they lie in a folder
        return "unknown"


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*_USER_NAMES, "__version__", *special} - {"__getattr__", "__dir__"})
