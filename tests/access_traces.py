# SPDX-License-Identifier: Apache-2.0
"""Generated access traces, each from a seed: requests as (time in seconds, chain of block ids)."""

from __future__ import annotations

import heapq
import itertools
import random

Requests = list[tuple[float, list[int]]]


def chat(
    seed: int, requests: int = 2500, median_s: float = 90.0, users_per_s: float = 1.5
) -> Requests:
    """Conversations that come back after a while, longer by a turn, or do not. The last block of a
    request is not full, so the next turn has another one in its place."""
    rng = random.Random(seed)
    ids = itertools.count(1)
    events: list[tuple[float, int, list[int], float]] = []
    made: Requests = []
    order = itertools.count()
    now = 0.0
    while len(made) < requests:
        now += rng.expovariate(users_per_s)
        fresh = [next(ids) for _ in range(1 + int(rng.lognormvariate(2.3, 0.9)))]
        heapq.heappush(events, (now, next(order), [0, *fresh], rng.lognormvariate(0, 0.5)))
        while events and events[0][0] <= now and len(made) < requests:
            at, _, chain, pace = heapq.heappop(events)
            made.append((at, [*chain, next(ids)]))
            if rng.random() < 0.3 + 0.1 * min(4, len(chain) % 5):
                chain = [*chain, *(next(ids) for _ in range(rng.randrange(1, 4)))]
                wait = rng.lognormvariate(0, 0.7) * median_s * pace
                heapq.heappush(events, (at + wait, next(order), chain, pace))
    return made


def agents(seed: int, requests: int = 4000, prompts: int = 60) -> Requests:
    """Long shared prompts of tools, chosen by a Zipf law, each followed by blocks of its own."""
    rng = random.Random(seed)
    ids = itertools.count(1)
    shared = [[next(ids) for _ in range(rng.randrange(4, 20))] for _ in range(prompts)]
    weights = [1 / (rank + 1) for rank in range(prompts)]
    made: Requests = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(3.0)
        prompt = rng.choices(shared, weights)[0]
        made.append((now, [*prompt, *(next(ids) for _ in range(rng.randrange(1, 12)))]))
    return made


def zipf(seed: int, requests: int = 30000, blocks: int = 3000, skew: float = 0.9) -> Requests:
    """Single blocks, independently, by a Zipf law."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** skew for rank in range(blocks)]
    chosen = rng.choices(range(blocks), weights, k=requests)
    return [(0.02 * at, [block]) for at, block in enumerate(chosen)]


def loop(seed: int, rounds: int = 40, blocks: int = 700) -> Requests:
    """A cyclic scan over somewhat more than the cache, a few popular blocks between."""
    rng = random.Random(seed)
    steps = ((round_, block) for round_ in range(rounds) for block in range(blocks))
    return [
        (0.05 * at, [block if rng.random() < 0.9 else blocks + rng.randrange(20)])
        for at, (_, block) in enumerate(steps)
    ]


def shift(seed: int, requests: int = 30000) -> Requests:
    """Popularity that moves: the popular blocks of now are forgotten later."""
    rng = random.Random(seed)
    return [
        (0.02 * at, [int(at / 12 + rng.paretovariate(0.8) * 3) % 200000]) for at in range(requests)
    ]


GENERATORS = {"chat": chat, "agents": agents, "zipf": zipf, "loop": loop, "shift": shift}
