"""``index.html`` of a dump: the passes of every graph, one after the other, in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from hecate.passes.base import PassRecord
from hecate.passes.dumps.drawing import Picture
from hecate.passes.dumps.html_page import KINDS, html_page, kind_colour, layer_class, style
from hecate.passes.dumps.printing import Line

# Most lines of a graph or a difference on the page; the files have all.
MOST_LINES = 3000

_STYLE = """
h2{font-size:18px;margin-top:36px;border-top:1px solid #dadce0;padding-top:16px}h3{font-size:15px}
nav a{display:inline-block;margin:0 12px 6px 0}
table{border-collapse:collapse;font-size:14px}th,td{text-align:left;padding:4px 10px;border-bottom:1px solid #e8eaed}
td.number{text-align:right;font-variant-numeric:tabular-nums}
tr.same,tr.off{color:#5f6368}
.scroll{overflow-x:auto;max-width:100%}
pre{font:12px/1.4 ui-monospace,monospace;margin:0;overflow:auto;max-height:75vh;border:1px solid #dadce0}
pre span{display:block;padding:0 8px;min-width:max-content;min-height:1.4em}
.plus{background:#e6f4ea}.minus{background:#fce8e6}.at{background:#e8f0fe;color:#3c4043}
.key span{display:inline-block;padding:1px 8px;margin:0 6px 6px 0;border:1px solid #dadce0;font-size:13px}
@media(max-width:600px){th,td{padding:3px 5px}pre{font-size:11px}}
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A graph as it was dumped.

    Attributes:
        index: place of the pass in its list; 0 for the graph that came in.
        record: what the pass did; None for the graph that came in, and for one that a failed pass left behind.
        summary: what the pass does.
        lines: the graph; empty if the pass changed nothing.
        diff: the lines of the unified diff.
    """

    index: int
    name: str
    record: PassRecord | None = None
    summary: str = ""
    lines: Sequence[Line] = ()
    diff: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Name of the step, such as ``14_exchange_rows``."""
        return f"{self.index:02}_{self.name}"


@dataclass(kw_only=True)
class DumpedPart:
    """All steps of one part of a graph; "" is the part that Dynamo captured."""

    graph: int
    part: str
    steps: list[Step] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    before: Picture | None = None
    after: Picture | None = None

    @property
    def folder(self) -> str:
        """Folder of its files in the folder of its rank."""
        return f"graph{self.graph}/{self.part}/" if self.part else f"graph{self.graph}/"

    @property
    def title(self) -> str:
        return f"graph {self.graph}, {self.part or 'as captured'}"

    @property
    def anchor(self) -> str:
        """Name of the part in links on the page."""
        return f"graph{self.graph}-{self.part or 'captured'}"

    def file(self, step: Step, kind: str = "py") -> str:
        """Return the name of a file of one step."""
        return f"{self.folder}{step.title}.{kind}"


@dataclass(frozen=True, kw_only=True)
class PartOfPage:
    """A part of a graph as HTML ("" if the page has no room), its link, and short names of its layers."""

    html: str
    link: str
    layers: tuple[str, ...]


def part_of_page(part: DumpedPart, *, most: int) -> PartOfPage:
    """Return a part with all its graphs, or without them, or nothing, as ``most`` letters have room."""
    text = _part(part, graphs=True)
    if len(text) > most:
        text = _part(part, graphs=False)
    layers = dict.fromkeys(line.layer for step in part.steps for line in step.lines if line.layer)
    return PartOfPage(
        html=text if len(text) <= most else "",
        link=f'<a href="#{part.anchor}">{part.title}</a>',
        layers=tuple(layers),
    )


def page(parts: Sequence[PartOfPage], title: str) -> str:
    """Return the whole page."""
    shown = [part for part in parts if part.html]
    left = len(parts) - len(shown)
    more = f"<p>This page is full: {left} more parts of graphs are in the folder that it is in.</p>" if left else ""
    body = (
        f"<h1>Graphs of {escape(title)}</h1>{_key(parts)}<nav>{''.join(part.link for part in shown)}</nav>{more}"
        + "".join(part.html for part in shown)
    )
    return html_page(f"Graphs of {title}", body, _STYLE + style())


def _key(parts: Sequence[PartOfPage]) -> str:
    """Return the legend of the colours."""
    layers = dict.fromkeys(layer for part in parts for layer in part.layers)
    shown = [f'<span class="{layer_class(layer)}">experts of {escape(layer)}</span>' for layer in list(layers)[:8]]
    shown += [
        f'<span style="border-left:5px solid {kind_colour(kind)}">collective of {kind}</span>' for kind in KINDS
    ]
    return f'<p class="key">{"".join(shown)}</p>'


def _part(part: DumpedPart, *, graphs: bool) -> str:
    text = [f'<h2 id="{part.anchor}">{part.title}</h2>', _table(part, graphs=graphs)]
    if not graphs:
        folder = escape(part.folder)
        text.append(f'<p>This page is full: the graphs are in <a href="{folder}">{folder}</a>.</p>')
    if part.schedule:
        text.append(f"<h3>schedule</h3>{_pre([(line, '') for line in part.schedule], '')}")
    for what, picture in (("before", part.before), ("after", part.after)):
        if picture is not None and graphs:
            text.append(
                f"<details{' open' if what == 'after' else ''}><summary>layer {escape(picture.layer)}, {what} its "
                f'rows are exchanged</summary><div class="scroll">{picture.svg}</div></details>'
            )
    text += [_step(part, step) for step in part.steps if step.lines and graphs]
    return "".join(text)


def _table(part: DumpedPart, *, graphs: bool) -> str:
    rows = []
    for step in part.steps:
        record = step.record
        if record is None:
            continue
        # The first two lines of a diff are its head.
        plus, minus = (sum(line.startswith(sign) for line in step.diff[2:]) for sign in "+-")
        kind = "" if step.lines else "same" if record.enabled else "off"
        where = f"#{part.anchor}-{step.index}" if graphs else part.file(step)
        name = f'<a href="{escape(where)}">{step.name}</a>' if step.lines else step.name
        changed = f"+{plus} −{minus}" if step.lines else "nothing" if record.enabled else "off"  # noqa: RUF001  a minus as wide as +
        why = "; ".join(f"{skip.where}: {skip.reason}" for skip in record.skipped)
        rows.append(
            f'<tr class="{kind}"><td class="number">{step.index}</td><td>{name}</td><td>{escape(step.summary)}</td>'
            f'<td class="number">{record.rewritten}</td><td class="number">{len(record.skipped)}</td>'
            f'<td class="number">{record.seconds * 1e3:.1f}</td><td>{changed}</td><td>{escape(why)}</td></tr>'
        )
    head = "".join(
        f"<th>{name}</th>" for name in ("", "pass", "what it does", "rewritten", "left alone", "ms", "lines", "why")
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _step(part: DumpedPart, step: Step) -> str:
    diff = ""
    if step.diff:
        marks = {"+": "plus", "-": "minus", "@": "at"}
        lines = [(line, marks.get(line[:1], "")) for line in step.diff]
        diff = f"<details open><summary>difference</summary>{_pre(lines, part.file(step, 'diff'))}</details>"
    classes = [(layer_class(line.layer), f"carries-{line.carries}" if line.carries else "") for line in step.lines]
    shown = [(line.text, " ".join(filter(None, own))) for line, own in zip(step.lines, classes, strict=True)]
    graph = _pre(shown, part.file(step))
    return (
        # A link to something inside opens what it is in; one to the outside does not.
        f'<details><summary>{step.index:02} {escape(step.name)}</summary><div id="{part.anchor}-{step.index}">{diff}'
        f"<details><summary>graph, {len(step.lines)} lines</summary>{graph}</details></div></details>"
    )


def _pre(lines: Sequence[tuple[str, str]], file: str) -> str:
    shown = [
        f'<span class="{kind}">{escape(text)}</span>' if kind else f"<span>{escape(text)}</span>"
        for text, kind in lines[:MOST_LINES]
    ]
    missing = len(lines) - len(shown)
    if missing > 0:
        shown.append(f'<span>cut here: {missing} more lines in <a href="{escape(file)}">{escape(file)}</a></span>')
    return f"<pre>{''.join(shown)}</pre>"
