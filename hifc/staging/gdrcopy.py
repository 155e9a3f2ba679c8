# SPDX-License-Identifier: Apache-2.0
"""Memory of an NVIDIA GPU, mapped through its BAR by GDRCopy (libgdrapi.so.2, module gdrdrv).

GDRCopy pins whole GPU pages of 64 KiB and maps them wherever the kernel has room, at a multiple of
4 KiB. SPDK takes pieces of 2 MiB at multiples of 2 MiB. So one piece more than asked for is pinned
and mapped, and what is handed out begins at the first multiple of 2 MiB within; the IOMMU maps by
4 KiB, so nothing is asked of the address within the GPU. Moving the mapping (mremap) would not do:
gdrdrv forgets a mapping that moved, and could not take it away when the GPU's memory goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint32, c_uint64, c_ulong, c_void_p
from pathlib import Path
from typing import Any

from hifc.errors import HiFCError, NotPermitted, NotSupported
from hifc.staging import cuda
from hifc.staging.bar import MAP_BYTES, BarMemory, align_up
from hifc.util.units import format_size

LIBRARY = "libgdrapi.so.2"
GPU_PAGE_BYTES = 64 << 10
_DEVICE = Path("/dev/gdrdrv")


class _Handle(Structure):
    """gdr_mh_t."""

    _fields_ = [("h", c_ulong)]


class _Info(Structure):
    """gdr_info_v2_t."""

    _fields_ = [
        ("va", c_uint64),
        ("mapped_size", c_uint64),
        ("page_size", c_uint32),
        ("tm_cycles", c_uint64),
        ("cycles_per_ms", c_uint32),
        ("mapped", c_uint32),  # bits: mapped, wc_mapping
        ("mapping_type", c_int),
    ]


_SYMBOLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gdr_open": (c_void_p, ()),
    "gdr_close": (c_int, (c_void_p,)),
    "gdr_pin_buffer": (
        c_int,
        (c_void_p, c_ulong, c_size_t, c_uint64, c_uint32, POINTER(_Handle)),
    ),
    "gdr_unpin_buffer": (c_int, (c_void_p, _Handle)),
    "gdr_get_info_v2": (c_int, (c_void_p, _Handle, POINTER(_Info))),
    "gdr_map": (c_int, (c_void_p, _Handle, POINTER(c_void_p), c_size_t)),
    "gdr_unmap": (c_int, (c_void_p, _Handle, c_void_p, c_size_t)),
}


@functools.cache
def _library() -> Any:
    try:
        lib = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NotSupported(
            f"staging gpu needs GDRCopy 2.4 or newer ({error}): install its library and its kernel "
            "module gdrdrv, or use staging pinned"
        ) from error
    for name, (result, arguments) in _SYMBOLS.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise NotSupported(f"{LIBRARY} has no {name}: GDRCopy 2.4 or newer is needed") from None
        function.restype = result
        function.argtypes = arguments
    return lib


class GdrCopyProvider:
    """Memory of an NVIDIA GPU. ordinal: which; None: the one that this process uses, or GPU 0."""

    def __init__(self, ordinal: int | None = None) -> None:
        self._ordinal = ordinal

    @property
    def name(self) -> str:
        """The GPU."""
        return "the GPU in use" if self._ordinal is None else f"GPU {self._ordinal}"

    def check(self) -> None:
        """As BarProvider.check."""
        _library()
        if not _DEVICE.exists():
            raise NotSupported(f"{_DEVICE} is missing: load GDRCopy's module: modprobe gdrdrv")
        if not os.access(_DEVICE, os.R_OK | os.W_OK):
            fix = f"chmod 0666 {_DEVICE} (GDRCopy's udev rule does that)"
            raise NotPermitted(f"{_DEVICE}: this user may not open it; {fix}", fix=fix)
        with contextlib.closing(cuda.gpu(self._ordinal)) as gpu:
            if not gpu.is_reachable:
                raise NotSupported(
                    f"{gpu} lets no other device reach its memory (GPUDirect RDMA): use staging "
                    "pinned"
                )

    def map(self, size_bytes: int) -> BarMemory:
        """As BarProvider.map."""
        self.check()
        with contextlib.ExitStack() as undo:
            gpu = cuda.gpu(self._ordinal)
            undo.callback(gpu.close)
            flush = gpu.flush if gpu.needs_flush else None
            length = size_bytes + MAP_BYTES
            allocated = gpu.allocate(length + GPU_PAGE_BYTES)
            undo.callback(gpu.free, allocated)
            start = align_up(allocated, GPU_PAGE_BYTES)
            mapped_at, info = _map(undo, start, length, str(gpu))
            address = align_up(mapped_at, MAP_BYTES)
            if info.va != start or info.mapped_size < length:
                raise HiFCError(
                    f"GDRCopy mapped {info.mapped_size} bytes from {info.va:#x} of {gpu}, not the "
                    f"{length} from {start:#x} that it was asked for"
                )
            gpu_address = start + (address - mapped_at)
            release = undo.pop_all().close
        return BarMemory(address, size_bytes, release, gpu_address=gpu_address, flush=flush)


def _map(undo: contextlib.ExitStack, start: int, length: int, gpu: str) -> tuple[int, _Info]:
    """Pins and maps length bytes of GPU memory from start on; undo takes it all back."""
    lib = _library()
    session = lib.gdr_open()
    if not session:
        raise NotSupported(
            f"GDRCopy cannot open {_DEVICE}: are library and module of one version? "
            "(GDRCOPY_ENABLE_LOGGING=1 tells more)"
        )
    undo.callback(lib.gdr_close, session)
    handle = _Handle()
    code = lib.gdr_pin_buffer(session, start, length, 0, 0, byref(handle))
    if code:
        raise HiFCError(
            f"GDRCopy cannot pin {format_size(length)} of {gpu}: {os.strerror(code)}; is its BAR1 "
            "full (nvidia-smi -q -d MEMORY)? Use a smaller swap_buffer_size"
        )
    undo.callback(lib.gdr_unpin_buffer, session, handle)
    mapped_at = c_void_p()
    code = lib.gdr_map(session, handle, byref(mapped_at), length)
    if code or mapped_at.value is None:
        raise HiFCError(f"GDRCopy cannot map {format_size(length)} of {gpu}: {os.strerror(code)}")
    undo.callback(lib.gdr_unmap, session, handle, mapped_at.value, length)
    info = _Info()
    code = lib.gdr_get_info_v2(session, handle, byref(info))
    if code:
        raise HiFCError(f"GDRCopy cannot tell where it mapped {gpu}: {os.strerror(code)}")
    return mapped_at.value, info
