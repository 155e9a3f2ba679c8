# SPDX-License-Identifier: Apache-2.0
"""Tensors come back bit by bit, with dtype and shape, from numpy and torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from hifc import codec
from hifc.errors import ConfigError, FormatError, InvalidRequest


def encode(tensor: Any, dtype: str | None = None, way: str | None = None) -> Any:
    info = codec.describe(tensor, dtype)
    if way is not None:
        packed = codec.compress(tensor, info, codec.compression(way), 1)
        if packed is not None:
            out = np.full(codec.encoded_size(packed[0]), 0xAA, dtype=np.uint8)
            codec.fill(packed[1], packed[0], out)
            return out
    out = np.full(codec.encoded_size(info), 0xAA, dtype=np.uint8)
    codec.encode_into(tensor, info, out)
    return out


def random_bits(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Every bit pattern, NaNs with payloads and denormals included."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(5).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", ["f4", "f2", "i1", "u1"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (1,), (2, 0, 3), ()])
def test_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    back = codec.decode(encode(tensor))
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.tobytes() == tensor.tobytes()
    assert back.flags.writeable


def test_bfloat16_in_numpy_is_uint16() -> None:
    tensor = random_bits("u2", (4, 4))
    data = encode(tensor, "bfloat16")
    assert codec.inspect(data).handler.name == "bfloat16"
    assert (codec.decode(data) == tensor).all()
    with pytest.raises(InvalidRequest, match="bfloat16"):
        codec.describe(tensor)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "uint8"])
@pytest.mark.parametrize("way", [None, "zlib"])
def test_torch(name: str, way: str | None) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(random_bits("u1", (2, 3, 64))).view(getattr(torch, name))
    back = codec.decode(encode(tensor, way=way))
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_strided_tensors_are_stored_by_value() -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert (codec.decode(encode(array.T)) == array.T).all()
    tensor = torch.arange(24.0, requires_grad=True).reshape(4, 6).t()
    assert torch.equal(codec.decode(encode(tensor)), tensor.detach())


def test_payload_begins_the_buffer() -> None:
    """So that it stands on a page and moves by DMA."""
    tensor = np.arange(1024, dtype=np.float32)
    data = encode(tensor)
    assert data[:4096].tobytes() == tensor.tobytes()
    assert data.size == 8192
    assert encode(tensor[:512]).size == 2048 + codec.TRAILER_BYTES


@pytest.mark.parametrize("way", ["zlib", "zstd", "lz4"])
def test_compression(way: str) -> None:
    package = {"zstd": "zstandard", "lz4": "lz4"}.get(way)
    if package is not None and importlib.util.find_spec(package) is None:
        with pytest.raises(ConfigError, match=f"pip install {package}"):
            codec.compression(way)
        return
    tensor = np.zeros((64, 64), dtype=np.float16)
    data = encode(tensor, way=way)
    assert data.size < tensor.nbytes / 4
    assert (codec.decode(data) == tensor).all()
    noise = random_bits("f2", (64, 64))
    data = encode(noise, way=way)
    assert codec.inspect(data).payload_bytes <= noise.nbytes  # never larger
    assert codec.decode(data).tobytes() == noise.tobytes()


def test_unknown_compression() -> None:
    with pytest.raises(ConfigError, match="none of"):
        codec.compression("xz")


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tensor"):
        codec.describe([1.0])
    with pytest.raises(InvalidRequest, match="float64"):
        codec.describe(np.zeros(3))
    with pytest.raises(FormatError):
        codec.decode(np.zeros(10, dtype=np.uint8))
    with pytest.raises(FormatError, match="not stored as a tensor"):
        codec.decode(np.zeros(4096, dtype=np.uint8))
    data = encode(np.zeros(8, dtype=np.float32))
    with pytest.raises(FormatError, match="wrong length"):
        codec.decode(data[4:])
    data[-codec.TRAILER_BYTES + 8] = 9
    with pytest.raises(FormatError, match="newer"):
        codec.decode(data)
