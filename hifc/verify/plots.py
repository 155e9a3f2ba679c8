# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, as PNG. Needs matplotlib, which `hifc[verify]` brings."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hifc.verify.result import Maps, Stage, Verification

DPI = 110
# Up to it the axis is linear, so that it has a 0.
SMALLEST = 1e-9
# Lines that lie on each other all show: the first is the widest and the last lies on top.
WIDTHS = (7.0, 4.5, 2.6, 1.2)


def all_of(found: Verification) -> list[tuple[str, str]]:
    """(title, data URI) of each picture."""
    pictures = [("Logits and next tokens", _steps(found.stages))]
    if found.maps is not None and len(found.maps.positions):
        pictures.append(("Attention maps, mean over heads", _maps(found.maps)))
        pictures.append(("Attention by layer and head", _heads(found.maps)))
    return [(title, _encode(figure)) for title, figure in pictures]


def _steps(stages: list[Stage]) -> Any:
    """Per token: the largest difference of logits, and what the text's token cost each run."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    highest = SMALLEST
    for stage, width in zip(stages, WIDTHS, strict=False):
        values = np.nan_to_num(np.asarray(stage.difference), nan=np.inf)
        left.plot(values, label=stage.title, linewidth=width, solid_capstyle="butt")
        highest = max(highest, float(values[np.isfinite(values)].max(initial=0.0)))
        if stage.bounds.difference:
            limit = stage.bounds.difference
            left.axhline(limit, color="0.4", linestyle=":", linewidth=1, label=f"bound, {limit:g}")
            highest = max(highest, limit)
    left.set_yscale("symlog", linthresh=SMALLEST)
    left.set_ylim(-SMALLEST / 2, highest * 10)
    left.set_yticks([0.0, *10.0 ** np.arange(-8, math.log10(highest) + 1, 2)])
    left.set_title("largest difference of a token's logits", fontsize="medium")
    left.set_ylabel("difference (0: equal)")
    first = stages[0]
    right.plot(first.nll_reference, label="reference", linewidth=4.5, color="#f2b26b")
    right.plot(first.nll_hifc, label="HiFC, on top of it", linewidth=1.1, color="#1f4e79")
    right.set_title("surprise at the text's next token, nats", fontsize="medium")
    for axes in (left, right):
        axes.set_xlabel("token after the prompt")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    return figure


def _maps(maps: Maps) -> Any:
    """Side by side: reference, HiFC, and how far they are apart."""
    rows = len(maps.layers)
    figure = Figure(figsize=(11, 2.1 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, 3, squeeze=False)
    reach = [0, maps.reference.shape[2] * maps.column_tokens]
    extent = (*reach, len(maps.positions), 0)
    for row, layer in enumerate(maps.layers):
        pair = np.sqrt(maps.reference[row]), np.sqrt(maps.hifc[row])
        highest = max(float(np.nan_to_num(one).max()) for one in pair)
        apart = maps.hifc[row] - maps.reference[row]
        # One scale for all three, so that what is nothing beside the maps looks like it.
        limit = highest**2
        for axes, image in zip(grid[row], pair, strict=False):
            axes.imshow(image, aspect="auto", extent=extent, vmin=0, vmax=highest, cmap="magma")
        grid[row][2].imshow(
            apart, aspect="auto", extent=extent, vmin=-limit, vmax=limit, cmap="RdBu"
        )
        largest = float(np.abs(apart).max())
        grid[row][0].set_ylabel(f"layer {layer}\nstep watched", fontsize="small")
        titles = ("reference", "HiFC", f"difference, at most {largest:.2g}")
        for axes, title in zip(grid[row], titles, strict=True):
            axes.set_title(title, fontsize="small")
            axes.tick_params(labelsize="x-small")
    for axes in grid[-1]:
        axes.set_xlabel(f"key, in columns of {maps.column_tokens} tokens", fontsize="small")
    return figure


def _heads(maps: Maps) -> Any:
    """How far each head's attention is from the reference's at most: names the broken one."""
    layers, heads = maps.distance.shape
    figure = Figure(figsize=(11, 1.4 + 0.16 * heads), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(maps.distance.T, aspect="auto", vmin=0, vmax=1, cmap="Reds")
    axes.set_xlabel("layer")
    axes.set_ylabel("query head")
    title = f"all {heads} heads of {layers} layers attend alike"
    worst = int(np.argmax(np.nan_to_num(maps.distance, nan=np.inf)))
    layer, head = np.unravel_index(worst, maps.distance.shape)
    if maps.distance[layer, head] != 0:
        share = maps.distance[layer, head]
        title = f"share of attention that lies elsewhere: {share:.3g} in layer {layer}, head {head}"
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axes)
    return figure


def _encode(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
