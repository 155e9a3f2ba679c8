# SPDX-License-Identifier: Apache-2.0
"""Tensors to bytes and back, exactly: numpy arrays and torch tensors of plain numbers.

An encoded tensor is its payload, zeroes up to whole pages where it takes a page or more, and in its
last 128 bytes a trailer with dtype, shape and compression. So the payload begins on the page of its
buffer and the whole moves by DMA, the last page included. docs/format.md has the byte map.

A payload is the items in C order, each little-endian. What numpy or torch keep beside the bytes
(another byte order, a mask, scales of a quantised tensor, a conjugation not carried out yet) is
carried out first, or the tensor is refused: nothing comes back that is not equal.

Numpy knows no bfloat16: such data is an array of uint16 with dtype="bfloat16".
"""

from __future__ import annotations

import importlib
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hifc.errors import ConfigError, FormatError, InvalidRequest
from hifc.native_lib.layouts import PAGE_BYTES
from hifc.native_lib.memory import ByteArray, Memory, memory_of
from hifc.util.units import page_up

TRAILER_BYTES = 128
_MAGIC = b"HIFCTENS"
_VERSION = 1
_HEAD = struct.Struct("<8sIIIIIIQQ10Q")
_DIMENSIONS_MAX = 10
_TORCH = 1
assert _HEAD.size == TRAILER_BYTES


@dataclass(frozen=True)
class TypeHandler:
    """How one dtype is stored. `array_dtype`: what numpy holds it in."""

    name: str
    code: int
    array_dtype: np.dtype[Any]
    in_numpy: bool = True  # False: a dtype of torch alone


# The codes stand on devices: they are never given to another dtype.
_HANDLERS = (
    TypeHandler("float32", 1, np.dtype("<f4")),
    TypeHandler("float16", 2, np.dtype("<f2")),
    TypeHandler("bfloat16", 3, np.dtype("<u2"), in_numpy=False),
    TypeHandler("int8", 4, np.dtype("i1")),
    TypeHandler("uint8", 5, np.dtype("u1")),
    TypeHandler("float64", 6, np.dtype("<f8")),
    TypeHandler("int16", 7, np.dtype("<i2")),
    TypeHandler("uint16", 8, np.dtype("<u2")),
    TypeHandler("int32", 9, np.dtype("<i4")),
    TypeHandler("uint32", 10, np.dtype("<u4")),
    TypeHandler("int64", 11, np.dtype("<i8")),
    TypeHandler("uint64", 12, np.dtype("<u8")),
    TypeHandler("bool", 13, np.dtype("?")),
    TypeHandler("complex64", 14, np.dtype("<c8")),
    TypeHandler("complex128", 15, np.dtype("<c16")),
    TypeHandler("float8_e4m3fn", 16, np.dtype("u1"), in_numpy=False),
    TypeHandler("float8_e5m2", 17, np.dtype("u1"), in_numpy=False),
    TypeHandler("float8_e4m3fnuz", 18, np.dtype("u1"), in_numpy=False),
    TypeHandler("float8_e5m2fnuz", 19, np.dtype("u1"), in_numpy=False),
    TypeHandler("float8_e8m0fnu", 20, np.dtype("u1"), in_numpy=False),
)
HANDLERS = {handler.name: handler for handler in _HANDLERS}
_BY_CODE = {handler.code: handler for handler in _HANDLERS}


# ---- compression


@dataclass(frozen=True)
class Compression:
    """A way to compress payloads."""

    name: str
    code: int
    compress: Callable[[Any, int], bytes]
    decompress: Callable[[Any, int], bytes]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"compression_algorithm: {package} is not installed; `pip install {package}`, or use "
            "zlib, or enable_compression: false"
        ) from None


def _zlib() -> Compression:
    return Compression(
        "zlib",
        1,
        lambda data, level: zlib.compress(data, min(level, 9)),
        lambda data, size: zlib.decompress(data, bufsize=size),
    )


def _zstd() -> Compression:
    zstandard = _module("zstandard", "zstandard")
    return Compression(
        "zstd",
        2,
        lambda data, level: zstandard.ZstdCompressor(level=level).compress(data),
        lambda data, size: zstandard.ZstdDecompressor().decompress(data, max_output_size=size),
    )


def _lz4() -> Compression:
    block = _module("lz4.block", "lz4")
    return Compression(
        "lz4",
        3,
        lambda data, level: block.compress(data, store_size=False),
        lambda data, size: block.decompress(data, uncompressed_size=size),
    )


_COMPRESSIONS: dict[str, tuple[int, Callable[[], Compression]]] = {
    "zlib": (1, _zlib),
    "zstd": (2, _zstd),
    "lz4": (3, _lz4),
}


def compression(name: str) -> Compression:
    """By name. ConfigError: unknown, or its package is not installed (and which one)."""
    if name not in _COMPRESSIONS:
        raise ConfigError(f"compression {name!r} is none of {', '.join(_COMPRESSIONS)}")
    return _COMPRESSIONS[name][1]()


def _compression_by_code(code: int) -> Compression:
    for known, make in _COMPRESSIONS.values():
        if known == code:
            return make()
    raise FormatError(f"a tensor is compressed in way {code}, which this version does not know")


# ---- tensors


@dataclass(frozen=True)
class TensorInfo:
    """What a trailer tells."""

    handler: TypeHandler
    shape: tuple[int, ...]
    payload_bytes: int
    raw_bytes: int
    compression_code: int
    torch: bool


def _is_torch(tensor: Any) -> bool:
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size")


def describe(tensor: Any, dtype: str | None = None) -> TensorInfo:
    """What will be stored for a numpy array or a torch tensor on the CPU, uncompressed.

    dtype: "bfloat16" for a uint16 array that holds bfloat16. InvalidRequest: not a tensor, or one
    whose bytes do not tell all of it, with what to do.
    """
    if not (dtype is None or isinstance(dtype, str)):
        raise InvalidRequest(f"dtype is the name of a type, not {type(dtype).__name__}")
    if _is_torch(tensor):
        name = _torch_name(tensor)
    elif isinstance(tensor, np.ndarray):
        name = _numpy_name(tensor)
        if dtype == "bfloat16" and name == "uint16":
            name = "bfloat16"
    else:
        raise InvalidRequest(
            f"{type(tensor).__name__} is no tensor: give a numpy array or a torch tensor"
        )
    if dtype is not None and dtype != name:
        raise InvalidRequest(
            f"a tensor of {name} cannot be stored as {dtype}: leave dtype out, or convert it "
            '(dtype="bfloat16" takes an array of uint16)'
        )
    shape = tuple(int(size) for size in tensor.shape)
    if len(shape) > _DIMENSIONS_MAX:
        raise InvalidRequest(f"a tensor has {len(shape)} dimensions, at most {_DIMENSIONS_MAX} fit")
    handler = HANDLERS[name]
    raw = int(np.prod(shape, dtype=np.int64)) * handler.array_dtype.itemsize
    return TensorInfo(handler, shape, raw, raw, 0, _is_torch(tensor))


def _numpy_name(array: npt.NDArray[Any]) -> str:
    """The name of an array's dtype. InvalidRequest: its bytes alone are not the array."""
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidRequest(
            "a masked array cannot be stored, its mask would be lost: store array.filled(...), or "
            "array.data and array.mask"
        )
    dtype = array.dtype
    handler = HANDLERS.get(dtype.name)
    if handler is not None and handler.in_numpy and dtype.newbyteorder("=") == handler.array_dtype:
        return dtype.name
    if dtype.hasobject:
        advice = "it holds Python objects: convert it, as in array.astype(np.float32)"
    elif dtype.kind in "mM":
        advice = "store array.view(np.int64), and keep its unit"
    elif dtype.kind in "fc":
        advice = "convert it, as in array.astype(np.float64)"
    elif dtype.name == "bfloat16":
        advice = 'store array.view(np.uint16) with dtype="bfloat16"'
    else:  # texts, records, and what other packages add
        advice = "store np.frombuffer(array.tobytes(), np.uint8), and keep its dtype and shape"
    raise InvalidRequest(f"an array of {dtype} cannot be stored: {advice}")


def _torch_name(tensor: Any) -> str:
    """The name of a tensor's dtype. InvalidRequest: its bytes alone are not the tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        advice = "store tensor.int_repr(), and keep its scales; or tensor.dequantize()"
    elif tensor.is_nested or str(tensor.layout) != "torch.strided":
        name = f"{name} in layout {str(tensor.layout).removeprefix('torch.')}"
        advice = "store tensor.to_dense(), or of a nested tensor each tensor of tensor.unbind()"
    elif name == "complex32":
        advice = "store tensor.to(torch.complex64)"
    elif name not in HANDLERS:  # several items a byte, or bits without a meaning
        advice = "store tensor.view(torch.uint8), and keep its dtype"
    else:
        return name
    raise InvalidRequest(f"a tensor of {name} cannot be stored: {advice}")


def encoded_size(info: TensorInfo) -> int:
    """Bytes of payload, padding and trailer."""
    size = info.payload_bytes + TRAILER_BYTES
    return size if size < PAGE_BYTES else page_up(size)


def encode_into(tensor: Any, info: TensorInfo, out: ByteArray) -> None:
    """Fills out, of shape (encoded_size(info),), with one copy."""
    _fill(_contiguous(tensor, info).array(info.raw_bytes), info, out)


def compress(
    tensor: Any, info: TensorInfo, way: Compression, level: int
) -> tuple[TensorInfo, bytes] | None:
    """What will be stored compressed, and its payload for `fill`; None where it is not smaller."""
    payload = way.compress(_contiguous(tensor, info).array(info.raw_bytes).data, level)
    if len(payload) >= info.raw_bytes:
        return None
    smaller = TensorInfo(
        info.handler, info.shape, len(payload), info.raw_bytes, way.code, info.torch
    )
    return smaller, payload


def fill(payload: bytes, info: TensorInfo, out: ByteArray) -> None:
    """Fills out, of shape (encoded_size(info),), with a compressed payload."""
    _fill(np.frombuffer(payload, dtype=np.uint8), info, out)


def _fill(payload: ByteArray, info: TensorInfo, out: ByteArray) -> None:
    out[: payload.size] = payload
    out[payload.size : -TRAILER_BYTES] = 0
    out[-TRAILER_BYTES:] = np.frombuffer(_trailer(info), dtype=np.uint8)


def _contiguous(tensor: Any, info: TensorInfo) -> Memory:
    """The payload: a copy only where items have another order or are not what they stand for."""
    if _is_torch(tensor):
        return memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    return memory_of(np.ascontiguousarray(tensor, dtype=info.handler.array_dtype))


def _trailer(info: TensorInfo) -> bytes:
    shape = info.shape + (0,) * (_DIMENSIONS_MAX - len(info.shape))
    return _HEAD.pack(
        _MAGIC,
        _VERSION,
        info.handler.code,
        info.compression_code,
        _TORCH if info.torch else 0,
        len(info.shape),
        0,
        info.payload_bytes,
        info.raw_bytes,
        *shape,
    )


def inspect(data: ByteArray) -> TensorInfo:
    """Reads the trailer of an encoded tensor. FormatError: it is none."""
    if data.size < TRAILER_BYTES:
        raise FormatError(f"{data.size} bytes are no stored tensor")
    fields = _HEAD.unpack(data[-TRAILER_BYTES:].tobytes())
    magic, version, code, way, flags, dimensions, _, payload, raw = fields[:9]
    if magic != _MAGIC:
        raise FormatError("these bytes were not stored as a tensor: read them with Namespace.get")
    if version != _VERSION or code not in _BY_CODE or dimensions > _DIMENSIONS_MAX:
        raise FormatError(
            f"a stored tensor has version {version}, dtype code {code} and {dimensions} "
            "dimensions: it was written by a newer HiFC"
        )
    info = TensorInfo(
        _BY_CODE[code], fields[9 : 9 + dimensions], payload, raw, way, flags == _TORCH
    )
    expected = int(np.prod(info.shape, dtype=np.int64)) * info.handler.array_dtype.itemsize
    if encoded_size(info) != data.size or raw != expected:
        raise FormatError(f"a stored tensor of shape {info.shape} has the wrong length")
    return info


def decode(data: ByteArray) -> Any:
    """The tensor, in memory of its own: torch if it was stored from torch, otherwise numpy."""
    info = inspect(data)
    payload = data[: info.payload_bytes]
    if info.compression_code:
        way = _compression_by_code(info.compression_code)
        plain = way.decompress(payload.tobytes(), info.raw_bytes)
        if len(plain) != info.raw_bytes:
            raise FormatError(f"a stored tensor decompressed to {len(plain)} bytes")
        flat = np.frombuffer(bytearray(plain), dtype=np.uint8)
    else:
        flat = payload.copy()
    if info.torch:
        return _to_torch(flat, info)
    array: npt.NDArray[Any] = flat.view(info.handler.array_dtype).reshape(info.shape)
    return array


def _to_torch(flat: ByteArray, info: TensorInfo) -> Any:
    torch = sys.modules.get("torch") or _torch()
    dtype = getattr(torch, info.handler.name, None)
    if dtype is None:
        raise ConfigError(
            f"this block is a tensor of {info.handler.name}, which torch {torch.__version__} does "
            "not have: load it with a newer one"
        )
    return torch.from_numpy(flat).view(dtype).reshape(info.shape)


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ConfigError(
            "this block was stored from a torch tensor: `pip install hifc[torch]` to load it"
        ) from None
