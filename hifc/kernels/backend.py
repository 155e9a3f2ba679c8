# SPDX-License-Identifier: Apache-2.0
"""The kernels of native/, on a GPU through CuPy or on the host through libhifc_kernels.so.

Both backends are built from the same sources and called alike: a kernel takes one struct, which
its row in KERNELS describes, and a number of thread blocks. `backend("cuda")` compiles them by
NVRTC for the GPU at hand, at the first use of each; launches go to CuPy's current stream and return
at once. `backend("host")` runs the grid on the calling thread, with the GIL released, and returns
when it is done.

Nothing is loaded at import. To add a kernel, write native/NAME.cu (native/README.md has the rules),
add its row to hifc/kernels/table.py, and a function that fills its struct beside those who use it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import hifc
from hifc.errors import ConfigError, InvalidRequest, LibraryError, NotSupported
from hifc.kernels.table import KERNELS
from hifc.native_lib.libhifc import library_path

# Without contraction both builds round alike; a kernel that wants a fused operation calls one.
NVRTC_OPTIONS = ("-std=c++17", "-fmad=false")
BLOCKS_MAX = (1 << 31) - 1


class Backend(Protocol):
    """Where kernels run.

    name: "host" or "cuda"; reason: why this one, in words; xp: numpy or cupy, which make its
    arrays; wide: thread blocks that keep it busy.
    """

    name: str
    reason: str
    xp: Any
    wide: int

    def launch(self, kernel: str, blocks: int, /, **arguments: Any) -> None:
        """Runs `blocks` thread blocks of a kernel; none for 0. arguments: every field of its
        struct, pointers as addresses (`Strided.address`, `address_of`)."""
        ...


class HostBackend:
    """The grid as a loop on the calling thread."""

    name = "host"
    xp: Any = np
    wide = 1

    def __init__(self, reason: str, *, backwards: bool = False) -> None:
        self.reason = reason
        # Threads and blocks run from the last to the first: tests compare, since a result that
        # depends on the order would be a race on a GPU.
        self._backwards = backwards
        self._functions = _host_functions(kernels_path())

    def launch(self, kernel: str, blocks: int, /, **arguments: Any) -> None:
        """See Backend."""
        struct = _fill(kernel, blocks, arguments)
        self._functions[kernel](struct.ctypes.data, blocks, self._backwards)


class CudaBackend:
    """The grid on the current device of CuPy, in its current stream."""

    name = "cuda"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.xp = _cupy()
        properties = self.xp.cuda.runtime.getDeviceProperties(self.xp.cuda.Device().id)
        # Eight blocks of 256 threads fill a multiprocessor.
        self.wide = 8 * int(properties["multiProcessorCount"])
        self._functions: dict[str, Any] = {}

    def launch(self, kernel: str, blocks: int, /, **arguments: Any) -> None:
        """See Backend."""
        struct = _fill(kernel, blocks, arguments)
        if blocks:
            self._function(kernel)((blocks,), (KERNELS[kernel].threads,), (struct,))

    def _function(self, kernel: str) -> Any:
        function = self._functions.get(kernel)
        if function is None:
            module = self.xp.RawModule(
                code=source(KERNELS[kernel].source), options=NVRTC_OPTIONS, backend="nvrtc"
            )
            function = self._functions[kernel] = module.get_function(kernel)
        return function


@functools.cache
def backend(name: str = "auto") -> Backend:
    """The backend called "host" or "cuda", or for "auto" cuda where CuPy finds a GPU, else host.

    Its `reason` says what "auto" found. ConfigError: no such name; NotSupported: "cuda" was asked
    for and CuPy or a GPU is missing; LibraryError: libhifc_kernels.so is missing.
    """
    match name:
        case "host":
            return HostBackend("asked for")
        case "cuda":
            return CudaBackend("asked for")
        case "auto":
            try:
                return CudaBackend("CuPy found a GPU")
            except NotSupported as error:
                return HostBackend(str(error))
    raise ConfigError(f"kernels: there is no backend {name!r}: use auto, cuda or host")


def _cupy() -> Any:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise NotSupported(
            f"kernels on a GPU need CuPy ({error}): `pip install hifc[cupy]`, or use the backend "
            "host"
        ) from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NotSupported(
            f"CuPy finds no GPU ({error}): check nvidia-smi, or use the backend host"
        ) from None
    if count < 1:
        raise NotSupported("CuPy finds no GPU: check nvidia-smi, or use the backend host")
    return cupy


# ---- sources and library -------------------------------------------------------------------------


def source_folder() -> Path:
    """native/: in the package, or beside it in a checkout. LibraryError: neither is there."""
    candidates = [Path(folder, "native") for folder in hifc.__path__]
    candidates += [Path(folder).parent / "native" for folder in hifc.__path__]
    for folder in candidates:
        if (folder / "portable.cuh").exists():
            return folder
    raise LibraryError(f"{candidates[0]} with the kernels is missing: install HiFC again")


def header_folder() -> Path:
    """Where hifc_ring.h is, which kernels share with C. LibraryError: it is not there."""
    beside = source_folder().parent
    for folder in (beside / "include", beside / "driver/include"):
        if (folder / "hifc_ring.h").exists():
            return folder
    raise LibraryError(f"{beside / 'include/hifc_ring.h'} is missing: install HiFC again")


def source(name: str) -> str:
    """One source with the headers of native/ in the place of their #include.

    CuPy caches by the text that it is given, so a header must be part of it.
    """
    folder = source_folder()
    seen: set[str] = set()

    def text(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        lines = [f'#line 1 "{file}"']
        path = (header_folder() if file.endswith(".h") else folder) / file
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            header = re.fullmatch(r'#include "(\w+\.(?:cuh|h))"', line)
            lines.append(f'{text(header[1])}\n#line {number + 1} "{file}"' if header else line)
        return "\n".join(lines)

    return text(name)


def kernels_path() -> Path:
    """libhifc_kernels.so, which stands beside libhifc.so."""
    return library_path().with_name("libhifc_kernels.so")


@functools.cache
def _host_functions(path: Path) -> Mapping[str, Callable[..., None]]:
    """Every kernel of the library, its struct size and block size compared with the table."""
    if not path.exists():
        raise LibraryError(f"{path} is missing: build it with `pip install .` in the repository")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(
            f"{path} cannot be loaded ({error}): build it again with `pip install .`"
        ) from error
    functions: dict[str, Callable[..., None]] = {}
    for name, kernel in KERNELS.items():
        try:
            function, shape = lib[name], lib[f"{name}_shape"]
        except AttributeError:
            raise LibraryError(
                f"{path} has no {name}: it is older than this package; build it again with "
                "`pip install .`"
            ) from None
        shape.restype, shape.argtypes = ctypes.c_uint64, ()
        args_bytes, threads = divmod(shape(), 1 << 32)
        if (args_bytes, threads) != (kernel.args.itemsize, kernel.threads):
            raise LibraryError(
                f"{name} in {path} takes {args_bytes} bytes and {threads} threads, this package "
                f"gives {kernel.args.itemsize} and {kernel.threads}: build both from one source "
                "with `pip install .`"
            )
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
        functions[name] = function
    return functions


def _fill(kernel: str, blocks: int, arguments: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The struct as an array of one, which is what CuPy passes by value."""
    names = KERNELS[kernel].args.names or ()
    if arguments.keys() != set(names):
        raise InvalidRequest(f"{kernel} takes {', '.join(names)}; given: {', '.join(arguments)}")
    if not 0 <= blocks <= BLOCKS_MAX:
        raise InvalidRequest(f"{kernel}: {blocks} blocks, at most {BLOCKS_MAX} can run at once")
    struct = np.zeros(1, KERNELS[kernel].args)
    try:
        struct[0] = tuple([arguments[name] for name in names])
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{kernel}: a number does not fit its field: {error}") from None
    return struct


# ---- arrays --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Strided:
    """An array as a kernel sees it: strides in bytes; dtype as a name ("float16", "bfloat16"), or,
    in another order of bytes than this machine's, as numpy writes it (">f4")."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    dtype: str
    on_gpu: bool
    writable: bool

    @property
    def size(self) -> int:
        """Items of it."""
        return math.prod(self.shape)

    @property
    def overlaps(self) -> bool:
        """Whether two of its items may be the same memory, as in what was broadcast."""
        end = self.item_bytes if self.size else 0
        steps = zip(map(abs, self.strides), self.shape, strict=True)
        for stride, size in sorted(step for step in steps if step[1] > 1):
            if stride < end:
                return True
            end += stride * (size - 1)
        return False

    def check_output(self, name: str) -> None:
        """InvalidRequest: a kernel cannot write to it."""
        if not self.writable:
            raise InvalidRequest(f"{name} is a read-only array of shape {self.shape}")
        if self.overlaps:
            raise InvalidRequest(
                f"items of {name} of shape {self.shape} overlap (strides of {self.strides} bytes): "
                "give an array that was not broadcast"
            )


def strided(array: Any, where: Backend) -> Strided:
    """A numpy, CuPy or torch array in the memory of a backend. InvalidRequest: it is elsewhere, or
    has no memory that a kernel could read."""
    if isinstance(array, np.ndarray):
        found = _by_interface(array, array.__array_interface__, on_gpu=False)
    elif hasattr(array, "data_ptr") and hasattr(array, "element_size"):
        found = _of_torch(array)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _by_interface(array, array.__cuda_array_interface__, on_gpu=True)
    else:
        raise InvalidRequest(
            f"{type(array).__name__} is no array: give one of numpy, CuPy or torch"
        )
    if found.on_gpu != (where.name == "cuda"):
        here = "GPU" if found.on_gpu else "host"
        raise InvalidRequest(
            f"an array of shape {found.shape} is in {here} memory, the kernels run on "
            f"{where.name}: move one of them"
        )
    return found


def _of_torch(array: Any) -> Strided:
    kind = array.device.type
    if kind not in ("cpu", "cuda") or str(array.layout) != "torch.strided":
        raise InvalidRequest(
            f"a tensor of shape {tuple(array.shape)} on {array.device}, {array.layout}: give a "
            "dense one in host or GPU memory"
        )
    if array.is_neg() or array.is_conj():
        raise InvalidRequest(
            "a tensor whose sign or conjugation is pending has other numbers in memory: give "
            "tensor.resolve_neg().resolve_conj()"
        )
    step = array.element_size()
    return Strided(
        array.data_ptr(),
        tuple(array.shape),
        tuple(stride * step for stride in array.stride()),
        step,
        str(array.dtype).removeprefix("torch."),
        kind == "cuda",
        True,
    )


def _by_interface(array: Any, interface: Mapping[str, Any], *, on_gpu: bool) -> Strided:
    address, readonly = interface["data"]
    return Strided(
        address,
        array.shape,
        array.strides,
        array.itemsize,
        _name_of(array.dtype),
        on_gpu,
        not readonly,
    )


@functools.cache
def _name_of(dtype: Any) -> str:
    """numpy makes the name anew whenever it is asked for it."""
    return str(dtype.name if dtype.isnative else dtype.str)


def address_of(array: Any, where: Backend) -> int:
    """Address of a contiguous array in the memory of a backend. InvalidRequest: it is not."""
    found = strided(array, where)
    step = found.item_bytes
    if not found.size:
        return found.address
    for size, stride in zip(reversed(found.shape), reversed(found.strides), strict=True):
        if size != 1 and stride != step:
            raise InvalidRequest(f"an array of shape {found.shape} is strided: make it contiguous")
        step *= size
    return found.address
