"""A run as one page of HTML that needs nothing else: ``hecate report``."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence

import numpy as np

from hecate.passes.dumps.html_page import KINDS, html_page
from hecate.reports.plots import COLOURS, Bar, heat_map, line_plot, timeline
from hecate.reports.run_alerts import Alert, find_alerts, gone_since
from hecate.reports.run_data import Floats, RunData, max_over_mean, without_nan
from hecate.reports.run_files import Array
from hecate.reports.tables import Section, as_bytes, as_time
from hecate.runtime.comm.collective import collective_named

# Most lines of a plot with one for each rank, ranks of a timeline, and collectives of its table.
_MOST_LINES, _MOST_TIMELINES, _MOST_WAITS = 6, 8, 10
# The name in the timeline's legend of what a collective carries.
_KINDS = dict(rows="rows", counts="counts", tickets="counts", replicas="experts", experts="experts")
_KINDS |= dict(dense="dense", bucket="dense", fractions="counts")
_COLOURS = {kind: KINDS[kind] for kind in ("rows", "experts", "dense", "counts")}
_COLOURS |= {"other": "#777777", "stands still": COLOURS[1]}

_STYLE = """
body { overflow-wrap: anywhere; } h2 { font-size: 1.15em; margin: 28px 0 8px; }
p { margin: 4px 0; max-width: 75ch; } .quiet { color: #555; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 8px; margin: 16px 0; }
.numbers div { border: 1px solid #ddd; border-radius: 6px; padding: 8px 10px; }
.numbers b { display: block; font-size: 1.25em; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 12px; }
.wide { grid-template-columns: minmax(0, 1fr); max-width: 560px; }
figure { margin: 0; border: 1px solid #e3e3e3; border-radius: 6px; padding: 8px; min-width: 0; }
figcaption { font-weight: 600; font-size: .92em; margin-bottom: 4px; }
img { width: 100%; height: auto; display: block; } td, th { padding: 0 8px; }
ul.alerts { list-style: none; padding: 0; margin: 8px 0; }
ul.alerts li { border-left: 4px solid #d55e00; background: #fff5ee; padding: 8px 12px; margin: 6px 0; }
ul.alerts li.good { border-color: #009e73; background: #eefaf5; }
ul.alerts span { display: block; color: #444; }
summary { font-weight: 600; padding: 6px 0; }
"""


def page_of(run: RunData, *, name: str, alerts: Sequence[Alert] | None = None) -> str:
    """Draw the page of a run with this name; ``alerts`` are found anew if they are not given."""
    alerts = find_alerts(run) if alerts is None else alerts
    parts = [
        _head(run, name),
        _numbers(run),
        _alerts(run, alerts),
        _section("Balance", _BALANCE, _balance(run)) if run.head.layers else "",
        _section("Load of ranks", _RANKS, _ranks(run)) if run.head.layers and run.head.world_size > 1 else "",
        _section("Time", _TIME, _times(run)),
        _section("Timeline of a step", _TIMELINE, [_timelines(run)], wide=True) if run.timelines else "",
        _waits(run),
        _section("Memory and traffic", _MEMORY, _memory(run)),
        _layers(run),
    ]
    return html_page(f"{name}: Hecate", "\n".join(part for part in parts if part), _STYLE)


_BALANCE = (
    "Rows of the busiest rank over the mean, mean over layers: 1 is balanced. Before: if owners computed all rows of "
    "their experts. After: what ranks computed with this run's replicas."
)
_RANKS = "Rows of each rank over the mean, mean over layers. Before: if owners computed all. After: as it was."
_TIME = (
    "A step lasts from one forward to the next, so it has the optimizer and the loading of data in it. Hidden is the "
    "part of the collectives' time in which the compute went on."
)
_TIMELINE = (
    "What travelled, and below it when the compute stood still for that. Clocks of ranks start with the step, each "
    "on its own."
)
_MEMORY = "Memory of a process; on GPUs the most that tensors took. Bytes are those that a rank sent in a step."


def _head(run: RunData, name: str) -> str:
    head = run.head
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(head.started))
    nodes, experts = len(set(head.nodes)), ", ".join(map(str, sorted(set(head.experts)))) or "no"
    ranks = f"{head.world_size} rank(s)" + (f" in {head.groups} groups" if head.groups > 1 else "")
    text = (
        f"{head.model}, {len(head.layers)} MoE layer(s) with {experts} experts, {ranks} on "
        f"{nodes} node(s) ({head.device}), {head.policy}, started {started}"
    )
    notes = "".join(f'<p class="quiet">{html.escape(note)}</p>' for note in run.notes)
    return f'<h1>{html.escape(name)}</h1>\n<p class="quiet">{html.escape(text)}</p>{notes}'


def _numbers(run: RunData) -> str:
    newest = slice(-min(run.steps, 100), None)
    shown = [("steps", f"{run.steps:,}"), ("a step", as_time(_median(run.seconds[newest])))]
    if "loss" in run.logged:
        shown.append(("loss", _newest(run.logged["loss"])))
    if run.head.layers and run.head.world_size > 1:
        shown.append(("max/mean, before", _number(_median(run.before[newest]))))
        shown.append(("max/mean, after", _number(_median(run.after[newest]))))
        shown.append(("replicas in a layer", _number(float(run.replicas[newest].mean()))))
        hidden = _median(run.hidden[newest])
        shown.append(("hidden", f"{hidden:.0%}" if np.isfinite(hidden) else "not measured"))
    memory = run.memory[newest]
    if np.isfinite(memory).any():
        shown.append(("memory, most", as_bytes(float(np.nanmax(memory)))))
    cells = "".join(f"<div><b>{html.escape(value)}</b>{html.escape(label)}</div>" for label, value in shown)
    text = f"Times and max/mean: medians of the last {-newest.start} steps."
    return f'<div class="numbers">{cells}</div>\n<p class="quiet">{text}</p>'


def _newest(values: Floats) -> str:
    """Return the last value that was logged; "nan" if values were logged before, and have been NaN for long."""
    logged = values[~np.isnan(values)]
    return f"{logged[-1]:.4g}" if gone_since(values) is None and logged.size else "nan"


def _alerts(run: RunData, alerts: Sequence[Alert]) -> str:
    lines = [
        f'<li data-kind="{alert.kind}"><strong>{html.escape(alert.text)}.</strong><span>{html.escape(alert.advice)}'
        "</span></li>"
        for alert in alerts
    ] or ['<li class="good">Nothing stands out: no dead expert, no collapsed router, no lost overlap.</li>']
    return f'<h2>Alerts</h2>\n<ul class="alerts">{"".join(lines)}</ul>'


def _balance(run: RunData) -> list[str]:
    many = run.head.world_size > 1
    plots = []
    if many:
        series = {"before": _mean(run.before), "after": _mean(run.after)}
        plots.append(line_plot(series, run.step, title="Busiest rank over the mean", floor=1.0))
    used = [max_over_mean(run.load[:, index, :experts]) for index, experts in enumerate(run.head.experts)]
    experts = {"busiest layer": np.max(used, 0), "mean of layers": np.mean(used, 0)}
    plots.append(line_plot(experts, run.step, title="Busiest expert over the mean", floor=1.0))
    if many:
        plots.append(line_plot({"replicas": _mean(run.replicas)}, run.step, title="Replicas in a layer", floor=0.0))
    return plots


def _ranks(run: RunData) -> list[str]:
    before, after = _relative(run.owner_rows), _relative(run.rows)
    known = [values[np.isfinite(values)] for values in (before, after)]
    most = max(float(values.max()) if values.size else 1.0 for values in known)
    return [
        heat_map(before, run.step, title="Rows of ranks, before", rows="rank", low=0.0, high=most),
        heat_map(after, run.step, title="Rows of ranks, after", rows="rank", low=0.0, high=most),
    ]


def _times(run: RunData) -> list[str]:
    # The first steps compile; on their scale all others would be flat.
    seconds = np.where(np.arange(run.steps) < min(3, run.steps - 1), np.nan, run.seconds)
    plots = [line_plot({"slowest rank": seconds * 1e3}, run.step, title="Step time", unit="ms", floor=0.0)]
    if np.isfinite(run.hidden).any():
        plots.append(line_plot({"hidden": run.hidden * 100}, run.step, title="Hidden transfers", unit="%", floor=0.0))
        exposed = {"travelling": _mean(run.travel) * 1e3, "standing still": _mean(run.exposed) * 1e3}
        plots.append(line_plot(exposed, run.step, title="Collectives, mean of ranks", unit="ms", floor=0.0))
    plots += [line_plot({name: values}, run.step, title=name) for name, values in run.logged.items()]
    return plots


def _timelines(run: RunData) -> str:
    shown = run.timelines[:_MOST_TIMELINES]
    lines: list[tuple[str, list[Bar]]] = []
    for one in shown:
        milliseconds = (one.times * 1e3).tolist()
        travels = [
            (begun, ended, _kind(operator))
            for operator, (_, begun, ended, _, _) in zip(one.names[:, 1].tolist(), milliseconds, strict=True)
        ]
        waits = [(waited, ready, "stands still") for _, _, _, waited, ready in milliseconds]
        lines += [(f"rank {one.rank}", travels), ("", waits)]
    title = f"Step {shown[0].step}" + ("" if len(shown) == len(run.timelines) else f", the first {len(shown)} ranks")
    return timeline(lines, _COLOURS, title=title)


def _waits(run: RunData) -> str:
    """Return a table of the timeline's collectives for which the compute stood still the longest."""
    found = [
        (ready - waited, (f"rank {one.rank}", *names, as_time(ended - begun), as_time(ready - waited)))
        for one in run.timelines
        for names, (_, begun, ended, waited, ready) in zip(one.names.tolist(), one.times.tolist(), strict=True)
    ]
    if not found:
        return ""
    rows = tuple(row for _, row in sorted(found, reverse=True)[:_MOST_WAITS])
    columns = ("", "part", "what travelled", "of", "took", "stood still")
    return Section(title="Longest waits in this step", columns=columns, rows=rows, numbers=(4, 5)).html()


def _kind(operator: str) -> str:
    try:
        return _KINDS.get(collective_named(operator).carries, "other")
    except LookupError:
        # A collective of another version, or of a user's own file that is not imported here.
        return "other"


def _memory(run: RunData) -> list[str]:
    return [
        line_plot(_per_rank(run.memory / 1e9), run.step, title="Memory", unit="GB", floor=0.0),
        line_plot(_per_rank(run.row_bytes / 1e6), run.step, title="Rows sent", unit="MB", floor=0.0),
        line_plot(_per_rank(run.expert_bytes / 1e6), run.step, title="Experts sent", unit="MB", floor=0.0),
    ]


def _per_rank(values: Floats) -> dict[str, Array]:
    """Return a line for each rank, or the least, the mean and the most if there are too many."""
    if values.shape[1] <= _MOST_LINES:
        return {f"rank {rank}": values[:, rank] for rank in range(values.shape[1])}
    functions = {"least": np.nanmin, "mean": np.nanmean, "most": np.nanmax}
    return {name: without_nan(function, values, 1) for name, function in functions.items()}


def _layers(run: RunData) -> str:
    if not run.head.layers:
        return ""
    parts = []
    for index, (name, experts) in enumerate(zip(run.head.layers, run.head.experts, strict=True)):
        load = run.load[:, index, :experts].astype(np.float64)
        plots = [
            heat_map(
                _relative(load[:, None]), run.step, title="Rows of experts over the mean", rows="expert", low=0.0
            )
        ]
        if run.head.world_size > 1:
            held = run.holders[:, index, :experts].astype(np.float64)
            size = float(run.head.world_size)
            plots.append(heat_map(held, run.step, title="Holders of experts", rows="expert", low=1.0, high=size))
            owners = run.owners[:, index, :experts].astype(np.float64)
            plots.append(heat_map(owners, run.step, title="Owners of experts", rows="expert", low=0.0, high=size - 1))
            if np.isfinite(run.layer_hidden[:, index]).any():
                hidden = {"hidden": run.layer_hidden[:, index] * 100}
                plots.append(line_plot(hidden, run.step, title="Hidden transfers", unit="%", floor=0.0))
        opened = " open" if index == 0 else ""
        parts.append(
            f"<details{opened}><summary>{html.escape(name or 'the model')}</summary>"
            f'<div class="plots">{"".join(plots)}</div></details>'
        )
    return (
        "<h2>Layers: load and placement of experts</h2>\n<p>Time runs to the right, one line for each expert. "
        "Holders are the ranks that had an expert in a step, its owner among them.</p>\n" + "\n".join(parts)
    )


def _section(title: str, text: str, plots: Sequence[str], *, wide: bool = False) -> str:
    kind = "plots wide" if wide else "plots"
    return f'<h2>{html.escape(title)}</h2>\n<p>{html.escape(text)}</p>\n<div class="{kind}">{"".join(plots)}</div>'


def _relative(rows: Floats) -> Floats:
    """Return rows over the mean of all lines, mean over layers: ``[n, L, r] -> [n, r]``."""
    mean = rows.mean(-1, keepdims=True)
    found: Floats = (rows / np.where(mean == 0, 1, mean)).mean(1)
    return found


def _mean(values: Array) -> Floats:
    return without_nan(np.nanmean, values, 1)


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")


def _number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "not known"
