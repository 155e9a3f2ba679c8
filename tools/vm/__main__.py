# SPDX-License-Identifier: Apache-2.0
"""Boots the machine, passes its output on, and ends with its result. See tools/vm/run."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from vm import apt, drives, initramfs, kernel, machine, udev
from vm.awake import cpus_awake

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 3600.0  # a hang; on two quiet cores the tests take three minutes
TAIL_LINES = 60
HUNG = 124
DIED = 125


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/vm/run")
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True, help="where hifc is installed")
    parser.add_argument("--build", type=Path, required=True, help="where the console's log stays")
    parser.add_argument("--tsc-khz", type=int, required=True, help="see tools/vm/tsc_khz.c")
    parser.add_argument("--junit", type=Path, help="where the JUnit file goes")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S")
    parser.add_argument("--shell", help="a command for bash, instead of the tests")
    options, tests = parser.parse_known_args()
    signal.signal(signal.SIGTERM, terminate)
    try:
        return run(options, tests)
    except (apt.SetupError, subprocess.CalledProcessError) as error:
        print(f"tools/vm/run: {error}", file=sys.stderr)
        return DIED


def terminate(number: int, frame: FrameType | None) -> None:
    """Ends the machine on SIGTERM as well: through the finally clauses."""
    sys.exit(128 + number)


def run(options: argparse.Namespace, tests: list[str]) -> int:
    cache = Path(os.environ["HIFC_CACHE"]) / "vm"
    found = kernel.find(cache)
    with tempfile.TemporaryDirectory(prefix="hifc-vm-") as folder:
        work = Path(folder)
        share = work / "share"
        share.mkdir()
        for spec in drives.DRIVES:
            drives.create(spec, work / f"{spec.name}.img")
        (share / "kernel").write_text(str(found.folder))
        (share / "udev").write_text(str(udev.find(cache)))
        (share / "namespaces").write_text(str(len(drives.DRIVES)))
        (share / "job").write_text(job(options, tests))
        guest = machine.Machine(
            found,
            initramfs.find(found),
            work,
            share,
            Path(__file__).with_name("guest"),
            options.tsc_khz,
        )
        started = time.monotonic()
        try:
            status = boot(guest, options.timeout)
        finally:
            keep(guest.console, options.build / "console.log")
            if options.junit is not None:
                keep(share / "junit.xml", options.junit)
    print(f"tools/vm/run: {time.monotonic() - started:.0f} s, exit {status}", file=sys.stderr)
    return status


def keep(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, target)


def job(options: argparse.Namespace, tests: list[str]) -> str:
    """The script that the guest runs."""
    path = f"{options.site}/bin:{options.build}/bin:{options.venv}/bin"
    python_path = [options.site, REPOSITORY / "tools", REPOSITORY / "tests/vm"]
    lines = [
        f"cd {shlex.quote(str(REPOSITORY))}",
        f"export PATH={shlex.quote(path)}:$PATH HIFC_VM=1",
        f"export PYTHONPATH={shlex.quote(':'.join(map(str, python_path)))}",
        # Only pytest's own plugins: each import costs an emulated CPU a lot.
        "export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONUNBUFFERED=1",
    ]
    if options.shell is not None:
        lines.append(options.shell)
    else:
        command = [
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            "--junit-xml",
            "/run/hifc-vm/junit.xml",
        ]
        if not any(Path(test.split("::")[0]).exists() for test in tests):
            command.append("tests/vm")
        lines.append(shlex.join([*command, *tests]))
    return "".join(f"{line}\n" for line in lines)


def boot(guest: machine.Machine, timeout_s: float) -> int:
    """Runs the machine to its end. What it writes goes to stdout as it comes."""
    # The kernel ends QEMU if this process is killed.
    command = ["setpriv", "--pdeathsig", "KILL", *guest.command()]
    deadline = time.monotonic() + timeout_s
    # QEMU takes the end of its stdin for a hang-up: hold it open.
    with (
        cpus_awake(),
        guest.messages.open("wb") as messages,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages
        ) as process,
    ):
        try:
            is_over = pass_on(process, deadline)
        finally:
            process.kill()
    if not is_over:
        report(guest, f"the machine was killed: not done after {timeout_s:.0f} s")
        return HUNG
    try:
        return int((guest.share / "status").read_text())
    except FileNotFoundError:
        report(guest, f"the machine ended without a result (QEMU exited with {process.returncode})")
        return DIED


def pass_on(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Copies the output until it ends; False where the deadline passed first."""
    assert process.stdout is not None
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            return False
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 1))
                return True
            return False
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return False


def report(guest: machine.Machine, what: str) -> None:
    print(f"\ntools/vm/run: {what}", file=sys.stderr)
    for title, path in ("console", guest.console), ("QEMU's messages", guest.messages):
        if path.exists():
            lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            print(f"The last lines of {title}:", *lines, sep="\n  ", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
