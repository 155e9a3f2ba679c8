# SPDX-License-Identifier: Apache-2.0
"""The manual page, completions, help and table of settings: nothing that the code knows is
missing."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hifc import Config
from hifc_admin.main import make_parser

DOCS = Path(__file__).parents[2] / "docs"
REMEDY = "run tools/reference_docs"


def verbs() -> dict[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    found = next(a for a in actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}


@pytest.mark.parametrize("name", verbs())
def test_the_manual_has_every_verb_and_option(name: str) -> None:
    page = (DOCS / "hifc-admin.1").read_text().replace("\\-", "-")
    sections = re.split(r"^\.SS ", page, flags=re.M)
    (section,) = (s for s in sections if re.match(rf"{name}(?![\w-])", s))
    shared = options(make_parser())
    for option in options(verbs()[name]):
        where = page if option in shared else section
        assert re.search(rf"\\fB{option}(?![\w-])", where), f"{name} {option}: {REMEDY}"


@pytest.mark.parametrize("file", ["hifc-admin", "_hifc-admin"])
def test_completions_have_every_verb_and_option(file: str) -> None:
    script = (DOCS / "completion" / file).read_text()
    for name, parser in verbs().items():
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", script), f"{name}: {REMEDY}"
        for option in options(parser):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", script), f"{option}: {REMEDY}"


def test_bash_takes_its_completion() -> None:
    subprocess.run(["bash", "-n", DOCS / "completion/hifc-admin"], check=True, timeout=300)


def test_bash_completes_a_verb() -> None:
    script = f"""
        source {DOCS}/completion/hifc-admin
        COMP_WORDS=(hifc-admin er) COMP_CWORD=1 COMP_LINE="hifc-admin er"
        _shtab_hifc_admin
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["erase"]


@pytest.mark.skipif(shutil.which("man") is None, reason="there is no man here")
def test_man_has_nothing_to_say_against_the_page() -> None:
    words = ["man", "--warnings", "-l", "-E", "UTF-8", str(DOCS / "hifc-admin.1")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    assert "Take everything off a device." in done.stdout


@pytest.mark.parametrize("name", verbs())
def test_help_has_an_example(name: str) -> None:
    text = verbs()[name].format_help()
    assert f"example: hifc-admin {name}" in " ".join(text.split())


def test_the_table_of_settings_is_the_configuration() -> None:
    lines = re.findall(r"^\| `.*$", (DOCS / "settings.md").read_text(), flags=re.M)
    rows = [line.strip("| ").split(" | ") for line in lines]
    settings = [dataclasses.astuple(setting) for setting in Config.settings()]
    assert rows == [[f"`{s[0]}`", f"`{s[1]}`", *s[2:]] for s in settings], REMEDY
