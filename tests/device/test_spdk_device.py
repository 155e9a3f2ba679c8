# SPDX-License-Identifier: Apache-2.0
"""The C tests of the SPDK device, each in a process of its own, against targets on loopback.

They are device_spdk (tests/device/spdk.c) and unit_device, the table that every device has to pass.
HIFC_C_TESTS names the folder where a build with SPDK left them; tools/test sets it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Nvmf

pytestmark = pytest.mark.spdk

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 900  # of a hang
SLOW = {
    "an_idle_device_is_kept_alive",
    "a_stopped_target_times_out_and_comes_back",
    "a_stopped_target_can_be_left",
}


def _names(source: str, using: str = "") -> list[str]:
    """The tests in a C file whose bodies contain `using`."""
    text = (REPOSITORY / "tests" / source).read_text()
    found = re.findall(r"^TEST\((\w+)\)\n(.*?)^}", text, re.MULTILINE | re.DOTALL)
    return [name for name, body in found if using in body]


def _program(name: str) -> str:
    folder = os.environ.get("HIFC_C_TESTS", "")
    program = Path(folder, name)
    if not folder or not program.exists():
        reason = f"no {name}: HIFC_C_TESTS must name the C tests of a build with SPDK"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(program)


def _run(program: str, tests: list[str], **environment: str) -> None:
    command = [_program(program), *tests]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Of SPDK's own words nothing may reach stdout.
    assert re.fullmatch(r"\d+ passed, 0 failed\n", done.stdout), done.stdout


@pytest.fixture
def target(nvmf: Nvmf, tmp_path: Path) -> Iterator[Any]:
    """A target of 64 MiB of its own, since tests stop and kill it."""
    target = nvmf.start(tmp_path / "disk.img", size_bytes=64 << 20)
    yield target
    nvmf.stop(target.port)


@pytest.mark.parametrize("block_size", [4096, 512])
def test_the_device_table_passes_on_a_target(nvmf: Nvmf, tmp_path: Path, block_size: int) -> None:
    target = nvmf.start(tmp_path / "disk.img", size_bytes=8 << 20, block_size=block_size)
    _run("unit_device", _names("unit/device.c", using="FOR_EACH (c)"), HIFC_TEST_URIS=target.uri)
    nvmf.stop(target.port)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in _names("device/spdk.c")
    ],
)
def test_c(nvmf: Nvmf, target: Any, tmp_path: Path, name: str) -> None:
    # The successor of a target that the test killed. It is started in the background, since it
    # must not hold the pipe, and stopped by the fixture.
    restart = tmp_path / "restart"
    restart.write_text(
        f"""#!/bin/sh
{sys.executable} {REPOSITORY}/tools/nvmf_target start --backing {target.backing} \\
    --port {target.port} --block-size {target.block_size} >&2 </dev/null || exit 1
cat {nvmf.module.run_dir(target.port)}/pid
"""
    )
    restart.chmod(0o700)
    _run(
        "device_spdk",
        [name],
        HIFC_TEST_URIS=target.uri,
        HIFC_TEST_PID=str(nvmf.pid(target.port)),
        HIFC_TEST_RESTART=str(restart),
    )
