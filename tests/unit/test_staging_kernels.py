# SPDX-License-Identifier: Apache-2.0
"""Pack and unpack move between a cache and the very staging memory that the drive reads and writes.

No GPU is needed: a file that is mapped twice stands in for a BAR, one mapping being what the drive
sees and the other what kernels see, and the host runs what would be launched.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Opener
from fake_bar import FakeBar

from hifc import Answer, Namespace, NotSupported
from hifc.kernels import backend as kernels
from hifc.kernels.packing import checksums, pack, unpack
from hifc.kernels.pages import page_layout
from hifc.staging.bar import BarMemory

KEYS = [bytes([number]) * 16 for number in range(3)]
TABLE = np.array([[5, 0], [3, 2], [1, 7]], np.int32)


class SeenBar:
    """A provider of memory that kernels see elsewhere than the drive and the CPU do."""

    name = "a BAR seen twice"

    def __init__(self, bar: FakeBar) -> None:
        self._provider = bar.provider()
        self.seen = bar.peer_view()

    def check(self) -> None:
        self._provider.check()

    def map(self, size_bytes: int) -> BarMemory:
        memory = self._provider.map(size_bytes)
        memory.gpu_address = self.seen.ctypes.data
        return memory


class OnDevice:
    """An array of a GPU as CuPy's look, in host memory."""

    def __init__(self, array: Any, owner: object = None) -> None:
        self.array, self.owner = array, owner
        self.__cuda_array_interface__ = array.__array_interface__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)

    def __getitem__(self, index: Any) -> OnDevice:
        return OnDevice(np.atleast_1d(self.array[index]))

    def __int__(self) -> int:
        return int(self.array.item())

    def reshape(self, *shape: int) -> OnDevice:
        return OnDevice(self.array.reshape(*shape))


class UnownedMemory:
    """As CuPy's."""

    def __init__(self, ptr: int, size: int, owner: object) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    """As CuPy's."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Cupy:
    """What pack, unpack and staging ask of it."""

    class cuda:
        UnownedMemory = UnownedMemory
        MemoryPointer = MemoryPointer

    @staticmethod
    def zeros(shape: Any, dtype: str) -> OnDevice:
        return OnDevice(np.zeros(shape, dtype))

    @staticmethod
    def asarray(array: Any) -> OnDevice:
        return array if isinstance(array, OnDevice) else OnDevice(np.asarray(array))

    ascontiguousarray = asarray

    @staticmethod
    def ndarray(shape: tuple[int], dtype: str, memptr: MemoryPointer) -> OnDevice:
        assert np.prod(shape) * np.dtype(dtype).itemsize <= memptr.mem.size
        memory = (ctypes.c_uint8 * memptr.mem.size).from_address(memptr.ptr)
        return OnDevice(np.frombuffer(memory, dtype).reshape(shape), memptr.mem.owner)


class PlayedGpu:
    """A backend of a GPU whose grid the host runs."""

    name, reason, wide, xp = "cuda", "played by the host", 8, Cupy

    def launch(self, kernel: str, blocks: int, /, **arguments: Any) -> None:
        struct = kernels._fill(kernel, blocks, arguments)
        functions = kernels._host_functions(kernels.kernels_path())
        functions[kernel](struct.ctypes.data, blocks, 0)


@pytest.fixture
def bar(tmp_path: Path) -> SeenBar:
    return SeenBar(FakeBar(tmp_path / "devices"))


@pytest.fixture
def ns(ram: Opener, bar: SeenBar) -> Namespace:
    return ram.open(staging="gpu", staging_size="4MiB", bar=bar)


def cache(seed: int) -> np.ndarray:
    """Two layers of K and V, pages of 16 tokens, three heads of 64 half floats."""
    return np.random.default_rng(seed).standard_normal((2, 2, 8, 16, 3, 64)).astype(np.float16)


AXES = "layer kv page token head dim"


def test_blocks_are_packed_to_where_the_drive_reads_them(ns: Namespace) -> None:
    where = PlayedGpu()
    old, new = cache(1), np.zeros_like(cache(1))
    layout = page_layout(OnDevice(old), AXES, where)
    size = layout.block_bytes(32)
    blocks = [ns.staging.buffer(size) for _ in KEYS]
    moved = pack(
        layout,
        TABLE,
        [ns.staging.gpu_array(block, where) for block in blocks],
        where,
        checksums=True,
    )
    moved.check()
    packed = [block.copy() for block in blocks]
    assert [ns.put(key, block) for key, block in zip(KEYS, blocks, strict=True)] == [Answer.OK] * 3
    for block in blocks:
        block[:] = 0
    for key, block in zip(KEYS, blocks, strict=True):
        assert ns.get(key, out=block) is not None
    seen = [ns.staging.gpu_array(block, where) for block in blocks]
    back = page_layout(OnDevice(new), AXES, where)
    found = unpack(back, TABLE, seen, where, checksums=True)
    found.check()
    assert (new[:, :, TABLE] == old[:, :, TABLE]).all()
    assert not new[:, :, [4, 6]].any()
    assert (found.checksums.array == moved.checksums.array).all()
    for block, kernel_array, sums in zip(packed, seen, moved.checksums.array, strict=True):
        assert (kernel_array.array == block).all()
        assert (checksums(kernel_array, size // 2, where).array == sums).all()
    assert ns.stats().bounce_bytes == 0


def test_an_array_of_the_gpu_is_the_same_memory_and_keeps_it(ns: Namespace, bar: SeenBar) -> None:
    whole = ns.staging.buffer(3 * 4096)
    part = whole[4096:8192]
    seen = ns.staging.gpu_array(part, PlayedGpu())
    at = ns.offset(part)
    assert seen.shape == (4096,)
    assert seen.array.ctypes.data == bar.seen.ctypes.data + at != part.ctypes.data
    part[:] = 7
    assert (seen.array == 7).all()
    del whole, part
    gc.collect()
    others = [ns.staging.buffer(4096) for _ in range(8)]
    assert at not in [ns.offset(other) for other in others], "it is still taken"


def test_kernels_of_the_host_take_the_array_itself(ns: Namespace, ram: Opener) -> None:
    where = kernels.backend("host")
    for named in (where, None) if kernels.backend().name == "host" else (where,):
        with pytest.raises(NotSupported, match="give them the array"):
            ns.staging.gpu_array(ns.staging.buffer(4096), named)
    layout = page_layout(cache(1), AXES, where)
    blocks = [ns.staging.buffer(layout.block_bytes(32)) for _ in KEYS]
    pack(layout, TABLE, blocks, where)
    again = [ns.staging.buffer(layout.block_bytes(32)) for _ in KEYS]
    pack(layout, TABLE, [ns.staging.gpu_address(block) for block in again], where)
    assert all((one == two).all() for one, two in zip(blocks, again, strict=True))
    assert any(block.any() for block in blocks)


def test_no_gpu_sees_host_staging(ram: Opener) -> None:
    staging = ram.open(staging="host").staging
    with pytest.raises(NotSupported, match="no GPU sees it"):
        staging.gpu_array(staging.buffer(4096), PlayedGpu())
