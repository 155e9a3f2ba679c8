# SPDX-License-Identifier: Apache-2.0
"""How a verb is declared: its parser, its help with an example, and the function that does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from hifc_admin.result import Exit, Failure, Problem, Result

Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"
Run = Callable[[argparse.Namespace], Result]


class Parser(argparse.ArgumentParser):
    """Reports wrong usage as a Failure, so that --json covers it as well."""

    def error(self, message: str) -> NoReturn:
        fix = f"{self.prog} --help"
        raise Failure(Exit.USAGE, Problem("usage", self.prog, message, fix=fix))


def add_json_option(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--json", action="store_true", default=default, help="print one JSON object instead of text"
    )


def add_verb(verbs: Verbs, name: str, run: Run, summary: str, example: str) -> Parser:
    parser = verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
    )
    # Also after the verb, where people look for it; SUPPRESS keeps what stood before it.
    add_json_option(parser, argparse.SUPPRESS)
    parser.set_defaults(run=run)
    return parser
