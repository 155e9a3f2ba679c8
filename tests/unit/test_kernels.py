# SPDX-License-Identifier: Apache-2.0
"""The border to the kernels, and the checksum kernel against the driver's routine."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import NAMES, back, make_backend, to

from hifc.errors import ConfigError, InvalidRequest, LibraryError, NotSupported
from hifc.kernels import backend as kernels
from hifc.kernels import packing
from hifc.kernels import table as kernel_table
from hifc.native_lib.libhifc import library

NATIVE = Path(__file__).parents[2] / "native"


@pytest.fixture(params=NAMES)
def where(request: pytest.FixtureRequest) -> kernels.Backend:
    return make_backend(request.param)


def test_every_kernel_is_in_the_table() -> None:
    found = {
        (name, int(threads) if threads.isdigit() else threads, file.name)
        for file in NATIVE.glob("*.cu")
        for name, threads in re.findall(r"^HIFC_KERNEL\((\w+), ([\w:]+),", file.read_text(), re.M)
    }
    assert {(name, source) for name, _, source in found} == {
        (name, kernel.source) for name, kernel in kernel_table.KERNELS.items()
    }


def test_no_standard_header_is_included() -> None:
    for file in NATIVE.iterdir():
        if file.suffix in (".cu", ".cuh"):
            assert not re.search(r"#include\s*<", file.read_text()), file


def test_source_is_whole() -> None:
    text = kernels.source("checksum.cu")
    assert "#include" not in text
    assert text.count("struct Block") == 1
    assert text.index("struct Block") < text.index("HIFC_KERNEL(hifc_checksum")


def test_source_holds_what_it_shares_with_c() -> None:
    text = kernels.source("issue.cu")
    assert not re.search(r'^#include "', text, re.M)
    assert text.index("struct hifc_descriptor {") < text.index("HIFC_KERNEL(hifc_prefetch_issue")


def test_auto_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = kernels.backend.__wrapped__("auto")
    assert found.name == "host"
    assert "pip install hifc[cupy]" in found.reason


def test_cuda_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotSupported, match=re.escape("pip install hifc[cupy]")):
        kernels.backend.__wrapped__("cuda")


def test_cupy_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    class Runtime:
        def getDeviceCount(self) -> int:
            raise CUDARuntimeError("cudaErrorNoDevice")

    class Cupy:
        class cuda:
            runtime = Runtime()

    Cupy.cuda.runtime.CUDARuntimeError = CUDARuntimeError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    with pytest.raises(NotSupported, match="no GPU"):
        kernels.backend.__wrapped__("cuda")
    assert "no GPU" in kernels.backend.__wrapped__("auto").reason


class OnDevice:
    """An array of a GPU as CuPy's look, in host memory."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__array_interface__
        self.shape, self.strides = array.shape, array.strides
        self.itemsize, self.dtype = array.itemsize, array.dtype


def test_cuda_hands_cupy_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source, options, grid, block, and the struct by value; the host plays the GPU's part."""
    modules: list[tuple[str, tuple[str, ...], str]] = []
    launches: list[tuple[tuple[int], tuple[int]]] = []
    functions = kernels._host_functions(kernels.kernels_path())

    class RawModule:
        def __init__(self, *, code: str, options: tuple[str, ...], backend: str) -> None:
            modules.append((code, options, backend))

        def get_function(self, name: str) -> Any:
            def launch(
                grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]
            ) -> None:
                (struct,) = args
                assert struct.size == 1
                assert struct.dtype == kernels.KERNELS[name].args
                launches.append((grid, block))
                functions[name](struct.ctypes.data, grid[0], 0)

            return launch

    class Runtime:
        CUDARuntimeError = RuntimeError

        def getDeviceCount(self) -> int:
            return 1

        def getDeviceProperties(self, device: int) -> dict[str, Any]:
            return {"multiProcessorCount": 4}

    class Device:
        id = 0

    class Cuda:
        runtime = Runtime()

    Cuda.Device = Device  # type: ignore[attr-defined]

    class Cupy:
        cuda = Cuda()

        def zeros(self, shape: Any, dtype: str) -> OnDevice:
            return OnDevice(np.zeros(shape, dtype))

    cupy = Cupy()
    cupy.RawModule = RawModule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    where = kernels.backend.__wrapped__("auto")
    assert (where.name, where.wide) == ("cuda", 32)
    data = np.random.default_rng(1).integers(0, 256, 50 * 65536, np.uint8)
    data = data[-data.ctypes.data % 16 :][: 49 * 65536].reshape(49, 65536)
    for _ in range(2):
        found = packing.checksums(OnDevice(data), 65536, where)
        assert found.array.tolist() == [raw_crc(part) for part in data]
    assert modules == [(kernels.source("checksum.cu"), kernels.NVRTC_OPTIONS, "nvrtc")]
    assert launches == [((32,), (256,))] * 2
    where.launch(
        "hifc_checksum", 0, **dict.fromkeys(kernels.KERNELS["hifc_checksum"].args.names, 0)
    )
    assert len(launches) == 2, "a grid of no blocks is no launch"
    with pytest.raises(InvalidRequest, match="host memory"):
        packing.checksums(data, 65536, where)


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="auto, cuda or host"):
        kernels.backend("gpu")


def test_missing_library_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=re.escape("pip install .")):
        kernels._host_functions(tmp_path / "libhifc_kernels.so")


def test_a_missing_header_names_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "source_folder", lambda: tmp_path / "native")
    with pytest.raises(LibraryError, match=r"hifc_ring\.h is missing"):
        kernels.header_folder()


def test_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    row = kernel_table.KERNELS["hifc_checksum"]
    for args, threads in ((np.dtype("u8"), row.threads), (row.args, 128)):
        monkeypatch.setitem(
            kernel_table.KERNELS, "hifc_checksum", kernel_table.Kernel(row.source, threads, args)
        )
        with pytest.raises(LibraryError, match="one source"):
            kernels._host_functions.__wrapped__(kernels.kernels_path())
    monkeypatch.setitem(kernel_table.KERNELS, "hifc_absent", row)
    monkeypatch.setitem(kernel_table.KERNELS, "hifc_checksum", row)
    with pytest.raises(LibraryError, match="hifc_absent"):
        kernels._host_functions.__wrapped__(kernels.kernels_path())


def test_fields_of_a_struct_are_all_given(where: kernels.Backend) -> None:
    with pytest.raises(InvalidRequest, match="part_bytes"):
        where.launch("hifc_checksum", 1, data=0)


def test_array_of_another_place() -> None:
    host = kernels.backend("host")

    class OnGpu:
        shape, strides, itemsize, dtype = (1,), (1,), 1, np.dtype("u1")

        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"data": (0, False)}

    with pytest.raises(InvalidRequest, match="GPU memory"):
        kernels.strided(OnGpu(), host)
    with pytest.raises(InvalidRequest, match="no array"):
        kernels.strided([1, 2], host)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_torch_arrays(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 6, dtype=getattr(torch, dtype)).t()
    found = kernels.strided(tensor, kernels.backend("host"))
    size = tensor.element_size()
    assert found == kernels.Strided(
        tensor.data_ptr(), (6, 4), (size, 6 * size), size, dtype, False, True
    )
    with pytest.raises(InvalidRequest, match="strided"):
        kernels.address_of(tensor, kernels.backend("host"))


def test_torch_tensors_without_memory_to_read() -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.ones(2, 3)
    for tensor in (torch.zeros(2, 3, device="meta"), numbers.to_sparse(), torch._neg_view(numbers)):
        with pytest.raises(InvalidRequest, match=r"dense|resolve_neg"):
            kernels.strided(tensor, kernels.backend("host"))


def raw_crc(data: Any) -> int:
    buffer = np.ascontiguousarray(data)
    return int(library().hifc_crc32c_raw(ctypes.c_void_p(buffer.ctypes.data), buffer.nbytes))


@pytest.mark.parametrize("name", NAMES)
@given(
    part_bytes=st.integers(1, 40_000) | st.integers(1, 40).map(lambda n: n * 4096),
    parts=st.integers(1, 5),
    wide=st.integers(1, 40),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=60, deadline=None)
def test_checksums_are_the_drivers(
    name: str, part_bytes: int, parts: int, wide: int, seed: int
) -> None:
    where = make_backend(name)
    if parts > 1:
        part_bytes = -(-part_bytes // 16) * 16
    data = np.random.default_rng(seed).integers(0, 256, (parts, part_bytes), np.uint8)
    if where.name == "host":
        where = kernels.HostBackend("a test", backwards=name == "backwards")
        where.wide = wide
    found = back(packing.checksums(to(where, data), part_bytes, where))
    assert found.tolist() == [raw_crc(part) for part in data]


def test_checksums_of_what_does_not_fit(where: kernels.Backend) -> None:
    data = to(where, np.zeros(96, np.uint8))
    for part_bytes in (0, 7, 97):
        with pytest.raises(InvalidRequest, match="whole parts"):
            packing.checksums(data, part_bytes, where)
    with pytest.raises(InvalidRequest, match="multiples of 16"):
        packing.checksums(data, 24, where)
    with pytest.raises(InvalidRequest, match="multiples of 16"):
        packing.checksums(data[8:24], 16, where)
