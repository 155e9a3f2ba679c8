# SPDX-License-Identifier: Apache-2.0
"""The Python of the documentation runs as it stands there."""

from __future__ import annotations

import re
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
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert "://" in link or (path.parent / link).exists(), f"{path}: {link}"
