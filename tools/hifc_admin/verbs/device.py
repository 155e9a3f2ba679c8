# SPDX-License-Identifier: Apache-2.0
"""The verbs on a device below its namespace: smart."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from hifc.device import device
from hifc_admin import smart_log, target, text
from hifc_admin.engine import owner
from hifc_admin.parsing import Verbs, add_uri, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "smart",
        smart,
        "show the health log of a drive, also while an engine owns it",
        "hifc-admin smart 'spdk+tcp://192.0.2.1:4420/nqn.2024-01.org.example:kv?ns=1'",
    )
    add_uri(parser)


def smart(arguments: argparse.Namespace) -> Result:
    log = smart_log.decode(health_log(arguments.uri))
    data = {"uri": arguments.uri, **dataclasses.asdict(log)}
    rows = [(name, _shown(name, value)) for name, value in data.items()]
    return Result(data, text.pairs(rows), smart_log.problems(arguments.uri, log))


def health_log(uri: str) -> bytes:
    """The log page, from the process that owns the device if there is one; else from the device,
    whatever stands on it. Raises Failure where it has none."""
    medium = target.parse(uri)
    if medium.scheme == "ram" or (medium.scheme == "file" and not medium.is_block_device):
        detail = "this is no drive, so it has no health log"
        fix = "name the drive below it: hifc-admin list"
        raise Failure(Exit.USAGE, Problem("no-drive", uri, detail, fix=fix))
    path = owner.find(uri)
    if path is not None:
        return owned_log(path)
    found = device.device_info(uri)
    if found.health is None:
        problem = Problem("not-supported", uri, found.health_problem)
        raise Failure(Exit.PREREQUISITE, problem)
    return found.health


def owned_log(path: Path) -> bytes:
    """What the owner that listens there read for us."""
    answer = owner.ask(path, "health")
    try:
        log = bytes.fromhex(answer["log"])
    except (KeyError, TypeError, ValueError):
        log = b""
    if len(log) != smart_log.LOG_BYTES:
        detail = "what listens there did not answer with a health log"
        raise Failure(Exit.FAILED, Problem("bad-reply", str(path), detail))
    return log


def _shown(name: str, value: object) -> object:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{text.size(value)} ({value})"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value if item is not None) or "none"
    return value
