"""Drawings of one MoE layer as SVG, with a layout of our own, so that no program has to be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean

from torch.fx import GraphModule, Node

from hecate.passes.dumps.html_page import colour_of, kind_colour
from hecate.passes.dumps.printing import letters_of, text_of, value_of
from hecate.passes.dumps.value_names import expert_regions, operator_name
from hecate.passes.fx import describe
from hecate.runtime.comm.collective import collective_of

# More boxes than this are not readable.
MOST_BOXES = 150
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 46, 18, 34, 12


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing of one layer: the layer's short name, whether its rows are exchanged, and an SVG of its own."""

    layer: str
    exchanges: bool
    svg: str


def picture_of(gm: GraphModule, layers: Mapping[int, str]) -> Picture | None:
    """Return the first MoE layer in ``gm`` or in the body of a higher-order operator; None if there is none."""
    for module in gm.modules():
        regions = expert_regions(module.graph) if isinstance(module, GraphModule) else {}
        if not regions:
            continue
        layer = next(iter(regions.values()))
        inside = {node for node, own in regions.items() if own == layer}
        if len(inside) > MOST_BOXES:
            return None
        name = layers.get(layer, f"L_{layer}")
        exchanges = any(operator_name(node) in ("route", "count_rows") for node in inside)
        return Picture(layer=name, exchanges=exchanges, svg=_svg(inside, name))
    return None


def _svg(inside: set[Node], layer: str) -> str:
    """Draw the nodes of a layer, and the values that flow into them, each below the nodes that it uses."""
    shown = sorted(inside | {source for node in inside for source in node.all_input_nodes})
    # A value that flows in stands alone: its sources are not of this layer.
    uses = {node: node.all_input_nodes if node in inside else [] for node in shown}
    rows = _rows(uses)
    widest = max(map(len, rows))
    place = {
        node: (
            _MARGIN + number * (_WIDTH + _GAP_X) + (widest - len(row)) * (_WIDTH + _GAP_X) // 2,
            _MARGIN + depth * (_HEIGHT + _GAP_Y),
        )
        for depth, row in enumerate(rows)
        for number, node in enumerate(row)
    }
    width = 2 * _MARGIN + widest * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + len(rows) * (_HEIGHT + _GAP_Y) - _GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="monospace" role="img">',
        f"<title>{escape(layer)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for node, sources in uses.items():
        for used in sources:
            (x, y), (end_x, end_y) = place[used], place[node]
            start, end = (x + _WIDTH // 2, y + _HEIGHT), (end_x + _WIDTH // 2, end_y)
            middle = (start[1] + end[1]) // 2
            parts.append(
                f'<path d="M{start[0]} {start[1]} C{start[0]} {middle} {end[0]} {middle} {end[0]} {end[1]}" '
                'fill="none" stroke="#9aa0a6"/>'
            )
    letters = letters_of(shown[0].graph)
    for node in shown:
        colour = colour_of(layer) if node in inside else "#f1f3f4"
        if node.op == "call_function" and (collective := collective_of(node.target)) is not None:
            colour = kind_colour(collective.carries)
        parts += _box(node, text_of(value_of(node), letters), colour, *place[node])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(uses: Mapping[Node, Sequence[Node]]) -> list[list[Node]]:
    """Return nodes by the longest way to them; in a row near the middle of the nodes that they use."""
    depth: dict[Node, int] = {}
    for node, sources in uses.items():
        depth[node] = 1 + max((depth[used] for used in sources), default=-1)
    rows: list[list[Node]] = [[] for _ in range(max(depth.values()) + 1)]
    for node, level in depth.items():
        rows[level].append(node)
    at: dict[Node, float] = {}
    for row in rows:
        wanted = {node: mean(at[used] for used in uses[node]) if uses[node] else n for n, node in enumerate(row)}
        row.sort(key=lambda node: wanted[node])
        # The place is a part of the row, since rows are drawn around one middle.
        at.update((node, number - len(row) / 2) for number, node in enumerate(row))
    return rows


def _box(node: Node, shape: str, colour: str, x: int, y: int) -> list[str]:
    made_by = node.op if node.op == "placeholder" else describe(node).split(" ")[0]
    middle, under = x + _WIDTH // 2, shape or made_by
    return [
        f"<g><title>{escape(f'{node.name} = {made_by}: {shape}')}</title>",
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{colour}" stroke="#5f6368"/>',
        f'<text x="{middle}" y="{y + 18}" text-anchor="middle" font-size="12" font-weight="bold" fill="#202124">'
        # The end of a long name tells more: it is a parameter's path.
        f"{escape(node.name if len(node.name) <= 25 else '…' + node.name[-24:])}</text>",
        f'<text x="{middle}" y="{y + 35}" text-anchor="middle" font-size="11" fill="#3c4043">'
        f"{escape(under if len(under) <= 26 else under[:25] + '…')}</text></g>",
    ]
