# SPDX-License-Identifier: Apache-2.0
"""The transcript of docs/operating.md: runs its commands in order and shows what they say.

    tools/vm/run --shell 'python -P tests/vm/transcript.py'

prints it anew for the document, in a machine where nothing was done before. test_transcript.py runs
the same commands and compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hifc_admin.main import main

DOCUMENT = Path(__file__).parents[2] / "docs/operating.md"
HEADING = "## From a new drive to a namespace, and back"
USED_FOLDER = Path("/srv/data")
CODE = re.compile(r"\[exit code (\d+)\]")


@dataclass
class Step:
    """One command, what it said, and its exit code."""

    words: list[str]
    lines: list[str]
    code: int

    @property
    def text(self) -> str:
        shown = [f"$ {shlex.join(self.words)}", *self.lines]
        if self.code:
            shown.append(f"[exit code {self.code}]")
        return "\n".join(f"    {line}".rstrip() for line in shown) + "\n"


def documented() -> list[Step]:
    """The steps as the document has them."""
    _, _, rest = DOCUMENT.read_text().partition(f"{HEADING}\n")
    steps: list[Step] = []
    for line in rest.partition("\n## ")[0].splitlines():
        if line.startswith("    $ "):
            steps.append(Step(shlex.split(line.removeprefix("    $ ")), [], 0))
        elif line.startswith("    ") and steps:
            code = CODE.fullmatch(line.strip())
            if code is not None:
                steps[-1].code = int(code[1])
            else:
                steps[-1].lines.append(line.removeprefix("    "))
    return steps


def type_it(step: Step) -> Step:
    """The same command now, as a user would run it."""
    pipe = subprocess.PIPE
    done = subprocess.run(step.words, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False)
    return Step(step.words, done.stdout.splitlines(), done.returncode)


def run(step: Step) -> Step:
    """The same in this process: an emulated CPU takes seconds to start one."""
    program, *words = step.words
    assert program == "hifc-admin"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    return Step(step.words, said.getvalue().splitlines(), code)


@contextlib.contextmanager
def data_in_use(partition: Path) -> Iterator[None]:
    """The drive with somebody's files, mounted where the document has them."""
    USED_FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-o", "ro", partition, USED_FOLDER], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", USED_FOLDER], check=True)


if __name__ == "__main__":
    (used,) = Path("/dev").glob("nvme*n1p1")
    with data_in_use(used):
        for each in documented():
            print(type_it(each).text, flush=True)
