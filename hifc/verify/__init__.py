# SPDX-License-Identifier: Apache-2.0
"""Compares a model with and without HiFC, for those who want to see it before they rely on it.

    from hifc import verify
    with hifc.HiFC({"device": "ram://verify?size=2GiB", "format": "if_missing"}) as engine:
        found = verify.run(model, token_ids, engine)
    verify.write(found, "report.html")
    assert found.passed, found.failures()

result.py says what is compared and what passes, lockstep.py runs the two caches side by side,
attention.py takes the attention maps, plots.py and report.py draw. `hifc-admin verify` calls it.
Names are loaded when they are first used: importing this imports neither torch nor matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hifc.util.packages import need

if TYPE_CHECKING:
    from hifc.verify.lockstep import run as run
    from hifc.verify.report import write as write
    from hifc.verify.result import Bounds as Bounds
    from hifc.verify.result import Verification as Verification

_HOME = {"run": "lockstep", "write": "report", "Bounds": "result", "Verification": "result"}
_NEEDS = {"run": ("torch", "transformers"), "write": ("matplotlib", "jinja2")}

__all__ = ["Bounds", "Verification", "run", "write"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hifc.verify' has no attribute {name!r}")
    if name in _NEEDS:
        need(f"hifc.verify.{name}", "verify", *_NEEDS[name])
    return getattr(importlib.import_module(f"hifc.verify.{_HOME[name]}"), name)
