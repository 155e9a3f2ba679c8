# SPDX-License-Identifier: Apache-2.0
"""How fast a namespace could be read when its owner was content: what bench --baseline writes down
and doctor --measure compares with. One small file a namespace, by its uuid."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from hifc_admin.result import Exit, Failure, Problem

ROOT_FOLDER = "/var/lib/hifc/baseline"
# Values of another size are read at another speed: not comparable beyond this factor.
SIZE_FACTOR_MAX = 2.0


@dataclass(frozen=True)
class Baseline:
    """Of sequential reads of whole values."""

    uuid: str
    uri: str
    bytes_per_s: float
    value_bytes: float  # on average
    depth: int
    written_s: float  # seconds since 1970

    def is_comparable(self, value_bytes: float) -> bool:
        smaller, larger = sorted((max(1.0, value_bytes), max(1.0, self.value_bytes)))
        return larger <= smaller * SIZE_FACTOR_MAX


def folder() -> Path:
    """Root's is the host's; other users have their own."""
    if os.geteuid() == 0:
        return Path(ROOT_FOLDER)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(state) / "hifc/baseline"


def save(found: Baseline) -> Path:
    path = folder() / f"{found.uuid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    early = path.with_suffix(".new")
    early.write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
    early.replace(path)
    return path


def load(uuid: str) -> Baseline | None:
    """None where none was written. Raises Failure where it cannot be understood."""
    path = folder() / f"{uuid}.json"
    try:
        return Baseline(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        detail = "this file was not written by this version of hifc-admin"
        problem = Problem("bad-baseline", str(path), detail, str(error), f"remove {path}")
        raise Failure(Exit.FAILED, problem) from error
