# SPDX-License-Identifier: Apache-2.0
"""Talks to the process that owns a device, over its Unix socket (driver/admin/owner.c).

One word and a newline go out, one JSON object comes back. Every wait and size has a limit.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hifc_admin import target
from hifc_admin.result import Exit, Failure, Problem

TIMEOUT_S = 5.0
REPLY_MAX_BYTES = 1 << 20
FOLDERS = ("run/hifc", "run/user/*/hifc", "tmp/hifc-*")


def ask(path: Path, request: str) -> dict[str, Any]:
    """The owner's answer without its "ok". Raises OSError where it fails to answer, and Failure,
    also where nobody listens."""
    reply = bytearray()
    deadline_s = time.monotonic() + TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            fix = "hifc-admin status shows the engines that run"
            problem = Problem("not-owned", str(path), "nobody listens there", str(error), fix)
            raise Failure(Exit.PREREQUISITE, problem) from error
        connection.sendall(f"{request}\n".encode())
        while (chunk := connection.recv(65536)) and len(reply) <= REPLY_MAX_BYTES:
            reply += chunk
            # Of the whole answer: who sends a byte now and then must not keep us for ever.
            connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
    try:
        answer = dict(json.loads(reply.decode("utf-8", "replace")))
        ok = answer.pop("ok")
    except (ValueError, TypeError, KeyError) as error:
        problem = Problem("bad-reply", str(path), "this is not the socket of a HiFC owner")
        raise Failure(Exit.FAILED, problem) from error
    if not ok:
        raise Failure(Exit.FAILED, Problem("owner", str(path), str(answer.get("error"))))
    return answer


def owners(root: Path = Path("/")) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every socket that answers, with what its owner says of itself: uri and pid."""
    for pattern in FOLDERS:
        for path in sorted(root.glob(f"{pattern}/*.sock")):
            # Dead owners leave names, and other users' sockets are not ours to ask.
            with contextlib.suppress(OSError, Failure):
                yield path, ask(path, "hello")


def find(uri: str, root: Path = Path("/")) -> Path | None:
    """The socket of the process that owns the device of a URI, or None."""
    wanted = _identity(target.parse(uri))
    for path, answer in owners(root):
        with contextlib.suppress(Failure):
            if _identity(target.parse(str(answer.get("uri")))) == wanted:
                return path
    return None


def _identity(device: target.Target) -> tuple[str, ...]:
    """Equal for two URIs of one medium; what only describes it, like size, is left out."""
    if device.path is not None:
        return "file", str(device.path)
    return device.scheme, device.name, device.parameters.get("ns", "1")


def socket_of(name: str) -> Path:
    """The socket that a path, hifc://PATH or the URI of an owned device names. Raises Failure."""
    if "://" not in name:
        return Path(name)
    if name.startswith("hifc://"):
        return Path(name.removeprefix("hifc://"))
    path = find(name)
    if path is None:
        problem = Problem(
            "not-owned",
            name,
            "no process that you may ask has this device open",
            f"sockets looked for in {', '.join('/' + folder for folder in FOLDERS)}",
            f"hifc-admin info {shlex.quote(name)}",
        )
        raise Failure(Exit.PREREQUISITE, problem)
    return path
