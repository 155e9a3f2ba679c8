# SPDX-License-Identifier: Apache-2.0
"""How a verb is declared: its parser, its help with an example, and the function that does it."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from hifc_admin import text
from hifc_admin.result import Exit, Failure, Problem, Result

Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"
Run = Callable[[argparse.Namespace], Result]


# What the verbs on the host honour, see add_verb.
ALL_OPTIONS = ("dry_run", "sysroot")
HELP_COLUMNS = 78
URI_HELP = (
    "the device: file:///PATH, file:///dev/NODE, spdk://BDF?ns=1, spdk+tcp://ADDR:PORT/NQN?ns=1 or "
    "ram://NAME; quote it, since shells take ? and & for their own"
)


class Parser(argparse.ArgumentParser):
    """Reports wrong usage as a Failure, so that --json covers it as well."""

    def error(self, message: str) -> NoReturn:
        self.fail(message, f"{self.prog} --help")

    def fail(self, message: str, fix: str) -> NoReturn:
        """Raises the Failure of wrong usage."""
        raise Failure(Exit.USAGE, Problem("usage", self.prog, message, fix=fix))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names what was probably meant, where argparse lists all that there is."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), known)
        if isinstance(action, argparse._SubParsersAction):
            fix = f"{self.prog} --help lists the verbs"
            self.fail(f"there is no verb {value!r}{hint}", fix)
        name = argparse._get_action_name(action)
        self.fail(f"{name} cannot be {value!r}{hint}", f"use {', '.join(known)}")


class GroupedParser(Parser):
    """The parser of the program: its help shows the verbs in groups, which argparse cannot."""

    verb_groups: Mapping[str, Sequence[str]] = {}

    def format_help(self) -> str:
        shown = {
            choice.dest: choice
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for choice in action._choices_actions
        }
        options = [
            action for action in self._actions if not isinstance(action, argparse._SubParsersAction)
        ]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, names in self.verb_groups.items():
            formatter.start_section(title)
            formatter.add_arguments([shown[name] for name in names])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(options)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def did_you_mean(written: str, known: Iterable[str]) -> str:
    """A question to append to a message; empty where nothing that is known looks like it."""
    near = difflib.get_close_matches(written, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def refuse_unknown(parser: Parser, arguments: argparse.Namespace, unknown: Sequence[str]) -> None:
    """Raises Failure for words that neither the program nor the verb knows."""
    if not unknown:
        return
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    verb = verbs.choices[arguments.verb]
    options = [word for word in unknown if word.startswith("-")]
    if not options:
        verb.error(f"{' '.join(unknown)!r} is too much: the arguments before it are all")
    known = [name for action in verb._actions for name in action.option_strings]
    name = options[0].partition("=")[0]
    verb.error(f"there is no option {name}{did_you_mean(name, known)}")


def whole_number(least: int) -> Callable[[str], int]:
    """For argparse: a whole number that is at least so much."""

    def parse(written: str) -> int:
        if not written.isdecimal() or int(written) < least:
            raise argparse.ArgumentTypeError(f"{written!r} is not a whole number from {least} on")
        return int(written)

    return parse


def _folder(written: str) -> str:
    """A misspelt one would look like a host without drives, and be made by what writes below it."""
    if not Path(written).is_dir():
        raise argparse.ArgumentTypeError(f"{written!r} is not a folder")
    return written


def add_common_options(
    parser: argparse.ArgumentParser, *, is_verb: bool, shows: tuple[str, ...] = ALL_OPTIONS
) -> None:
    """Those that stand before or after the verb: SUPPRESS keeps what stood before it. Help shows
    only those named; the others are known, so as to be refused by name where they would be
    ignored."""

    def default(value: object) -> object:
        return argparse.SUPPRESS if is_verb else value

    def shown(name: str, written: str) -> str:
        return written if name in shows else argparse.SUPPRESS

    parser.add_argument(
        "--json",
        action="store_true",
        default=default(False),
        help="print one JSON object instead of text",
    )
    parser.add_argument(
        "--color",
        choices=text.COLOR_CHOICES,
        default=default("auto"),
        help="colour the text (default: auto, on a terminal unless NO_COLOR is set)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        default=default(False),
        help=shown("dry_run", "check everything and show the steps; change nothing"),
    )
    parser.add_argument(
        "--sysroot",
        metavar="DIR",
        type=_folder,
        default=default("/"),
        help=shown("sysroot", "look at the files below DIR instead of at this host (default: /)"),
    )


def add_verb(
    verbs: Verbs,
    name: str,
    run: Run,
    summary: str,
    example: str,
    honours: tuple[str, ...] = (),
    *,
    reads_only: bool = False,
) -> Parser:
    """honours: which of "dry_run" and "sysroot" the verb acts on; with another one it is refused,
    since a verb that ignored them would change what was not to be changed. reads_only: the verb
    changes nothing, so its help leaves these options out."""
    parser = verbs.add_parser(
        name,
        help=summary,
        description=textwrap.fill(summary[0].upper() + summary[1:] + ".", HELP_COLUMNS),
        epilog=f"example:\n{textwrap.indent(wrapped(example), '  ')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_options(parser, is_verb=True, shows=() if reads_only else honours)
    parser.set_defaults(run=run, honours=honours)
    return parser


def add_uri(parser: argparse.ArgumentParser, more: str = "", **options: Any) -> None:
    """The positional argument that names a device. more: what the help says besides."""
    help_text = f"{URI_HELP}; {more}" if more else URI_HELP
    parser.add_argument("uri", metavar="URI", help=help_text, **options)


def wrapped(command: str) -> str:
    """A command over several lines that can be pasted: broken before options, with backslashes."""
    words = re.findall(r"(?:'[^']*'|\S)+", command)
    parts = [words[0]]
    for before, word in itertools.pairwise(words):
        if word.startswith("-") or not before.startswith("-"):
            parts.append(word)
        else:
            parts[-1] += f" {word}"  # an option stays with its value
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + len(" ") > HELP_COLUMNS - len("   \\"):
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}"
    return " \\\n".join(lines)


def refuse_ignored_options(arguments: argparse.Namespace) -> None:
    """Raises Failure for an option before the verb that the verb would ignore."""
    given = {"dry_run": arguments.dry_run, "sysroot": arguments.sysroot != "/"}
    for name, is_given in given.items():
        if is_given and name not in arguments.honours:
            option = f"--{name.replace('_', '-')}"
            detail = f"{arguments.verb} has no {option}"
            raise Failure(Exit.USAGE, Problem("usage", arguments.verb, detail, fix="leave it out"))
