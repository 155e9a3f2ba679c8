# SPDX-License-Identifier: Apache-2.0
"""hifc-admin: parses, runs one verb, shows its result, and returns the exit code."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from hifc.errors import HiFCError
from hifc_admin import device_verbs, live_verbs, namespace_verbs
from hifc_admin.failures import failure_of
from hifc_admin.parsing import Parser, add_json_option
from hifc_admin.result import Failure, Result, show_json, show_text

EXIT_CODES = """exit codes:
  0  done
  1  failed
  2  wrong usage
  3  refused by a safety check, nothing was touched
  4  partly done, or done and not verified
  5  a privilege or something this needs is missing"""


def make_parser() -> Parser:
    parser = Parser(
        prog="hifc-admin",
        description="Looks after HiFC namespaces and the devices they are on.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"hifc-admin {importlib.metadata.version('hifc')}"
    )
    add_json_option(parser, False)
    verbs = parser.add_subparsers(
        metavar="VERB", dest="verb", required=True, parser_class=Parser, title="verbs"
    )
    for group in (namespace_verbs, device_verbs, live_verbs):
        group.register(verbs)
    return parser


def run(arguments: argparse.Namespace) -> Result:
    """The verb's result; errors that people can act on become one, bugs stay exceptions."""
    try:
        result: Result = arguments.run(arguments)
    except Failure as failure:
        return failure.result()
    except (HiFCError, OSError) as error:
        return failure_of(error, arguments.uri).result()
    return result


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    try:
        arguments = make_parser().parse_args(words)
    except Failure as failure:
        result, verb, as_json = failure.result(), "usage", "--json" in words
    else:
        result, verb, as_json = run(arguments), arguments.verb, arguments.json
    try:
        if as_json:
            show_json(verb, result, sys.stdout)
        else:
            show_text(result, sys.stdout, sys.stderr)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) left: nobody to tell. Keep the interpreter from trying again.
        sys.stdout = None
    return int(result.exit)


if __name__ == "__main__":
    sys.exit(main())
