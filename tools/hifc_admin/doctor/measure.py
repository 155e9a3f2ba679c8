# SPDX-License-Identifier: Apache-2.0
"""doctor --measure: reads a namespace at rest for a moment and compares with its own baseline."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from hifc_admin.bench import load as bench_load
from hifc_admin.doctor import baseline
from hifc_admin.doctor.checks import Finding, Row, Status, failed, passed, warned
from hifc_admin.text import size
from hifc_admin.verbs import bench as bench_verb

DURATION_S = 2.0
FALLEN_SHARE = 0.15
# Checks whose warnings make reading slower.
EXPLAIN = (
    "pcie link",
    "numa",
    "health",
    "locks",
    "direct i/o",
    "o_direct",
    "file system",
    "memlock",
)


def measured(uri: str, rows: Sequence[Row]) -> Iterator[Finding]:
    """rows: what the other checks found, which may explain it. Raises HiFCError, Failure."""
    depth = bench_verb.DEPTH_DEFAULT
    with bench_verb.reading(uri, depth) as (namespace, keys, longest, total):
        known = baseline.load(namespace.stats().uuid)
        value_bytes = total / len(keys)
        command = f"hifc-admin bench {shlex.quote(uri)} --read-only --baseline"
        if known is None:
            yield warned("there is no baseline to compare with", str(baseline.folder()), command)
            return
        if not known.is_comparable(value_bytes):
            yield warned(
                "values are of another size than when the baseline was taken",
                f"{size(int(value_bytes))} on average now, {size(int(known.value_bytes))} then",
                command,
            )
            return
        load = bench_load.Load(namespace, longest, depth)
        choose = bench_load.sequential_gets(keys)
        outcome = load.run("sequential", choose, DURATION_S, lambda _: None)
    yield judged(outcome.data()["bytes_per_s"], known.bytes_per_s, rows, uri)


def judged(now: float, then: float, rows: Sequence[Row], uri: str) -> Finding:
    """Bytes a second, against the baseline's."""
    detail = f"{size(int(now))}/s read, {size(int(then))}/s at its baseline"
    fallen = 1 - now / then if then else 0.0
    if fallen <= FALLEN_SHARE:
        return passed(detail, subject=uri)
    reasons = [
        f"{row.check}: {row.finding.detail}"
        for row in rows
        if row.check in EXPLAIN and row.finding.status is not Status.PASS
    ]
    return failed(
        f"{detail}: {fallen:.0%} less",
        "; ".join(reasons) or "none of the other checks explains it",
        "see the rows named"
        if reasons
        else "see what else uses the device and the processors: iostat -x 1, top",
        uri,
    )
