# SPDX-License-Identifier: Apache-2.0
"""What a verification found, and what of it passes.

A stage is one run of HiFC beside one of the reference, token by token: the largest difference of
their logits, how likely each thought the next token of the text, and whether both would have
written the same one. The bounds depend on what was promised: exact mode promises equal bits, so
its bound is 0; sparse mode promises perplexity, which takes many tokens to tell. A run in which
nothing came from the device verifies nothing, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TOLERANCE = 1e-3  # of logits, where equal bits are not promised but equal arithmetic is
PERPLEXITY_RATIO = 1.01  # sparse mode, over the reference
CONFIDENCE_Z = 1.96  # two-sided 95 %


@dataclass(frozen=True)
class Bounds:
    """What still passes; None: reported and not judged.

    difference: of any logit. ratio: of perplexities, HiFC over the reference. agreement: share of
    tokens that both choose.
    """

    difference: float | None = 0.0
    ratio: float | None = None
    agreement: float | None = 1.0

    @classmethod
    def of_mode(cls, mode: str) -> Bounds:
        """Those of a mode of the cache: exact promises bits, any other one perplexity."""
        if mode == "exact":
            return cls()
        return cls(difference=None, ratio=PERPLEXITY_RATIO, agreement=None)


@dataclass(frozen=True)
class Check:
    """One promise and what became of it."""

    text: str
    found: float
    bound: float
    passed: bool
    found_text: str = ""  # the same for people
    bound_text: str = ""
    undecided: bool = False  # not kept by these few tokens, which may be chance

    @property
    def outcome(self) -> str:
        """In one word."""
        return "passed" if self.passed else "undecided" if self.undecided else "FAILED"

    def data(self) -> dict[str, Any]:
        """For JSON, which has no nan."""
        return {
            "check": self.text,
            "found": _plain(self.found),
            "bound": self.bound,
            "outcome": self.outcome.lower(),
        }

    @property
    def line(self) -> str:
        """All of it."""
        return f"{self.text}: {self.found_text}, wanted {self.bound_text}"


@dataclass
class Stage:
    """Two runs, step by step. Arrays have one item a step; targets are nan where the text ended
    and both wrote on by themselves."""

    name: str
    title: str
    bounds: Bounds
    difference: list[float] = field(default_factory=list)  # largest of a step's logits
    divergence: list[float] = field(default_factory=list)  # KL of the reference from HiFC, nats
    same_token: list[bool] = field(default_factory=list)
    nll_reference: list[float] = field(default_factory=list)  # nats
    nll_hifc: list[float] = field(default_factory=list)
    equal_bits: list[bool] = field(default_factory=list)  # all logits of a step

    @property
    def same_bits(self) -> bool:
        """Whether no logit of any step differs in a bit."""
        return all(self.equal_bits)

    @property
    def steps(self) -> int:
        """Tokens compared."""
        return len(self.difference)

    @property
    def largest(self) -> float:
        """The largest difference of any logit; nan if one was no number."""
        return float(np.max(self.difference)) if self.difference else math.nan

    @property
    def agreement(self) -> float:
        """Share of steps in which both choose the same token."""
        return float(np.mean(self.same_token)) if self.same_token else math.nan

    @property
    def first_disagreement(self) -> int | None:
        """The step at which they first chose different tokens."""
        return self.same_token.index(False) if False in self.same_token else None

    def perplexities(self) -> tuple[float, float]:
        """Of the reference and of HiFC, over the tokens of the text."""
        reference, hifc = self._scored()
        if not reference.size:
            return math.nan, math.nan
        return float(np.exp(reference.mean())), float(np.exp(hifc.mean()))

    def ratio(self) -> tuple[float, float, float]:
        """Perplexity of HiFC over the reference's, and its 95 % interval from paired tokens."""
        reference, hifc = self._scored()
        if not reference.size:
            return math.nan, math.nan, math.nan
        paired = hifc - reference
        spread = float(paired.std(ddof=1)) if paired.size > 1 else math.inf
        half = CONFIDENCE_Z * spread / math.sqrt(paired.size)
        mean = float(paired.mean())
        return math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0))

    def _scored(self) -> tuple[Floats, Floats]:
        reference = np.asarray(self.nll_reference, dtype=np.float64)
        hifc = np.asarray(self.nll_hifc, dtype=np.float64)
        known = ~np.isnan(reference)
        return reference[known], hifc[known]

    def checks(self) -> list[Check]:
        """Written so that a value that is no number fails."""
        found = []
        limit = self.bounds.difference
        if limit is not None:
            text = "logits are bitwise equal" if limit == 0 else "largest difference of a logit"
            passed = self.largest <= limit and (limit > 0 or self.same_bits)
            shown = f"{self.largest:.3g}", f"at most {limit:g}"
            if limit == 0:
                apart = "" if passed else f", others by up to {self.largest:.3g}"
                shown = f"{self.steps_of(self.equal_bits)}{apart}", "all"
            found.append(Check(f"{self.title}: {text}", self.largest, limit, passed, *shown))
        if self.bounds.ratio is not None:
            ratio, low, _ = self.ratio()
            limit = self.bounds.ratio
            text = f"{self.title}: perplexity over the reference's"
            shown = f"{ratio:.6g}", f"at most {limit:g}"
            found.append(Check(text, ratio, limit, ratio <= limit, *shown, low <= limit))
        if self.bounds.agreement is not None:
            share = self.agreement
            limit = self.bounds.agreement
            text = f"{self.title}: both choose the same token"
            shown = self.steps_of(self.same_token), "all" if limit == 1 else f"{limit:.0%} or more"
            found.append(Check(text, share, limit, share >= limit, *shown))
        return found

    @staticmethod
    def steps_of(what: list[bool]) -> str:
        """How many of the steps it holds for, in words."""
        return f"{sum(what)} of {len(what)} tokens"

    def data(self) -> dict[str, Any]:
        """For JSON."""
        reference, hifc = self.perplexities()
        ratio, low, high = self.ratio()
        return {
            "stage": self.name,
            "steps": self.steps,
            "scored_tokens": len(self._scored()[0]),
            "largest_logit_difference": _plain(self.largest),
            "bitwise_equal": self.same_bits,
            "token_agreement": _plain(self.agreement),
            "first_disagreement": self.first_disagreement,
            "perplexity_reference": _plain(reference),
            "perplexity": _plain(hifc),
            "perplexity_ratio": _plain(ratio),
            "perplexity_ratio_interval": [_plain(low), _plain(high)],
            "largest_divergence": _plain(max(self.divergence, default=math.nan)),
        }


@dataclass
class Maps:
    """Attention of single queries over keys, summed into columns of equal width in tokens.

    reference, hifc: [layer, step, column], mean over heads. distance: [layer, head], the largest
    total variation distance of any step, 0 (the same) to 1, of all layers.
    """

    layers: list[int]
    positions: list[int]
    column_tokens: int
    reference: Floats
    hifc: Floats
    distance: Floats


@dataclass
class Verification:
    """All that was found. The report shows this and no more."""

    mode: str
    model: str
    device: str
    settings: dict[str, Any]  # as shown: text, tokens, dtype, plan
    stages: list[Stage] = field(default_factory=list)
    maps: Maps | None = None
    read_bytes: int = 0  # of KV, from the device, while logits were compared
    written_bytes: int = 0
    quality: dict[str, Any] = field(default_factory=dict)  # what a sparse cache tells of itself
    resident_bytes: int = 0  # at its peak
    total_bytes: int = 0
    tokens_per_s: dict[str, float] = field(default_factory=dict)  # one at a time, by run
    run: dict[str, str] = field(default_factory=dict)  # when, where and with which versions

    def checks(self) -> list[Check]:
        """Of all stages."""
        return [check for stage in self.stages for check in stage.checks()]

    @property
    def is_meaningful(self) -> bool:
        """False if no KV came from the device: everything was in memory, so nothing was tried."""
        return self.read_bytes > 0

    @property
    def passed(self) -> bool:
        """All promises were kept, and it took the device to keep them."""
        return self.is_meaningful and all(check.passed for check in self.checks())

    @property
    def verdict(self) -> str:
        """PASSED, FAILED or NOT VERIFIED."""
        if self.failures():
            return "FAILED"
        return "PASSED" if self.passed else "NOT VERIFIED"

    @property
    def sentence(self) -> str:
        """What was found, in plain words."""
        if self.failures():
            return f"What was promised was not kept: {self.failures()[0]}."
        if not self.is_meaningful:
            return (
                "This run says nothing about HiFC: all of the KV fitted into memory, and none came "
                "from the device."
            )
        if self.undecided():
            return f"This run cannot tell: {self.undecided()[0]}."
        share = 1 - self.resident_bytes / self.total_bytes if self.total_bytes else 0.0
        where = f"{share:.0%} of the KV was on the device".replace("%", " %")
        first = self.stages[0]
        if first.bounds.difference == 0:
            return f"The logits of all {first.steps} scored tokens are equal to the bit; {where}."
        ratio = first.ratio()[0]
        return (
            f"Over {first.steps} scored tokens, perplexity is {ratio:.4f} times that of the "
            f"reference; {where}."
        )

    def undecided(self) -> list[str]:
        """What these few tokens do not tell, one line each."""
        return [
            f"{check.line}; too few tokens to tell"
            for check in self.checks()
            if check.undecided and not check.passed
        ]

    def failures(self) -> list[str]:
        """What was not kept, one line each."""
        return [check.line for check in self.checks() if not check.passed and not check.undecided]

    def data(self) -> dict[str, Any]:
        """For JSON; attention maps are in the report only."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "mode": self.mode,
            "model": self.model,
            "device": self.device,
            "settings": self.settings,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "quality": self.quality,
            "resident_bytes": self.resident_bytes,
            "total_bytes": self.total_bytes,
            "tokens_per_s": self.tokens_per_s,
            "run": self.run,
            "checks": [check.data() for check in self.checks()],
            "stages": [stage.data() for stage in self.stages],
        }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
