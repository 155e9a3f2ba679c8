# SPDX-License-Identifier: Apache-2.0
"""How long something takes, learned from what it took: seconds as a sum of terms of its size.

Samples are sorted into classes by powers of two of tokens and context; a class keeps its last few
and stands for itself by their median, so a single outlier has no say, and old figures go when new
ones come. The weights are fitted to the classes by least squares of the relative error, none of
them negative. All of it is bounded: CLASSES_MAX classes of CLASS_SAMPLES.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

CLASSES_MAX = 64
CLASS_SAMPLES = 5
# A further term must lower the mean squared relative error by more than this: a few samples would
# otherwise be explained by terms that they say nothing about.
TERM_COST = 1e-3

Terms = Callable[[float, float], Sequence[float]]
Sample = tuple[int, int, float]  # tokens, context, seconds


class CostModel:
    """terms: of (tokens, context), the likeliest to matter first. Not thread-safe."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._classes: collections.OrderedDict[tuple[int, int], collections.deque[Sample]] = (
            collections.OrderedDict()
        )
        self._weights: npt.NDArray[np.float64] | None = None
        self.tokens_max = 0  # of any sample

    def add(self, tokens: int, context: int, seconds: float) -> None:
        """So long it took. Without effect where a clock that stood still says 0."""
        if seconds <= 0:
            return
        name = (tokens.bit_length(), context.bit_length())
        self._weights = None
        self.tokens_max = max(self.tokens_max, tokens)
        samples = self._classes.get(name) or collections.deque(maxlen=CLASS_SAMPLES)
        samples.append((tokens, context, seconds))
        self._classes[name] = samples  # which is never empty, whatever comes in between
        self._classes.move_to_end(name)
        while len(self._classes) > CLASSES_MAX:
            self._classes.popitem(last=False)

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def predict(self, tokens: float, context: float) -> float | None:
        """Seconds; None before the first sample."""
        if not self._classes:
            return None
        if self._weights is None:
            self._weights = self._fit()
        return float(np.dot(self._weights, self._terms(tokens, context)))

    def _fit(self) -> npt.NDArray[np.float64]:
        medians = [_median(samples) for samples in self._classes.values()]
        rows = np.array([self._terms(tokens, context) for tokens, context, _ in medians])
        # Relative errors: a row's target becomes 1.
        rows = rows / np.array([seconds for _, _, seconds in medians])[:, None]
        terms = rows.shape[1]
        best, best_error = np.zeros(terms), np.inf
        for count in range(1, terms + 1):
            for chosen in itertools.combinations(range(terms), count):
                columns = list(chosen)
                weights, *_ = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)
                if (weights < 0).any():
                    continue
                error = np.mean((rows[:, columns] @ weights - 1) ** 2) + TERM_COST * count
                if error < best_error - 1e-12:
                    best, best_error = np.zeros(terms), error
                    best[columns] = weights
        return best


def _median(samples: Sequence[Sample]) -> Sample:
    """The sample in the middle by time a token; of two the faster, since noise only slows down."""
    ordered = sorted(samples, key=lambda sample: sample[2] / sample[0])
    return ordered[(len(ordered) - 1) // 2]
