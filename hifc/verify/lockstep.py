# SPDX-License-Identifier: Apache-2.0
"""Runs a model with HiFC and with transformers' DynamicCache, in turns, token by token.

Both get the same prefill partition, dtype and attention function: that is what equal bits are
promised against. The stages:

  decode   the text's beginning in one forward or in chunks, then its last tokens one at a time
  generate goes on with tokens that each run chooses by itself
  prefix   the beginning again, stored and loaded; the reference is cut where the loaded prefix
           ends. Beside it, against the first run's logits: another partition, so equal arithmetic
           within TOLERANCE and not equal bits

Nothing of it stays on the device: the prefix is stored under a salt of its own and deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from hifc.errors import InvalidRequest, NoSpace
from hifc.integrations.transformers.attention import ATTENTION
from hifc.integrations.transformers.cache import token_array
from hifc.util.checking import whole
from hifc.verify import environment
from hifc.verify.attention import Recorder, shown_layers
from hifc.verify.result import TOLERANCE, Bounds, Maps, Stage, Verification

if TYPE_CHECKING:
    from hifc.engine import HiFC

# Logits that are kept for the comparison of a loaded prefix with the first run.
KEPT_STEPS = 32
# Steps of which attention maps are taken, evenly spaced.
MAP_STEPS = 32

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Plan:
    """How much is compared.

    scored: the text's last tokens, one at a time. generated: tokens after it. prefill_chunk:
    tokens a forward of the prompt, None: all at once. prefix: also the stored prefix.
    """

    scored: int = 256
    generated: int = 32
    prefill_chunk: int | None = None
    prefix: bool = True

    def check(self, tokens: int) -> None:
        """Raises InvalidRequest for what makes no sense with a text of that many tokens."""
        whole("scored", self.scored, 1)
        whole("generated", self.generated, 0)
        if self.prefill_chunk is not None:
            whole("prefill_chunk", self.prefill_chunk, 1)
        if tokens < self.scored + 2:
            raise InvalidRequest(
                f"the text has {tokens} tokens, {self.scored} are to be scored after 2 or more: "
                "use a longer text, or score fewer"
            )

    def steps(self, tokens: int) -> int:
        """Of progress, see run."""
        later = min(self.scored, KEPT_STEPS) if self.prefix else 0
        return tokens + self.generated + later


def run(
    model: Any,
    token_ids: Any,
    engine: HiFC,
    *,
    plan: Plan | None = None,
    bounds: Bounds | None = None,
    tick: Tick = lambda done: None,
    **options: Any,
) -> Verification:
    """Compares; returns what was found, also where it failed.

    model: a causal language model of transformers, on the CPU. token_ids: [1, tokens]. engine: the
    HiFC whose namespace is tried, in the mode that its configuration says (`attention`). options:
    those of engine.cache. bounds: of the first stages, by default those of the mode. tick: called
    with the tokens done, of plan.steps(tokens). InvalidRequest: a text too short. HiFCError: what a
    cache raises.
    """
    plan = plan or Plan()
    for what, wanted in ((model, "generate"), (engine, "cache")):
        if not callable(getattr(what, wanted, None)):
            raise InvalidRequest(
                f"{type(what).__name__} has no {wanted}: give run(model, token_ids, engine) a "
                "language model of transformers, ids, and a HiFC"
            )
    ids = torch.from_numpy(token_array(token_ids))[None]
    mode = engine.config.attention
    if mode != "exact":  # what a sparse step appends is not what the prompt alone gives
        plan = dataclasses.replace(plan, prefix=False)
    plan.check(ids.shape[1])
    job = _Job(model, ids, engine, plan, options, tick)
    with torch.inference_mode(), _attention(model, mode):
        return job.compare(mode, bounds or Bounds.of_mode(mode))


@contextlib.contextmanager
def _attention(model: Any, mode: str) -> Iterator[None]:
    """The model attends as the mode wants it; the reference, to all keys."""
    before = model.config._attn_implementation
    if mode == "sparse":
        model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _Job:
    def __init__(
        self,
        model: Any,
        ids: torch.Tensor,
        engine: HiFC,
        plan: Plan,
        options: dict[str, Any],
        tick: Tick,
    ) -> None:
        self.model = model
        self.ids = ids
        self.engine = engine
        self.plan = plan
        self.tick = tick
        self.done = 0
        self.prompt = ids[:, : ids.shape[1] - plan.scored]
        self.max_tokens = ids.shape[1] + plan.generated
        # Entries of other users are never met, and ours are told from theirs.
        self.options = {
            "salt": secrets.token_bytes(16),
            "model_id": "verify",
            "load_or_recompute": "load",
            **options,
        }
        self.recorder = Recorder(model, self.max_tokens)
        self.kept: list[torch.Tensor] = []
        self.seconds: dict[str, list[float]] = {}  # of single tokens, by run

    def compare(self, mode: str, bounds: Bounds) -> Verification:
        cache = self.engine.cache(self.model.config, self.max_tokens, **self.options)
        found = Verification(
            mode=mode,
            model=getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__,
            device=self.engine.config.device,
            settings={
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "attention": self.model.config._attn_implementation,
                "prompt_tokens": self.prompt.shape[1],
                "scored_tokens": self.plan.scored,
                "generated_tokens": self.plan.generated,
                "prefill_chunk": self.plan.prefill_chunk,
                "cache": cache.plan.describe(),
            },
            run=environment.describe(),
        )
        try:
            reference = DynamicCache(config=self.model.config)
            reading = Stage("decode", "reading the text", bounds)
            # Once tokens differ, logits are of different texts.
            own = bounds if mode == "exact" else Bounds(None, None, None)
            writing = Stage("generate", "writing on", own)
            found.stages += [reading, writing] if self.plan.generated else [reading]
            found.maps = self._decode(reading, writing, cache, reference)
            found.tokens_per_s = {
                name: round(len(spent) / sum(spent), 2) for name, spent in self.seconds.items()
            }
            found.resident_bytes = cache.resident_peak_bytes
            found.total_bytes = cache.total_kv_bytes
            found.quality = getattr(cache, "quality", {})
            self._count(found, cache)
            if self.plan.prefix:
                found.stages += self._prefix(found, cache, reference)
        finally:
            cache.close()
        return found

    def _count(self, found: Verification, cache: Any) -> None:
        found.read_bytes += cache.counters["read_bytes"]
        found.written_bytes += cache.counters["written_bytes"]

    # ---- the first two stages

    def _decode(self, reading: Stage, writing: Stage, cache: Any, reference: Any) -> Maps:
        logits = self._prefill(reference, self.prompt), self._prefill(cache, self.prompt)
        start = self.prompt.shape[1]
        watched = _spread(self.plan.scored - 1, MAP_STEPS)
        maps = _MapBuilder(self.recorder)
        for step in range(self.plan.scored):
            target = self.ids[:, start + step]
            _compare(reading, *logits, int(target))
            if step < KEPT_STEPS:
                self.kept.append(logits[0])
            if step in watched:
                pairs = [self._watched(one, target) for one in (reference, cache)]
                logits = pairs[0][0], pairs[1][0]
                maps.add(start + step, pairs[0][1], pairs[1][1])
            else:
                logits = self._timed(reference, target), self._timed(cache, target)
            self._advance(1)
        for _ in range(self.plan.generated):
            _compare(writing, *logits, None)
            chosen = [one.argmax(-1) for one in logits]
            logits = self._timed(reference, chosen[0]), self._timed(cache, chosen[1])
            self._advance(1)
        return maps.build()

    def _prefill(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last token, [1, vocabulary]."""
        logits = torch.empty(0)
        for part in ids.split(self.plan.prefill_chunk or ids.shape[1], dim=1):
            logits = self.model(part, cache=cache, logits_to_keep=1).logits[:, -1]
        if not isinstance(cache, DynamicCache):
            self._advance(ids.shape[1])
        return logits

    def _step(self, cache: Any, token: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(token[None], cache=cache, logits_to_keep=1).logits[:, -1]
        return logits

    def _timed(self, cache: Any, token: torch.Tensor) -> torch.Tensor:
        """A step that counts for the speed: one that nobody watches."""
        name = "reference" if isinstance(cache, DynamicCache) else "hifc"
        start_s = time.perf_counter()
        logits = self._step(cache, token)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start_s)
        return logits

    def _watched(self, cache: Any, token: torch.Tensor) -> tuple[torch.Tensor, dict[int, Any]]:
        with self.recorder.attached():
            self.recorder.weights = {}
            return self._step(cache, token), self.recorder.weights

    def _advance(self, steps: int) -> None:
        self.done += steps
        self.tick(self.done)

    # ---- the last two

    def _prefix(self, found: Verification, cache: Any, reference: Any) -> list[Stage]:
        """The prompt stored, loaded into a new cache, and gone on from."""
        owner = cache
        try:
            cache.save_prefix(self.prompt)
            cache.close()
            owner = self.engine.cache(self.model.config, self.max_tokens, **self.options)
            loaded = owner.load_prefix(self.prompt)
            found.settings["loaded_tokens"] = loaded
            if loaded == 0:
                raise NoSpace(
                    f"{self.engine.config.device} declined to keep the prefix that was stored a "
                    "moment ago (admission, or no room): verify on another device, or leave the "
                    "prefix out"
                )
            reference.crop(loaded - reference.get_seq_length())
            stages = self._continue(owner, reference, loaded)
            self._count(found, owner)
            return stages
        finally:
            try:
                owner.reset()
            finally:
                try:
                    owner.forget_prefix(self.prompt)
                finally:
                    owner.close()

    def _continue(self, cache: Any, reference: Any, loaded: int) -> list[Stage]:
        title = f"from the stored prefix of {loaded} tokens"
        same = Stage("prefix", title, Bounds())
        # 16-bit arithmetic in another order differs by more than any useful bound.
        is_float32 = self.model.dtype == torch.float32
        limit = Bounds(TOLERANCE if is_float32 else None, agreement=None)
        other = Stage("prefix_and_computed", f"{title}, against all computed at once", limit)
        rest = self.prompt[:, loaded:]
        logits = [self._forward(one, rest) for one in (reference, cache)]
        start = self.prompt.shape[1]
        for step in range(len(self.kept)):
            target = self.ids[:, start + step]
            _compare(same, logits[0], logits[1], int(target))
            _compare(other, self.kept[step], logits[1], int(target))
            logits = [self._step(one, target) for one in (reference, cache)]
            self._advance(1)
        return [same, other]

    def _forward(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, cache=cache, logits_to_keep=1).logits[:, -1]
        return logits


class _MapBuilder:
    """Collects attention of both runs, step by step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.layers = shown_layers(recorder.layers)
        self.positions: list[int] = []
        self.rows: list[tuple[list[Any], list[Any]]] = []
        self.distance: Any = None

    def add(self, position: int, reference: dict[int, Any], hifc: dict[int, Any]) -> None:
        """Weights of one step, by layer [head, column]."""
        self.positions.append(position)
        self.rows.append(
            (
                [reference[layer].mean(0) for layer in self.layers],
                [hifc[layer].mean(0) for layer in self.layers],
            )
        )
        apart = np.stack(
            [
                np.abs(reference[layer] - hifc[layer]).sum(-1) / 2
                for layer in range(self.recorder.layers)
            ]
        )
        self.distance = apart if self.distance is None else np.maximum(self.distance, apart)

    def build(self) -> Maps:
        """Arrays [layer, step, column]."""
        reference = np.array([row[0] for row in self.rows]).swapaxes(0, 1)
        hifc = np.array([row[1] for row in self.rows]).swapaxes(0, 1)
        return Maps(
            self.layers,
            self.positions,
            self.recorder.column_tokens,
            reference.astype(np.float64),
            hifc.astype(np.float64),
            self.distance.astype(np.float64),
        )


def _compare(stage: Stage, reference: torch.Tensor, hifc: torch.Tensor, target: int | None) -> None:
    """One step's logits, [1, vocabulary] each; target: the text's next token, if there is one."""
    bits = {4: torch.int32, 2: torch.int16}[reference.element_size()]
    stage.equal_bits.append(torch.equal(reference.view(bits), hifc.view(bits)))
    wanted, found = reference[0].double(), hifc[0].double()
    stage.difference.append(float((wanted - found).abs().max()))
    stage.same_token.append(int(wanted.argmax()) == int(found.argmax()))
    wanted, found = wanted.log_softmax(-1), found.log_softmax(-1)
    stage.divergence.append(float((wanted.exp() * (wanted - found)).sum()))
    stage.nll_reference.append(math.nan if target is None else -float(wanted[target]))
    stage.nll_hifc.append(math.nan if target is None else -float(found[target]))


def _spread(steps: int, count: int) -> set[int]:
    """Up to count of 0 to steps, evenly spaced, both ends among them."""
    count = min(count, steps + 1)
    return {round(i * steps / max(1, count - 1)) for i in range(count)}
