"""Plots as SVG text, which stands in a page by itself: no library draws them, and nothing is loaded.

Every plot is 400 units wide and scales with its column, so that its letters can be read on a telephone.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hecate.reports.units import short

Array = np.ndarray[Any, Any]

WIDTH, HEIGHT = 400, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34
# Colours that differ for colour-blind readers too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# From dark to bright with even steps of lightness (points of viridis).
_RAMP = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=np.float64)
_NOTHING = (225, 225, 225)
# Most columns of a heat map, which has one for each step if there are fewer steps.
_COLUMNS = 400


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of time on a line of a timeline.

    Attributes:
        line: which line, from the top.
        begin, end: in the plot's unit.
        kind: a key of the plot's colours.
        text: shown when the pointer is on it.
    """

    line: int
    begin: float
    end: float
    kind: str
    text: str


def heat_map(
    values: Array, steps: Array, *, title: str, rows: str, low: float | None = None, high: float | None = None
) -> str:
    """``values`` ``[n, r]`` over time: one line for each of r experts or ranks, bright for much.

    Args:
        steps: number of each of the n steps.
        rows: what the lines are, for the axis.
        low, high: values of the darkest and the brightest colour; by default the least and the most.
    """
    small, firsts = _fewer(values.astype(np.float64), steps)
    finite = small[np.isfinite(small)]
    least = low if low is not None else float(finite.min()) if finite.size else 0.0
    most = high if high is not None else float(finite.max()) if finite.size else 1.0
    most = most if most > least else least + 1.0
    picture = _png(_coloured((small.T - least) / (most - least)))
    count = values.shape[1]
    width, height = WIDTH - LEFT - RIGHT - 44, HEIGHT - TOP - BOTTOM
    parts = [
        f'<image x="{LEFT}" y="{TOP}" width="{width}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{picture}"/>',
        _text(LEFT - 6, TOP + 9, "0", anchor="end"),
        _text(LEFT - 6, TOP + height, str(count - 1), anchor="end") if count > 1 else "",
        _text(10, TOP + height / 2, rows, anchor="middle", turned=True),
        *_step_axis(firsts, steps, width),
        *_colour_bar(LEFT + width + 8, height, least, most),
    ]
    return _svg(title, parts)


def line_plot(
    series: Mapping[str, Array], steps: Array, *, title: str, unit: str = "", floor: float | None = None
) -> str:
    """Lines over the steps, with their names below.

    Args:
        series: ``[n]`` each; NaN is left out.
        unit: of all.
        floor: lowest value of the axis; by default the least of all values.
    """
    drawn = {name: _fewer(values.astype(np.float64)[:, None], steps)[0][:, 0] for name, values in series.items()}
    firsts = _fewer(np.zeros((len(steps), 1)), steps)[1]
    everything = np.concatenate(list(drawn.values())) if drawn else np.zeros(0)
    finite = everything[np.isfinite(everything)]
    least = floor if floor is not None else float(finite.min()) if finite.size else 0.0
    most = float(finite.max()) if finite.size else 1.0
    most = most if most > least else least + (abs(least) or 1.0)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM - 16 * (1 + (len(drawn) - 1) // 3)
    parts = []
    for tick in ticks(least, most):
        y = TOP + height * (1 - (tick - least) / (most - least))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, short(tick), anchor="end"))
    for number, (name, values) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        # Lines behind are thicker: where two lie on each other, both can be seen.
        behind = len(drawn) - 1 - number
        thick = 1.6 + behind * min(1.8, 4 / max(1, len(drawn) - 1))
        parts += [
            f'<polyline fill="none" stroke="{colour}" stroke-width="{thick:.1f}" points="{points}"/>'
            for points in _polylines(values, least, most, width, height)
        ]
        x, y = LEFT + (number % 3) * 118, HEIGHT - 6 - 16 * ((len(drawn) - 1) // 3 - number // 3)
        parts.append(f'<rect x="{x}" y="{y - 8}" width="10" height="8" fill="{colour}"/>')
        parts.append(_text(x + 14, y, name))
    parts += _step_axis(firsts, steps, width, TOP + height)
    if unit:
        parts.append(_text(10, TOP + height / 2, unit, anchor="middle", turned=True))
    return _svg(title, parts)


def timeline(bars: Sequence[Bar], lines: Sequence[str], colours: Mapping[str, str], *, title: str, end: float) -> str:
    """Bars on lines, in milliseconds from 0 to ``end``.

    Args:
        lines: a label for each line.
        colours: by kind of bar.
    """
    height, wide = 16, WIDTH - LEFT - RIGHT
    bottom = TOP + height * len(lines)
    end = end if end > 0 else 1.0
    parts = [
        _text(LEFT - 6, TOP + height * line + 12, label, anchor="end") for line, label in enumerate(lines) if label
    ]
    for bar in bars:
        x, length = LEFT + wide * bar.begin / end, wide * (bar.end - bar.begin) / end
        parts.append(
            f'<rect x="{x:.2f}" y="{TOP + height * bar.line + 2}" width="{max(length, 0.4):.2f}" '
            f'height="{height - 4}" fill="{colours[bar.kind]}"><title>{html.escape(bar.text)}</title></rect>'
        )
    for tick in ticks(0, end):
        x = LEFT + wide * tick / end
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 14, f"{short(tick)}", anchor="middle"))
    parts.append(_text(LEFT + wide / 2, bottom + 28, "ms since the step began", anchor="middle"))
    for number, (kind, colour) in enumerate(colours.items()):
        x, y = LEFT + (number % 3) * 118, bottom + 46 + 16 * (number // 3)
        parts.append(f'<rect x="{x}" y="{y - 8}" width="10" height="8" fill="{colour}"/>')
        parts.append(_text(x + 14, y, kind))
    return _svg(title, parts, height=bottom + 54 + 16 * ((len(colours) - 1) // 3))


def ticks(least: float, most: float, count: int = 4) -> list[float]:
    """About ``count`` round numbers between two."""
    if not most > least:
        return [least]
    rough = (most - least) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(least / step - 1e-9)
    return [number * step for number in range(first, math.floor(most / step + 1e-9) + 1)]


def _fewer(values: Array, steps: Array) -> tuple[Array, Array]:
    """Means over neighbouring steps, so that at most as many are left as a plot can show; and their first steps."""
    count = len(values)
    columns = min(count, _COLUMNS)
    edges = np.linspace(0, count, columns + 1).round().astype(np.int64)[:-1]
    good = np.isfinite(values)
    total = np.add.reduceat(np.where(good, values, 0.0), edges, axis=0)
    number = np.add.reduceat(good.astype(np.int64), edges, axis=0)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan), steps[edges]


def _polylines(values: Array, least: float, most: float, width: float, height: float) -> list[str]:
    """Points of the stretches without gaps. A single point gets a little length, or it could not be seen."""
    found: list[list[str]] = [[]]
    scale = width / max(1, len(values) - 1)
    for index, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            found.append([])
            continue
        y = TOP + height * (1 - (min(max(value, least), most) - least) / (most - least))
        found[-1].append(f"{LEFT + scale * index:.1f},{y:.1f}")
    lone = []
    for x, y in (part[0].split(",") for part in found if len(part) == 1):
        lone.append(f"{x},{y} {float(x) + 1:.1f},{y}")
    return [" ".join(part) for part in found if len(part) > 1] + lone


def _step_axis(firsts: Array, steps: Array, width: float, bottom: float = HEIGHT - BOTTOM) -> list[str]:
    return [
        _text(LEFT, bottom + 14, str(int(firsts[0])), anchor="middle"),
        _text(LEFT + width, bottom + 14, str(int(steps[-1])), anchor="middle"),
        _text(LEFT + width / 2, bottom + 14, "step", anchor="middle"),
    ]


def _colour_bar(x: float, height: float, least: float, most: float) -> list[str]:
    levels = np.linspace(1, 0, 32)[:, None]
    return [
        f'<image x="{x}" y="{TOP}" width="8" height="{height}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{_png(_coloured(levels))}"/>',
        _text(x + 11, TOP + 9, short(most)),
        _text(x + 11, TOP + height, short(least)),
    ]


def _coloured(levels: Array) -> Array:
    """Levels between 0 and 1 as colours, ``[h, w] -> uint8 [h, w, 3]``; grey where there is no value."""
    known = np.isfinite(levels)
    place = np.clip(np.where(known, levels, 0), 0, 1) * (len(_RAMP) - 1)
    low = np.minimum(place.astype(np.int64), len(_RAMP) - 2)
    part = (place - low)[..., None]
    colours = _RAMP[low] * (1 - part) + _RAMP[low + 1] * part
    found: Array = np.where(known[..., None], colours, np.array(_NOTHING)).round().astype(np.uint8)
    return found


def _png(pixels: Array) -> str:
    """A picture ``uint8 [h, w, 3]`` as base64 of a PNG."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(lines.tobytes(), 9))
    return base64.b64encode(whole + part(b"IEND", b"")).decode()


def _text(x: float, y: float, text: str, *, anchor: str = "start", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{html.escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], *, height: float = HEIGHT) -> str:
    body = "".join(parts)
    label = html.escape(title, quote=True)
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{label}" xmlns="http://www.w3.org/2000/svg">{body}</svg></figure>'
    )
