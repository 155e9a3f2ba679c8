# SPDX-License-Identifier: Apache-2.0
"""What all Python tests share: options, markers, the count of tests that need SPDK, a target, and
namespaces on every device."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from admin_shell import Shell
from fake_host import Host
from hifc import Namespace
from hifc.native_lib import libhifc
from hifc_admin.host import system

REPOSITORY = Path(__file__).parents[1]

# What is in tests/vm needs the machine of tools/vm/run, down to what it imports.
collect_ignore = [] if os.environ.get("HIFC_VM") == "1" else ["vm"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-spdk", action="store_true", help="skip what needs a real SPDK queue pair"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spdk") is None:
            continue
        # tools/lib/report.py fails CI unless a test with this property passed.
        item.user_properties.append(("needs", "spdk"))
        if config.getoption("--no-spdk"):
            item.add_marker(pytest.mark.skip(reason="needs SPDK; --no-spdk was given"))


class Nvmf:
    """NVMe/TCP targets on loopback, through tools/nvmf_target."""

    def __init__(self) -> None:
        tool = REPOSITORY / "tools/nvmf_target"
        loader = importlib.machinery.SourceFileLoader("nvmf_target", str(tool))
        self.module = types.ModuleType(loader.name)
        loader.exec_module(self.module)
        self._ports: list[int] = []

    def start(self, backing: Path, **options: Any) -> Any:
        """Starts a target at a free port unless the options say otherwise; close stops it.

        Skips where SPDK or huge pages are missing; in CI that is an error.
        """
        try:
            target = self.module.start(backing, **{"port": 0, "die_with_caller": True} | options)
        except self.module.TargetError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"no NVMe/TCP target: {error}")
        self._ports.append(target.port)
        return target

    def stop(self, port: int) -> None:
        self.module.stop(port)

    def pid(self, port: int) -> int:
        """The process of the target at that port."""
        return int(self.module.read_pid(port))

    def close(self) -> None:
        for port in self._ports:
            self.module.stop(port)


@pytest.fixture(scope="module")
def nvmf() -> Iterator[Nvmf]:
    """Starts and stops targets; for tests marked spdk."""
    if "spdk+tcp" not in libhifc.library().hifc_schemes().decode().split():
        pytest.skip("libhifc.so was built without SPDK: see tools/build_spdk")
    nvmf = Nvmf()
    yield nvmf
    nvmf.close()


@pytest.fixture(scope="module")
def nvmf_uri(nvmf: Nvmf, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of a real NVMe/TCP target on loopback, of 256 MiB; for tests marked spdk."""
    backing = tmp_path_factory.mktemp("nvmf") / "disk.img"
    return str(nvmf.start(backing, size_bytes=256 << 20).uri)


# ---- namespaces on every device

# A named image in memory stays until the process ends, so every test formats the same one.
# Add a device here and every namespace test runs on it.
DEVICES = (
    pytest.param("ram"),
    pytest.param("file"),
    pytest.param("spdk+tcp", marks=pytest.mark.spdk),
)
DEVICE_SIZE = "64MiB"
SEGMENT_SIZE = "2MiB"


class Opener:
    """Formats and opens namespaces on one device, and closes what a test left open."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._opened: list[Namespace] = []

    def format(self, **options: Any) -> None:
        """An empty namespace with segments of 2 MiB, unless the options say otherwise."""
        Namespace.format(self.uri, **{"segment_size": SEGMENT_SIZE, "force": True} | options)

    def open(self, **options: Any) -> Namespace:
        """Opens it; pool of 16 MiB unless the options say otherwise."""
        options = {"pool_size": "16MiB"} | options
        self._opened.append(Namespace.open(self.uri, **options))
        return self._opened[-1]

    def close(self) -> None:
        """Closes whatever is open, without complaint."""
        for namespace in self._opened:
            with contextlib.suppress(Exception):
                namespace.close()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """A formatted namespace of 64 MiB or more on each device in turn."""
    uris = {
        "ram": lambda: f"ram://device?size={DEVICE_SIZE}",
        "file": lambda: f"file://{tmp_path}/namespace.img?size={DEVICE_SIZE}",
        "spdk+tcp": lambda: request.getfixturevalue("nvmf_uri"),
    }
    opener = Opener(uris[request.param]())
    opener.format()
    yield opener
    opener.close()


@pytest.fixture
def ram() -> Iterator[Opener]:
    """A formatted namespace of 64 MiB in memory."""
    opener = Opener(f"ram://scratch?size={DEVICE_SIZE}")
    opener.format()
    yield opener
    opener.close()


@pytest.fixture(params=["reactor", "inline"])
def ns(request: pytest.FixtureRequest, device: Opener) -> Namespace:
    """An open namespace on each device, driven in each way."""
    return device.open(drive=request.param)


# ---- a host that hifc-admin may change


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A tree of files and the part of a kernel behind it; what `--sysroot` names is this host."""
    host = Host(tmp_path / "host")
    monkeypatch.setattr(system, "System", lambda root: host.system)
    yield host
    host.remove()


@pytest.fixture
def on_host(host: Host, capsys: pytest.CaptureFixture[str]) -> Shell:
    """hifc-admin on that host."""
    return Shell(capsys, "--sysroot", str(host.root))


@pytest.fixture
def faulty_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the library that has the device of injected faults, which is not shipped."""
    path = os.environ.get("HIFC_FAULTY_LIBRARY")
    if not path:
        pytest.skip("HIFC_FAULTY_LIBRARY is not set: tools/test builds it and sets it")
    library = libhifc.load(Path(path))
    monkeypatch.setattr(libhifc, "library", lambda: library)
