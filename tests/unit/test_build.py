"""What the build says where it cannot go on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Names of programs in /usr/bin by what they belong to.
PROGRAMS = {
    "gcc": ("gcc", "cc"),
    "g++": ("g++", "c++"),
    "pkg-config": ("pkg-config",),
    "the rest": ("as", "ld", "ar", "nm", "ranlib", "objcopy", "uname", "sh", "ninja"),
}


def configure(tmp_path: Path, without: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Configures in a world whose PATH lacks the programs of `without`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for package, names in PROGRAMS.items():
        for name in names if package != without else ():
            found = shutil.which(name)
            assert found is not None, name
            (programs / name).symlink_to(found)
    cmake = shutil.which("cmake")
    assert cmake is not None
    command = [cmake, "-G", "Ninja", "-S", str(REPOSITORY), "-B", str(tmp_path / "build")]
    # CMake looks into /usr/bin itself, too.
    command += ["-DHIFC_SPDK=off", "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF"]
    known = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    return subprocess.run(
        command,
        env=known | {"PATH": str(programs)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("without", "environment", "thing", "packages"),
    [
        ("gcc", {}, "a C compiler", "gcc"),
        ("gcc", {"CC": "gcc -pipe"}, "a C compiler (CC=gcc -pipe)", "gcc"),
        ("g++", {}, "a C++ compiler, for the CPU build of the kernels", "g++"),
        ("pkg-config", {}, "pkg-config", "pkg-config liburing-dev"),
        ("", {"PKG_CONFIG_LIBDIR": "/nonexistent"}, "liburing 2.3 or newer", "liburing-dev"),
        ("gcc", {"PKG_CONFIG_LIBDIR": "/nonexistent"}, "liburing 2.3", "gcc liburing-dev"),
    ],
)
def test_what_is_missing_is_named_with_the_packages_that_bring_it(
    without: str, environment: dict[str, str], thing: str, packages: str, tmp_path: Path
) -> None:
    result = configure(tmp_path, without, **environment)
    assert result.returncode != 0
    words = " ".join(result.stderr.split())
    assert f"HiFC cannot be built, this is missing: {thing}" in words or (
        "HiFC cannot be built" in words and thing in words
    )
    assert f"apt install {packages}\n" in result.stderr
    # One message, and none of CMake's own beside it.
    assert result.stderr.count("CMake Error") == 1


def test_an_older_liburing_is_named_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "liburing.pc").write_text("Name: liburing\nDescription: x\nVersion: 2.1\nLibs:\n")
    result = configure(tmp_path, "", PKG_CONFIG_LIBDIR=str(tmp_path))
    assert "liburing 2.3 or newer (2.1 is installed)" in " ".join(result.stderr.split())


def test_it_configures_where_nothing_is_missing(tmp_path: Path) -> None:
    # The static library is looked for where this test forbids CMake to look.
    options = {"CMAKE_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu"}
    result = configure(tmp_path, "", **options)
    assert result.returncode == 0, result.stderr
