# SPDX-License-Identifier: Apache-2.0
"""hifc-admin list and status on a pretended host."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin_shell import Shell
from fake_host import PCI, SIZE_BYTES, Host
from hifc_admin.engine import owner
from hifc_admin.result import Exit

BDF = "0000:3b:00.0"


def test_a_host_without_drives(host: Host, on_host: Shell) -> None:
    assert on_host("list") == Exit.DONE
    assert on_host.out == "no NVMe drive on PCIe\n"


def test_all_that_is_known_of_a_free_drive(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    host.add_device("0000:3a:00.0", "0x060400", "pcieport", "12")
    host.add_device("0000:41:00.0", "0x030200", "nvidia", "20", vendor="0x10de")
    host.add_device("0000:02:00.0", "0x030000", "ast", "21", vendor="0x1a03")  # no GPU of use
    code, document = on_host.json("list")
    assert (code, document["problems"]) == (Exit.DONE, [])
    (drive,) = document["data"]["drives"]
    assert drive == {
        "bdf": BDF,
        "driver": "nvme",
        "bound": False,
        "model": "QEMU NVMe Ctrl",
        "serial": "S0",
        "firmware": "1.0",
        "numa_node": 1,
        "iommu_group": "12",
        "iommu_group_others": [{"bdf": "0000:3a:00.0", "class": "0x060400", "driver": "pcieport"}],
        "link": {"speed_gts": 8.0, "speed_best_gts": 16.0, "width": 2, "width_best": 4},
        "namespaces": [
            {
                "block_device": f"/dev/{node}",
                "nsid": 1,
                "size_bytes": SIZE_BYTES,
                "lba_bytes": 512,
                "metadata_bytes": 0,
                "partitions": [],
                "signatures": [],
                "hifc": None,
            }
        ],
        "in_use": False,
        "uses": [],
        "owner": None,
    }
    assert document["data"]["gpus"] == [
        {"bdf": "0000:41:00.0", "vendor": "NVIDIA", "driver": "nvidia", "numa_node": 1}
    ]
    assert on_host("list") == Exit.DONE
    lines = on_host.out.splitlines()
    assert "8 GT/s x2 (best 16 x4)" in lines[1]
    assert lines[1].endswith("free")
    assert any(line.startswith("0000:41:00.0  NVIDIA") for line in lines)


def test_signatures_and_partitions_are_listed(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF, partitions=1)
    host.write_at(node, 512, b"EFI PART")
    host.write_at(f"{node}p1", 0, b"XFSB")
    _, document = on_host.json("list")
    (drive,) = document["data"]["drives"]
    (namespace,) = drive["namespaces"]
    assert namespace["partitions"] == [f"{node}p1"]
    assert namespace["signatures"] == [
        [node, "a GPT partition table"],
        [f"{node}p1", "an xfs file system"],
    ]
    assert not drive["in_use"]  # data, and nobody uses it
    assert on_host("list") == Exit.DONE
    assert on_host.out.splitlines()[1].endswith("data")


def test_a_shared_namespace_has_one_node_for_all_its_paths(host: Host, on_host: Shell) -> None:
    node = host.add_drive(BDF)
    folder = host.path(f"{PCI}/devices/{BDF}/nvme/nvme0")
    # The head hangs below its subsystem, and the controller has a hidden device of the path.
    head = host.path("/sys/devices/virtual/nvme-subsystem/nvme-subsys0")
    head.mkdir(parents=True)
    (folder / node).rename(head / node)
    where = "devices/virtual/nvme-subsystem/nvme-subsys0"
    host.link(f"/sys/class/block/{node}", f"../../{where}/{node}")
    (folder / "nvme0c0n1").mkdir()
    host.mount("/srv", f"/dev/{node}", host.number(node), "ext4")
    _, document = on_host.json("list")
    (drive,) = document["data"]["drives"]
    assert [n["block_device"] for n in drive["namespaces"]] == [f"/dev/{node}"]
    assert [use["kind"] for use in drive["uses"]] == ["mounted"]


def test_a_bound_drive_is_known_by_its_record(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    _, document = on_host.json("list")
    (drive,) = document["data"]["drives"]
    assert (drive["driver"], drive["bound"], drive["in_use"]) == ("vfio-pci", True, False)
    assert (drive["model"], drive["serial"]) == ("QEMU NVMe Ctrl", "S0")
    assert drive["namespaces"] == [
        {"block_device": None, "nsid": 1, "size_bytes": SIZE_BYTES, "lba_bytes": 512}
    ]


def test_a_record_that_cannot_be_read_is_a_warning(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    host.put(f"/run/hifc-admin/{BDF}.json", "{")
    code, document = on_host.json("list")
    assert code == Exit.DONE
    assert [p["code"] for p in document["problems"]] == ["bad-record"]
    assert len(document["data"]["drives"]) == 1


@pytest.fixture
def engine(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A pretended owner of the drive, whose socket lies below the tree."""
    folder = host.path("/run/hifc")
    folder.mkdir(parents=True)
    # Their paths are short, and a temporary folder's is not: look where the socket can be.
    path = Path(f"/tmp/hifc-test-{id(host):x}.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    said = {"ok": True, "pid": 4711, "uri": f"spdk://{BDF}?ns=1"}

    def serve() -> None:
        try:
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(64)
                    client.sendall(json.dumps(said).encode() + b"\n")
        except OSError:
            return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    monkeypatch.setattr(owner, "owners", lambda root: [(path, owner.ask(path, "hello"))])
    yield path
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(120)
    assert not thread.is_alive()
    listener.close()
    path.unlink()


def test_the_engine_of_a_drive_is_shown(host: Host, on_host: Shell, engine: Path) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF) == Exit.DONE
    _, document = on_host.json("list")
    (drive,) = document["data"]["drives"]
    assert drive["owner"] == {"pid": 4711, "uri": f"spdk://{BDF}?ns=1"}
    assert on_host("list") == Exit.DONE
    assert "HiFC, pid 4711" in on_host.out
    assert on_host("status") == Exit.DONE
    assert f"process 4711 has spdk://{BDF}?ns=1 open" in on_host.out


# ---- status


def test_status_of_an_idle_host(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    code, document = on_host.json("status")
    data = document["data"]
    assert (code, data["drives"], data["processes"], data["leftovers"]) == (Exit.DONE, [], [], [])
    assert data["modules"]["vfio_iommu_type1"] is True
    assert data["modules"]["uio_pci_generic"] is False
    assert data["iommu_groups"] == 1
    assert data["group"]["locked_memory_bytes"] is None
    assert on_host("status") == Exit.DONE
    assert on_host.out.startswith("no drive is bound\n")


def test_status_of_a_bound_drive(host: Host, on_host: Shell) -> None:
    host.add_drive(BDF)
    assert on_host("bind", BDF, "--persist") == Exit.DONE
    _, document = on_host.json("status")
    (drive,) = document["data"]["drives"]
    assert (drive["bdf"], drive["node"], drive["persisted"]) == (BDF, "/dev/vfio/12", True)
    assert document["data"]["leftovers"] == []
    assert on_host("status") == Exit.DONE
    assert BDF in on_host.out
