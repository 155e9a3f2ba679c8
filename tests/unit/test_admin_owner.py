# SPDX-License-Identifier: Apache-2.0
"""hifc-admin's side of the owner's socket, against a pretended owner."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from admin_shell import Shell, code_of
from hifc_admin.engine import owner
from hifc_admin.result import Exit, Failure
from hifc_admin.verbs import device as device_verbs

Answers = dict[str, bytes]


@contextlib.contextmanager
def pretend(path: Path, answers: Answers) -> Iterator[None]:
    """An owner at path that answers a request with the bytes given for it, until the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.sendall(answers.get(client.recv(64).decode().strip(), b""))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(120)
        assert not thread.is_alive()
        listener.close()


def hello(uri: str) -> Answers:
    said = {"ok": True, "pid": 1, "uri": uri}
    stats = said | {"uuid": "ab", "label": "", "entries": 3, "live_bytes": 4096}
    return {"hello": json.dumps(said).encode(), "stats": json.dumps(stats).encode()}


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short folder: the path of a socket has at most 107 bytes."""
    return tmp_path_factory.mktemp("s")


def test_stats_of_a_socket(admin: Shell, short: Path) -> None:
    with pretend(short / "a.sock", hello("ram://")):
        for name in (f"{short}/a.sock", f"hifc://{short}/a.sock"):
            code, document = admin.json("stats", name)
            assert code == 0
            assert document["data"]["entries"] == 3
            assert "ok" not in document["data"]


@pytest.mark.parametrize("answer", [{}, {"log": "xyz"}, {"log": 7}, {"log": "00"}])
def test_an_answer_that_is_no_health_log(short: Path, answer: dict[str, object]) -> None:
    path = short / "run/hifc/1-0.sock"
    said = hello("ram://x") | {"health": json.dumps({"ok": True} | answer).encode()}
    with pretend(path, said), pytest.raises(Failure) as caught:
        device_verbs.owned_log(path)
    assert caught.value.problem.code == "bad-reply"


class Clock:
    """Each look at it finds it a second later."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return float(self.looks)


def test_an_answer_that_never_ends_is_cut_short(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(owner, "TIMEOUT_S", 5.0)
    monkeypatch.setattr(owner, "time", clock)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(short / "slow.sock"))
    listener.listen()

    def drip() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            for _ in range(100):
                client.sendall(b" ")
                time.sleep(0.05)

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    with pytest.raises(TimeoutError):
        owner.ask(short / "slow.sock", "stats")
    assert clock.looks < 50, "the time is that of the whole answer, not of each byte"
    listener.close()
    thread.join(120)
    assert not thread.is_alive()


def test_what_a_program_published_is_shown_as_counters(admin: Shell, short: Path) -> None:
    stats = {"ok": True, "uri": "ram://", "entries": 3, "published": {"hit": 7, "miss": 0}}
    with pretend(short / "a.sock", {"stats": json.dumps(stats).encode()}):
        assert admin("stats", f"{short}/a.sock") == 0
    assert [line.split() for line in admin.out.splitlines()[-2:]] == [
        ["entries", "3"],
        ["hit", "7"],
    ]


def test_the_owner_is_found_by_medium(short: Path) -> None:
    disk = short / "kv.hifc"
    disk.touch()
    link = short / "link"
    link.symlink_to(disk)
    path = short / "run/hifc/1-0.sock"
    with pretend(path, hello(f"file://{disk}?size=8GiB")):
        assert owner.find(f"file://{link}", short) == path
        assert owner.find(f"file://{short}/other", short) is None


def test_namespaces_of_one_target_are_told_apart(short: Path) -> None:
    path = short / "tmp/hifc-1000/1-0.sock"
    with pretend(path, hello("spdk+tcp://127.0.0.1:1/nqn?ns=2")):
        assert owner.find("spdk+tcp://127.0.0.1:1/nqn?ns=2", short) == path
        assert owner.find("spdk+tcp://127.0.0.1:1/nqn", short) is None


def test_dead_and_foreign_sockets_are_passed_over(short: Path) -> None:
    folder = short / "run/hifc"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "0-0.sock"))
    foreign = pretend(folder / "1-0.sock", {"hello": b"220 mail ready\r\n"})
    with foreign, pretend(folder / "2-0.sock", hello("ram://x")):
        assert owner.find("ram://x", short) == folder / "2-0.sock"


@pytest.mark.parametrize("reply", [b"", b"no json", b"[]", b"{}", b'{"ok": tru', b"\xff"])
def test_a_reply_that_makes_no_sense(short: Path, reply: bytes) -> None:
    with (
        pretend(short / "a.sock", {"stats": reply}),
        pytest.raises(Failure, match="not the socket"),
    ):
        owner.ask(short / "a.sock", "stats")


def test_an_error_of_the_owner_is_shown(admin: Shell, short: Path) -> None:
    reply = b'{"ok": false, "errno": 95, "error": "it has no health log"}\n'
    with pretend(short / "a.sock", {"stats": reply}):
        code, document = admin.json("stats", f"{short}/a.sock")
    assert (code, code_of(document)) == (Exit.FAILED, "owner")
    assert document["problems"][0]["detail"] == "it has no health log"


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.touch()])
def test_nobody_there(admin: Shell, short: Path, make: Callable[[Path], None]) -> None:
    make(short / "a.sock")
    for words in (["stats"], ["top", "--once"]):
        code, document = admin.json(*words, f"{short}/a.sock")
        assert (code, code_of(document)) == (Exit.PREREQUISITE, "not-owned")


def test_a_device_without_an_owner(admin: Shell, short: Path) -> None:
    code, document = admin.json("stats", f"file://{short}/none")
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "not-owned")


OWNER_IN_A_CONTAINER = """
import os, sys, hifc
assert os.getpid() == 1, os.getpid()
uri = sys.argv[1]
hifc.Namespace.format(uri)
with hifc.Namespace.open(uri):
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_processes_of_one_number_in_two_containers_share_a_run_folder(tmp_path: Path) -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no pid namespace of one's own: {tried.stderr.strip()}")
    uris = [f"file://{tmp_path}/{name}.img?size=16MiB" for name in ("first", "second")]
    engines: list[subprocess.Popen[str]] = []

    def seen() -> list[str]:
        return sorted(said["uri"] for _, said in owner.owners() if str(tmp_path) in said["uri"])

    try:
        for uri in uris:
            engines.append(
                subprocess.Popen(
                    [*unshare, sys.executable, "-c", OWNER_IN_A_CONTAINER, uri],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            assert engines[-1].stdout is not None
            assert engines[-1].stdout.readline() == "open\n"
        assert seen() == uris
        assert [owner.find(uri) is not None for uri in uris] == [True, True]
        engines[1].communicate("\n")
        assert engines[1].returncode == 0
        assert seen() == uris[:1]  # the end of one leaves the other's socket
        engines[0].communicate("\n")
        assert engines[0].returncode == 0
        assert seen() == []
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()
