# SPDX-License-Identifier: Apache-2.0
"""hifc-admin erase --method sanitize, against a pretended drive; the C side is in unit/drive.c."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from pretended_drive import INFO

from admin_shell import Shell, code_of
from hifc.device import device
from hifc.device.device import DeviceInfo, InfoFlag, SanitizeState, SanitizeStatus
from hifc.errors import DeviceError, WaitTimeout
from hifc.native_lib import layouts, libhifc
from hifc_admin import erase_methods
from hifc_admin.result import Exit

URI = "spdk://0000:3b:00.0?ns=2"
WORDS = ("erase", URI, "--confirm", "S5GX/2", "--method")
ALONE = dataclasses.replace(
    INFO, namespaces=1, flags=INFO.flags | InfoFlag.SANITIZE_BLOCK | InfoFlag.SANITIZE_CRYPTO
)


def in_state(state: SanitizeState, found: DeviceInfo = ALONE) -> DeviceInfo:
    status = SanitizeStatus(state, "overwrite", 0.25, 90)
    return dataclasses.replace(
        found, sanitize=status, flags=found.flags | InfoFlag.UNREADABLE, signature=""
    )


class Drive:
    """What the verb sees of it, and what was done to it."""

    def __init__(self) -> None:
        self.info = ALONE
        self.calls: list[str] = []
        self.end: BaseException | None = None

    def sanitize(self, uri: str, watch: Callable[[SanitizeStatus], None]) -> None:
        assert uri == URI
        self.calls.append("sanitize")
        for progress in (0.25, 0.5):
            watch(SanitizeStatus(SanitizeState.RUNNING, "block erase", progress, 90))
        if self.end:
            raise self.end


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    drive = Drive()
    monkeypatch.setattr(device, "device_info", lambda _: drive.info)
    monkeypatch.setattr(device, "erase", lambda _, method: drive.calls.append(method.name))
    monkeypatch.setattr(device, "sanitize", drive.sanitize)
    return drive


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.mark.parametrize(
    ("flags", "action"),
    [(ALONE.flags, "block erase"), (ALONE.flags & ~InfoFlag.SANITIZE_BLOCK, "crypto erase")],
)
def test_sanitize_says_what_the_drive_did(
    admin: Shell, drive: Drive, flags: InfoFlag, action: str
) -> None:
    drive.info = dataclasses.replace(ALONE, flags=flags)
    code, document = admin.json(*WORDS, "sanitize")
    assert code == 0
    assert document["data"]["action"] == action
    assert not document["data"]["waited_only"]
    assert not document["problems"]
    assert drive.calls == ["sanitize"]


def test_a_dry_run_starts_nothing(admin: Shell, drive: Drive) -> None:
    code, document = admin.json(*WORDS, "sanitize", "--dry-run")
    assert (code, document["data"]["steps"]) == (0, [f"erase {URI}: sanitize"])
    drive.info = in_state(SanitizeState.RUNNING)
    code, document = admin.json(*WORDS, "sanitize", "--dry-run")
    assert (code, document["data"]["steps"]) == (0, [f"wait for the sanitize of {URI}"])
    assert not drive.calls


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (dataclasses.replace(ALONE, namespaces=2), "all 2 namespaces"),
        (dataclasses.replace(ALONE, namespaces=0), "all 0 namespaces"),
        (dataclasses.replace(ALONE, flags=ALONE.flags | InfoFlag.SHARED), "share"),
        (dataclasses.replace(ALONE, flags=ALONE.flags | InfoFlag.RESERVED), "reserved"),
        (dataclasses.replace(ALONE, flags=ALONE.flags & ~InfoFlag.WHOLE), "a part"),
        (dataclasses.replace(ALONE, flags=INFO.flags), "no NVMe Sanitize"),
        (in_state(SanitizeState.UNKNOWN), "did not tell whether a sanitize runs"),
    ],
)
def test_sanitize_is_refused(admin: Shell, drive: Drive, info: DeviceInfo, said: str) -> None:
    drive.info = info
    code, document = admin.json(*WORDS, "sanitize", "--force")
    assert (code, code_of(document)) == (Exit.REFUSED, "method-refused")
    assert said in document["problems"][0]["detail"]
    assert not drive.calls


ALL_FLAGS = (
    InfoFlag.DEALLOCATE,
    InfoFlag.WHOLE,
    InfoFlag.SHARED,
    InfoFlag.RESERVED,
    InfoFlag.FORMAT,
    InfoFlag.FORMAT_ALL,
    InfoFlag.CRYPTO_ERASE,
    InfoFlag.SANITIZE_BLOCK,
)


def test_a_refusal_names_methods_that_are_not_refused(admin: Shell, drive: Drive) -> None:
    """Over every combination of what a drive may say of itself."""
    for chosen in itertools.product((False, True), repeat=len(ALL_FLAGS)):
        flags = InfoFlag(0)
        for flag, is_set in zip(ALL_FLAGS, chosen, strict=True):
            flags |= flag if is_set else InfoFlag(0)
        drive.info = dataclasses.replace(ALONE, flags=flags)
        for method in erase_methods.NAMES:
            reason = erase_methods.refusal(method, drive.info)
            if not reason:
                continue
            with pytest.raises(erase_methods.Failure) as caught:
                erase_methods.refuse(URI, method, drive.info)
            words = caught.value.problem.fix.split()
            offered = [word for word in words if word in erase_methods.NAMES]
            assert "overwrite" in offered
            assert not any(erase_methods.refusal(name, drive.info) for name in offered)


@pytest.mark.parametrize("method", ["deallocate", "overwrite", "format", "crypto"])
@pytest.mark.parametrize(
    ("state", "problem"),
    [(SanitizeState.RUNNING, "sanitizing"), (SanitizeState.FAILED, "sanitize-failed")],
)
def test_nothing_else_while_a_sanitize_closes_the_drive(
    admin: Shell, drive: Drive, method: str, state: SanitizeState, problem: str
) -> None:
    drive.info = in_state(state)
    code, document = admin.json(*WORDS, method, "--force")
    assert (code, code_of(document)) == (Exit.REFUSED, problem)
    assert "--method sanitize" in document["problems"][0]["fix"]
    assert not drive.calls


def test_who_comes_back_waits_for_the_one_that_runs(admin: Shell, drive: Drive) -> None:
    drive.info = in_state(SanitizeState.RUNNING, dataclasses.replace(ALONE, namespaces=2))
    code, document = admin.json(*WORDS, "sanitize")
    assert code == 0
    assert document["data"]["waited_only"]
    assert document["data"]["action"] == "overwrite"


def test_after_a_failed_one_another_is_started(admin: Shell, drive: Drive) -> None:
    drive.info = in_state(SanitizeState.FAILED)
    assert admin.json(*WORDS, "sanitize")[0] == 0
    assert drive.calls == ["sanitize"]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), WaitTimeout("four hours")])
def test_a_wait_cut_short_says_that_the_drive_goes_on(
    admin: Shell, drive: Drive, end: BaseException
) -> None:
    drive.end = end
    code, document = admin.json(*WORDS, "sanitize")
    assert (code, code_of(document)) == (Exit.PARTLY, "sanitizing")
    assert "goes on" in document["problems"][0]["detail"]


def test_an_open_that_fails_of_it_names_the_way_out(
    admin: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceError("Sanitize In Progress", sct=0, sc=0x1D)

    monkeypatch.setattr("hifc_admin.verbs.namespace.Namespace.open", fail)
    code, document = admin.json("info", URI)
    assert (code, code_of(document)) == (Exit.FAILED, "sanitizing")
    assert "--method sanitize" in document["problems"][0]["fix"]


def test_what_watch_raises_comes_back_out_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """C sees only a nonzero answer, and its error must not hide an interrupt."""
    answers = []

    class Library:
        @staticmethod
        def hifc_sanitize(uri: bytes, watch: Callable[..., int], _: None) -> None:
            raw = layouts.SanitizeStatus(state=2, action=2, progress=32768, estimate_s=0xFFFFFFFF)
            answers.append(watch(raw, None))
            if answers[-1]:
                raise DeviceError("no longer waited for")

    def interrupt(status: SanitizeStatus) -> None:
        assert status == SanitizeStatus(SanitizeState.RUNNING, "block erase", 0.5, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(libhifc, "library", Library)
    with pytest.raises(KeyboardInterrupt):
        device.sanitize(URI, interrupt)
    device.sanitize(URI, lambda _: None)
    assert answers == [1, 0]
