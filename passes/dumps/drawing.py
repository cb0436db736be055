"""Drawings of one MoE layer as SVG, with a layout of our own, so that no program has to be installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

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
class Box:
    """A node: its name, its operator, its shape, and the boxes that it uses."""

    name: str
    made_by: str
    shape: str
    colour: str
    uses: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Nodes of one layer and the values that flow into them, each after the nodes that it uses."""

    layer: str
    boxes: tuple[Box, ...]
    exchanges: bool

    def svg(self) -> str:
        """Return the drawing as a file of its own."""
        rows = self._rows()
        place = {
            box: (
                _MARGIN + number * (_WIDTH + _GAP_X) + (max(map(len, rows)) - len(row)) * (_WIDTH + _GAP_X) // 2,
                _MARGIN + depth * (_HEIGHT + _GAP_Y),
            )
            for depth, row in enumerate(rows)
            for number, box in enumerate(row)
        }
        width = 2 * _MARGIN + max(map(len, rows), default=1) * (_WIDTH + _GAP_X) - _GAP_X
        height = 2 * _MARGIN + len(rows) * (_HEIGHT + _GAP_Y) - _GAP_Y
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="monospace" role="img">',
            f"<title>{escape(self.layer)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]
        for index, box in enumerate(self.boxes):
            x, y = place[index]
            for used in box.uses:
                a, b = place[used]
                start, end = (a + _WIDTH // 2, b + _HEIGHT), (x + _WIDTH // 2, y)
                middle = (start[1] + end[1]) // 2
                parts.append(
                    f'<path d="M{start[0]} {start[1]} C{start[0]} {middle} {end[0]} {middle} {end[0]} {end[1]}" '
                    'fill="none" stroke="#9aa0a6"/>'
                )
        for index, box in enumerate(self.boxes):
            parts += _drawn(box, *place[index])
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _rows(self) -> list[list[int]]:
        """Return the boxes by the longest way to them; in a row near the middle of the boxes that they use."""
        depth: list[int] = []
        for box in self.boxes:
            depth.append(1 + max((depth[used] for used in box.uses), default=-1))
        rows: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
        for index, level in enumerate(depth):
            rows[level].append(index)
        at: dict[int, float] = {}
        for row in rows:
            wanted = {
                index: sum(at[used] for used in self.boxes[index].uses) / len(self.boxes[index].uses)
                if self.boxes[index].uses
                else float(number)
                for number, index in enumerate(row)
            }
            row.sort(key=lambda index: (wanted[index], index))
            # The place is a part of the row, since rows are drawn around one middle.
            at.update((index, number - len(row) / 2) for number, index in enumerate(row))
        return rows


def picture_of(gm: GraphModule, layers: Mapping[int, str]) -> Picture | None:
    """Return the first MoE layer in ``gm`` or in the body of a higher-order operator; None if there is none."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        regions = expert_regions(module.graph)
        if not regions:
            continue
        layer = next(iter(regions.values()))
        inside = {node for node, own in regions.items() if own == layer}
        if len(inside) > MOST_BOXES:
            return None
        shown = inside | {source for node in inside for source in node.all_input_nodes}
        return _picture(module, shown, inside, layers.get(layer, f"L_{layer}"))
    return None


def _picture(gm: GraphModule, shown: set[Node], inside: set[Node], layer: str) -> Picture:
    letters = letters_of(gm.graph)
    number: dict[Node, int] = {}
    boxes: list[Box] = []
    for node in gm.graph.nodes:
        if node not in shown:
            continue
        collective = collective_of(node.target) if node.op == "call_function" else None
        colour = "#f1f3f4"
        if collective is not None:
            colour = kind_colour(collective.carries)
        elif node in inside:
            colour = colour_of(layer)
        # A value that flows in stands alone: its sources are not of this layer.
        uses = node.all_input_nodes if node in inside else []
        boxes.append(
            Box(
                name=node.name,
                made_by=node.op if node.op == "placeholder" else describe(node).split(" ")[0],
                shape=text_of(value_of(node), letters),
                colour=colour,
                uses=tuple(dict.fromkeys(number[used] for used in uses if used in number)),
            )
        )
        number[node] = len(boxes) - 1
    exchanges = any(operator_name(node) in ("route", "count_rows") for node in inside)
    return Picture(layer=layer, boxes=tuple(boxes), exchanges=exchanges)


def _drawn(box: Box, x: int, y: int) -> list[str]:
    middle, under = x + _WIDTH // 2, box.shape or box.made_by
    return [
        f"<g><title>{escape(f'{box.name} = {box.made_by}: {box.shape}')}</title>",
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{box.colour}" stroke="#5f6368"/>',
        f'<text x="{middle}" y="{y + 18}" text-anchor="middle" font-size="12" font-weight="bold" fill="#202124">'
        # The end of a long name tells more: it is a parameter's path.
        f"{escape(box.name if len(box.name) <= 25 else '…' + box.name[-24:])}</text>",
        f'<text x="{middle}" y="{y + 35}" text-anchor="middle" font-size="11" fill="#3c4043">'
        f"{escape(under if len(under) <= 26 else under[:25] + '…')}</text></g>",
    ]
