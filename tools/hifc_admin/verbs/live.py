# SPDX-License-Identifier: Apache-2.0
"""The verbs on a running engine, through its owner's socket: stats, top."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hifc_admin.engine import owner, prometheus, rates
from hifc_admin.engine.stats_text import stats_lines
from hifc_admin.parsing import Verbs, add_verb, whole_number
from hifc_admin.result import Exit, Failure, Problem, Result

INTERVAL_MIN_S = 0.1
INTERVAL_MAX_S = 3600.0
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "stats",
        stats,
        "show the counters of a running engine",
        "hifc-admin stats file:///var/tmp/kv.hifc",
    )
    parser.add_argument(
        "uri", metavar="SOCKET|URI", help="the owner's socket, or the device that it owns"
    )

    parser = add_verb(
        verbs,
        "top",
        top,
        "watch a running engine",
        "hifc-admin top file:///var/tmp/kv.hifc --interval 2",
    )
    parser.add_argument(
        "uri",
        metavar="SOCKET|URI",
        nargs="?",
        help="the owner's socket, or the device that it owns (default: the only running engine)",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=1.0,
        help="between two looks (default: 1)",
    )
    parser.add_argument(
        "--count", metavar="N", type=whole_number(1), help="stop after so many screens"
    )
    parser.add_argument("--once", action="store_true", help="one screen; --json implies it")
    parser.add_argument(
        "--prometheus",
        action="store_true",
        help="print the counters once as Prometheus text, of all engines where none is named",
    )


def _interval(written: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = 0.0
    if not INTERVAL_MIN_S <= value <= INTERVAL_MAX_S:
        raise argparse.ArgumentTypeError(
            f"{written!r} is not from {INTERVAL_MIN_S:g} to {INTERVAL_MAX_S:g} seconds"
        )
    return value


def stats(arguments: argparse.Namespace) -> Result:
    path = owner.socket_of(arguments.uri)
    data = {"socket": str(path), **owner.ask(path, "stats")}
    return Result(data, stats_lines(data))


def top(arguments: argparse.Namespace) -> Result:
    if arguments.prometheus:
        return _prometheus(arguments)
    path = _socket(arguments.uri)
    count = 1 if arguments.once or arguments.json else arguments.count
    before, then_s = owner.ask(path, "stats"), time.monotonic()
    if count == 1:
        time.sleep(arguments.interval)
        after = owner.ask(path, "stats")
        found = rates.between(before, after, time.monotonic() - then_s)
        return Result(found, rates.lines(found))
    result = Result({"socket": str(path)})
    result.lines = _screens(path, before, arguments.interval, count, result)
    return result


def _socket(name: str | None) -> Path:
    """The one that is named, or the only one there is."""
    if name is not None:
        return owner.socket_of(name)
    found = list(owner.owners())
    if len(found) == 1:
        return found[0][0]
    if not found:
        fix = "start one, or ask as its user or as root"
        problem = Problem("not-owned", "top", "no engine runs that you may ask", fix=fix)
        raise Failure(Exit.PREREQUISITE, problem)
    fix = "name one: " + ", ".join(str(said.get("uri")) for _, said in found)
    raise Failure(Exit.USAGE, Problem("not-named", "top", f"{len(found)} engines run", fix=fix))


def _prometheus(arguments: argparse.Namespace) -> Result:
    if arguments.uri is not None:
        paths = [owner.socket_of(arguments.uri)]
    else:
        paths = [path for path, _ in owner.owners()]
    found = [owner.ask(path, "stats") for path in paths]
    lines = list(prometheus.text(found))
    return Result({"text": "".join(f"{line}\n" for line in lines)}, lines)


def _screens(
    path: Path, before: dict[str, Any], interval_s: float, count: int | None, result: Result
) -> Iterator[str]:
    """Screens until count, Ctrl-C or the engine's end; drawn over each other on a terminal."""
    on_terminal = sys.stdout.isatty()
    shown = 0
    then_s = time.monotonic()
    try:
        while count is None or shown < count:
            time.sleep(interval_s)
            after, now_s = owner.ask(path, "stats"), time.monotonic()
            screen = list(rates.lines(rates.between(before, after, now_s - then_s)))
            screen[0] = (CLEAR_SCREEN if on_terminal else "") + screen[0]
            yield from screen
            yield ""
            sys.stdout.flush()
            before, then_s, shown = after, now_s, shown + 1
    except KeyboardInterrupt:
        return
    except (OSError, Failure) as error:
        result.exit = Exit.FAILED
        result.problems.append(
            Problem("owner-gone", str(path), "the engine does not answer any more", str(error))
        )
