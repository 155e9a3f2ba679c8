# SPDX-License-Identifier: Apache-2.0
"""Tensors come back bit by bit, with dtype and shape, from numpy and torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from hifc.blocks import codec
from hifc.errors import ConfigError, FormatError, InvalidRequest
from hifc.native_lib.memory import memory_of


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


# ---- every dtype comes back equal, or is refused with what to do


NUMPY = [np.dtype(code) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]


@pytest.mark.parametrize("order", ["<", ">", "="])
@pytest.mark.parametrize("way", [None, "zlib"])
@pytest.mark.parametrize("dtype", NUMPY, ids=lambda dtype: f"{dtype.char}-{dtype.name}")
def test_every_dtype_of_numpy(dtype: np.dtype[Any], order: str, way: str | None) -> None:
    values = np.arange(-3, 1021).reshape(4, 256)
    tensor = (values % 2 if dtype.kind == "b" else values).astype(dtype.newbyteorder(order))
    if tensor.dtype.name in ("float128", "float96", "complex256", "complex192"):
        with pytest.raises(InvalidRequest, match="convert it, as in"):
            codec.describe(tensor)
        return
    for one in (tensor, tensor[:, ::3], tensor.T, tensor[:0], tensor[:1, :1].reshape(())):
        back = codec.decode(encode(one, way=way))
        assert np.array_equal(back, one)
        assert back.shape == one.shape
        assert back.dtype == one.dtype.newbyteorder("=")
        assert back.flags.writeable


@pytest.mark.parametrize(
    ("tensor", "advice"),
    [
        (np.array([1, None]), "Python objects"),
        (np.array(["2026-12-01"], "M8[D]"), r"view\(np.int64\)"),
        (np.array([3], "m8[s]"), r"view\(np.int64\)"),
        (np.array(["text"]), "frombuffer"),
        (np.array([b"text"]), "frombuffer"),
        (np.zeros(3, "V7"), "frombuffer"),
        (np.zeros(3, [("a", "<f4"), ("b", "<i2")]), "frombuffer"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "filled"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value.dtype),
)
def test_arrays_whose_bytes_are_not_all(tensor: Any, advice: str) -> None:
    with pytest.raises(InvalidRequest, match=advice):
        codec.describe(tensor)


def test_a_dtype_of_another_package_is_no_dtype_of_torch() -> None:
    """ml_dtypes, for one, has a bfloat16; it would come back as uint16."""
    kinds = pytest.importorskip("ml_dtypes")
    with pytest.raises(InvalidRequest, match=r'view\(np.uint16\) with dtype="bfloat16"'):
        codec.describe(np.zeros(3, kinds.bfloat16))
    with pytest.raises(InvalidRequest, match="frombuffer"):
        codec.describe(np.zeros(3, kinds.float8_e4m3fn))


def test_every_dtype_of_torch() -> None:
    torch = pytest.importorskip("torch")
    found = [getattr(torch, name) for name in dir(torch)]
    dtypes = sorted({one for one in found if isinstance(one, torch.dtype)}, key=str)
    assert len(dtypes) > 20
    stored = set()
    for dtype in dtypes:
        size = dtype.itemsize
        tensor = torch.arange(64 * size, dtype=torch.uint8)
        try:
            tensor = tensor.remainder(2).bool() if dtype == torch.bool else tensor.view(dtype)
            data = encode(tensor.reshape(2, -1))
        except (InvalidRequest, RuntimeError) as error:
            # RuntimeError: torch itself makes no such tensor by a view.
            assert isinstance(error, RuntimeError) or "store tensor." in str(error), dtype
            continue
        back = codec.decode(data)
        assert back.dtype == dtype
        assert back.shape == (2, 32)
        assert torch.equal(back.view(torch.uint8).flatten(), tensor.view(torch.uint8))
        stored.add(str(dtype).removeprefix("torch."))
    names = [name for name in codec.HANDLERS if hasattr(torch, name)]
    assert stored == set(names), "each one that is listed, and no other"


def test_tensors_whose_bytes_are_not_all() -> None:
    torch = pytest.importorskip("torch")
    plain = torch.arange(6.0).reshape(2, 3)
    for tensor, advice in (
        (torch.quantize_per_tensor(plain, 0.1, 3, torch.quint8), "int_repr"),
        (plain.to_sparse(), "to_dense"),
        (torch.nested.nested_tensor([plain, plain], layout=torch.jagged), "unbind"),
        (torch.zeros(3, dtype=torch.complex32), "complex64"),
        (torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "uint8"),
    ):
        with pytest.raises(InvalidRequest, match=advice):
            codec.describe(tensor)


def test_what_torch_carries_out_on_reading_is_carried_out() -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    conjugated, negated = numbers.conj(), numbers.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    for tensor in (conjugated, negated):
        assert torch.equal(codec.decode(encode(tensor)), tensor)
        with pytest.raises(InvalidRequest, match="resolve_conj"):
            memory_of(tensor)
    for tensor, advice in (
        (torch._efficientzerotensor(3), "no memory of its own"),
        (torch.zeros(2, 3).to_sparse(), "to_dense"),
    ):
        with pytest.raises(InvalidRequest, match=advice):
            memory_of(tensor)


def test_a_dtype_that_this_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    data = encode(torch.zeros(4, dtype=torch.float8_e5m2))
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(ConfigError, match="newer one"):
        codec.decode(data)


def test_golden_bytes() -> None:
    """The trailer as docs/format.md tells it: what stands on devices already."""
    tensor = np.array([[1.0, -2.0, 3.5]], dtype="<f4")
    assert (
        encode(tensor).tobytes().hex()
        == (
            "0000803f000000c000006040"  # the payload
            "4849464354454e53" + "01000000" + "01000000"  # magic, version, float32
            "00000000" + "00000000" + "02000000" + "00000000"  # plain, numpy, two dimensions
            "0c00000000000000" + "0c00000000000000"  # payload and raw bytes
            "0100000000000000" + "0300000000000000" + "00" * 64  # shape
        )
    )
    torch = pytest.importorskip("torch")
    data = encode(torch.zeros(1024, dtype=torch.bfloat16), way="zlib")
    head = data[-codec.TRAILER_BYTES :].tobytes()
    assert head[8:32].hex() == "010000000300000001000000010000000100000000000000"
    assert int.from_bytes(head[32:40], "little") == data.size - codec.TRAILER_BYTES
    assert int.from_bytes(head[40:48], "little") == 2048
    assert {handler.name: handler.code for handler in codec.HANDLERS.values()} == {
        "float32": 1,
        "float16": 2,
        "bfloat16": 3,
        "int8": 4,
        "uint8": 5,
        "float64": 6,
        "int16": 7,
        "uint16": 8,
        "int32": 9,
        "uint32": 10,
        "int64": 11,
        "uint64": 12,
        "bool": 13,
        "complex64": 14,
        "complex128": 15,
        "float8_e4m3fn": 16,
        "float8_e5m2": 17,
        "float8_e4m3fnuz": 18,
        "float8_e5m2fnuz": 19,
        "float8_e8m0fnu": 20,
    }


def test_bfloat16_in_numpy_is_uint16() -> None:
    tensor = random_bits("u2", (4, 4))
    data = encode(tensor, "bfloat16")
    assert codec.inspect(data).handler.name == "bfloat16"
    assert (codec.decode(data) == tensor).all()
    assert codec.inspect(encode(tensor)).handler.name == "uint16"
    swapped = tensor.astype(">u2")
    assert (codec.decode(encode(swapped, "bfloat16")) == tensor).all()
    with pytest.raises(InvalidRequest, match="float32 cannot be stored as bfloat16"):
        codec.describe(np.zeros(3, np.float32), "bfloat16")


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
    with pytest.raises(InvalidRequest, match="name of a type"):
        codec.describe(np.zeros(3), np.float64)  # type: ignore[arg-type]
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
