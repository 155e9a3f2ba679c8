# SPDX-License-Identifier: Apache-2.0
"""Where bytes wait: the kinds of staging, what each refuses, and transfers to and from a BAR.

A file stands in for the resource of a PCI device, a scripted library for CUDA and GDRCopy. The
transfer by a real drive is in tests/vm.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, Opener
from fake_bar import BDF, FakeBar
from hypothesis import given
from hypothesis import strategies as st

from hifc import (
    Answer,
    BlockClass,
    BufferExhausted,
    ClosedError,
    ConfigError,
    CorruptionError,
    HiFC,
    InvalidRequest,
    Namespace,
    NotSupported,
    Op,
    make_requests,
)
from hifc.native_lib import libhifc
from hifc.staging.bar import MAP_BYTES, PciBarProvider
from hifc.staging.staging import Extents

KEYS = [bytes([number]) * 16 for number in range(8)]


def value(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def bar(tmp_path: Path) -> FakeBar:
    return FakeBar(tmp_path / "devices")


@pytest.fixture
def ns(ram: Opener, bar: FakeBar) -> Namespace:
    return ram.open(staging="gpu", staging_size="4MiB", bar=bar.provider())


# ---- transfers


def test_values_are_written_from_a_bar_and_read_into_it(ns: Namespace, bar: FakeBar) -> None:
    assert ns.staging.kind == "gpu"
    source, target = ns.staging.buffer(100_000), ns.staging.buffer(100_000)
    peer = bar.peer_view()
    assert source.ctypes.data % 4096 == 0
    base = source.ctypes.data - ns.offset(source)
    assert base % MAP_BYTES == 0
    data = value(1, 100_000)
    peer[ns.offset(source) : ns.offset(source) + 100_000] = data
    assert ns.put(KEYS[0], source) is Answer.OK
    found = ns.get(KEYS[0], out=target)
    assert found is not None
    at = ns.offset(target)
    assert (peer[at : at + 100_000] == data).all()
    assert (ns.get(KEYS[0]) == data).all()


def test_a_whole_value_moves_without_a_copy_in_memory(ns: Namespace) -> None:
    source, target = ns.staging.buffer(1 << 20), ns.staging.buffer(1 << 20)
    source[:] = value(2, 1 << 20)
    assert ns.put(KEYS[0], source) is Answer.OK
    assert ns.get(KEYS[0], out=target) is not None
    assert (target == source).all()
    assert ns.stats().bounce_bytes == 0


def test_a_batch_may_mix_pools(ns: Namespace) -> None:
    sizes = [4096, 65536, 368_640, 300_000]
    sources = [
        (ns.buffer if number % 2 else ns.staging.buffer)(size) for number, size in enumerate(sizes)
    ]
    for number, source in enumerate(sources):
        source[:] = value(number, source.size)
    ticket = ns.put_many(KEYS[:4], sources)
    ticket.wait()
    assert (ticket.answers == Answer.OK).all()
    targets = [
        (ns.staging.buffer if number % 2 else ns.buffer)(size) for number, size in enumerate(sizes)
    ]
    ticket = ns.get_many(KEYS[:4], targets)
    ticket.wait()
    assert (ticket.answers == Answer.OK).all()
    for source, target in zip(sources, targets, strict=True):
        assert (source == target).all()


def test_rows_of_one_array_and_ranges_of_parts(ns: Namespace) -> None:
    rows = ns.staging.buffer(4 * 65536).reshape(4, 65536)
    rows[:] = value(3, 4 * 65536).reshape(4, 65536)
    ns.put_many(KEYS[:4], rows, parts=4).wait()
    part = ns.staging.buffer(16384)
    found = ns.get_range(KEYS[2], 2 * 16384, 16384, out=part)
    assert found is not None
    assert (part == rows[2, 32768:49152]).all()


def test_prepared_requests_name_the_pool(ns: Namespace) -> None:
    source, target = ns.staging.buffer(65536), ns.staging.buffer(65536)
    source[:] = value(4, 65536)
    assert ns.staging.pool > 0
    requests = make_requests(1, Op.PUT)
    requests["key"] = np.frombuffer(KEYS[0], dtype=np.uint8)
    requests["length"] = 65536
    requests["pool"] = ns.staging.pool
    requests["buffer_offset"] = ns.offset(source)
    ns.submit(requests).wait()
    assert requests["status"][0] == Answer.OK
    requests["op"], requests["length"], requests["capacity"] = Op.GET, 0, 65536
    requests["buffer_offset"] = ns.offset(target)
    ns.submit(requests).wait()
    assert (target == source).all()


def prepared(ns: Namespace, op: Op, buffer: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """A request whose checksum is given, or wanted, in sums: what a kernel would do."""
    requests = make_requests(1, op)
    requests["key"] = np.frombuffer(KEYS[0], dtype=np.uint8)
    requests["flags"] = 1
    requests["pool"] = ns.staging.pool
    requests["length" if op == Op.PUT else "capacity"] = buffer.size
    requests["buffer_offset"], requests["checksum_offset"] = ns.offset(buffer), ns.offset(sums)
    return requests


def test_checksums_are_given_and_wanted_in_the_bar(ns: Namespace) -> None:
    buffer, sums = ns.staging.buffer(65536), ns.staging.buffer(4).view(np.uint32)
    buffer[:] = value(5, 65536)
    raw = libhifc.library().hifc_crc32c_raw(buffer.ctypes.data, buffer.size)
    sums[0] = raw
    ns.submit(prepared(ns, Op.PUT, buffer, sums)).wait()
    sums[0] = 0
    ns.submit(prepared(ns, Op.GET, buffer, sums)).wait()
    assert sums[0] == raw
    assert (ns.get(KEYS[0]) == value(5, 65536)).all()


def test_a_value_that_does_not_match_leaves_zeros_in_the_bar(ns: Namespace) -> None:
    buffer, sums = ns.staging.buffer(65536), ns.staging.buffer(4).view(np.uint32)
    buffer[:], sums[0] = value(6, 65536), 1
    request = prepared(ns, Op.PUT, buffer, sums)
    request["cls"] = BlockClass.SWAP
    ns.submit(request).wait()
    with pytest.raises(CorruptionError):
        ns.get(KEYS[0], out=buffer)
    assert not buffer.any()


# ---- memory


def test_the_bar_is_enabled_as_long_as_an_array_lives(ram: Opener, bar: FakeBar) -> None:
    ns = ram.open(staging="gpu", staging_size="2MiB", bar=bar.provider())
    assert bar.enabled
    kept = ns.staging.buffer(4096)
    ns.close()
    assert bar.enabled
    kept[:] = 7
    assert (bar.peer_view()[:4096] == 7).all()
    del kept
    gc.collect()
    assert not bar.enabled


def test_closing_undoes_it_all(ram: Opener, bar: FakeBar) -> None:
    ns = ram.open(staging="gpu", staging_size="2MiB", bar=bar.provider())
    ns.close()
    assert not bar.enabled
    with pytest.raises(ClosedError):
        ns.staging.buffer(4096)


def test_closing_with_a_ring_over_it(ram: Opener, bar: FakeBar) -> None:
    ns = ram.open(staging="gpu", staging_size="2MiB", bar=bar.provider())
    ring = ns.ring(ns.staging.buffer(65536), 65536)
    ns.close()
    ring.close()
    del ring
    gc.collect()
    assert not bar.enabled


def test_room_comes_back_when_arrays_are_gone(ns: Namespace) -> None:
    arrays = [ns.staging.buffer(1 << 20) for _ in range(4)]
    with pytest.raises(BufferExhausted, match="swap_buffer_size"):
        ns.staging.buffer(1)
    del arrays
    assert ns.staging.buffer(4 << 20).size == 4 << 20


def test_it_does_not_take_more_than_it_was_given(ns: Namespace, bar: FakeBar) -> None:
    bar.peer_view()[4 << 20 :] = 9
    ns.staging.buffer(4 << 20)[:] = 1
    assert (bar.peer_view()[4 << 20 :] == 9).all()


def test_no_gpu_sees_a_plain_bar(ns: Namespace) -> None:
    with pytest.raises(NotSupported, match="no GPU sees it"):
        ns.staging.gpu_address(ns.staging.buffer(4096))


def test_sizes_that_make_no_sense(ns: Namespace) -> None:
    with pytest.raises(InvalidRequest, match="size_bytes"):
        ns.staging.buffer(0)


class Holder:
    """Of a range."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_extents_never_overlap_and_lose_nothing(steps: list[tuple[bool, int]]) -> None:
    extents, taken = Extents(100), list[tuple[Holder, int]]()
    for takes, number in steps:
        if takes or not taken:
            holder = extents.take(number, Holder)
            if holder is None:
                ends = sorted([(0, 0), (100, 100), *((o.offset, o.offset + n) for o, n in taken)])
                gaps = [start - end for (_, end), (start, _) in itertools.pairwise(ends)]
                assert max(gaps) < number, "there was room"
                continue
            offset = holder.offset
            assert offset + number <= 100
            assert all(
                offset + number <= one.offset or one.offset + size <= offset for one, size in taken
            )
            taken.append((holder, number))
        else:
            del taken[number % len(taken)]
            holder = None
    taken.clear()
    holder = None
    whole = extents.take(100, Holder)
    assert whole is not None
    assert whole.offset == 0


# ---- the choice


def test_auto_without_a_gpu_is_host_memory_and_says_so(ram: Opener) -> None:
    ns = ram.open()
    assert str(ns.staging) == "host (auto: this process uses no GPU)"
    assert ns.offset(ns.staging.buffer(4096)) >= 0
    assert ns.staging.pool == 0


def test_auto_takes_a_bar_that_was_given(ram: Opener, bar: FakeBar) -> None:
    ns = ram.open(staging="auto", bar=bar.provider(), staging_size="2MiB")
    assert str(ns.staging) == f"gpu (auto: {BDF} resource2)"


def test_auto_tells_what_it_passed_over(ram: Opener, bar: FakeBar) -> None:
    ns = ram.open(staging="auto", bar=bar.provider(), staging_size="1GiB")
    assert ns.staging.kind == "host"
    assert "not gpu: 0000:5e:00.0 resource2: 1GiB of staging" in ns.staging.reason


@pytest.mark.parametrize(
    ("kind", "text"), [("gpu", "GDRCopy 2.4 or newer"), ("pinned", "no NVIDIA driver")]
)
def test_a_kind_by_name_is_never_replaced(ram: Opener, kind: str, text: str) -> None:
    with pytest.raises(NotSupported, match=text):
        Namespace.open(ram.uri, staging=kind)
    ram.open(staging="host").put(KEYS[0], b"the device was not left open")


def test_a_bar_that_a_drive_cannot_reach_closes_the_device(
    ram: Opener, bar: FakeBar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hifc.staging.bar.map_aligned", lambda fd, size: 0x1000_0000_0800
    )  # off any page
    monkeypatch.setattr("hifc.native_lib.libhifc.unmap", lambda address, size: None)
    with pytest.raises(NotSupported, match="behind an IOMMU that is on"):
        ram.open(staging="gpu", staging_size="2MiB", bar=bar.provider())
    assert not bar.enabled
    monkeypatch.undo()
    ram.open()


def test_the_kernel_reaches_no_bar(tmp_path: Path, bar: FakeBar) -> None:
    with pytest.raises(NotSupported, match=r"spdk://BDF, not file"):
        Namespace.open(f"file://{tmp_path}/x?size=64MiB", staging="gpu", bar=bar.provider())


def test_kinds_and_bars_that_contradict(ram: Opener, bar: FakeBar) -> None:
    with pytest.raises(ConfigError, match="auto, gpu, pinned, host"):
        ram.open(staging="cpu")
    with pytest.raises(ConfigError, match="a bar was given"):
        ram.open(staging="host", bar=bar.provider())


def test_the_configuration_reaches_the_namespace(ram: Opener, bar: FakeBar) -> None:
    config = {"device": ram.uri, "staging": "gpu", "swap_buffer_size": "4MiB"}
    with HiFC(config, bar=bar.provider()) as engine:
        assert str(engine.namespace.staging) == "gpu (asked for)"
        assert engine.namespace.staging.buffer(4 << 20).size == 4 << 20
    with pytest.raises(NotSupported):
        HiFC({"device": ram.uri, "staging": "pinned"})
    with HiFC({"device": ram.uri, "staging": "host"}) as engine:
        assert engine.namespace.staging.kind == "host"


# ---- a PCI device that will not do


@pytest.mark.parametrize("bdf", ["5e:00.0", "0000:5e:00.9", "../../etc"])
def test_an_address_that_is_none(bdf: str) -> None:
    with pytest.raises(ConfigError, match="no PCI address"):
        PciBarProvider(bdf, "resource2")


def test_a_resource_that_is_none() -> None:
    with pytest.raises(ConfigError, match="resource0 to resource5"):
        PciBarProvider(BDF, "../resource2")
    with pytest.raises(ConfigError, match="no PCI address"):
        PciBarProvider(None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="resource0 to resource5"):
        PciBarProvider(BDF, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("staging", ["auto", "gpu"])
def test_a_bar_that_is_no_provider(ram: Opener, staging: str) -> None:
    with pytest.raises(ConfigError, match="object is no BarProvider"):
        ram.open(staging=staging, staging_size="2MiB", bar=object())


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="no such PCI device"):
        PciBarProvider(BDF, "resource2", devices=tmp_path).check()


def test_a_bar_of_another_kind(bar: FakeBar) -> None:
    (bar.folder / "resource1").write_bytes(b"")
    with pytest.raises(NotSupported, match="no memory BAR"):
        bar.provider("resource1").check()
    with pytest.raises(NotSupported, match="no memory BAR"):
        bar.provider("resource2_wc").check()


def test_a_device_that_a_driver_has(bar: FakeBar) -> None:
    (bar.folder / "driver").symlink_to("../../../bus/pci/drivers/nouveau")
    with pytest.raises(NotSupported, match="nouveau has it"):
        bar.provider().map(MAP_BYTES)
    assert not bar.enabled


def test_a_bar_that_cannot_be_mapped_is_disabled_again(
    bar: FakeBar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("hifc.staging.bar._mmap", refuse)
    with pytest.raises(PermissionError, match="locked down"):
        bar.provider().map(MAP_BYTES)
    assert not bar.enabled


# ---- a scripted GPU


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripted")
    source = REPOSITORY / "tests/scripted_gpu.c"
    command = ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source]
    subprocess.run(command, check=True, timeout=300)
    (folder / "libgdrapi.so.2").symlink_to("libcuda.so.1")
    return folder


class Scripted:
    """Runs Python with the scripted libraries; `calls` are those that were made."""

    def __init__(self, libraries: Path) -> None:
        self._libraries = libraries
        self.calls: list[str] = []

    def run(self, code: str, **environment: str) -> str:
        read, write = os.pipe()
        prologue = (
            "from pathlib import Path\nimport ctypes, gc\nimport numpy as np\n"
            "from hifc.staging import gdrcopy\ngdrcopy._DEVICE = Path('/dev/null')\n"
            "from hifc import HiFCError, Namespace\n"
            "uri = 'ram://gpu?size=64MiB'\nNamespace.format(uri, segment_size='2MiB')\n"
            "key = bytes(16)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", prologue + code],
            env={
                **os.environ, **environment, "SCRIPT_LOG": str(write),
                "LD_LIBRARY_PATH": str(self._libraries),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            pass_fds=[write], capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        os.close(write)
        with os.fdopen(read) as log:
            self.calls = log.read().split()
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def scripted(libraries: Path) -> Iterator[Scripted]:
    yield Scripted(libraries)


MOVE = """
with Namespace.open(uri, staging=kind, staging_size='4MiB', pool_size='4MiB') as ns:
    source, target = ns.staging.buffer(65536), ns.staging.buffer(65536)
    source[:] = np.arange(65536) % 251
    assert ns.put(key, source).name == 'OK' and ns.get(key, out=target) is not None
    if kind == 'gpu':
        assert ctypes.string_at(ns.staging.gpu_address(target), 65536) == source.tobytes()
        assert (target.ctypes.data - ns.offset(target)) % (2 << 20) == 0
    else:
        assert ns.staging.gpu_address(target) == target.ctypes.data + 0x10000000000
    assert ns.stats().bounce_bytes == 0
    del source, target
"""


def test_gdrcopy_maps_memory_that_the_gpu_sees(scripted: Scripted) -> None:
    scripted.run("kind = 'gpu'" + MOVE)
    wanted = [
        "cuMemAlloc_v2", "cuPointerSetAttribute", "gdr_open", "gdr_pin_buffer", "gdr_map",
        "gdr_get_info_v2", "cuFlushGPUDirectRDMAWrites", "gdr_unmap", "gdr_unpin_buffer",
        "gdr_close", "cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2",
    ]  # fmt: skip
    assert [name for name in scripted.calls if name in wanted[:-1]] == wanted[:-1]
    assert scripted.calls[-1] == wanted[-1]


def test_nothing_is_flushed_where_the_gpu_orders_writes(scripted: Scripted) -> None:
    scripted.run("kind = 'gpu'" + MOVE, SCRIPT_ORDERING="100")
    assert "cuFlushGPUDirectRDMAWrites" not in scripted.calls
    assert "gdr_map" in scripted.calls


def test_a_pinned_pool_is_registered_and_given_back(scripted: Scripted) -> None:
    scripted.run("kind = 'pinned'" + MOVE)
    assert scripted.calls.count("cuMemHostRegister_v2") == 1
    assert scripted.calls[-2:] == ["cuMemHostUnregister", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize(
    ("kind", "fails", "text"),
    [
        ("gpu", "cuInit", "no NVIDIA GPU can be used"),
        ("gpu", "cuMemAlloc_v2", "cannot allocate 6.0625MiB on GPU 0"),
        ("gpu", "cuPointerSetAttribute", "cannot make copies of GPU 0 synchronous"),
        ("gpu", "gdr_open", "of one version"),
        ("gpu", "gdr_pin_buffer", "BAR1"),
        ("gpu", "gdr_map", "cannot map 6MiB"),
        ("gpu", "gdr_get_info_v2", "cannot tell where"),
        ("pinned", "cuMemHostRegister_v2", "cannot register 4MiB of host memory"),
        ("pinned", "cuMemHostGetDevicePointer_v2", "cannot map host memory"),
    ],
)
def test_what_fails_is_undone_and_told(
    scripted: Scripted, kind: str, fails: str, text: str
) -> None:
    said = scripted.run(
        f"try:\n    Namespace.open(uri, staging='{kind}', staging_size='4MiB', pool_size='4MiB')\n"
        "except HiFCError as error:\n    print(error)\nelse:\n    print('opened')\n"
        "Namespace.open(uri, staging='host').close()\n",
        SCRIPT_FAIL=fails,
    )
    assert text in said.replace("6356992", "6.0625MiB").replace("6208KiB", "6.0625MiB")
    undo = {
        "cuMemAlloc_v2": "cuMemFree_v2", "gdr_open": "gdr_close", "gdr_map": "gdr_unmap",
        "gdr_pin_buffer": "gdr_unpin_buffer", "cuMemHostRegister_v2": "cuMemHostUnregister",
        "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease_v2",
    }  # fmt: skip
    for done, undone in undo.items():
        assert scripted.calls.count(done) - (fails == done) == scripted.calls.count(undone), done


def test_a_consumer_gpu_is_refused_by_name_and_passed_over_by_auto(scripted: Scripted) -> None:
    code = (
        "ctypes.CDLL('libcuda.so.1')\n"
        "with Namespace.open(uri) as ns:\n    print(ns.staging)\n"
        "try:\n    Namespace.open(uri, staging='gpu')\n"
        "except HiFCError as error:\n    print(error)\n"
    )
    said = scripted.run(code, SCRIPT_CONSUMER="1", SCRIPT_ACTIVE="1").splitlines()
    assert said[0].startswith("pinned (auto; not gpu: GPU 0 lets no other device")
    assert "staging pinned" in said[1]


def test_auto_uses_only_a_gpu_that_the_process_uses(scripted: Scripted) -> None:
    code = "{}with Namespace.open(uri) as ns:\n    print(ns.staging)\n"
    load = "ctypes.CDLL('libcuda.so.1')\n"
    assert scripted.run(code.format("")).startswith("host")
    assert scripted.run(code.format(load)).startswith("host")
    said = scripted.run(code.format(load), SCRIPT_ACTIVE="1")
    assert said.startswith("gpu (auto: GPU 0)")


def test_host_staging_refuses_odd_sizes_and_a_closed_namespace(ram: Opener) -> None:
    ns = ram.open(staging="host")
    staging = ns.staging
    for wrong in (0, -1, 1.5, "x", None, True):
        with pytest.raises(InvalidRequest, match="size_bytes"):
            staging.buffer(wrong)  # type: ignore[arg-type]
    ns.close()
    with pytest.raises(ClosedError):
        staging.buffer(10)
