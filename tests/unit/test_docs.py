# SPDX-License-Identifier: Apache-2.0
"""The Python of the documentation runs as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from byte_model import make_model

ROOT = Path(__file__).parents[2]


def blocks() -> list[tuple[str, str]]:
    """(where, source) of every block marked as Python."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            found.append((f"{path.relative_to(ROOT)}:{line}", match[1]))
    return found


@pytest.mark.parametrize(("where", "source"), blocks(), ids=[where for where, _ in blocks()])
def test_python_in_the_documentation(where: str, source: str, tmp_path: Path) -> None:
    source = source.replace("/var/tmp/", f"{tmp_path}/").replace("8GiB", "256MiB")
    if "path/of/a/model" in source:
        make_model(tmp_path / "model")
        (tmp_path / "long.txt").write_text("A long text, as texts go. " * 40)
        source = source.replace("path/of/a/model", f"{tmp_path}/model")
        source = source.replace("long.txt", f"{tmp_path}/long.txt")
    exec(compile(source, where, "exec"), {"__name__": "__main__"})


def test_links_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert "://" in link or (path.parent / link).exists(), f"{path}: {link}"


def test_links_of_the_readme_say_where_they_lead() -> None:
    # A package index shows the README where its relative links lead nowhere.
    for text, link in re.findall(r"\[([^]]+)\]\(([^)#]+)", (ROOT / "README.md").read_text()):
        assert "://" in link or text == link, (text, link)


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*")]
    files += [path for folder in ("hifc", "tools") for path in (ROOT / folder).rglob("*.py")]
    named = {
        extra: path
        for path in files
        if path.is_file()
        for extra in re.findall(r"pip install[^\n`]*?(?:hifc|\.)\[([a-z]+)\]", path.read_text())
    }
    assert {"verify", "transformers", "cupy", "bench"} <= set(named)
    for extra, path in named.items():
        assert extra in project["optional-dependencies"], (extra, path)


def test_the_licence_is_whole_and_goes_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_has_the_version_that_is_built() -> None:
    version = re.search(r"project\(hifc VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert version is not None
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert version[1] in headings
