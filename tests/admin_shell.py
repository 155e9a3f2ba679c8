# SPDX-License-Identifier: Apache-2.0
"""hifc-admin as the tests call it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hifc_admin.main import main


class Shell:
    """Runs hifc-admin in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *options: str) -> None:
        self.capsys = capsys
        self.options = options  # before the verb
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        self.capsys.readouterr()
        code = main((*self.options, *words))
        self.out, self.err = self.capsys.readouterr()
        return code

    def json(self, *words: str) -> tuple[int, dict[str, Any]]:
        code = self("--json", *words)
        document: dict[str, Any] = json.loads(self.out)
        assert set(document) == {"schema", "ok", "data", "problems"}
        assert document["ok"] == (code == 0)
        assert self.err == ""
        return code, document


def code_of(document: dict[str, Any]) -> str:
    """The only problem's code."""
    (problem,) = document["problems"]
    assert set(problem) == {"code", "severity", "subject", "detail", "evidence", "fix"}
    return str(problem["code"])
