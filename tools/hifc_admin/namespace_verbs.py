# SPDX-License-Identifier: Apache-2.0
"""The verbs on a namespace: format, info, fsck, list-keys. All but format change nothing."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
from collections.abc import Iterator
from typing import Any

from hifc.errors import ConfigError
from hifc.namespace import Namespace
from hifc.units import parse_size
from hifc_admin import target, text
from hifc_admin.parsing import Verbs, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result
from hifc_admin.stats_text import stats_lines


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "format",
        format_namespace,
        "lay an empty namespace on a device; what is there is lost",
        "hifc-admin format 'file:///var/tmp/kv.hifc?size=8GiB' --confirm /var/tmp/kv.hifc",
        honours=("dry_run",),
    )
    parser.add_argument("uri", metavar="URI")
    parser.add_argument(
        "--confirm",
        metavar="ID",
        help="names the medium once more: the path of a file, SERIAL/NSID of a drive, "
        "NQN/NSID of a fabrics namespace",
    )
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.add_argument(
        "--segment-size",
        metavar="SIZE",
        type=_size,
        default=0,
        help="a power of two from 256KiB to 256MiB (default: by the size of the device)",
    )
    parser.add_argument("--label", default="", help="up to 31 bytes that info shows")

    parser = add_verb(
        verbs, "info", info, "show a namespace", "hifc-admin info file:///var/tmp/kv.hifc"
    )
    parser.add_argument("uri", metavar="URI")

    parser = add_verb(
        verbs,
        "fsck",
        fsck,
        "verify a namespace at rest, read-only",
        "hifc-admin fsck file:///var/tmp/kv.hifc --payload",
    )
    parser.add_argument("uri", metavar="URI")
    parser.add_argument("--payload", action="store_true", help="also read and verify every value")

    parser = add_verb(
        verbs,
        "list-keys",
        list_keys,
        "list the entries of a namespace",
        "hifc-admin list-keys file:///var/tmp/kv.hifc --limit 20",
    )
    parser.add_argument("uri", metavar="URI")
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many (default: all)")


def _size(written: str) -> int:
    try:
        return parse_size(written)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_namespace(arguments: argparse.Namespace) -> Result:
    device = target.parse(arguments.uri)
    wanted = target.confirm_id(device)
    if arguments.confirm != wanted:
        given = "it is missing" if arguments.confirm is None else f"it is {arguments.confirm!r}"
        fix = f"hifc-admin format {shlex.quote(arguments.uri)} --confirm {shlex.quote(wanted)}"
        problem = Problem(
            "not-confirmed",
            arguments.uri,
            f"--confirm must be {wanted!r}; {given}",
            fix=f"if that is the medium to erase: {fix}",
        )
        raise Failure(Exit.REFUSED, problem)
    target.refuse_if_in_use(device)
    if arguments.dry_run:
        step = f"lay an empty namespace on {arguments.uri}"
        return Result({"uri": arguments.uri, "steps": [step]}, [f"would {step}"])
    Namespace.format(
        arguments.uri,
        segment_size=arguments.segment_size,
        force=arguments.force,
        label=arguments.label,
    )
    with Namespace.open(arguments.uri, read_only=True) as namespace:
        data = {"uri": arguments.uri, **dataclasses.asdict(namespace.stats())}
    return Result(data, [f"formatted {arguments.uri}", *stats_lines(data)])


def info(arguments: argparse.Namespace) -> Result:
    with Namespace.open(arguments.uri, read_only=True) as namespace:
        data = {"uri": arguments.uri, **dataclasses.asdict(namespace.stats())}
    return Result(data, stats_lines(data))


def fsck(arguments: argparse.Namespace) -> Result:
    with Namespace.open(arguments.uri, read_only=True) as namespace:
        stats = namespace.stats()
        found = namespace.check(payload=arguments.payload)
    data = {
        "uri": arguments.uri,
        "payload": arguments.payload,
        "entries_checked": found.entries_checked,
        "problems": found.problems,
        "recovery_dropped": stats.recovery_dropped,
        "recovery_damaged": stats.recovery_damaged,
        "segments_damaged": stats.segments_damaged,
    }
    result = Result(data, text.pairs(data.items()))
    if found.problems:
        result.problems.append(Problem("check-failed", arguments.uri, found.first_problem))
    if stats.recovery_damaged or stats.segments_damaged:
        result.problems.append(
            Problem(
                "damaged",
                arguments.uri,
                "entries that had been acknowledged and flushed are lost",
                f"{stats.recovery_damaged} entries, {stats.segments_damaged} segments",
            )
        )
    if result.problems:
        result.exit = Exit.FAILED
    return result


def list_keys(arguments: argparse.Namespace) -> Result:
    with Namespace.open(arguments.uri, read_only=True) as namespace:
        entries = list(itertools.islice(_entries(namespace), arguments.limit))
    head = ("key", "length", "parts", "class", "heat")
    rows = [[entry[name] for name in head] for entry in entries]
    return Result({"uri": arguments.uri, "entries": entries}, text.table(head, rows))


def _entries(namespace: Namespace) -> Iterator[dict[str, Any]]:
    for entry in namespace.list():
        yield {
            "key": entry.key.hex(),
            "length": entry.length_bytes,
            "parts": entry.part_count,
            "class": entry.cls.name.lower(),
            "heat": entry.heat,
        }
