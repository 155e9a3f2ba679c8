# SPDX-License-Identifier: Apache-2.0
"""How a verb is declared: its parser, its help with an example, and the function that does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

from hifc_admin.result import Exit, Failure, Problem, Result

Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"
Run = Callable[[argparse.Namespace], Result]


# What the verbs on the host honour, see add_verb.
ALL_OPTIONS = ("dry_run", "sysroot")


class Parser(argparse.ArgumentParser):
    """Reports wrong usage as a Failure, so that --json covers it as well."""

    def error(self, message: str) -> NoReturn:
        fix = f"{self.prog} --help"
        raise Failure(Exit.USAGE, Problem("usage", self.prog, message, fix=fix))


def whole_number(least: int) -> Callable[[str], int]:
    """For argparse: a whole number that is at least so much."""

    def parse(written: str) -> int:
        if not written.isdecimal() or int(written) < least:
            raise argparse.ArgumentTypeError(f"{written!r} is no whole number from {least} on")
        return int(written)

    return parse


def _folder(written: str) -> str:
    """A misspelt one would look like a host without drives, and be made by what writes below it."""
    if not Path(written).is_dir():
        raise argparse.ArgumentTypeError(f"{written!r} is no folder")
    return written


def add_common_options(
    parser: argparse.ArgumentParser, *, is_verb: bool, honours: tuple[str, ...] = ALL_OPTIONS
) -> None:
    """Those that stand before or after the verb: SUPPRESS keeps what stood before it. Help shows
    only those that the verb honours; the others are known, so as to be refused by name."""

    def default(value: object) -> object:
        return argparse.SUPPRESS if is_verb else value

    def text(name: str, written: str) -> str:
        return written if name in honours else argparse.SUPPRESS

    parser.add_argument(
        "--json",
        action="store_true",
        default=default(False),
        help="print one JSON object instead of text",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        default=default(False),
        help=text("dry_run", "check everything and show the steps; change nothing"),
    )
    parser.add_argument(
        "--sysroot",
        metavar="DIR",
        type=_folder,
        default=default("/"),
        help=text("sysroot", "look at the files below DIR instead of at this host (default: /)"),
    )


def add_verb(
    verbs: Verbs,
    name: str,
    run: Run,
    summary: str,
    example: str,
    honours: tuple[str, ...] = (),
) -> Parser:
    """honours: which of "dry_run" and "sysroot" the verb acts on; with another one it is refused,
    since a verb that ignored them would change what was not to be changed."""
    parser = verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
    )
    add_common_options(parser, is_verb=True, honours=honours)
    parser.set_defaults(run=run, honours=honours)
    return parser


def refuse_ignored_options(arguments: argparse.Namespace) -> None:
    """Raises Failure for an option before the verb that the verb would ignore."""
    given = {"dry_run": arguments.dry_run, "sysroot": arguments.sysroot != "/"}
    for name, is_given in given.items():
        if is_given and name not in arguments.honours:
            option = f"--{name.replace('_', '-')}"
            detail = f"{arguments.verb} has no {option}"
            raise Failure(Exit.USAGE, Problem("usage", arguments.verb, detail, fix="leave it out"))
