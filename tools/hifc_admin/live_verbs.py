# SPDX-License-Identifier: Apache-2.0
"""The verbs on a running engine, through its owner's socket: stats."""

from __future__ import annotations

import argparse

from hifc_admin import owner
from hifc_admin.parsing import Verbs, add_verb
from hifc_admin.result import Result
from hifc_admin.stats_text import stats_lines


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


def stats(arguments: argparse.Namespace) -> Result:
    path = owner.socket_of(arguments.uri)
    data = {"socket": str(path), **owner.ask(path, "stats")}
    return Result(data, stats_lines(data))
