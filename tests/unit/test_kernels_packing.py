# SPDX-License-Identifier: Apache-2.0
"""Pack and unpack against plain numpy: every layout, any shape, stride, address and dtype; the
conversions against tables of what bytes can hold; checksums against the driver's."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import NAMES, back, make_backend, to

from hifc.errors import InvalidRequest
from hifc.kernels import backend as kernels
from hifc.kernels import packing
from hifc.kernels.pages import AXES, PageLayout, page_layout
from hifc.native_lib.libhifc import library

LAYOUTS = {  # axes of one array, what a sequence brings
    "vllm": ("kv page token head dim", "layer"),
    "vllm-blocks-first": ("page kv token head dim", "layer"),
    "vllm-heads-first": ("kv page head token dim", "layer"),
    "cross-layer": ("page layer kv token head dim", ""),
    "transformers": ("head token dim", "layer kv"),
    "pairs": ("page token head dim", "layer kv"),
    "latent": ("page token dim", "layer"),
    "dim-first": ("kv page head dim token", "layer"),
}


@dataclass(frozen=True)
class Case:
    layout: str = "vllm"
    layers: int = 2
    pages: int = 5
    page_tokens: int = 4
    heads: int = 3
    dim: int = 16
    dtype: str = "u2"
    padding: tuple[int, ...] = (0,) * 6  # items between the indices of each axis
    offset: int = 0  # of the packed blocks, from a multiple of 16
    blocks: int = 2
    block_pages: int = 2
    left_out: int = 0  # tokens of the last page
    split: int = 0  # which way to cut parts
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.block_pages * self.page_tokens - self.left_out % self.page_tokens

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def table(self) -> Any:
        numbers = [self.random.permutation(self.pages) for _ in range(self.blocks)]
        return np.array([n[: self.block_pages] for n in numbers], np.int32)


def cases() -> st.SearchStrategy[Case]:
    def fit(case: Case) -> Case:
        pages = max(case.pages, case.block_pages)
        kind = LAYOUTS[case.layout]
        heads = case.heads if "head" in kind[0] else 1
        return dataclasses.replace(case, pages=pages, heads=heads)

    return st.builds(
        Case,
        layout=st.sampled_from(sorted(LAYOUTS)),
        layers=st.integers(1, 3),
        pages=st.integers(1, 6),
        page_tokens=st.integers(1, 9) | st.sampled_from([16, 32]),
        heads=st.integers(1, 4),
        dim=st.integers(1, 20) | st.sampled_from([32, 64, 128]),
        dtype=st.sampled_from(["u1", "u2", "f4", "f8", "c16"]),
        padding=st.just((0,) * 6) | st.tuples(*[st.sampled_from([0, 0, 1, 8])] * 6),
        offset=st.just(0) | st.integers(0, 15),
        blocks=st.integers(1, 3),
        block_pages=st.integers(1, 4),
        left_out=st.integers(0, 31),
        split=st.integers(0, 3),
        seed=st.integers(0, 1 << 32),
    ).map(fit)


class Cache:
    """Arrays of a case in the memory of a backend, and the same in one numpy array."""

    def __init__(self, case: Case, where: kernels.Backend, fill: str) -> None:
        axes, brought = LAYOUTS[case.layout]
        names, sizes = axes.split(), self._sizes(case, axes)
        kv = 2 if "kv" in brought.split() or "kv" in names else 1
        layers = case.layers if "layer" in brought.split() else 1
        halves = 2 if "kv" in brought.split() else 1
        padded = [
            sizes[name] + case.padding[i] if name != "dim" else sizes[name] + case.padding[5]
            for i, name in enumerate(names)
        ]
        inner = tuple(slice(0, sizes[name]) for name in names)
        dtype = np.dtype(case.dtype)
        count = int(np.prod(padded))
        self.whole, self.arrays = [], []
        random = case.random
        for _ in range(layers):
            group = []
            for _ in range(halves):
                bits = random.integers(0, 256, count * dtype.itemsize, np.uint8)
                if fill == "zeros":
                    bits[:] = 0
                whole = to(where, bits.view(dtype).reshape(padded))
                self.whole.append(whole)
                group.append(whole[inner])
            self.arrays.append(tuple(group) if halves == 2 else group[0])
        given = self.arrays if brought else self.arrays[0]
        page_tokens = None if "page" in names else case.page_tokens
        self.layout: PageLayout = page_layout(given, axes, where, page_tokens=page_tokens)
        self.names, self.shape = names, (case.layers, kv, case.pages, case.page_tokens)
        self.shape += (case.heads, case.dim)

    @staticmethod
    def _sizes(case: Case, axes: str) -> dict[str, int]:
        sizes = {"layer": case.layers, "kv": 2, "page": case.pages, "token": case.page_tokens}
        if "page" not in axes:
            sizes["token"] *= case.pages
        return sizes | {"head": case.heads, "dim": case.dim}

    def canonical(self) -> Any:
        """[layer, kv, page, token, head, dim]"""
        arrays = []
        for group in self.arrays:
            for array in group if isinstance(group, tuple) else (group,):
                order = [self.names.index(axis) for axis in AXES if axis in self.names]
                arrays.append(back(array).transpose(order))
        return np.ascontiguousarray(np.stack(arrays).reshape(self.shape))


def reference(canonical: Any, table: Any, tokens: int) -> Any:
    """Packed blocks of shape [block, layer, kv, head, token, dim]."""
    blocks = []
    for numbers in table:
        pages = canonical[:, :, numbers]  # layer, kv, page, token, head, dim
        flat = pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])[:, :, :tokens]
        blocks.append(flat.transpose(0, 1, 3, 2, 4))
    return np.ascontiguousarray(np.stack(blocks))


def raw_crc(data: Any) -> int:
    return int(library().hifc_crc32c_raw(ctypes.c_void_p(data.ctypes.data), data.nbytes))


def room(where: kernels.Backend, blocks: int, size: int, offset: int) -> tuple[Any, Any]:
    """Bytes for packed blocks with a margin, and the blocks in them."""
    stride = -(-(size + offset + 16) // 16) * 16
    whole = to(where, np.full((blocks, stride), 0xEE, np.uint8))
    return whole, whole[:, offset : offset + size]


def part_counts(case: Case, size: int, layers: int) -> int:
    """Different ways to cut a block of `size` bytes into equal parts."""
    wanted = [layers, 1, 2 * case.heads, 5][case.split]
    return wanted if size % wanted == 0 else 1


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_pack_and_unpack_are_numpys(name: str, case: Case) -> None:
    where = make_backend(name)
    cache = Cache(case, where, "random")
    table = case.table()
    expected = reference(cache.canonical(), table, case.tokens)
    size = cache.layout.block_bytes(case.tokens)
    assert expected.nbytes == size * case.blocks
    whole, packed = room(where, case.blocks, size, case.offset)
    parts = part_counts(case, size, case.layers)

    options = {"tokens": case.tokens, "parts": parts, "checksums": case.split != 1}
    moved = packing.pack(cache.layout, to(where, table), packed, where, **options)
    moved.check()
    assert back(packed).tobytes() == expected.tobytes()
    margin = back(whole).copy()
    margin[:, case.offset : case.offset + size] = 0xEE
    assert (margin == 0xEE).all(), "written beside a packed block"
    cut = expected.view(np.uint8).reshape(case.blocks, parts, -1)
    sums = [[raw_crc(part) for part in block] for block in cut]
    assert moved.scales is None
    assert moved.checksums is None if case.split == 1 else back(moved.checksums).tolist() == sums

    empty = Cache(case, where, "zeros")
    unpacked = packing.unpack(empty.layout, to(where, table), packed, where, **options)
    unpacked.check()
    found = empty.canonical()
    assert reference(found, table, case.tokens).tobytes() == expected.tobytes()
    assert case.split == 1 or back(unpacked.checksums).tolist() == sums
    # All that is not in the table stayed as it was.
    flat = np.zeros((case.pages, case.page_tokens), bool)
    for numbers in table:
        for place, number in enumerate(numbers):
            flat[number, : max(0, case.tokens - place * case.page_tokens)] = True
    assert not found[:, :, ~flat].view(np.uint8).any()
    total = sum(np.count_nonzero(back(whole).view(np.uint8)) for whole in empty.whole)
    assert total == np.count_nonzero(found.view(np.uint8)), "written beside the items"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["rows", "rows_crc", "bytes", "converted", "items"])
def test_many_chunks_and_blocks(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than one launch takes, and blocks of several chunks; every kernel is reached."""
    where = make_backend(name)
    if where.name == "host":
        where = kernels.HostBackend("a test", backwards=name == "backwards")
        where.wide = 7
    used: list[str] = []
    launch = where.launch
    monkeypatch.setattr(
        where, "launch", lambda kernel, *a, **k: (used.append(kernel), launch(kernel, *a, **k))
    )
    odd = way in ("bytes", "items")
    case = Case(pages=90, page_tokens=16, heads=2, dim=63 if odd else 64, blocks=40, block_pages=4)
    cache = Cache(dataclasses.replace(case, dtype="u2"), where, "random")
    layout = dataclasses.replace(cache.layout, dtype="bfloat16")
    coded = way in ("converted", "items")
    size = layout.block_bytes(case.tokens, 1 if coded else None)
    _, packed = room(where, case.blocks, size, 0)
    moved = packing.pack(
        layout,
        to(where, case.table()),
        packed,
        where,
        encoding="int8" if coded else "raw",
        checksums=way != "rows",
    )
    assert used[-1] == f"hifc_pack_{way}"
    assert used.count(f"hifc_pack_{way}") == 2
    data = back(packed)
    if not coded:
        assert data.tobytes() == reference(cache.canonical(), case.table(), case.tokens).tobytes()
    if way != "rows":
        found = back(moved.checksums)
        for block, sums in zip(data, found, strict=True):
            assert sums.tolist() == [raw_crc(part) for part in block.reshape(2, -1)]
    twin = packing.unpack(
        layout,
        to(where, case.table()),
        packed,
        where,
        encoding="int8" if coded else "raw",
        scales=moved.scales,
        checksums=way != "rows",
    )
    assert used[-1] == f"hifc_unpack_{way}"
    if way != "rows":
        assert (back(twin.checksums) == found).all()


# ---- conversions ---------------------------------------------------------------------------------


def e4m3_values() -> Any:
    """Of each code 0 to 255, by the format's definition."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value)


def nearest(values: Any, wanted: Any) -> Any:
    """Index of the nearest of increasing values, ties to the even index, the last where beyond."""
    above = np.clip(np.searchsorted(values, wanted), 1, len(values) - 1)
    low, high = wanted - values[above - 1], values[above] - wanted
    return np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)


def encode(encoding: str, value: Any) -> Any:
    """float32 to codes."""
    with np.errstate(invalid="ignore"):
        exact = value.astype(np.float64)
        if encoding == "int8":
            bounded = np.clip(np.nan_to_num(exact, nan=0.0, posinf=127, neginf=-127), -127, 127)
            return np.rint(bounded).astype(np.int8).view(np.uint8)
        size = np.minimum(np.abs(exact), 448.0)
        code = nearest(e4m3_values()[:127], np.nan_to_num(size)).astype(np.uint8)
        code[np.isnan(exact)] = 127
    return code | (np.signbit(value).astype(np.uint8) << 7)


def decode(encoding: str, code: Any) -> Any:
    if encoding == "int8":
        return code.view(np.int8).astype(np.float32)
    return e4m3_values().astype(np.float32)[code]


def to_float(kind: str, bits: Any) -> Any:
    if kind == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(kind).astype(np.float32)


def to_kind(kind: str, value: Any) -> Any:
    """float32 to the bits of kind."""
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "bfloat16":
            low = value.view(np.uint32) >> 16
            ends = np.stack([low, low + 1]).astype(np.uint32) << 16
            exact = np.abs(ends.view(np.float32).astype(np.float64) - value.astype(np.float64))
            up = (exact[1] < exact[0]) | ((exact[1] == exact[0]) & (low % 2 == 1))
            return (low + up).astype(np.uint16)
        return value.astype(kind).view(np.uint16 if kind == "float16" else np.uint32)


def same_numbers(kind: str, found: Any, expected: Any) -> None:
    """Equal bits, or both NaN."""
    both_nan = np.isnan(to_float(kind, found)) & np.isnan(to_float(kind, expected))
    assert (both_nan | (found == expected)).all()


def interesting_floats(random: np.random.Generator, count: int) -> Any:
    """Any bits, and numbers around what a byte can hold and half of the way between."""
    bits = random.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    held = np.concatenate([e4m3_values()[:127], np.arange(128)]).astype(np.float32)
    middles = ((held[1:].astype(np.float64) + held[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([held, middles, [np.inf, np.nan, 448.0, 464.0, 465.0]])
    edges = edges.astype(np.float32)
    edges = np.concatenate([edges, np.nextafter(edges, 1e9), np.nextafter(edges, -1e9)])
    return np.concatenate([bits, edges, -edges]).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [16, 5])
@pytest.mark.parametrize("encoding", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_every_number_to_a_byte(name: str, dim: int, encoding: str, kind: str) -> None:
    """With a scale of 1; all of the 65,536 numbers where there are no more."""
    where = make_backend(name)
    if kind == "float32":
        bits = interesting_floats(np.random.default_rng(3), 40_000).view(np.uint32)
    else:
        bits = np.arange(65_536, dtype=np.uint16)
    bits = bits[: len(bits) // (16 * dim) * 16 * dim].reshape(1, -1, 1, dim)
    layout = page_layout(to(where, bits), "page token head dim", where, dtype=kind)
    size = layout.block_bytes(bits.shape[1], 1)
    packed = to(where, np.zeros((1, size), np.uint8))
    one = to(where, np.ones((1, 1, 1), np.float32))
    pages = to(where, np.zeros((1, 1), np.int32))
    packing.pack(layout, pages, packed, where, encoding=encoding, scales=one)
    assert (back(packed)[0] == encode(encoding, to_float(kind, bits.ravel()))).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [16, 5])
@pytest.mark.parametrize("encoding", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_every_byte_to_numbers(name: str, dim: int, encoding: str, kind: str) -> None:
    """Scales from what makes float16 denormal to what makes it infinite, one a head."""
    where = make_backend(name)
    heads, tokens = 60, 256
    random = np.random.default_rng(4)
    scales = (10.0 ** random.uniform(-10, 3, heads)).astype(np.float32)
    code = np.stack([random.permutation(256) for _ in range(heads * dim)]).astype(np.uint8)
    code = np.ascontiguousarray(code.reshape(heads, dim, tokens).transpose(0, 2, 1))
    item = np.uint32 if kind == "float32" else np.uint16
    cache = to(where, np.zeros((1, tokens, heads, dim), item))
    layout = page_layout(cache, "page token head dim", where, dtype=kind)
    packing.unpack(
        layout,
        to(where, np.zeros((1, 1), np.int32)),
        to(where, code.reshape(1, -1)),
        where,
        encoding=encoding,
        scales=to(where, scales.reshape(1, 1, heads)),
    )
    with np.errstate(invalid="ignore"):
        expected = to_kind(kind, decode(encoding, code) * scales[:, None, None])
    same_numbers(kind, back(cache)[0].transpose(1, 0, 2), expected)


@pytest.mark.parametrize("name", NAMES)
@given(
    dim=st.integers(1, 20) | st.sampled_from([32, 64]),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 3),
    kind=st.sampled_from(["float32", "float16", "bfloat16"]),
    encoding=st.sampled_from(["fp8_e4m3", "int8"]),
    size=st.floats(-6, 4),
    odd=st.sampled_from([0.0, np.inf, -np.inf, np.nan]),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=60, deadline=None)
def test_scales_and_the_way_back(
    name: str,
    dim: int,
    tokens: int,
    heads: int,
    kind: str,
    encoding: str,
    size: float,
    odd: float,
    seed: int,
) -> None:
    """Scales are of the largest finite number of each head; packed, then unpacked, numbers are as
    near as the encoding allows."""
    where = make_backend(name)
    random = np.random.default_rng(seed)
    value = (random.standard_normal((2, 1, tokens, heads, dim)) * 10.0**size).astype(np.float32)
    value[0, 0, 0, 0, 0] = odd
    bits = to_kind(kind, np.nan_to_num(value, nan=np.nan, posinf=np.inf, neginf=-np.inf))
    value = to_float(kind, bits).reshape(value.shape)
    cache = to(where, bits.reshape(value.shape))
    layout = page_layout(cache, "kv page token head dim", where, dtype=kind)
    pages = to(where, np.zeros((1, 1), np.int32))
    packed = to(where, np.zeros((1, layout.block_bytes(tokens, 1)), np.uint8))
    moved = packing.pack(layout, pages, packed, where, encoding=encoding, checksums=True)

    finite = np.where(np.isfinite(value), np.abs(value), 0).max(axis=(1, 2, 4))
    limit = np.float32(448 if encoding == "fp8_e4m3" else 127)
    scales = np.maximum(finite / limit, np.float32(2.0**-126))
    assert (back(moved.scales)[0] == scales).all()
    blocks = np.ascontiguousarray(value[:, 0].transpose(0, 2, 1, 3))  # kv, head, token, dim
    with np.errstate(invalid="ignore"):
        scaled = blocks * (np.float32(1) / scales)[:, :, None, None]
    expected = encode(encoding, scaled)
    assert (back(packed)[0] == expected.ravel()).all()
    assert back(moved.checksums)[0].tolist() == [raw_crc(np.ascontiguousarray(expected))]

    packing.unpack(layout, pages, packed, where, encoding=encoding, scales=moved.scales)
    found = to_float(kind, back(cache).ravel()).reshape(value.shape)
    error = np.abs(found - value)[np.isfinite(value)]
    step = 2.0**-3.5 if encoding == "fp8_e4m3" else 2.0**-6.5
    assert (error <= step * max(finite.max(), 1e-30)).all()


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [-1, 5, 1 << 31, (1 << 32) + 1])
def test_page_that_the_cache_has_not(name: str, wrong: int) -> None:
    """It is told, and neither read nor written."""
    where = make_backend(name)
    cache = Cache(Case(), where, "random")
    before = cache.canonical()
    table = np.array([[0, 1], [wrong, 2]], np.int64)
    size = cache.layout.block_bytes(8)
    _, packed = room(where, 2, size, 0)
    for move in (packing.pack, packing.unpack):
        with pytest.raises(InvalidRequest, match="outside of the cache"):
            move(cache.layout, to(where, table), packed, where).check()
    expected = reference(before, np.array([[0, 1], [0, 2]]), 8)
    expected[1].reshape(2, 2, 3, 8, 16)[:, :, :, :4] = 0
    assert back(packed).tobytes() == expected.tobytes()
    assert (cache.canonical() == before).all()


def test_page_that_is_half_there() -> None:
    """A last page that the tokens of a transformers cache do not fill ends with them."""
    where = kernels.backend("host")
    keys = to(where, np.ones((2, 10, 8), np.float32))
    layout = page_layout([(keys, keys)], "head token dim", where, page_tokens=4)
    packed = np.zeros((1, layout.block_bytes(8)), np.uint8)
    packing.pack(layout, [[1, 2]], packed, where, tokens=6)
    with pytest.raises(InvalidRequest, match="outside of the cache"):
        packing.pack(layout, [[1, 2]], packed, where, tokens=7)


def test_arguments_that_do_not_fit() -> None:
    where = kernels.backend("host")
    cache = Cache(Case(), where, "random").layout
    pages = np.zeros((1, 2), np.int32)
    packed = np.zeros((1, cache.block_bytes(8)), np.uint8)

    def refused(match: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(InvalidRequest, match=match):
            packing.pack(*(arguments or (cache, pages, packed)), where, **options)

    refused("use raw, fp8_e4m3, int8", encoding="int4")
    refused("name the dtype", encoding="int8")
    refused("integers of shape", cache, [1, 2], packed)
    refused("integers of shape", cache, [[1.5, 2]], packed)
    for tokens in (9, 0, 7.5, True):
        refused("from 1 to 8", tokens=tokens)
    refused("no array of numbers", cache, [[1, 2], [3]], packed)
    for parts in (7, 65536):
        refused(f"{parts} equal parts", parts=parts)
    for parts in (0, -1, 2.0, True):
        refused("no whole number", parts=parts)
    fixed = packed.copy()
    fixed.flags.writeable = False
    refused("read-only", cache, pages, fixed)
    refused("read-only", cache, pages, [fixed])
    refused("contiguous bytes", cache, pages, packed[:, :-1])
    refused("contiguous bytes", cache, pages, np.asfortranarray(packed.reshape(1, -1, 2))[:, :, 0])
    refused("packed has shape", cache, pages, np.concatenate([packed, packed]))
    refused("2 packed blocks for 1", cache, pages, [packed, packed])
    twice = np.lib.stride_tricks.as_strided(packed, (2, packed.size), (0, 1))
    refused("overlap", cache, [[0, 1], [2, 3]], twice)
    for address in (0, True, -4096, 1 << 64):
        refused("the address of a packed block", cache, pages, [address])
    refused("no array", cache, pages, b"x")
    refused("no room", cache, pages, [packed[0, 1:]])
    number = dataclasses.replace(cache, dtype="float16")
    refused("float32 of shape", number, pages, packed, encoding="int8", scales=np.ones(1, "f4"))
    for scale in (0.0, -1.0, np.nan, np.inf, 1e-40):
        bad = np.full((len(pages), len(number.planes), number.heads), scale, "f4")
        refused("a scale is not", number, pages, packed, encoding="int8", scales=bad)
        with pytest.raises(InvalidRequest, match="a scale is not"):
            packing.unpack(number, pages, packed, where, encoding="int8", scales=bad)
    with pytest.raises(InvalidRequest, match="scales that pack answered"):
        packing.unpack(number, pages, packed, where, encoding="int8")
    with pytest.raises(InvalidRequest, match="read-only"):
        packing.unpack(dataclasses.replace(cache, writable=False), pages, fixed, where)
    one = np.broadcast_to(np.zeros((1, 4, 8), np.float32), (2, 4, 8))
    shared = page_layout(np.lib.stride_tricks.as_strided(one), "page token dim", where)
    with pytest.raises(InvalidRequest, match="overlap"):
        packing.unpack(shared, [[0, 1]], np.zeros((1, 256), np.uint8), where)
    packing.unpack(cache, pages, fixed, where)
    huge = dataclasses.replace(cache, dim=1 << 22)
    refused("fewer layers or tokens", huge, pages, packed)


def test_packed_blocks_by_address() -> None:
    where = kernels.backend("host")
    cache = Cache(Case(blocks=1), where, "random")
    size = cache.layout.block_bytes(8)
    one, other = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    packing.pack(cache.layout, [[3, 1]], [one], where)
    packing.pack(cache.layout, [[3, 1]], [other.ctypes.data], where)
    assert one.any()
    assert (one == other).all()


@pytest.mark.parametrize(
    ("arrays", "axes", "match"),
    [
        (np.zeros((2, 3, 4)), "token head head", "once"),
        (np.zeros((2, 3, 4)), "token row dim", "once"),
        (np.zeros((2, 3, 4)), "page head dim", "missing"),
        (np.zeros((2, 3)), "token head dim", "shape"),
        (np.zeros((2, 0, 3)), "token head dim", "empty"),
        ([], "token head dim", "without arrays"),
        ([np.zeros((2, 3, 4))] * 2, "layer token dim", "not both"),
        ([(np.zeros((2, 3, 4)),) * 2], "kv token dim", "not both"),
        ([np.zeros((2, 3, 4)), (np.zeros((2, 3, 4)),) * 2], "token head dim", "not both"),
        ([np.zeros((2, 3, 4)), np.zeros((2, 3, 5))], "token head dim", "differ in shape"),
        ([np.zeros((2, 3, 4)), np.zeros((2, 3, 4), "f4")], "token head dim", "differ in"),
        (np.zeros((2, 3, 4), "S3"), "token head dim", "items of 3 bytes"),
    ],
)
def test_layouts_that_are_none(arrays: Any, axes: str, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        page_layout(arrays, axes, kernels.backend("host"))


def test_page_tokens_that_do_not_fit() -> None:
    where = kernels.backend("host")
    with pytest.raises(InvalidRequest, match="page_tokens"):
        page_layout(np.zeros((2, 3)), "token dim", where, page_tokens=0)
    with pytest.raises(InvalidRequest, match="page_tokens"):
        page_layout(np.zeros((2, 3)), "token dim", where, page_tokens=1.5)
    with pytest.raises(InvalidRequest, match="float32 has 32 bits"):
        page_layout(np.zeros((2, 3)), "token dim", where, dtype="float32")
    with pytest.raises(InvalidRequest, match="the pages have 2 tokens"):
        page_layout(np.zeros((4, 2, 3)), "page token dim", where, page_tokens=3)
