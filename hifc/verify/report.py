# SPDX-License-Identifier: Apache-2.0
"""One HTML file with everything that a verification found, its pictures inside.

Needs matplotlib and Jinja2 (`pip install 'hifc[verify]'`).
"""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from hifc.verify import plots
from hifc.verify.result import Stage, Verification


def html(found: Verification) -> str:
    """The report's text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    text = resources.files("hifc.verify").joinpath("report.html.jinja").read_text("utf-8")
    made: str = environment.from_string(text).render(
        found=found,
        facts=_facts(found),
        checks=found.checks(),
        stages=[_stage(stage) for stage in found.stages],
        pictures=plots.all_of(found),
    )
    return made


def write(found: Verification, path: str | Path) -> None:
    """Writes the report to a file."""
    Path(path).write_text(html(found), encoding="utf-8")


def _facts(found: Verification) -> list[tuple[str, str]]:
    mib = 1 << 20
    share = found.resident_bytes / found.total_bytes if found.total_bytes else 1.0
    rows = [
        *found.run.items(),
        ("model", found.model),
        ("device", found.device),
        ("mode", found.mode),
        *((name.replace("_", " "), _fact(value)) for name, value in found.settings.items()),
        *((f"sparse: {name.replace('_', ' ')}", _fact(v)) for name, v in found.quality.items()),
        (
            "KV in memory at its peak",
            f"{found.resident_bytes / mib:.1f} of {found.total_bytes / mib:.1f} MiB ({share:.0%})",
        ),
        ("KV written to the device", f"{found.written_bytes / mib:.1f} MiB"),
        ("KV read from the device", f"{found.read_bytes / mib:.1f} MiB"),
        ("speed, one token at a time", _speed(found)),
    ]
    return [(name, str(value)) for name, value in rows]


def _speed(found: Verification) -> str:
    """Both runs take turns in one process, so neither is as fast as it would be alone."""
    rates = found.tokens_per_s
    if "hifc" not in rates or "reference" not in rates:
        return "not measured: every token was watched for the attention maps"
    return (
        f"{rates['hifc']:.4g} tokens/s with HiFC, {rates['reference']:.4g} in memory, taking turns"
    )


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return "none" if value is None else str(value)


def _stage(stage: Stage) -> dict[str, Any]:
    reference, hifc = stage.perplexities()
    ratio, low, high = stage.ratio()
    first = stage.first_disagreement
    interval = f"{_number(ratio)} ({_number(low)} to {_number(high)})"
    return {
        "title": stage.title,
        "steps": stage.steps,
        "largest": stage.largest,
        "bits": f"{sum(stage.equal_bits)} of {stage.steps}",
        "reference": reference,
        "hifc": hifc,
        "ratio": interval if math.isfinite(ratio) else "-",
        "same": f"{sum(stage.same_token)} of {stage.steps}",
        "first": "-" if first is None else first,
        "divergence": max(stage.divergence, default=math.nan),
    }


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "-"
