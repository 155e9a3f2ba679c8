# SPDX-License-Identifier: Apache-2.0
"""Measures sparse decode: perplexity against exact attention and against window + sink.

tools/bench/sparse sets everything up and calls it. The model reads a context, then every token that
follows is given to it one by one and its loss taken. The context is computed once and stored in the
namespace, from where every run, also of a later process, begins. Exact attention and window + sink,
which need no decode to be right, take the scored tokens in chunks.

All of the scored tokens are run at the budget --resident, the first --curve-tokens at the others.
The confidence interval is of the ratio of perplexities, from the paired differences of the losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch
import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache

import hifc
from hifc.integrations.transformers.attention import ATTENTION
from hifc.integrations.transformers.cache import kv_shape
from hifc.integrations.transformers.sparse import SparseCache
from hifc.sparse.plan import SparseSettings, make_sparse_plan

TEXT = "/usr/share/common-licenses/GPL-3"
CHUNK_TOKENS = 128
# Tokens that one cache decodes before the other has its turn.
TURN_TOKENS = 8
SINK_TOKENS = 16


def say(text: str) -> None:
    """For people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench/sparse", description="sparse decode")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--uri", required=True, help="device of the namespace")
    parser.add_argument("--format", default="if_missing", help="as in the configuration")
    parser.add_argument("--text", type=Path, default=Path(TEXT), help="what the model reads")
    parser.add_argument("--context", type=int, default=6144, help="tokens before the scored ones")
    parser.add_argument("--tokens", type=int, default=1408, help="tokens to score")
    parser.add_argument("--resident", type=float, default=0.25, help="of the KV, in memory")
    parser.add_argument("--budgets", default="0.2,0.35,0.5", help="others, for the curve; or none")
    parser.add_argument("--curve-tokens", type=int, default=256, help="tokens to score at those")
    parser.add_argument("--speed-tokens", type=int, default=64, help="tokens to time")
    parser.add_argument(
        "--prefetch-degree", type=int, default=2, help="of a run that prefetches; 0: none"
    )
    parser.add_argument("--sketch", default="4bit", help="4bit or digest")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--plot", type=Path, help="write the curve as a picture, PNG or SVG")
    return parser.parse_args()


class Bench:
    """Model, text, namespace, and the stored context."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.set_num_threads(1)
        say("loading the model")
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        text = options.text.read_text(encoding="utf-8")
        self.ids: torch.Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids
        self.context: int = options.context
        self.tokens: int = options.tokens
        self.max_tokens = self.context + self.tokens
        if not 0 < self.tokens < self.ids.shape[1] - self.context:
            raise SystemExit(
                f"--context {self.context} and --tokens {self.tokens}: the text has "
                f"{self.ids.shape[1]} tokens, the last of which can only be predicted"
            )
        self.targets = self.ids[0, self.context + 1 : self.max_tokens + 1]
        self.engine = self._open()

    def _open(self) -> hifc.HiFC:
        """The reactor gets a CPU of its own where there are two, the model another."""
        config = self.model.config
        largest = max([self.options.resident, *budgets_of(self.options)])
        plan = make_sparse_plan(kv_shape(config, 1), self.max_tokens, largest, SparseSettings())
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) > 1:
            os.sched_setaffinity(0, {cpus[-1]})
        try:
            return hifc.HiFC(
                {
                    "device": self.options.uri,
                    "format": self.options.format,
                    "pool_size": 2
                    * (plan.pool_bytes + plan.overhead_bytes),  # an arena is one piece
                    "memory_budget": "2MiB",
                    "swap_buffer_size": 0,
                    "owner_socket": False,
                    "attention": "sparse",
                    "sparse_sketch": self.options.sketch,
                    "sparse_missed_max": 1.0,  # the budget stays what it is
                    "sparse_resident_max": 1.0,
                }
            )
        finally:
            if len(cpus) > 1:
                os.sched_setaffinity(0, {cpus[0]})

    def attention(self, name: str) -> None:
        """Which attention function the model calls from now on."""
        self.model.set_attn_implementation(name)

    def sparse(self, resident: float, prefetch_degree: int = 0) -> SparseCache:
        """A cache of that budget that holds the context, computed and stored if need be."""
        settings = SparseSettings.of(self.engine.config)
        cache = self.engine.cache(
            self.model.config,
            self.max_tokens,
            resident=resident,
            load_or_recompute="load",
            sparse=dataclasses.replace(settings, prefetch_degree=prefetch_degree),
        )
        assert isinstance(cache, SparseCache)
        self.attention(ATTENTION)
        prompt = self.ids[:, : self.context]
        loaded = cache.load_prefix(self.ids[:, : self.context + 1])
        if loaded != self.context:
            cache.reset()
            say(f"computing the context of {self.context} tokens, once")
            self.model(prompt, cache=cache, logits_to_keep=1)
            cache.save_prefix(prompt)
        return cache

    def dynamic(self) -> DynamicCache:
        """A cache in memory that holds the context."""
        cache = self.sparse(self.options.resident)
        stream = cache._core.stream
        assert stream is not None
        filled = DynamicCache(config=self.model.config)
        for layer, buffer, _ in stream.each_layer():
            pair = (side[:, :, : self.context].clone() for side in (buffer.keys, buffer.values))
            filled.update(*pair, layer)
        cache.close()
        return filled

    def losses(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Of the scored tokens from first on, [n]."""
        wanted = self.targets[first : first + logits.shape[0]]
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="none")

    def in_chunks(self, cache: DynamicCache, count: int, window: int | None) -> torch.Tensor:
        """Losses of the first count scored tokens, [count]; exact, or with sinks and a window of
        that many tokens in all. Leaves the cache as it was."""
        self.attention("sdpa")
        found = []
        for first in range(0, count, CHUNK_TOKENS):
            size = min(CHUNK_TOKENS, count - first)
            start = self.context + first
            mask = None if window is None else window_mask(start, size, window)
            output = self.model(self.ids[:, start : start + size], cache=cache, attention_mask=mask)
            found.append(self.losses(output.logits[0], first))
        cache.crop(-count)
        return torch.cat(found)

    def steps(
        self, cache: Any, first: int, count: int
    ) -> Iterator[tuple[torch.Tensor, float, float]]:
        """Loss, seconds, and the thread's CPU seconds of each scored token, one by one."""
        for index in range(first, first + count):
            token = self.ids[:, self.context + index, None]
            started, cpu_started = time.perf_counter(), time.thread_time()
            logits = self.model(token, cache=cache).logits[0]
            seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu_started
            yield self.losses(logits, index)[0], seconds, cpu_seconds


def window_mask(start: int, size: int, window: int) -> torch.Tensor:
    """[1, 1, size, start + size]: sinks, and the tokens before each query that make up the rest."""
    query = torch.arange(start, start + size)[:, None]
    key = torch.arange(start + size)[None]
    seen = (key <= query) & ((key < SINK_TOKENS) | (key > query - (window - SINK_TOKENS)))
    return seen[None, None]


def budgets_of(options: argparse.Namespace) -> list[float]:
    """The budgets of the curve."""
    if options.budgets == "none":
        return []
    return [float(budget) for budget in options.budgets.split(",")]


def compared(losses: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Perplexity, its ratio to exact, and that's 95 % interval from paired differences."""
    difference = (losses - exact).double()
    middle = float(difference.mean())
    half = 1.96 * float(difference.std()) / math.sqrt(len(difference))
    return {
        "tokens": len(losses),
        "perplexity": math.exp(float(losses.double().mean())),
        "ratio": math.exp(middle),
        "ratio_low": math.exp(middle - half),
        "ratio_high": math.exp(middle + half),
    }


def bar(count: int, name: str) -> Any:
    return tqdm.tqdm(
        total=count, desc=name, unit="token", file=sys.stderr, leave=False, disable=None
    )


def timed(
    bench: Bench, cache: SparseCache, static: StaticCache
) -> tuple[list[Any], dict[str, Any]]:
    """The first scored tokens in turns with a StaticCache. Losses of the sparse ones; speeds."""
    found: dict[str, list[tuple[float, float]]] = {"static": [], "sparse": []}
    losses: list[torch.Tensor] = []
    turns: list[float] = []
    count = min(bench.options.speed_tokens, bench.tokens) // TURN_TOKENS
    with bar(count * TURN_TOKENS, "in turns with StaticCache") as shown:
        for turn in range(count):
            seconds = {}
            for name, one, attention in (
                ("static", static, "sdpa"),
                ("sparse", cache, ATTENTION),
            ):
                bench.attention(attention)
                steps = list(bench.steps(one, turn * TURN_TOKENS, TURN_TOKENS))
                seconds[name] = sum(second for _, second, _ in steps)
                if turn:  # the first loads all that is resident
                    found[name] += [(second, cpu) for _, second, cpu in steps]
            losses += [loss for loss, _, _ in steps]
            if turn:
                turns.append(seconds["static"] / seconds["sparse"])
            shown.update(TURN_TOKENS)
    if not turns:
        return losses, {}
    middle = {
        name: [statistics.median(column) * 1e3 for column in zip(*steps, strict=True)]
        for name, steps in found.items()
    }
    return losses, {
        "tokens": len(found["sparse"]),
        "static_ms": middle["static"][0],
        "sparse_ms": middle["sparse"][0],
        "static_cpu_ms": middle["static"][1],
        "sparse_cpu_ms": middle["sparse"][1],
        "ratio": middle["static"][0] / middle["sparse"][0],
        "ratio_of_turns": statistics.median(turns),
    }


def sparse_run(
    bench: Bench, resident: float, count: int, static: StaticCache | None, degree: int = 0
) -> Any:
    """Losses of the first count scored tokens at a budget, and what the cache says of itself."""
    cache = bench.sparse(resident, degree)
    losses: list[torch.Tensor] = []
    speed: dict[str, Any] = {}
    if static is not None:
        losses, speed = timed(bench, cache, static)
    with bar(count - len(losses), f"sparse, {resident:.2f} resident") as shown:
        for loss, _, _ in bench.steps(cache, len(losses), count - len(losses)):
            losses.append(loss)
            shown.update()
    quality = cache.quality
    facts = {
        **quality,
        "resident": resident,
        "resident_blocks": quality["resident"],
        "resident_ratio": cache.resident_bytes / cache.plan.total_bytes,
        "planned_ratio": cache.plan.ratio,
        "attended_ratio": quality["resident"] * cache.plan.block_tokens / bench.max_tokens,
        "read_bytes_per_token": cache.counters["read_bytes"] / count,
        "already_resident": cache.counters["prefetch_hit"] / cache.counters["total_access"],
    }
    cache.close()
    return torch.stack(losses), facts, speed


def measure(bench: Bench) -> dict[str, Any]:
    options = bench.options
    memory = bench.dynamic()
    say("exact attention and window + sink")
    exact = bench.in_chunks(memory, bench.tokens, None)
    static = StaticCache(config=bench.model.config, max_cache_len=bench.max_tokens)
    for layer, kept in enumerate(memory.layers):
        static.update(kept.keys, kept.values, layer)
    results: list[dict[str, Any]] = []
    curve: list[dict[str, Any]] = []
    short = min(options.curve_tokens, bench.tokens)

    def add(method: str, budget: float, losses: torch.Tensor, **facts: Any) -> None:
        found = {"method": method, "resident": budget}
        if len(losses) == bench.tokens:
            results.append(found | compared(losses, exact) | facts)
        curve.append(found | compared(losses[:short], exact[:short]))

    plan = [(options.resident, bench.tokens), *((budget, short) for budget in budgets_of(options))]
    for budget, count in plan:
        losses = bench.in_chunks(memory, count, int(budget * bench.max_tokens))
        add("window + sink", budget, losses)
    del memory
    speed: dict[str, Any] = {}
    for index, (budget, count) in enumerate(plan):
        losses, facts, timing = sparse_run(bench, budget, count, static if index == 0 else None)
        add("sparse", budget, losses, **facts)
        speed = speed or timing
        say(f"sparse at {budget}: {curve[-1]['ratio']:.4f} of exact's perplexity")
    prefetch: dict[str, Any] = {}
    if options.prefetch_degree:
        degree = options.prefetch_degree
        _, prefetch, _ = sparse_run(bench, options.resident, short, None, degree)
    return {
        "device": options.uri,
        "context_tokens": bench.context,
        "scored_tokens": bench.tokens,
        "exact_perplexity": math.exp(float(exact.double().mean())),
        "speed": speed,
        "prefetch": prefetch,
        "results": results,
        "curve": curve,
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{result['context_tokens']} tokens of context, {result['scored_tokens']} scored; exact "
        f"perplexity {result['exact_perplexity']:.4f}",
        f"{'':<15}{'resident':>9}{'tokens':>8}{'perplexity':>12}{'over exact':>12}{'95 %':>18}",
    ]
    for one in [*result["results"], *result["curve"]]:
        interval = f"{one['ratio_low']:.4f}-{one['ratio_high']:.4f}"
        lines.append(
            f"{one['method']:<15}{one['resident']:>9.2f}{one['tokens']:>8}"
            f"{one['perplexity']:>12.4f}{one['ratio']:>12.4f}{interval:>18}"
        )
    main = next(one for one in result["results"] if "missed_mean" in one)
    lines += [
        f"at {main['resident']}: {main['resident_ratio']:.4f} of the KV in memory, "
        f"{main['attended_ratio']:.4f} attended to; {main['missed_mean']:.4f} of the attention "
        f"missed by the sketch; {main['checks']} heads checked: {main['checked_missed']:.4f} "
        f"missed, {main['checked_estimate']:.4f} by the sketch",
        f"blocks that were there already {main['already_resident']:.4f}, "
        f"{main['read_bytes_per_token'] / 1e6:.2f} MB read a token",
    ]
    if ahead := result["prefetch"]:
        lines.append(
            f"prefetching: of {ahead['prefetched']} {ahead['prefetch_accuracy']:.4f} were wanted, "
            f"there already {ahead['already_resident']:.4f}, "
            f"{ahead['read_bytes_per_token'] / 1e6:.2f} MB read a token"
        )
    if speed := result["speed"]:
        lines.append(
            f"a token: StaticCache {speed['static_ms']:.1f} ms ({speed['static_cpu_ms']:.1f} CPU), "
            f"sparse {speed['sparse_ms']:.1f} ({speed['sparse_cpu_ms']:.1f}): "
            f"{speed['ratio']:.3f} of its speed, {speed['ratio_of_turns']:.3f} turn by turn"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Perplexity over exact by budget, sparse and window + sink on the same tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    tokens = result["curve"][0]["tokens"]
    for method, mark in (("window + sink", "s"), ("sparse", "o")):
        found = [one for one in result["curve"] if one["method"] == method]
        found.sort(key=lambda one: one["resident"])
        middle = [one["ratio"] for one in found]
        low = [one["ratio"] - one["ratio_low"] for one in found]
        high = [one["ratio_high"] - one["ratio"] for one in found]
        budgets = [one["resident"] for one in found]
        axes.errorbar(budgets, middle, [low, high], marker=mark, capsize=3, label=method)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.axhline(1.01, color="gray", linewidth=0.8, linestyle=":", label="bar: 1.01")
    axes.set_xlabel("KV in memory, sketches counted, of all")
    axes.set_ylabel(f"perplexity over exact, {tokens} tokens")
    axes.legend()
    figure.savefig(path)


def main() -> int:
    options = parse()
    bench = Bench(options)
    with torch.inference_mode():
        result = measure(bench)
    bench.engine.close()
    if options.plot:
        plot(result, options.plot)
    say(table(result)) if options.json else print(table(result))
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
