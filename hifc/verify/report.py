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
        ("model", found.model),
        ("device", found.device),
        ("mode", found.mode),
        *((name.replace("_", " "), _fact(value)) for name, value in found.settings.items()),
        *((f"sparse: {name.replace('_', ' ')}", _fact(v)) for name, v in found.quality.items()),
        (
            "KV in memory at its peak",
            f"{found.resident_bytes / mib:.1f} of {found.total_bytes / mib:.1f} MiB ({share:.3f})",
        ),
        ("KV written to the device", f"{found.written_bytes / mib:.1f} MiB"),
        ("KV read from the device", f"{found.read_bytes / mib:.1f} MiB"),
    ]
    return [(name, str(value)) for name, value in rows]


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return "none" if value is None else str(value)


def _stage(stage: Stage) -> dict[str, Any]:
    reference, hifc = stage.perplexities()
    ratio, low, high = stage.ratio()
    first = stage.first_disagreement
    return {
        "title": stage.title,
        "steps": stage.steps,
        "largest": stage.largest,
        "bits": "yes" if stage.same_bits else "no",
        "reference": reference,
        "hifc": hifc,
        "ratio": ratio,
        "low": low,
        "high": high,
        "agreement": stage.agreement,
        "first": "-" if first is None else first,
        "divergence": max(stage.divergence, default=math.nan),
    }


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "-"
