# SPDX-License-Identifier: Apache-2.0
"""install: puts the files of udev/ in place, so that members of group hifc use bound drives without
root, and lets the running system know.

Files that say the same already are left alone. Programs of the system that are not there are left
out: what they would do happens at the next boot.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import shutil
import sys
from pathlib import Path

from hifc_admin.host import accounts
from hifc_admin.host import system as systems
from hifc_admin.host.plan import Plan
from hifc_admin.host.system import System
from hifc_admin.parsing import ALL_OPTIONS, Verbs, add_verb
from hifc_admin.result import Exit, Failure, Problem, Result, Severity
from hifc_admin.verbs.host import require_root

SYSUSERS = "/etc/sysusers.d/hifc.conf"
TMPFILES = "/etc/tmpfiles.d/hifc.conf"
UNITS = "/etc/systemd/system"
FILES = {
    "60-hifc.rules": "/etc/udev/rules.d/60-hifc.rules",
    "hifc-modules.conf": "/etc/modules-load.d/hifc.conf",
    "hifc-sysusers.conf": SYSUSERS,
    "hifc-tmpfiles.conf": TMPFILES,
    "hifc-limits.conf": "/etc/security/limits.d/hifc.conf",
    "hifc-bind@.service": f"{UNITS}/hifc-bind@.service",
}
DROP_IN = "hifc-locked-memory.conf"
# systemd applies it to every service whose name begins so.
SERVICES = "hifc-.service"
RUN_FOLDER = "/run/hifc"
# What is there while a daemon runs, and how to tell it.
_DAEMONS = {
    "/run/udev/control": ["udevadm", "control", "--reload"],
    "/run/systemd/system": ["systemctl", "daemon-reload"],
}


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "install",
        install,
        "let members of group hifc use bound drives without root",
        "hifc-admin install --user kv --service vllm.service",
        honours=ALL_OPTIONS,
    )
    parser.add_argument(
        "--user",
        metavar="NAME",
        action="append",
        default=[],
        help="also make this user a member of group hifc (may be repeated)",
    )
    parser.add_argument(
        "--service",
        metavar="UNIT",
        action="append",
        default=[],
        help="also let this service lock memory (may be repeated); hifc-*.service may anyway",
    )


def install(arguments: argparse.Namespace) -> Result:
    system = systems.of(arguments)
    require_root(system, arguments)
    plan, problems = Plan("install"), []
    for source, name in FILES.items():
        plan.put(system, name, text_of(source))
    for unit in (SERVICES, *arguments.service):
        if not unit.endswith(".service") or "/" in unit:
            detail = f"{unit!r} is no name of a service"
            raise Failure(Exit.USAGE, Problem("usage", unit, detail, fix="write NAME.service"))
        plan.put(system, f"{UNITS}/{unit}.d/50-{DROP_IN}", text_of(DROP_IN))
    problems += _plan_programs(plan, system, arguments.user)
    data: dict[str, object] = {"steps": plan.lines()}
    data["changed"] = bool(plan.steps) and not arguments.dry_run
    if arguments.dry_run:
        return Result(data, plan.would(), problems)
    plan.run(arguments.announce)
    return Result(data, ["installed" if plan.steps else "all is in place already"], problems)


def _plan_programs(plan: Plan, system: System, users: list[str]) -> list[Problem]:
    """Makes what was installed effective now. Problems: what waits for a boot."""
    written = bool(plan.steps)
    commands: list[list[str]] = []
    if accounts.find_group(system, accounts.HIFC_GROUP) is None:
        commands.append(["systemd-sysusers", SYSUSERS])
        if not system.has_program("systemd-sysusers"):
            commands[-1] = ["groupadd", "--system", accounts.HIFC_GROUP]
    for user in users:
        if accounts.HIFC_GROUP not in accounts.find_user(system, user).groups:
            commands.append(["usermod", "--append", "--groups", accounts.HIFC_GROUP, user])
    if not system.exists(RUN_FOLDER):
        commands.append(["systemd-tmpfiles", "--create", TMPFILES])
        if not system.has_program("systemd-tmpfiles"):
            words = ["install", "-d", "-g", accounts.HIFC_GROUP, "-m", "2775", RUN_FOLDER]
            commands[-1] = words
    if written:
        # Those that run read their files again; others will when they start.
        commands += [words for folder, words in _DAEMONS.items() if system.exists(folder)]
    waiting = []
    for words in commands:
        if system.has_program(words[0]):
            plan.add(f"run {shlex.join(words)}", functools.partial(system.run, *words))
        elif system.is_real:
            waiting.append(words)
    return [
        Problem(
            "not-now",
            "install",
            f"{words[0]} is not installed, so this waits for the next boot: {shlex.join(words)}",
            severity=Severity.WARNING,
        )
        for words in waiting
    ]


def text_of(source: str) -> str:
    """A file of udev/, with the path of this program filled in."""
    return (folder() / source).read_text().replace("@HIFC_ADMIN@", own_command())


def folder() -> Path:
    """Inside the package where it is installed; in a checkout, at its top."""
    installed = Path(__file__).parents[1] / "udev"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "udev"


def own_command() -> str:
    """How a service starts this program."""
    program = Path(sys.argv[0])
    if program.name == "hifc-admin":
        found = program if program.is_absolute() else Path(shutil.which("hifc-admin") or program)
        return str(found.resolve())
    return f"{sys.executable} -m hifc_admin"
