# SPDX-License-Identifier: Apache-2.0
"""Attention mass from weights, sketches and digests against plain numpy, on every backend."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import classify_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import NAMES, back, make_backend, to

from hifc.errors import InvalidRequest
from hifc.kernels.mass import mass_from_digest, mass_from_sketch, mass_from_weights
from hifc.kernels.sketch import Digest, Sketch, build_sketch

backends = pytest.mark.parametrize("name", NAMES)
few = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 1 << 32)
dtypes = st.sampled_from(["float32", "float16"])
block_sizes = st.sampled_from([1, 2, 10, 16, 17, 64, 128, 129, 256, 300])


@st.composite
def keys_of_a_layer(draw: Any) -> Any:
    """Keys (kv_heads, tokens, dim) with some channels much larger than others, as models have."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 700)), 8 * draw(st.integers(1, 32))
    rng = np.random.default_rng(draw(seeds))
    keys = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1, shape[2])))
    if draw(st.booleans()):
        keys[:, rng.integers(shape[1])] = draw(st.sampled_from([0.0, 3.5, 1e5]))  # all alike
    with np.errstate(over="ignore"):
        narrow = keys.astype(draw(dtypes))
    return np.nan_to_num(narrow, posinf=60000, neginf=-60000)


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(back(found), expected, rtol=tolerance, atol=tolerance / 10)


@backends
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 20), st.integers(1, 1200)),
    block_tokens=block_sizes,
    dtype=dtypes,
    seed=seeds,
)
@few
def test_mass_from_weights(
    name: str, shape: tuple[int, ...], block_tokens: int, dtype: str, seed: int
) -> None:
    where = make_backend(name)
    weights = np.random.default_rng(seed).random(shape).astype(dtype)
    found = mass_from_weights(to(where, weights), block_tokens, scale=0.5, where=where)
    close(found, reference.weights_mass(weights, block_tokens, 0.5))


@backends
def test_weights_of_strides_into_a_part(name: str) -> None:
    where = make_backend(name)
    weights = np.random.default_rng(1).random((6, 3, 2, 80)).astype(np.float32)
    masses = where.xp.zeros((3, 9), dtype="float32")
    strided = to(where, weights)[1::2, :, ::-1]
    mass_from_weights(strided, 16, out=masses[:, 2:7], where=where)
    close(masses[:, 2:7], reference.weights_mass(weights[1::2], 16, 1.0))
    assert not back(masses)[:, [0, 1, 7, 8]].any()


@backends
@given(keys=keys_of_a_layer(), cuts=st.lists(st.integers(0, 700), max_size=4))
@few
def test_a_sketch_is_the_same_by_parts(name: str, keys: Any, cuts: list[int]) -> None:
    where = make_backend(name)
    kv_heads, tokens, dim = keys.shape
    codes, params = reference.sketch(keys.astype(np.float32))
    sketch = Sketch(kv_heads, dim, tokens + 3, where)
    places = [0, *sorted(min(cut, tokens) for cut in cuts), tokens]
    for start, end in pairwise(places):
        sketch.append(to(where, keys)[:, start:end])
    assert sketch.length == tokens
    np.testing.assert_array_equal(back(sketch.params)[:, :tokens], params)
    np.testing.assert_array_equal(back(sketch.codes)[:, :tokens], codes)
    assert not back(sketch.codes)[:, tokens:].any()


@backends
@given(
    keys=keys_of_a_layer(),
    group=st.integers(1, 17),
    count=st.integers(1, 5),
    block_tokens=block_sizes,
    dtype=dtypes,
    seed=seeds,
)
@few
def test_mass_from_sketch(
    name: str, keys: Any, group: int, count: int, block_tokens: int, dtype: str, seed: int
) -> None:
    where = make_backend(name)
    kv_heads, tokens, dim = keys.shape
    count = min(count, tokens)
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(count, kv_heads * group, dim)).astype(dtype)
    sketch = build_sketch(to(where, keys), where=where)
    scale = 0.3 / float(np.abs(keys.astype(np.float32)).max() + 1e-3)
    found = mass_from_sketch(to(where, queries), sketch, block_tokens, scale=scale)
    kept = reference.keys_of(back(sketch.codes), back(sketch.params))
    expected = reference.sketch_mass(queries, kept, tokens, block_tokens, scale)
    close(found, expected, 2e-4)


@backends
@given(keys=keys_of_a_layer(), cuts=st.lists(st.integers(0, 700), max_size=4), size=block_sizes)
@few
def test_a_digest_is_the_same_by_parts(name: str, keys: Any, cuts: list[int], size: int) -> None:
    where = make_backend(name)
    kv_heads, tokens, dim = keys.shape
    digest = Digest(kv_heads, dim, tokens, size, keys.dtype.name, where)
    places = [0, *sorted(min(cut, tokens) for cut in cuts), tokens]
    for start, end in pairwise(places):
        digest.append(to(where, keys)[:, start:end])
    np.testing.assert_array_equal(back(digest.values), reference.digest(keys, size))


@backends
@given(
    keys=keys_of_a_layer(),
    group=st.integers(1, 17),
    count=st.integers(1, 5),
    size=block_sizes,
    seed=seeds,
)
@few
def test_mass_from_digest(
    name: str, keys: Any, group: int, count: int, size: int, seed: int
) -> None:
    where = make_backend(name)
    kv_heads, tokens, dim = keys.shape
    count = min(count, tokens)
    queries = np.random.default_rng(seed).normal(size=(count, kv_heads * group, dim))
    queries = queries.astype(np.float32)
    digest = Digest(kv_heads, dim, tokens + size, size, keys.dtype.name, where)
    digest.append(to(where, keys))
    scale = 0.3 / float(np.abs(keys.astype(np.float32)).max() + 1e-3) / dim**0.5
    found = mass_from_digest(to(where, queries), digest, scale=scale)
    kept = reference.digest(keys.astype(np.float32), size)
    close(found, reference.digest_mass(queries, kept, tokens, size, scale), 2e-4)


@backends
def test_what_is_refused(name: str) -> None:
    where = make_backend(name)

    def zeros(*shape: int, dtype: str = "float32") -> Any:
        return where.xp.zeros(shape, dtype=dtype)

    for dim in (60, 264):
        with pytest.raises(InvalidRequest, match="multiple of 8 up to 256"):
            Sketch(1, dim, 1, where)
    for arguments in ((0, 64, 1), (1, 64, 0), (1.0, 64, 1), (1, "64", 1), (1, 64, 1 << 40)):
        with pytest.raises(InvalidRequest, match="no whole number"):
            Sketch(*arguments, where)
    sketch = Sketch(2, 64, 10, where)
    with pytest.raises(InvalidRequest, match=r"\(2, tokens, 64\)"):
        sketch.append(zeros(3, 4, 64))
    with pytest.raises(InvalidRequest, match="room for 10"):
        sketch.append(zeros(2, 11, 64))
    with pytest.raises(InvalidRequest, match="float64"):
        sketch.append(zeros(2, 4, 64, dtype="float64"))
    with pytest.raises(InvalidRequest, match="strided"):
        sketch.append(zeros(2, 4, 128)[:, :, ::2])
    sketch.append(zeros(2, 4, 64))
    with pytest.raises(InvalidRequest, match="5 queries of 4"):
        mass_from_sketch(zeros(5, 4, 64), sketch, 16)
    for shape in ((3, 64), (4, 32), (4,)):
        with pytest.raises(InvalidRequest, match="multiple of 2 heads"):
            mass_from_sketch(zeros(*shape), sketch, 16)
    for block_tokens in (0, 4.0, 1 << 40):
        with pytest.raises(InvalidRequest, match="block_tokens"):
            mass_from_sketch(zeros(4, 64), sketch, block_tokens)
        with pytest.raises(InvalidRequest, match="block_tokens"):
            mass_from_weights(zeros(4, 1, 32), block_tokens, where=where)
    for scale in (math.nan, "x"):
        with pytest.raises(InvalidRequest, match="scale"):
            mass_from_sketch(zeros(4, 64), sketch, 16, scale=scale)
        with pytest.raises(InvalidRequest, match="scale"):
            mass_from_weights(zeros(4, 1, 32), 16, scale=scale, where=where)
    for length in (5, 3.5):
        with pytest.raises(InvalidRequest, match="truncate"):
            sketch.truncate(length)
    with pytest.raises(InvalidRequest, match="int8"):
        Digest(2, 64, 10, 4, "int8", where)
    with pytest.raises(InvalidRequest, match="float16 for a digest of float32"):
        Digest(2, 64, 10, 4, "float32", where).append(zeros(2, 4, 64, dtype="float16"))
    with pytest.raises(InvalidRequest, match="weights of shape"):
        mass_from_weights(zeros(4, 4), 16, where=where)
    with pytest.raises(InvalidRequest, match=r"float32 \(4, 2\) is wanted"):
        mass_from_weights(zeros(4, 1, 32), 16, out=zeros(4, 3), where=where)
    if where.xp is np:
        kept = zeros(4, 2)
        kept.flags.writeable = False
        with pytest.raises(InvalidRequest, match="read-only"):
            mass_from_weights(zeros(4, 1, 32), 16, out=kept, where=where)


def test_arrays_that_cannot_be_read_or_written() -> None:
    where = make_backend("host")
    weights = np.random.default_rng(1).random((3, 2, 32), np.float32)
    fields = np.zeros((3, 2), [("weight", "f4", (8,)), ("other", "u1")])["weight"]
    for odd, match in ((weights.astype(">f4"), ">f4"), (fields, "not aligned")):
        with pytest.raises(InvalidRequest, match=match):
            mass_from_weights(odd, 4, where=where)
    fixed = np.zeros((3, 8), np.float32)
    fixed.flags.writeable = False
    shared = np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), (3, 8), (0, 4))
    for out, match in ((fixed, "read-only"), (shared, "overlap")):
        with pytest.raises(InvalidRequest, match=match):
            mass_from_weights(weights, 4, out=out, where=where)
    queries = np.lib.stride_tricks.as_strided(weights, (1, 1 << 33, 4), (0, 0, 4))
    with pytest.raises(InvalidRequest, match="does not fit"):
        mass_from_weights(queries, 4, where=where)


def test_empty_arrays_have_no_mass() -> None:
    where = make_backend("host")
    assert mass_from_weights(np.zeros((0, 2, 5), np.float32), 4, where=where).shape == (0, 2)
    assert mass_from_weights(np.zeros((2, 2, 0), np.float32), 4, where=where).shape == (2, 0)
    out = np.ones((2, 2), np.float32)
    mass_from_weights(np.zeros((2, 0, 5), np.float32), 4, where=where, out=out)
    assert not out.any()
    sketch = Sketch(2, 16, 8, where)
    sketch.append(np.zeros((2, 0, 16), np.float32))
    assert sketch.length == 0


def test_bfloat16_of_torch() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 50, 64, generator=generator).to(torch.bfloat16)
    query = torch.randn(6, 64, generator=generator).to(torch.bfloat16)
    where = make_backend("host")
    sketch = build_sketch(keys, where=where)
    codes, params = reference.sketch(keys.float().numpy())
    np.testing.assert_array_equal(sketch.codes, codes)
    expected = reference.sketch_mass(
        query.float().numpy()[None], reference.keys_of(codes, params), 50, 16, 0.125
    )
    close(mass_from_sketch(query, sketch, 16), expected[0], 2e-4)
    digest = Digest(2, 64, 50, 16, "bfloat16", where)
    digest.append(keys)
    found = torch.from_numpy(digest.values).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found, reference.digest(keys.float().numpy(), 16))
    weights = torch.softmax(torch.randn(3, 2, 40, generator=generator), -1).to(torch.bfloat16)
    expected = reference.weights_mass(weights.float().numpy()[None], 16, 1.0)
    close(mass_from_weights(weights, 16, where=where), expected)


@backends
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_has_no_mass(name: str, bad: float) -> None:
    where = make_backend(name)
    rng = np.random.default_rng(5)
    keys = to(where, rng.normal(size=(2, 77, 32)).astype(np.float32))
    sketch = build_sketch(keys, where=where)
    digest = Digest(2, 32, 77, 16, where=where)
    digest.append(keys)
    for channel in range(32):
        query = rng.normal(size=(4, 32)).astype(np.float32)
        query[2, channel] = bad  # of the second KV head
        given = to(where, query)
        for mass in (mass_from_sketch(given, sketch, 16), mass_from_digest(given, digest)):
            found = back(mass)
            assert np.isnan(found[1]).all()
            close(found[0].sum(keepdims=True), np.ones(1), 1e-5)


def test_a_sketch_forgets_and_goes_on() -> None:
    keys = np.random.default_rng(3).normal(size=(2, 40, 32)).astype(np.float32)
    where = make_backend("host")
    sketch = build_sketch(keys, where=where)
    with pytest.raises(AttributeError):
        sketch.length = 10  # type: ignore[misc]
    sketch.truncate(10)
    sketch.append(keys[:, 20:30])
    assert sketch.length == 20
    expected = build_sketch(np.concatenate([keys[:, :10], keys[:, 20:30]], 1), where=where)
    np.testing.assert_array_equal(sketch.codes[:, :20], expected.codes)
    digest = Digest(2, 32, 40, 16, where=where)
    for part in (keys[:, :20], keys[:, 20:]):
        digest.append(part)
    digest.reset()
    digest.append(keys[:, 30:])
    np.testing.assert_array_equal(digest.values[:, :1], reference.digest(keys[:, 30:], 16))


def test_the_block_that_is_looked_for_is_found() -> None:
    """Keys of which one block is what the query looks for: both kinds of sketch find it."""
    rng = np.random.default_rng(5)
    keys = rng.normal(size=(1, 512, 64)).astype(np.float32)
    query = rng.normal(size=(4, 64)).astype(np.float32)
    keys[0, 320:336] += query.mean(axis=0) * 3
    where = make_backend("host")
    digest = Digest(1, 64, 512, 16, where=where)
    digest.append(keys)
    for mass in (
        mass_from_sketch(query, build_sketch(keys, where=where), 16),
        mass_from_digest(query, digest),
    ):
        assert mass.shape == (1, 32)
        assert mass.sum() == pytest.approx(1, abs=1e-5)
        assert mass[0].argmax() == 20
