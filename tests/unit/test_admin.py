# SPDX-License-Identifier: Apache-2.0
"""hifc-admin: usage, refusals, and the parts that touch no namespace."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from admin_shell import Shell, code_of
from hifc import Namespace
from hifc.errors import BufferExhausted, DeviceBusy
from hifc_admin import smart_log, target, text
from hifc_admin.failures import failure_of
from hifc_admin.host.system import System
from hifc_admin.main import VERB_GROUPS, main, make_parser
from hifc_admin.parsing import wrapped
from hifc_admin.result import Exit, Failure, Result, show_text

SIZE = "16MiB"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "kv.hifc"


@pytest.fixture
def uri(path: Path) -> str:
    return f"file://{path}?size={SIZE}"


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.mark.parametrize("confirm", [[], ["--confirm", "/somewhere/else"]])
def test_format_unconfirmed_touches_nothing(
    admin: Shell, uri: str, path: Path, confirm: list[str]
) -> None:
    path.write_bytes(b"precious" * 4096)
    before = path.read_bytes()
    code, document = admin.json("format", uri, "--force", *confirm)
    assert code == Exit.REFUSED
    assert code_of(document) == "not-confirmed"
    assert f"--confirm {path}" in document["problems"][0]["fix"]
    assert path.read_bytes() == before


def test_format_of_a_new_file_needs_no_confirmation(admin: Shell, uri: str, path: Path) -> None:
    assert admin("format", uri, "--dry-run") == Exit.DONE
    assert not path.exists()
    assert admin("format", uri) == Exit.DONE
    before = path.read_bytes()
    for words in ([], ["--force"]):
        code, document = admin.json("format", uri, *words)
        assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    assert path.read_bytes() == before


def test_format_of_a_new_file_refuses_a_wrong_confirmation(
    admin: Shell, uri: str, path: Path
) -> None:
    code, document = admin.json("format", uri, "--confirm", "/somewhere/else")
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    assert not path.exists()


def test_format_forces_nothing_that_appears_after_it_looked(
    admin: Shell, uri: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program writes the file between the look and the format."""

    def appears(*_: Any) -> None:
        path.write_bytes(b"\x55\xaa" * (8 << 20))

    monkeypatch.setattr(target, "refuse_if_in_use", appears)
    code, document = admin.json("format", uri, "--force")
    assert (code, code_of(document)) == (Exit.REFUSED, "occupied")
    assert path.read_bytes() == b"\x55\xaa" * (8 << 20)


def test_format_of_a_dangling_link_wants_confirmation(admin: Shell, path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")
    code, document = admin.json("format", f"file://{path}?size={SIZE}")
    assert (code, code_of(document)) == (Exit.REFUSED, "not-confirmed")
    assert not (path.parent / "elsewhere").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["no-such-verb"],
        ["list", "--no-such-option"],
        ["list", "too", "much"],
        ["info"],
        ["format", "file:///x", "--segment-size", "7 apples"],
        ["top", "--count", "0"],
        ["hugepages", "--count", "-1"],
        ["verify", "model", "--text", "text", "--tokens", "0"],
    ],
)
def test_wrong_usage(admin: Shell, words: list[str]) -> None:
    code, document = admin.json(*words)
    assert code == Exit.USAGE
    assert document["problems"][0]["detail"]


@pytest.mark.parametrize(
    "verb", ["info", "format", "fsck", "list-keys", "scrub", "stats", "smart", "erase"]
)
def test_a_zero_character_in_a_path_is_wrong_usage(admin: Shell, verb: str) -> None:
    code, document = admin.json(verb, "file:///tmp/a%00b")
    assert code in (Exit.USAGE, Exit.FAILED)
    (problem,) = document["problems"]
    assert "zero" in problem["detail"] or "%00" in problem["detail"]


def test_help_shows_what_the_verb_honours(admin: Shell) -> None:
    for verb, honoured in (("format", True), ("info", False)):
        verb_help = subprocess.check_output(
            [sys.executable, "-m", "hifc_admin.main", verb, "--help"], text=True, timeout=300
        )
        assert ("--dry-run" in verb_help) == honoured
    assert admin("info", "ram://x", "--dry-run") == Exit.USAGE
    assert "info has no --dry-run" in admin.err


def test_no_verb_shows_the_help_as_wrong_usage(admin: Shell) -> None:
    assert admin() == Exit.USAGE
    assert admin.out == ""
    assert admin.err.startswith("usage: hifc-admin ")
    assert "exit codes:" in admin.err


def test_the_help_has_every_verb_in_one_group() -> None:
    parser = make_parser()
    shown = [name for names in VERB_GROUPS.values() for name in names]
    assert sorted(shown) == sorted(verb_parsers())
    page = parser.format_help()
    for group, names in VERB_GROUPS.items():
        section = page.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  ([a-z-]+)", section, re.M) == list(names)


def verb_parsers() -> dict[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    return dict(next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["formt"], "there is no verb 'formt'; did you mean format?"),
        (["list-kyes", "ram://x"], "did you mean list-keys?"),
        (["format", "ram://x", "--confrim", "y"], "no option --confrim; did you mean --confirm?"),
        (["format", "ram://x", "--lable=y"], "no option --lable; did you mean --label?"),
        (["bench", "ram://x", "--load", "sequental"], "did you mean sequential?"),
        (["list", "--colour", "never"], "no option --colour; did you mean --color?"),
    ],
)
def test_what_was_probably_meant(admin: Shell, words: list[str], said: str) -> None:
    code, document = admin.json(*words)
    assert code == Exit.USAGE
    assert said in document["problems"][0]["detail"]


def test_what_looks_like_nothing_known_gets_no_suggestion(admin: Shell) -> None:
    assert admin("xyzzy") == Exit.USAGE
    assert "did you mean" not in admin.err


@pytest.mark.parametrize("words", [["formt"], ["format"], ["list", "--x"], ["--color", "blue"]])
def test_the_name_of_the_program_stands_once_before_an_error(
    admin: Shell, words: list[str]
) -> None:
    assert admin(*words) == Exit.USAGE
    first = admin.err.splitlines()[0]
    assert first.startswith("hifc-admin: error: ")
    assert first.count("hifc-admin") == 1


@pytest.mark.parametrize("name", verb_parsers())
def test_an_example_can_be_pasted(name: str) -> None:
    """Its lines end with a backslash, what a shell would take for itself is quoted, and the verb
    understands it."""
    epilog = verb_parsers()[name].epilog or ""
    lines = epilog.removeprefix("example:\n").splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    command = " ".join(line.removesuffix("\\").strip() for line in lines)
    outside = re.sub(r"'[^']*'", "", command)
    assert not re.search(r"[?*&;|<>]", outside), outside
    program, *words = shlex.split(command)
    assert program == "hifc-admin"
    assert make_parser().parse_args(words).verb == name


def test_a_long_example_is_broken_between_options() -> None:
    command = (
        "hifc-admin verify ./model --text book.txt --device 'file:///a b?size=8GiB' --report x"
    )
    lines = wrapped(command).split(" \\\n")
    assert [line.split()[0] for line in lines] == ["hifc-admin", "--report"]
    assert " ".join(line.strip() for line in lines) == command


@pytest.mark.parametrize("name", verb_parsers())
def test_every_positional_argument_has_help(name: str) -> None:
    for action in verb_parsers()[name]._actions:
        assert action.help, action.dest


@pytest.mark.parametrize("name", ["list", "status", "doctor", "info", "fsck", "scrub", "dump"])
def test_help_of_what_only_reads_offers_no_options_of_changes(name: str) -> None:
    page = verb_parsers()[name].format_help()
    assert "--sysroot" not in page
    assert "--dry-run" not in page or name == "fsck"  # which has --repair


# ---- colour


@pytest.mark.parametrize(
    ("choice", "is_terminal", "environment", "expected"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),  # as no-color.org says
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1", "TERM": "dumb"}, True),
        ("never", True, {}, False),
    ],
)
def test_when_text_is_coloured(
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    is_terminal: bool,
    environment: dict[str, str],
    expected: bool,
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    assert text.wants_color(out, choice) == expected
    show_text(Result({}, [text.paint("PASS", text.Color.GOOD)]), out, out, choice)
    assert out.getvalue() == ("\x1b[32mPASS\x1b[0m\n" if expected else "PASS\n")


def test_json_is_never_coloured(admin: Shell, uri: str) -> None:
    assert admin("format", uri) == Exit.DONE
    code, document = admin.json("--color", "always", "fsck", uri)
    assert code == Exit.DONE
    assert document["data"]["verdict"] == "clean"
    assert "\x1b" not in admin.out
    assert admin("fsck", uri, "--color", "always") == Exit.DONE
    assert "\x1b[32mclean\x1b[0m: 0 entries" in admin.out


def test_an_error_is_coloured_where_it_is_asked_for(admin: Shell) -> None:
    assert admin("--color=always", "no-such-verb") == Exit.USAGE
    assert admin.err.startswith("hifc-admin: \x1b[1;31merror\x1b[0m: ")


def test_colours_do_not_move_columns() -> None:
    green = text.paint("PASS", text.Color.GOOD)
    coloured = text.table(("", "n"), [(green, 1), ("longer", 23)])
    assert coloured != text.table(("", "n"), [("PASS", 1), ("longer", 23)])
    assert list(map(text.plain, coloured)) == text.table(("", "n"), [("PASS", 1), ("longer", 23)])


def test_advice_of_the_library_is_the_fix(admin: Shell, tmp_path: Path) -> None:
    _, document = admin.json("info", f"file://{tmp_path}/none; really/x")
    problem = document["problems"][0]
    assert problem["fix"] == "format it first, giving its size, or check the path"
    assert problem["fix"] not in problem["detail"]
    assert "none; really/x: no such file" in problem["detail"]


@pytest.mark.parametrize("verb", ["format", "doctor", "info", "fsck"])
def test_a_bare_file_name_is_answered_with_its_path(admin: Shell, verb: str) -> None:
    code, document = admin.json(verb, "cache.img")
    assert code == Exit.USAGE
    (problem,) = document["problems"]
    assert "./cache.img for a file in this folder" in problem["detail"] + problem["fix"]


def test_advice_that_is_replaced_is_not_in_the_detail(admin: Shell, uri: str, path: Path) -> None:
    command = ["format", uri, "--confirm", str(path)]
    assert admin(*command) == Exit.DONE
    _, document = admin.json(*command)
    problem = document["problems"][0]
    assert problem["fix"] == "if nothing there is needed any more, repeat with --force"
    assert ";" not in problem["detail"]
    with Namespace.open(uri):
        _, document = admin.json("fsck", uri)
    assert ";" not in document["problems"][0]["detail"]


def test_a_checkout_has_no_version(monkeypatch: pytest.MonkeyPatch, admin: Shell) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert admin("info") == Exit.USAGE
    assert "URI" in admin.err


def test_a_ram_device_is_not_formatted(admin: Shell) -> None:
    code, document = admin.json("format", "ram://?size=64MiB", "--confirm", "ram")
    assert (code, code_of(document)) == (Exit.REFUSED, "identity-unknown")


def test_problems_go_to_stderr(admin: Shell, path: Path) -> None:
    assert admin("info", f"file://{path}") != 0
    assert admin.out == ""
    assert admin.err.startswith("hifc-admin: error: ")


# ---- the identity and use of devices, against fake trees


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[target.Target, Path]:
    """A pretended NVMe namespace /dev/nvme7n2 and the root of a sysfs that describes it."""
    block = tmp_path / "sys/class/block/nvme7n2"
    (block / "device").mkdir(parents=True)
    (block / "device/serial").write_text("S5GX  \n")
    (block / "nsid").write_text("2\n")
    monkeypatch.setattr(target.Target, "is_block_device", True)
    return target.parse("file:///dev/nvme7n2"), tmp_path


def test_a_drive_is_confirmed_by_serial_and_nsid(drive: tuple[target.Target, Path]) -> None:
    device, sysroot = drive
    assert target.confirm_ids(device, sysroot) == ["S5GX/2"]


def test_a_fabrics_namespace_is_confirmed_by_nqn_and_nsid() -> None:
    device = target.parse("spdk+tcp://127.0.0.1:4420/nqn.2024-01.org.hifc:kv?ns=3")
    assert target.confirm_ids(device) == ["nqn.2024-01.org.hifc:kv/3"]


def test_a_path_may_be_percent_encoded(tmp_path: Path) -> None:
    device = target.parse(f"file://{tmp_path}/a%20100%25.img?size=1MiB")
    assert target.confirm_ids(device) == [f"{tmp_path.resolve()}/a 100%.img"]
    assert device.parameters == {"size": "1MiB"}


def test_a_drive_that_cannot_be_checked_is_refused(drive: tuple[target.Target, Path]) -> None:
    device, sysroot = drive
    with pytest.raises(Failure) as caught:
        target.refuse_if_in_use(device, System(sysroot / "empty"))
    assert caught.value.problem.code == "not-checked"


# ---- the health log


def smart_page() -> bytearray:
    page = bytearray(512)
    page[1:3] = (273 + 41).to_bytes(2, "little")
    page[3:6] = bytes([100, 10, 3])
    page[32:48] = (7).to_bytes(16, "little")
    page[48:64] = (2**64 + 5).to_bytes(16, "little")
    page[144:160] = (9).to_bytes(16, "little")
    page[200:204] = (273 + 44).to_bytes(2, "little") + bytes(2)
    return page


def test_health_log_fields() -> None:
    log = smart_log.decode(bytes(smart_page()))
    assert log.temperature_celsius == 41
    assert (log.available_spare_percent, log.available_spare_threshold_percent) == (100, 10)
    assert log.percentage_used == 3
    assert log.data_read_bytes == 7 * 512_000
    assert log.data_written_bytes == (2**64 + 5) * 512_000
    assert log.unsafe_shutdowns == 9
    assert log.temperature_sensors_celsius == (44, *[None] * 7)
    assert log.critical_warnings == ()
    assert smart_log.problems("drive", log) == []


def test_health_log_warnings() -> None:
    page = smart_page()
    page[0] = 0b1011
    page[5] = 93
    page[160] = 2
    log = smart_log.decode(bytes(page))
    assert log.critical_warnings == ("spare-low", "temperature", "read-only")
    found = [problem.code for problem in smart_log.problems("drive", log)]
    assert found == ["spare-low", "read-only", "temperature", "worn", "media-errors"]


def test_health_log_of_a_wrong_size() -> None:
    with pytest.raises(ValueError, match="511"):
        smart_log.decode(bytes(511))


# ---- text


def test_table_aligns() -> None:
    assert text.table(("name", "n"), [("a", 1), ("longer", 23)]) == [
        "name    n",
        "a        1",
        "longer  23",
    ]


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: argparse.Namespace) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("hifc_admin.verbs.namespace.info", broken)
    with pytest.raises(AssertionError):
        main(["info", "ram://"])


def test_sizes_for_people() -> None:
    assert [text.size(n) for n in (0, 1023, 1536, 64 << 20)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "64 MiB",
    ]


# ---- options that stand before the verb


@pytest.mark.parametrize("option", [["--dry-run"], ["--sysroot", "/usr"]])
def test_an_option_that_a_verb_would_ignore_is_refused(
    admin: Shell, uri: str, option: list[str]
) -> None:
    code, document = admin.json(*option, "info", uri)
    assert (code, code_of(document)) == (Exit.USAGE, "usage")


def test_a_dry_run_of_format_changes_nothing(admin: Shell, uri: str, path: Path) -> None:
    code, document = admin.json("--dry-run", "format", uri, "--confirm", str(path))
    assert code == Exit.DONE
    assert document["data"]["steps"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "expected", "said"),
    [
        (["--segment-size", "3MiB"], Exit.USAGE, "power of two"),
        (["--segment-size", "64MiB"], Exit.USAGE, "too few"),
        (["--label", "x" * 32], Exit.USAGE, "label"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_dry_run_of_format_refuses_like_the_real_one(
    admin: Shell, uri: str, path: Path, is_there: bool, words: list[str], expected: Exit, said: str
) -> None:
    if is_there:
        path.write_bytes(bytes(16 << 20))
    command = ["format", uri, "--confirm", str(path), *words]
    for option in ([], ["--dry-run"]):
        code, document = admin.json(*command, *option)
        assert code == expected, document
        problem = document["problems"][0]
        assert said in problem["detail"] + problem["fix"]
        assert "ram://" not in problem["detail"]


def test_a_dry_run_of_format_refuses_what_is_there(admin: Shell, uri: str, path: Path) -> None:
    assert admin("format", uri, "--confirm", str(path)) == Exit.DONE
    before = path.read_bytes()
    command = ["format", uri, "--confirm", str(path), "--dry-run"]
    code, document = admin.json(*command)
    assert (code, code_of(document)) == (Exit.REFUSED, "occupied")
    assert admin.json(*command, "--force")[0] == Exit.DONE
    assert path.read_bytes() == before


def test_a_dry_run_of_format_refuses_a_file_that_has_no_room(admin: Shell, path: Path) -> None:
    uri = f"file://{path}?size=4096TiB"
    code, document = admin.json("format", uri, "--confirm", str(path), "--dry-run")
    assert (code, code_of(document)) == (Exit.FAILED, "failed")
    assert "has room for" in document["problems"][0]["detail"]


def test_a_dry_run_of_format_in_a_folder_that_is_missing(admin: Shell, path: Path) -> None:
    missing = path.parent / "none" / "kv"
    command = ["format", f"file://{missing}?size=16MiB", "--confirm", str(missing)]
    assert admin(*command) == admin(*command, "--dry-run") == Exit.FAILED


@pytest.mark.parametrize("words", [["list"], ["install"], ["hugepages"]])
@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.touch()])
def test_a_sysroot_that_is_no_folder_is_refused_and_not_made(
    admin: Shell, tmp_path: Path, words: list[str], make: Callable[[Path], None]
) -> None:
    root = tmp_path / "misspelt"
    make(root)
    code, document = admin.json("--sysroot", str(root), *words)
    assert (code, code_of(document)) == (Exit.USAGE, "usage")
    assert not root.is_dir()


def test_what_the_sysroot_lacks_is_named(admin: Shell, tmp_path: Path) -> None:
    code, document = admin.json("--sysroot", str(tmp_path), "status")
    assert (code, code_of(document)) == (Exit.FAILED, "system")
    assert f"{tmp_path.resolve()}/proc" in document["problems"][0]["fix"]


# ---- commands that a fix names can be pasted


@pytest.mark.parametrize("words", [["stats"], ["top", "--once"], ["erase"]])
def test_a_uri_in_a_fix_is_quoted(admin: Shell, uri: str, words: list[str]) -> None:
    assert admin(*words, uri) != Exit.DONE
    assert f" '{uri}'" in admin.err


def test_no_huge_pages_is_a_missing_prerequisite() -> None:
    found = failure_of(BufferExhausted("0 huge pages are free"), "spdk://0000:3b:00.0?ns=1")
    assert (found.exit, found.problem.code) == (Exit.PREREQUISITE, "no-memory")
    assert "hifc-admin hugepages" in found.problem.fix


def test_doctor_of_a_user_who_is_not_there(admin: Shell) -> None:
    code, document = admin.json("doctor", "--user", "no-such-user")
    assert (code, code_of(document)) == (Exit.USAGE, "no-such-user")


def test_only_an_engine_is_asked_to_stop() -> None:
    uri = "spdk://0000:3b:00.0?ns=1"
    message = "nvme has it, not vfio-pci; bind it: hifc-admin bind 0000:3b:00.0"
    assert failure_of(DeviceBusy(message), uri).problem.fix == ""
    assert "process 7" in failure_of(DeviceBusy("in use", holders=(7,)), uri).problem.fix


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_no_file_is_made_among_the_devices(admin: Shell, option: list[str]) -> None:
    path = Path("/dev/nvme7n1-of-a-test")
    uri = f"file://{path}?size=16MiB"
    assert admin("format", uri, "--confirm", str(path), *option) == Exit.FAILED
    assert "no such device" in admin.err
    assert not path.exists()
