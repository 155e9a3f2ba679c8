# SPDX-License-Identifier: Apache-2.0
"""hifc-admin: parses, runs one verb, shows its result, and returns the exit code."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from hifc.device.device import device_uri
from hifc.errors import HiFCError
from hifc_admin.failures import failure_of
from hifc_admin.host import hugepages, install
from hifc_admin.parsing import (
    GroupedParser,
    Parser,
    add_common_options,
    refuse_ignored_options,
    refuse_unknown,
)
from hifc_admin.result import PROGRAM, Exit, Failure, Result, show_json, show_text
from hifc_admin.text import COLOR_CHOICES
from hifc_admin.verbs import bench as bench_verb
from hifc_admin.verbs import check as check_verbs
from hifc_admin.verbs import device as device_verbs
from hifc_admin.verbs import doctor as doctor_verb
from hifc_admin.verbs import erase as erase_verb
from hifc_admin.verbs import host as host_verbs
from hifc_admin.verbs import live as live_verbs
from hifc_admin.verbs import medium as medium_verbs
from hifc_admin.verbs import namespace as namespace_verbs
from hifc_admin.verbs import upkeep as upkeep_verbs
from hifc_admin.verbs import verify as verify_verb

_GROUPS = (
    host_verbs,
    hugepages,
    medium_verbs,
    erase_verb,
    namespace_verbs,
    check_verbs,
    device_verbs,
    live_verbs,
    upkeep_verbs,
    install,
    doctor_verb,
    bench_verb,
    verify_verb,
)

# What help and the manual page show, by what a verb is about.
VERB_GROUPS = {
    "drive": ("list", "bind", "unbind", "smart", "erase"),
    "namespace": ("format", "info", "list-keys", "dump", "fsck", "scrub", "bench"),
    "engine": ("top", "stats", "verify"),
    "host": ("doctor", "status", "hugepages", "install", "cleanup"),
}

EXIT_CODES = """exit codes:
  0  done
  1  failed, or damage was found
  2  wrong usage
  3  refused by a safety check, nothing was touched
  4  partly done, or done and not verified
  5  a privilege or something this needs is missing"""


def _version() -> str:
    try:
        return importlib.metadata.version("hifc")
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


def make_parser() -> Parser:
    parser = GroupedParser(
        prog=PROGRAM,
        description="Looks after HiFC namespaces and the devices they are on.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hifc-admin {_version()}")
    add_common_options(parser, is_verb=False)
    verbs = parser.add_subparsers(
        metavar="VERB", dest="verb", required=True, parser_class=Parser, title="verbs"
    )
    for group in _GROUPS:
        group.register(verbs)
    parser.verb_groups = VERB_GROUPS
    return parser


def _name_device(arguments: argparse.Namespace) -> None:
    """A path will do for a device URI. Where a socket may stand as well, a path of one stays."""
    device = getattr(arguments, "device", None)
    if isinstance(device, str) and device.startswith(("/", "./", "../")):
        arguments.device = device_uri(device)
    uri = getattr(arguments, "uri", None)
    if isinstance(uri, str) and uri.startswith(("/", "./", "../")):
        takes_sockets = arguments.verb in ("stats", "top")
        if not takes_sockets or Path(uri).is_file() or Path(uri).is_block_device():
            arguments.uri = device_uri(uri)


def run(arguments: argparse.Namespace) -> Result:
    """The verb's result; errors that people can act on become one, bugs stay exceptions."""
    try:
        refuse_ignored_options(arguments)
        _name_device(arguments)
        result: Result = arguments.run(arguments)
    except Failure as failure:
        return failure.result()
    except (HiFCError, OSError) as error:
        return failure_of(error, getattr(arguments, "uri", None) or arguments.verb).result()
    return result


def _announce(line: str) -> None:
    """What a verb is about to do, while it does it. stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    """The steps are in the JSON object."""


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Raises Failure for wrong usage."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(words)
    refuse_unknown(parser, arguments, unknown)
    return arguments


def _color_of(words: Sequence[str]) -> str:
    """What --color says, of words that could not be parsed."""
    written = " ".join(words).replace("--color=", "--color ")
    return next((choice for choice in COLOR_CHOICES if f"--color {choice}" in written), "auto")


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words:
        # Still wrong usage to a script, which forgot the verb: nothing on stdout, exit code 2.
        make_parser().print_help(sys.stderr)
        return Exit.USAGE
    try:
        arguments = _parse(words)
    except Failure as failure:
        result, verb, as_json = failure.result(), "usage", "--json" in words
        color = _color_of(words)
    else:
        arguments.command = [PROGRAM, *words]
        arguments.announce = _say_nothing if arguments.json else _announce
        result, verb, as_json = run(arguments), arguments.verb, arguments.json
        color = arguments.color
    try:
        if as_json:
            show_json(verb, result, sys.stdout)
        else:
            show_text(result, sys.stdout, sys.stderr, color)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) left: nobody to tell. Keep the interpreter from trying again.
        sys.stdout = None
    return int(result.exit)


if __name__ == "__main__":
    sys.exit(main())
