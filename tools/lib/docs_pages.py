# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the documentation's site: guides as they are, and the references.

    python docs_pages.py FOLDER

The guides are README.md and docs/*.md. The reference of Python names what mkdocstrings is to read;
that of C is made of the comments in driver/include; that of hifc-admin of its help. Exits with 1
where a public name is not documented or a link leads to a file that is not there.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import inspect
import io
import re
import shutil
import sys
from pathlib import Path

import hifc

REPOSITORY = Path(__file__).resolve().parents[2]
HEADERS = ("hifc.h", "hifc_device.h", "hifc_ring.h")
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]+)?\)")

problems: list[str] = []


# ---- guides


def page_of(path: Path) -> str | None:
    """The page that a file of the repository becomes, if it does."""
    name = str(path.relative_to(REPOSITORY))
    if name in PAGES:
        return PAGES[name]
    if path.parent == REPOSITORY / "docs" and path.suffix == ".md":
        return path.name
    return "c.md" if path.parent == REPOSITORY / "driver/include" else None


def guide(source: Path) -> str:
    """Its text with links that hold within the site; others become the name of the file."""

    def relink(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (source.parent / target).resolve()
        if not path.exists():
            problems.append(f"{source.relative_to(REPOSITORY)}: {target} does not exist")
            return match[0]
        page = page_of(path)
        return f"[{text}]({page}{anchor})" if page else f"`{path.relative_to(REPOSITORY)}`"

    return LINK.sub(relink, source.read_text(encoding="utf-8"))


# ---- Python


def members(cls: type) -> list[str]:
    """Public methods and properties that a class defines itself."""
    return [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    ]


def python_page() -> str:
    """All public names, each for mkdocstrings at the place where it is defined."""
    lines = [
        "# Python",
        "",
        "The public names of the package `hifc`, in the order of `hifc.__all__`. All of them are",
        "imported from `hifc` itself.",
        "",
    ]
    for name in [*hifc.__all__, "HiFCCache"]:
        value = getattr(hifc, name)
        if inspect.ismodule(value):
            lines += [f"::: {value.__name__}", ""]
            continue
        if not inspect.getdoc(value):
            problems.append(f"hifc.{name} has no docstring")
        if inspect.isclass(value) and value.__module__.startswith("hifc"):
            problems.extend(
                f"hifc.{name}.{member} has no docstring"
                for member in members(value)
                if not inspect.getdoc(getattr(value, member))
            )
        lines += [f"::: {home_of(name, value)}", ""]
    return "\n".join(lines)


def home_of(name: str, value: object) -> str:
    """The dotted place where a name is defined, which a static reader finds."""
    module = getattr(value, "__module__", "") or ""
    if not module.startswith("hifc") or not hasattr(importlib.import_module(module), name):
        found = next(
            key
            for key in sorted(sys.modules)
            if key.startswith("hifc.") and getattr(sys.modules[key], name, None) is value
        )
        return f"{found}.{name}"
    return f"{module}.{name}"


# ---- C

COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)


def plain(comment: str) -> str:
    """The text of a comment without its stars."""
    lines = [re.sub(r"^\s*\*? ?", "", line) for line in comment.strip().splitlines()]
    return "\n".join(lines).strip()


def prose_lines(prose: str) -> list[str]:
    """Paragraphs as they flow; what is set out in columns stays so."""
    lines = []
    for paragraph in prose.split("\n\n"):
        columns = re.search(r"^  +\S", paragraph, re.MULTILINE)
        shown = html.escape(paragraph, quote=False)
        lines += ["```text", paragraph, "```", ""] if columns else [shown, ""]
    return lines


def c_page() -> str:
    """Each header: its opening comment, then sections of declarations with their comments."""
    lines = ["# C", "", "The headers that are installed with the library, in their own words.", ""]
    for header in HEADERS:
        text = (REPOSITORY / "driver/include" / header).read_text(encoding="utf-8")
        opening, _, body = text.partition("*/")
        prose = plain(opening.replace("/* SPDX-License-Identifier: Apache-2.0", "", 1))
        lines += [f"## {header}", "", *prose_lines(prose)]
        for block in re.split(r"\n{2,}", body):
            lines += c_block(header, block.strip("\n"))
    return "\n".join(lines)


def c_block(header: str, block: str) -> list[str]:
    """One run of lines without an empty one between."""
    section = re.match(r"/\* -{2,} (.*?) -{2,} \*/\s*", block)
    out = []
    if section:
        out = [f"### {section[1][0].upper()}{section[1][1:]}", ""]
        block = block[section.end() :].strip("\n")
    code = COMMENT.sub("", block)
    commented = False
    for declaration in COMMENT.sub("\1", block).split(";"):
        name = re.search(r"HIFC_API[\s\w*]*?\b(hifc_\w+)\(", declaration)
        commented = commented or "\1" in declaration  # neighbours share the comment above the first
        if name and not commented:
            problems.append(f"{header}: {name[1]} has no comment")
    if re.search(r"\b(struct|enum|#define|typedef|HIFC_API)\b|#define", code) and not re.match(
        r"#(ifndef|ifdef|include|endif)|extern \"C\"|}", block
    ):
        out += ["```c", block, "```", ""]
    return out


# ---- hifc-admin


def help_of(*words: str) -> str:
    from hifc_admin.main import make_parser

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        make_parser().parse_args([*words, "--help"])
    return out.getvalue().rstrip()


def admin_page() -> str:
    """The help of hifc-admin and of each of its verbs."""
    from hifc_admin.main import VERB_GROUPS

    lines = ["# hifc-admin", "", "```text", help_of(), "```", ""]
    for verbs in VERB_GROUPS.values():
        for verb in verbs:
            lines += [f"## {verb}", "", "```text", help_of(verb), "```", ""]
    return "\n".join(lines)


def main(folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in [*map(Path, PAGES), *sorted((REPOSITORY / "docs").glob("*.md"))]:
        path = REPOSITORY / source
        (folder / (page_of(path) or path.name)).write_text(guide(path), encoding="utf-8")
    for name, make in (("python.md", python_page), ("c.md", c_page), ("hifc-admin.md", admin_page)):
        (folder / name).write_text(make(), encoding="utf-8")
    for problem in problems:
        print(f"docs: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
