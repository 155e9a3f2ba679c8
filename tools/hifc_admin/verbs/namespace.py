# SPDX-License-Identifier: Apache-2.0
"""The verbs that show a namespace: info, list-keys, dump. None of them changes anything."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hifc.device import device
from hifc.device.device import DeviceInfo, SanitizeState
from hifc.namespace.namespace import Namespace
from hifc.namespace.state import Entry
from hifc.native_lib import layouts
from hifc_admin import scan, text
from hifc_admin.engine.stats_text import device_lines, namespace_lines
from hifc_admin.parsing import Verbs, add_uri, add_verb, whole_number
from hifc_admin.result import Exit, Failure, Problem, Result
from hifc_admin.verbs.medium import size

DUMP_LINE_BYTES = 16


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "info", info, "show a namespace", "hifc-admin info file:///var/tmp/kv.hifc"
    )
    add_uri(parser)

    parser = add_verb(
        verbs,
        "list-keys",
        list_keys,
        "list the entries of a namespace",
        "hifc-admin list-keys file:///var/tmp/kv.hifc --limit 20",
    )
    add_uri(parser)
    parser.add_argument(
        "--limit", metavar="N", type=whole_number(0), help="at most so many (default: all)"
    )

    parser = add_verb(
        verbs,
        "dump",
        dump,
        "show one value, verified",
        "hifc-admin dump file:///var/tmp/kv.hifc 6b65792d30303031000000000000000f",
    )
    add_uri(parser)
    parser.add_argument("key", metavar="KEY", type=_key, help="32 hexadecimal digits")
    parser.add_argument(
        "--limit",
        metavar="BYTES",
        type=size,
        default=256,
        help="show at most so many bytes (default: %(default)s)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the whole value to FILE")


def _key(written: str) -> bytes:
    try:
        key = bytes.fromhex(written)
    except ValueError:
        key = b""
    if len(key) != layouts.KEY_BYTES:
        raise argparse.ArgumentTypeError(f"{written!r} is not 32 hexadecimal digits")
    return key


def info(arguments: argparse.Namespace) -> Result:
    uri = arguments.uri
    with scan.look(uri) as namespace:
        stats = dataclasses.asdict(namespace.stats())
    below = _describe(device.device_info(uri))
    data = {"uri": uri, **stats, "device": below}
    return Result(data, [uri, *namespace_lines(stats), *device_lines(below)])


def _describe(found: DeviceInfo) -> dict[str, Any]:
    names = ("model", "serial", "firmware", "nsid", "eui64", "nguid", "size_bytes", "lba_bytes")
    return {name: getattr(found, name) for name in names} | {
        "flags": [flag.name.lower() for flag in found.flags if flag.name],
        "sanitized": found.sanitize.action if found.sanitize.state is SanitizeState.DONE else "",
    }


def list_keys(arguments: argparse.Namespace) -> Result:
    with scan.look(arguments.uri) as namespace:
        entries = list(itertools.islice(_entries(namespace), arguments.limit))
    head = ("key", "length", "parts", "class", "heat")
    rows = [[entry[name] for name in head] for entry in entries]
    lines = text.table([name.upper() for name in head], rows)
    if not entries:
        shown = "no entry is shown: --limit is 0" if arguments.limit == 0 else "it has no entries"
        lines = [f"{arguments.uri}: {shown}"]
    return Result({"uri": arguments.uri, "entries": entries}, lines)


def _entries(namespace: Namespace) -> Iterator[dict[str, Any]]:
    for entry in namespace.list():
        yield _fields(entry)


def _fields(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key.hex(),
        "length": entry.length_bytes,
        "parts": entry.part_count,
        "class": entry.cls.name.lower(),
        "heat": entry.heat,
    }


def dump(arguments: argparse.Namespace) -> Result:
    uri, key = arguments.uri, arguments.key
    with scan.look(uri) as namespace:
        entry = next((entry for entry in namespace.list() if entry.key == key), None)
    if entry is None:
        detail = f"there is no value under key {key.hex()}"
        fix = f"hifc-admin list-keys {shlex.quote(uri)}"
        raise Failure(Exit.FAILED, Problem("not-found", uri, detail, fix=fix))
    value = _read(uri, entry)
    data: dict[str, Any] = {"uri": uri, **_fields(entry)}
    lines = text.pairs(data.items())
    if arguments.output:
        Path(arguments.output).write_bytes(value)
        data["output"] = arguments.output
        return Result(data, [*lines, f"written to {arguments.output}"])
    shown = value[: arguments.limit]
    data["hex"] = shown.hex()
    lines += ["", *_hex_lines(shown)]
    if len(shown) < len(value):
        lines.append(f"... {len(value) - len(shown)} more bytes; --output FILE writes all")
    return Result(data, lines)


def _read(uri: str, entry: Entry) -> bytes:
    """The value, or Failure where it does not match its checksum."""
    pool_bytes = scan.pool_size(entry.length_bytes)
    with Namespace.open(uri, read_only=True, pool_size=pool_bytes) as namespace:
        value = namespace.get(entry.key)
    if value is None:
        detail = f"the value under key {entry.key.hex()} does not match its checksum"
        fix = f"hifc-admin fsck {shlex.quote(uri)} --payload shows what else is hit"
        raise Failure(Exit.FAILED, Problem("corrupt", uri, detail, fix=fix))
    return value.tobytes()


def _hex_lines(value: bytes) -> Iterator[str]:
    for at in range(0, len(value), DUMP_LINE_BYTES):
        line = value[at : at + DUMP_LINE_BYTES]
        plain = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        yield f"{at:08x}  {line.hex(' '):<{3 * DUMP_LINE_BYTES - 1}}  {plain}"
