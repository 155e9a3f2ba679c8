# SPDX-License-Identifier: Apache-2.0
"""The Python part of tools/bench/policy: arguments, table, JSON and plot around hifc.blocks.replay.

docs/measuring.md says what is counted and shows figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hifc.blocks.policy import POLICIES
from hifc.blocks.replay import ADMISSIONS, BELADY, Outcome, Trace, load_trace, replay
from hifc.errors import HiFCError

CAPACITIES = "1000,5000,10000,30000"
SHOWN = ["default", "frequency", "lru", "lfu", "arc", "s3fifo", BELADY]
KNOWN = [*POLICIES, BELADY]
DEFAULT_ADMISSIONS = ["always", "second_use", "expected"]


@dataclass(frozen=True)
class Row:
    """One replay."""

    policy: str
    admission: str
    capacity_blocks: int
    outcome: Outcome

    def mapping(self) -> dict[str, object]:
        """As --json prints it."""
        return {
            "policy": self.policy,
            "admission": self.admission,
            "capacity_blocks": self.capacity_blocks,
            "hit_ratio": self.outcome.hit_ratio,
            "written_blocks": self.outcome.written_blocks,
            "reused_blocks": self.outcome.reused_blocks,
        }


def choice(text: str, known: list[str], what: str) -> list[str]:
    """Names between commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{what} {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def capacities(text: str) -> list[int]:
    """Counts of blocks between commas."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(0 < count < 1 << 31 for count in counts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of capacities in blocks, such as {CAPACITIES}"
        )
    return counts


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; errors end the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="tools/bench/policy", description="Replays an access trace against the policies."
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", type=capacities, default=CAPACITIES)
    parser.add_argument("--policy", type=lambda text: choice(text, KNOWN, "policy"), default=None)
    parser.add_argument(
        "--admission", type=lambda text: choice(text, list(ADMISSIONS), "admission"), default=None
    )
    parser.add_argument("--write-budget", type=float, default=0.0, metavar="BLOCKS")
    parser.add_argument("--lambda", type=float, default=0.1, dest="decay_lambda")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.plot is not None:
        # Before a replay, which may take minutes.
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        if not options.plot.parent.is_dir() or options.plot.is_dir():
            parser.error(f"--plot {options.plot}: no file can be made there")
        if options.plot.suffix.removeprefix(".").lower() not in known:
            parser.error(f"--plot {options.plot}: its end is none of {', '.join(sorted(known))}")
        if not os.access(options.plot if options.plot.exists() else options.plot.parent, os.W_OK):
            parser.error(f"--plot {options.plot}: it cannot be written to")
    if "budget" in (options.admission or []) and not options.write_budget > 0:
        parser.error("--admission budget wants --write-budget N, in blocks a day")
    return options


def runs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Pairs of policy and admission."""
    policies = options.policy or SHOWN
    pairs = []
    for policy in policies:
        admissions = options.admission or (
            DEFAULT_ADMISSIONS if policy == "default" else ["always"]
        )
        if options.write_budget > 0 and not options.admission and policy == "default":
            admissions = [*admissions[:-1], "budget", admissions[-1]]
        for admission in admissions:
            if policy == BELADY and admission != "always":
                continue
            if admission == "expected" and policy not in ("default", "return_time"):
                continue
            pairs.append((policy, admission))
    return pairs


def run(trace: Trace, options: argparse.Namespace) -> list[Row]:
    """Every pair at every capacity; progress to stderr."""
    rows = []
    for capacity in options.capacity:
        for policy, admission in runs(options):
            started = time.perf_counter()
            outcome = replay(
                trace,
                policy,
                capacity,
                admission=admission,
                budget_blocks_per_day=options.write_budget,
                decay_lambda=options.decay_lambda,
            )
            rate = outcome.access_count / max(time.perf_counter() - started, 1e-9) * 60 / 1e6
            print(
                f"{capacity} blocks, {policy}, {admission}: {rate:.0f} million accesses a minute",
                file=sys.stderr,
            )
            rows.append(Row(policy, admission, capacity, outcome))
    return rows


def gap_closed(row: Row, rows: list[Row]) -> str:
    """The share of the way from LRU to Belady at the same capacity, where both are there."""
    at = {
        other.policy: other.outcome.hit_ratio
        for other in rows
        if other.capacity_blocks == row.capacity_blocks and other.admission == "always"
    }
    if "lru" not in at or BELADY not in at or at[BELADY] <= at["lru"]:
        return "-"
    return f"{(row.outcome.hit_ratio - at['lru']) / (at[BELADY] - at['lru']):.2f}"


def table(rows: list[Row]) -> str:
    """For people."""
    head = f"{'blocks':>8} {'policy':<12} {'admission':<10} {'hit ratio':>9} {'gap closed':>10}"
    lines = [f"{head} {'written':>9} {'written/reused':>14}"]
    for row in rows:
        found = row.outcome
        lines.append(
            f"{row.capacity_blocks:>8} {row.policy:<12} {row.admission:<10} "
            f"{found.hit_ratio:>9.4f} {gap_closed(row, rows):>10} {found.written_blocks:>9} "
            f"{found.written_per_reused:>14.2f}"
        )
    return "\n".join(lines)


def plot(rows: list[Row], trace: Path, file: Path) -> None:
    """Hit ratio, and blocks written per block reused, by capacity."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (hits, writes) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for policy, admission in dict.fromkeys((row.policy, row.admission) for row in rows):
        line = sorted(
            (row for row in rows if (row.policy, row.admission) == (policy, admission)),
            key=lambda row: row.capacity_blocks,
        )
        label = policy if admission == "always" else f"{policy}, {admission}"
        style = {"always": "-", "second_use": ":", "budget": "-.", "expected": "--"}[admission]
        x = [row.capacity_blocks for row in line]
        width = 2.5 if policy == "default" else 1.2
        hits.plot(x, [row.outcome.hit_ratio for row in line], style, marker="o", ms=3, lw=width)
        writes.plot(
            x,
            [row.outcome.written_per_reused for row in line],
            style,
            marker="o",
            ms=3,
            lw=width,
            label=label,
        )
    for axes, name in ((hits, "hit ratio"), (writes, "blocks written per block reused")):
        axes.set(xscale="log", xlabel="capacity, blocks of 512 tokens", ylabel=name)
        axes.grid(alpha=0.3)
    if any(0 < row.outcome.written_per_reused < math.inf for row in rows):
        writes.set_yscale("log")
    else:
        writes.text(0.5, 0.5, "nothing was reused", ha="center", transform=writes.transAxes)
    writes.legend(fontsize="small")
    figure.suptitle(trace.name)
    figure.savefig(file, dpi=150)


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 with a message where the trace or the plot's file is no good."""
    options = parse(arguments)
    try:
        trace = load_trace(options.trace, warn=lambda text: print(text, file=sys.stderr))
        rows = run(trace, options)
        if options.plot:
            plot(rows, options.trace, options.plot)
    except HiFCError as error:
        print(f"tools/bench/policy: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"tools/bench/policy: {options.plot}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"results": [row.mapping() for row in rows]}))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
