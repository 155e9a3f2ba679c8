# SPDX-License-Identifier: Apache-2.0
"""What staging asks of a GPU, through NVIDIA's driver API (libcuda.so.1): memory that a peer may
reach, host memory that the GPU may reach.

It works in the device's primary context, the one that CuPy and torch use, and imports neither.
cuMemHostRegister is what cudaHostRegister calls. One table of symbols; a failing call raises. Any
thread: a context is current for the length of a call only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from hifc.errors import HiFCError, NotSupported
from hifc.util.units import format_size

LIBRARY = "libcuda.so.1"

_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_
_RDMA_SUPPORTED, _RDMA_FLUSH_OPTIONS, _RDMA_WRITES_ORDERING = 116, 117, 118  # CU_DEVICE_ATTRIBUTE_
_RDMA_FLUSH_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_ORDERING_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_FLUSH_TO_OWNER = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
_REGISTER_FLAGS = 0x1 | 0x2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP

# Names as cuda.h has them after its macros.
_SYMBOLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), POINTER(c_int)),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuPointerSetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
}


class Gpu:
    """One GPU by its ordinal, its primary context held until close."""

    def __init__(self, lib: Any, ordinal: int) -> None:
        self._lib = lib
        self.ordinal = ordinal
        device = c_int()
        self._do(f"open GPU {ordinal}", "cuDeviceGet", byref(device), ordinal)
        self._device = device.value
        self._context = c_void_p()
        self._do(
            f"use GPU {ordinal}", "cuDevicePrimaryCtxRetain", byref(self._context), self._device
        )

    def __str__(self) -> str:
        return f"GPU {self.ordinal}"

    def close(self) -> None:
        """Lets go of the context."""
        self._do(f"let go of {self}", "cuDevicePrimaryCtxRelease_v2", self._device)

    # ---- memory of the GPU

    @property
    def is_reachable(self) -> bool:
        """Whether the GPU lets peers reach its memory: no consumer card does."""
        return bool(self._attribute(_RDMA_SUPPORTED))

    def allocate(self, size_bytes: int) -> int:
        """Address of memory that peers may reach; copies to it are synchronous to the caller."""
        address = c_uint64()
        with self._current(), contextlib.ExitStack() as undo:
            self._do(
                f"allocate {format_size(size_bytes)} on {self}",
                "cuMemAlloc_v2", byref(address), size_bytes,
            )  # fmt: skip
            undo.callback(self._lib.cuMemFree_v2, address.value)
            # Without it cuMemcpy may return before the bytes are there, and a drive reads others.
            self._do(
                f"make copies of {self} synchronous",
                "cuPointerSetAttribute", byref(c_uint(1)), _SYNC_MEMOPS, address.value,
            )  # fmt: skip
            undo.pop_all()
        return address.value

    def free(self, address: int) -> None:
        """What allocate gave."""
        with self._current():
            self._do(f"free memory of {self}", "cuMemFree_v2", address)

    @property
    def needs_flush(self) -> bool:
        """Whether kernels that start after a drive's write may miss it without flush."""
        if self._attribute(_RDMA_WRITES_ORDERING) >= _ORDERING_OWNER:
            return False
        if not self._attribute(_RDMA_FLUSH_OPTIONS) & _RDMA_FLUSH_HOST:
            raise NotSupported(
                f"{self} neither orders writes of a peer nor can be told to: use staging pinned"
            )
        return True

    def flush(self) -> None:
        """Returns once what peers wrote is visible to kernels of this GPU that start later."""
        with self._current():
            self._do(f"flush writes to {self}", "cuFlushGPUDirectRDMAWrites", 0, _FLUSH_TO_OWNER)

    # ---- memory of the host

    def register(self, address: int, size_bytes: int) -> int:
        """Pins host memory for this GPU; returns where its kernels see it."""
        seen = c_uint64()
        with self._current(), contextlib.ExitStack() as undo:
            self._do(
                f"register {format_size(size_bytes)} of host memory with {self}",
                "cuMemHostRegister_v2", address, size_bytes, _REGISTER_FLAGS,
            )  # fmt: skip
            undo.callback(self._lib.cuMemHostUnregister, address)
            self._do(
                f"map host memory on {self}",
                "cuMemHostGetDevicePointer_v2", byref(seen), address, 0,
            )  # fmt: skip
            undo.pop_all()
        return seen.value

    def unregister(self, address: int) -> None:
        """Undoes register."""
        with self._current():
            self._do(f"unregister host memory of {self}", "cuMemHostUnregister", address)

    # ---- within

    def _attribute(self, which: int) -> int:
        value = c_int()
        self._do(
            f"ask {self} for attribute {which}",
            "cuDeviceGetAttribute", byref(value), which, self._device,
        )  # fmt: skip
        return value.value

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._do(f"use {self}", "cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._do(f"use {self}", "cuCtxPopCurrent_v2", byref(c_void_p()))

    def _do(self, doing: str, symbol: str, *arguments: Any) -> None:
        _call(self._lib, doing, symbol, *arguments)


def _call(lib: Any, doing: str, symbol: str, *arguments: Any) -> None:
    code = getattr(lib, symbol)(*arguments)
    if code != 0:
        text = c_char_p()
        lib.cuGetErrorString(code, byref(text))
        why = text.value.decode("utf-8", "replace") if text.value else "unknown error"
        raise HiFCError(f"cannot {doing}: {symbol}: {why} [{code}]")


def _declare(lib: Any) -> Any:
    for name, arguments in _SYMBOLS.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise NotSupported(
                f"{LIBRARY} has no {name}: the NVIDIA driver is older than 465 (CUDA 11.3)"
            ) from None
        function.argtypes = arguments
        function.restype = c_int
    lib.cuGetErrorString.argtypes = (c_int, POINTER(c_char_p))
    lib.cuGetErrorString.restype = c_int
    return lib


def running() -> Gpu | None:
    """The GPU that this process uses already: that of the current context, or the first with an
    active one. None where it uses none; nothing is loaded or started in order to look."""
    try:
        lib = _declare(ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    except OSError:
        return None
    device, count, flags, active = c_int(), c_int(), c_uint(), c_int()
    if lib.cuCtxGetDevice(byref(device)) == 0:
        return Gpu(lib, device.value)
    if lib.cuDeviceGetCount(byref(count)) != 0:
        return None
    for ordinal in range(count.value):
        state = lib.cuDevicePrimaryCtxGetState(ordinal, byref(flags), byref(active))
        if state == 0 and active.value:
            return Gpu(lib, ordinal)
    return None


@functools.cache
def _started() -> Any:
    """libcuda, loaded and started. NotSupported: there is none, or no GPU."""
    try:
        lib = _declare(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise NotSupported(f"no NVIDIA driver: {error}; install it, or use staging host") from error
    code = lib.cuInit(0)
    count = c_int()
    if code != 0 or lib.cuDeviceGetCount(byref(count)) != 0 or count.value == 0:
        raise NotSupported(
            f"no NVIDIA GPU can be used (cuInit [{code}]): see nvidia-smi, or use staging host"
        )
    return lib


def gpu(ordinal: int | None = None) -> Gpu:
    """A GPU by ordinal; None: the one that this process uses, or else GPU 0. NotSupported: no
    driver, or no GPU. After this the process must not fork and use CUDA in the child."""
    lib = _started()
    if ordinal is None:
        return running() or Gpu(lib, 0)
    return Gpu(lib, ordinal)
