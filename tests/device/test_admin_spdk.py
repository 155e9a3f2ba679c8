# SPDX-License-Identifier: Apache-2.0
"""hifc-admin through a real SPDK queue pair."""

from __future__ import annotations

import pytest

from admin_shell import Shell, code_of
from hifc_admin.result import Exit

pytestmark = pytest.mark.spdk


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def test_format_info_fsck_smart(admin: Shell, nvmf_uri: str) -> None:
    nqn = nvmf_uri.split("/")[-1].split("?")[0]
    code, document = admin.json("format", nvmf_uri, "--confirm", nqn)
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    code, document = admin.json("format", nvmf_uri, "--confirm", f"{nqn}/1", "--label", "loop")
    assert code == 0
    assert document["data"]["label"] == "loop"
    assert admin.json("info", nvmf_uri)[1]["data"]["label"] == "loop"
    assert admin.json("fsck", nvmf_uri, "--payload")[0] == 0
    code, document = admin.json("smart", nvmf_uri)
    assert code == 0
    assert document["data"]["percentage_used"] in range(101)
