# SPDX-License-Identifier: Apache-2.0
"""The plot of bench: latency by percentile, one line a load. Needs matplotlib (hifc[bench])."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hifc_admin import text
from hifc_admin.bench.load import Outcome
from hifc_admin.result import Exit, Failure, Problem

SUFFIXES = (".svg", ".png", ".pdf")
# Percentiles on the axis, by how many of a hundred thousand batches are above: evenly spaced nines.
MARKS = ("50", "90", "99", "99.9", "99.99")
POINTS = 200


def require(name: str) -> None:
    """Raises Failure where the plot could not be made: before the load is run, not after."""
    if Path(name).suffix not in SUFFIXES:
        detail = f"the plot's name must end with {', '.join(SUFFIXES)}"
        raise Failure(Exit.USAGE, Problem("bad-argument", name, detail))
    if importlib.util.find_spec("matplotlib") is None:
        fix = "pip install 'hifc[bench]', or leave --plot out"
        problem = Problem("no-matplotlib", name, "a plot needs matplotlib", fix=fix)
        raise Failure(Exit.PREREQUISITE, problem)


def draw(outcomes: Sequence[Outcome], title: str, name: str) -> None:
    """Writes the plot; its kind by the name's suffix."""
    from matplotlib.figure import Figure  # an optional extra, and slow to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for outcome in outcomes:
        if len(outcome.times_us) > 1:
            # Evenly spaced in nines, and not beyond what the count of batches can tell.
            most = np.log10(len(outcome.times_us))
            nines = np.linspace(0, most, POINTS)
            times = np.quantile(outcome.times_us, 1 - 10.0**-nines)
            axes.plot(nines, times, label=_label(outcome))
    marks = [float(mark) for mark in MARKS]
    axes.set_xticks([-np.log10(1 - mark / 100) for mark in marks], MARKS)
    axes.set_yscale("log")
    axes.set_xlabel("percentile of batches")
    axes.set_ylabel("latency, us")
    axes.set_title(title, fontsize="medium", wrap=True)
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend(fontsize="small")
    figure.savefig(name)


def _label(outcome: Outcome) -> str:
    """In the units of the table."""
    rate = text.size(outcome.data()["bytes_per_s"])
    return f"{outcome.name}, {outcome.batch * outcome.depth} in flight, {rate}/s"
