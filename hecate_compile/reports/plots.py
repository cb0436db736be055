"""Plots of a run as pictures that stand in a page by themselves; matplotlib draws them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hecate.reports.run_files import Array

# Colours that differ for colour-blind readers too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_NOTHING = "#e1e1e1"
# Most points of a line, and most columns of a heat map; with fewer steps there is one for each.
_COLUMNS = 400
# Letters are drawn as text, so that a page stays small and can be read on a telephone.
_STYLE = {"svg.fonttype": "none", "font.size": 8, "axes.prop_cycle": cycler(color=COLOURS)}

# Begin and end in milliseconds, and a key of the colours.
Bar = tuple[float, float, str]


def heat_map(
    values: Array, steps: Array, *, title: str, rows: str, low: float | None = None, high: float | None = None
) -> str:
    """Draw ``values`` ``[n, r]`` over n steps: one line for each expert or rank, bright for much."""
    small, _ = fewer(values.astype(np.float64), steps)

    def draw(axes: Axes) -> None:
        extent = (float(steps[0]), float(steps[-1]) + 1, small.shape[1] - 0.5, -0.5)
        picture = axes.imshow(
            small.T, aspect="auto", interpolation="none", extent=extent, vmin=low, vmax=high, cmap="viridis"
        )
        axes.set_facecolor(_NOTHING)
        axes.set_xlabel("step")
        axes.set_ylabel(rows)
        axes.locator_params(integer=True, nbins=5)
        axes.figure.colorbar(picture, ax=axes, pad=0.02, aspect=40)

    return _drawn(title, draw)


def line_plot(
    series: Mapping[str, Array], steps: Array, *, title: str, unit: str = "", floor: float | None = None
) -> str:
    """Draw lines ``[n]`` over the steps, with names below; values that are not finite are left out."""

    def draw(axes: Axes) -> None:
        for number, (name, values) in enumerate(series.items()):
            small, firsts = fewer(values.astype(np.float64), steps)
            known = np.pad(np.isfinite(small), 1)
            # A value without neighbours makes no line, only a point.
            alone = known[1:-1] & ~known[:-2] & ~known[2:]
            # The first lines are thicker: where two lie on each other, both can be seen.
            width = 1.2 + 1.5 * (len(series) - 1 - number) / len(series)
            axes.plot(firsts, small, label=name, linewidth=width, marker=".", markevery=alone)
        axes.set_ylim(bottom=floor)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.locator_params(axis="x", integer=True, nbins=5)
        axes.figure.legend(loc="outside lower left", ncols=3, frameon=False)

    return _drawn(title, draw)


def timeline(lines: Sequence[tuple[str, Sequence[Bar]]], colours: Mapping[str, str], *, title: str) -> str:
    """Draw bars on lines, from the top, over milliseconds since the step began; each line with its label."""

    def draw(axes: Axes) -> None:
        for number, (_, bars) in enumerate(lines):
            stretches = [(begin, end - begin) for begin, end, _ in bars]
            axes.broken_barh(stretches, (number - 0.4, 0.8), facecolors=[colours[kind] for _, _, kind in bars])
        axes.set_yticks(range(len(lines)), [label for label, _ in lines])
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("ms since the step began")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        legend = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
        axes.figure.legend(handles=legend, loc="outside lower left", ncols=3, frameon=False)

    return _drawn(title, draw, height=1 + 0.16 * len(lines))


def fewer(values: Array, steps: Array) -> tuple[Array, Array]:
    """Return means of ``values`` ``[n, ...]`` over steps, as many as a plot can show, and the first step of each.

    Values that are not finite are left out; a mean of nothing else is NaN.
    """
    edges = np.linspace(0, len(values), min(len(values), _COLUMNS) + 1).round().astype(np.int64)[:-1]
    good = np.isfinite(values)
    total = np.add.reduceat(np.where(good, values, 0.0), edges, axis=0)
    number = np.add.reduceat(good.astype(np.int64), edges, axis=0)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan), steps[edges]


def _drawn(title: str, draw: Callable[[Axes], None], height: float = 2.2) -> str:
    """Return a picture with its title; 4 inches wide, so that it can be read on a telephone."""
    styles: dict[Any, Any] = dict(_STYLE)
    with matplotlib.rc_context(styles):
        figure = Figure(figsize=(4, height), layout="constrained")
        draw(figure.add_subplot())
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    label = html.escape(title, quote=True)
    picture = base64.b64encode(text.getvalue()).decode()
    return (
        f'<figure><figcaption>{label}</figcaption><img alt="{label}" src="data:image/svg+xml;base64,{picture}">'
        "</figure>"
    )
