# SPDX-License-Identifier: Apache-2.0
"""An exception of a signal handler at each place of what a cache does: it goes on exactly or says
that reset() is needed, no block of a prefix is wrong, and nothing is left once it is closed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cache_loop import BLOCK_TOKENS, PROMPT, CacheLoop
from interrupts import interrupt, unraisable_kept

import kv_models as kv
from hifc import Answer, InvalidRequest, Namespace
from hifc.integrations.transformers.attention import ATTENTION, sparse_attention
from hifc.integrations.transformers.sparse import SparseCache
from hifc.sparse.plan import SparseSettings, widened

LAYERS, HEADS, DIM = 5, 2, 64
PROMPT_TOKENS, MAX_TOKENS = PROMPT.shape[1], 240
URI = "ram://stream-interrupts?size=32MiB"


@pytest.fixture(scope="module")
def network() -> Any:
    return kv.model(LAYERS)


@pytest.fixture
def memory() -> Iterator[Namespace]:
    gc.collect()
    gc.freeze()  # the collections that follow then look at little
    Namespace.format(URI, segment_size="1MiB", force=True)
    with Namespace.open(URI, pool_size="8MiB") as opened:
        yield opened
    gc.unfreeze()


def _content(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a sequence, by layer."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, MAX_TOKENS, DIM)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(LAYERS)
    ]


class Bench:
    """A cache that is given keys and values, and that must give them back."""

    def __init__(self, namespace: Namespace, network: Any, rows: int = 1) -> None:
        self.namespace = namespace
        self.network = network
        self.rows = rows
        self.content = _content(0)
        if rows > 1:
            parts = [_content(seed) for seed in range(rows)]
            self.content = [
                (torch.cat([p[i][0] for p in parts]), torch.cat([p[i][1] for p in parts]))
                for i in range(LAYERS)
            ]
        self.cache: Any = None
        self.new()
        self.forward(PROMPT_TOKENS)
        self.cache.close()
        self.before = lent_bytes(namespace)
        self.resets = 0

    def new(self) -> None:
        self.cache = kv.cache_of(
            self.namespace,
            self.network,
            MAX_TOKENS,
            pinned=1,
            block_tokens=BLOCK_TOKENS,
            rows=self.rows,
        )

    def forward(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The next tokens; what attention would see, by layer."""
        start = self.cache.get_seq_length()
        found = []
        for layer, (keys, values) in enumerate(self.content):
            new = slice(start, start + count)
            seen = self.cache.update(keys[:, :, new], values[:, :, new], layer)
            found.append((seen[0].clone(), seen[1].clone()))
        return found

    def prompt(self, count: int = PROMPT_TOKENS) -> None:
        """A new cache that holds the first tokens."""
        self.new()
        self.forward(count)

    def check_forward(self, count: int = 1) -> None:
        """The next tokens are seen with all before them, bitwise."""
        end = self.cache.get_seq_length() + count
        for layer, (keys, values) in enumerate(self.forward(count)):
            assert torch.equal(keys, self.content[layer][0][:, :, :end]), f"keys of layer {layer}"
            assert torch.equal(values, self.content[layer][1][:, :, :end]), f"values of {layer}"

    def check_goes_on(self, lengths: tuple[int, ...]) -> None:
        """It has as many tokens as it may have and goes on, or it says that it must be reset."""
        length = self.cache.get_seq_length()
        try:
            self.check_forward()
            assert length in lengths
        except InvalidRequest as error:
            assert "interrupted" in str(error)
            assert "reset()" in str(error)
            self.resets += 1
        self.cache.reset()
        assert self.cache.get_seq_length() == 0
        for count in (PROMPT_TOKENS, BLOCK_TOKENS - 1, 1, 1):
            self.check_forward(count)

    def check_nothing_left(self) -> None:
        """After close, nothing of the cache remains."""
        self.cache.close()
        self.cache = None
        gc.collect()
        check_nothing_left(self.namespace, self.before)


def lent_bytes(namespace: Namespace) -> int:
    """What arrays hold of the pool."""
    namespace._handle.collect()
    return int(namespace._handle.lib.hifc_pool_lent(namespace._handle.pointer))


def check_nothing_left(namespace: Namespace, before: int) -> None:
    namespace.drain()
    found = namespace.stats()
    assert (found.entries, found.reservations, found.leases) == (0, 0, 0)
    assert found.requests_inflight == 0
    assert lent_bytes(namespace) == before


def each(
    prepare: Callable[[], None],
    operation: Callable[[], Any],
    check: Callable[[str], None],
    first: int = 1,
    step: int = 1,
) -> int:
    """As interrupts.each_place, each time from what prepare made. Returns how many places."""
    with unraisable_kept() as kept:
        for place in range(first, 100_000, step):
            prepare()
            where = interrupt(operation, place)
            kept.clear()  # their tracebacks hold what the frames held
            if where is None:
                check("not interrupted")
                return place
            try:
                check(where)
            except BaseException as error:
                error.add_note(f"interrupted at place {place}: {where}")
                raise
    raise AssertionError("the operation has no end")


# Tokens before it, tokens of it; every how many places it is interrupted.
FORWARDS = {
    "prefill": (0, 40, 3),
    "prefill of the rest": (20, 20, 3),
    "step": (40, 1, 1),
    "step that fills a block": (47, 1, 2),
    "step after it": (48, 1, 2),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_is_exact_or_asks_for_a_reset(memory: Namespace, network: Any, name: str) -> None:
    start, count, step = FORWARDS[name]
    bench = Bench(memory, network)

    def check(_where: str) -> None:
        bench.check_goes_on((start, start + count))
        bench.check_nothing_left()

    def prepare() -> None:
        bench.prompt(start) if start else bench.new()

    places = each(prepare, lambda: bench.forward(count), check, step=step)
    assert places > 100
    assert bench.resets > 20


def test_a_crop_is_exact_or_asks_for_a_reset(memory: Namespace, network: Any) -> None:
    bench = Bench(memory, network)

    def check(_where: str) -> None:
        bench.check_goes_on((PROMPT_TOKENS, 20))
        bench.check_nothing_left()

    assert each(bench.prompt, lambda: bench.cache.crop(-20), check) > 50


def test_beams_are_exact_or_ask_for_a_reset(memory: Namespace, network: Any) -> None:
    bench = Bench(memory, network, rows=2)
    content = bench.content

    def check(where: str) -> None:
        length = bench.cache.get_seq_length()
        swapped = [(keys.flip(0), values.flip(0)) for keys, values in content]
        try:
            found = bench.forward(1)
        except InvalidRequest as error:
            assert "reset()" in str(error)
        else:
            # Before the new token the rows are as they were, or exchanged: all of them.
            seen = torch.cat([side[:, :, :length] for pair in found for side in pair])
            either = [
                torch.cat([side[:, :, :length] for pair in one for side in pair])
                for one in (content, swapped)
            ]
            assert any(torch.equal(seen, one) for one in either)
            assert where != "not interrupted" or torch.equal(seen, either[1])
        bench.cache.reset()
        bench.check_forward(PROMPT_TOKENS)
        bench.check_forward()
        bench.check_nothing_left()

    order = torch.tensor([1, 0])
    assert each(bench.prompt, lambda: bench.cache.reorder_cache(order), check) > 50


@pytest.mark.parametrize("name", ["reset", "close"])
def test_an_end_can_be_interrupted_and_repeated(memory: Namespace, network: Any, name: str) -> None:
    bench = Bench(memory, network)

    def prepare() -> None:
        bench.prompt(PROMPT_TOKENS + BLOCK_TOKENS)

    def check(_where: str) -> None:
        if name == "reset":
            bench.check_goes_on((0, PROMPT_TOKENS + BLOCK_TOKENS))
        bench.check_nothing_left()

    def operation() -> None:
        getattr(bench.cache, name)()

    assert each(prepare, operation, check) > 30


def test_an_interrupted_end_can_be_interrupted_again(memory: Namespace, network: Any) -> None:
    bench = Bench(memory, network)
    with unraisable_kept():
        for place in range(1, 60, 2):
            bench.prompt()
            interrupt(lambda: bench.forward(30), 10 * place)
            for again in range(3):
                interrupt(bench.cache.reset, place + 17 * again)
            bench.check_goes_on((0,))
            interrupt(lambda: bench.cache.save_prefix(PROMPT[:, :20]), 9 * place)
            for again in range(3):
                interrupt(bench.cache.close, place + 13 * again)
            if bench.cache._core.stream is None:
                bench.new()
            bench.cache.forget_prefix(PROMPT[:, :20])
            bench.check_nothing_left()


def test_a_dropped_cache_leaves_nothing(memory: Namespace, network: Any) -> None:
    bench = Bench(memory, network)

    def prepare() -> None:
        bench.prompt()
        memory.drain()  # nothing is in flight: the finalizer closes it

    def drop() -> None:
        bench.cache = None

    def check(_where: str) -> None:
        bench.new()
        bench.check_forward(PROMPT_TOKENS)  # who opens the next stream closes what was dropped
        bench.check_nothing_left()

    assert each(prepare, drop, check) > 20


def test_a_new_cache_is_there_or_not(memory: Namespace, network: Any) -> None:
    bench = Bench(memory, network)

    def prepare() -> None:
        bench.cache = None

    def make() -> None:
        bench.new()
        bench.forward(1)

    def check(_where: str) -> None:
        if bench.cache is None:
            bench.new()
        bench.check_goes_on((0, 1))
        bench.check_nothing_left()

    assert each(prepare, make, check, step=7) > 500


# ---- prefixes


class Prefixes(Bench):
    """With the values that a stored prefix is to have."""

    def __init__(self, namespace: Namespace, network: Any) -> None:
        super().__init__(namespace, network)
        self.prompt()
        self.cache.save_prefix(PROMPT)
        entries = list(namespace.list())
        self.values = {entry.key: namespace.get(entry.key).copy() for entry in entries}
        self.values = {
            entry.key: self.values[entry.key] for entry in entries if entry.cls.name == "REUSE"
        }
        assert len(self.values) == -(-PROMPT_TOKENS // BLOCK_TOKENS)
        self.cache.close()

    def forget(self) -> None:
        self.cache.forget_prefix(PROMPT)

    def stored(self) -> int:
        """How many blocks are there; those are right, the others absent."""
        count = 0
        for key, wanted in self.values.items():
            found = self.namespace.get(key)
            if found is not None:
                count += 1
                assert (found == wanted).all(), "a block of the prefix is wrong"
            else:
                assert self.namespace.lookup([key])[0] == Answer.MISS
        return count


def test_a_stored_prefix_is_right_or_absent(memory: Namespace, network: Any) -> None:
    bench = Prefixes(memory, network)
    bench.new()
    bench.forget()
    counts = set()

    def check(where: str) -> None:
        counts.add(bench.stored())
        if where == "not interrupted":
            assert bench.stored() == len(bench.values)
        assert bench.cache.save_prefix(PROMPT) == PROMPT_TOKENS
        assert bench.stored() == len(bench.values)
        assert memory.stats().reservations == 0
        bench.check_forward()  # the cache goes on: nothing of it was lost
        bench.forget()
        bench.check_nothing_left()

    bench.cache.close()
    assert each(bench.prompt, lambda: bench.cache.save_prefix(PROMPT), check, step=3) > 200
    assert counts >= {0, len(bench.values)}


def test_a_prefix_is_loaded_or_the_cache_is_empty(memory: Namespace, network: Any) -> None:
    bench = Prefixes(memory, network)
    lengths = set()

    def check(where: str) -> None:
        length = bench.cache.get_seq_length()
        lengths.add(length)
        assert length == PROMPT_TOKENS - 1 or (length == 0 and where != "not interrupted")
        bench.check_forward(PROMPT_TOKENS - length)
        assert bench.stored() == len(bench.values)
        bench.cache.reset()
        assert bench.cache.load_prefix(PROMPT) == PROMPT_TOKENS - 1
        bench.check_forward()
        bench.cache.close()
        assert memory.stats().leases == 0
        assert bench.stored() == len(bench.values)

    assert each(bench.new, lambda: bench.cache.load_prefix(PROMPT), check, step=2) > 100
    assert lengths == {0, PROMPT_TOKENS - 1}
    bench.new()
    bench.forget()
    bench.check_nothing_left()


def test_a_loaded_prefix_that_is_cropped_or_reset_stays_stored(
    memory: Namespace, network: Any
) -> None:
    bench = Prefixes(memory, network)

    def prepare() -> None:
        bench.new()
        bench.cache.load_prefix(PROMPT)

    def operation() -> None:
        bench.cache.crop(-20)
        bench.cache.reset()

    def check(_where: str) -> None:
        bench.check_goes_on((0, PROMPT_TOKENS - 1, PROMPT_TOKENS - 21))
        assert bench.stored() == len(bench.values)
        bench.cache.close()

    assert each(prepare, operation, check) > 100
    bench.new()
    bench.forget()
    bench.check_nothing_left()


# ---- sparse


class Sparse(Bench):
    """A sparse cache; what its steps compute is compared with a run that was not interrupted."""

    def __init__(self, namespace: Namespace, network: Any) -> None:
        self.queries = _content(9)[0][0].repeat(1, 2, 1, 1)
        super().__init__(namespace, network)
        self.new()
        self.wanted = self.run()
        self.cache.close()

    def new(self) -> None:
        self.cache = SparseCache(
            self.namespace,
            self.network.config,
            MAX_TOKENS,
            resident=1_640_000,
            sparse=SparseSettings(
                block_tokens=BLOCK_TOKENS, sink_tokens=1, recent_tokens=1, check_every=2
            ),
            model_id="random",
        )

    def step(self) -> torch.Tensor:
        """The next token; what attention computes, by layer."""
        at = self.cache.get_seq_length()
        found = []
        for layer, (keys, values) in enumerate(self.content):
            new = slice(at, at + 1)
            seen = self.cache.update(keys[:, :, new], values[:, :, new], layer)
            query = self.queries[:, :, new]
            found.append(sparse_attention(torch.nn.Module(), query, *seen, None)[0])
        return torch.stack(found)

    def run(self, start: int = 0) -> list[torch.Tensor]:
        """A prompt of two thirds of the cache and the steps after it."""
        if not start:
            self.forward(10 * BLOCK_TOKENS - 2)
        return [self.step() for _ in range(start, 5)]

    def check_goes_on(self, lengths: tuple[int, ...]) -> None:
        length = self.cache.get_seq_length()
        try:
            if length:
                self.step()
            else:
                self.forward(3)
            assert length in lengths
        except InvalidRequest as error:
            assert "interrupted" in str(error)
            assert "reset()" in str(error)
            self.resets += 1
        self.cache.reset()
        for found, wanted in zip(self.run(), self.wanted, strict=True):
            assert torch.equal(found, wanted)


# Steps before the one that is interrupted; the second fills a block.
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_sparse_step_goes_on_or_asks_for_a_reset(memory: Namespace, steps: int) -> None:
    network = kv.model(LAYERS)
    network.set_attn_implementation(ATTENTION)
    bench = Sparse(memory, network)
    before = 10 * BLOCK_TOKENS - 2

    def prepare() -> None:
        bench.new()
        bench.forward(before)
        for _ in range(steps):
            bench.step()

    def check(_where: str) -> None:
        bench.check_goes_on((before + steps, before + steps + 1))
        bench.check_nothing_left()

    assert each(prepare, bench.step, check, step=37) > 500
    assert bench.resets > 10


def test_an_arena_that_is_widened_goes_on(memory: Namespace) -> None:
    network = kv.model(LAYERS)
    network.set_attn_implementation(ATTENTION)
    bench = Sparse(memory, network)

    def prepare() -> None:
        bench.new()
        bench.forward(10 * BLOCK_TOKENS - 2)
        bench.step()

    def widen() -> None:
        stream = bench.cache._core.stream
        plan = widened(stream.plan, 2.0)
        assert plan is not None
        stream.replace_arena(plan)

    prepare()
    narrow = bench.cache.plan
    widen()
    bench.cache.reset()
    wanted = {False: bench.wanted, True: bench.run()}
    bench.cache.close()

    def check(where: str) -> None:
        bench.step()  # nothing was lost
        assert bench.cache.get_seq_length() == 10 * BLOCK_TOKENS
        wide = bench.cache.plan != narrow
        assert wide or where != "not interrupted"
        bench.cache.reset()
        for found, right in zip(bench.run(), wanted[wide], strict=True):
            assert torch.equal(found, right)
        bench.check_nothing_left()

    assert each(prepare, widen, check, step=13) > 500


# ---- all of it, with a model


def test_the_loop_is_exact(memory: Namespace) -> None:
    loop = CacheLoop(memory)
    before = lent_bytes(memory)
    with unraisable_kept():
        for place in range(1, 60, 2):
            interrupt(loop.once, 97 * place)
            loop.go_on()
            loop.once()
    assert loop.resets > 0
    loop.close()
    gc.collect()
    check_nothing_left(memory, before)
