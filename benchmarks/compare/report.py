"""Tables from what was measured, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.compare import plots, shapes, store
from benchmarks.compare.cells import OVERLAPS
from benchmarks.compare.figures import (
    BASE,
    FREE,
    OURS,
    OWN,
    PAPER,
    SETTINGS,
    compared,
    lines_of,
    means,
    systems_of,
    times_as_long,
    waits_of,
    workloads_of,
)
from benchmarks.compare.shapes import CORES
from benchmarks.compare.variants import BOUNDS
from benchmarks.compare.waits import KINDS

_HEAD = f"""# Hecate beside its rivals, measured

Made by `python -m benchmarks.compare` from the raw samples in `compare.*.json`. A number is the median over launches,
in brackets the least and the greatest launch; what a launch says of time is the mean of its steps, the same steps for
all systems. A cell of a single launch has no brackets.

- *step*: with its share of the moves between steps; *of it moves* is that share. A column has `-` where a system does
  not tell.
- *MB of a rank*: parameters, gradients, optimizer states, and the slots that experts are gathered into, on the rank
  with most.
- *CPU ms*: of a rank in a step. First the thread that computes, which has a quota, then all its others, which have
  none; the rank with most. *of it planning*: in the policy, before the gate, where it can hide, and after it. A rank
  has {CORES} of a core, so a step waits {1 / CORES:.1f} times as long for what does not hide.
- *waits*: percent of the step in which a rank's compute stands still for rows, counts of rows, experts and dense
  gradients, the median rank's. What is left is compute, in its quota, and what no span shows.
- *of the bound*: seconds on free links over those of the line.
- *overlaps*: what the system can send while it computes, on CPUs with gloo.
- Bounds are no systems: the first trains on even routing; in the second only counts of rows take time on links, and
  moves take none.
"""


def markdown(name: str, cell: dict[str, Any]) -> str:
    """All tables of one cell."""
    shape, launches = shapes.SHAPES[cell["cell"]["shape"]], cell["launches"]
    lines = [
        f"## {name}",
        "",
        f"{shape.layers} layers, hidden {shape.hidden}, expert {shape.ffn}, {shape.experts} experts, "
        f"top {shape.top_k}, {shape.tokens} tokens per rank.",
    ]
    for number, launch in enumerate(launches, 1):
        ratios = shapes.ratios(shape, launch["link"], launch["attention"])
        said = {**launch["environment"], **{key: f"{value:.2f}" for key, value in ratios.items()}}
        before = {} if number == 1 else launches[number - 2]["environment"]
        rounds = sorted({len(samples[BASE]) for samples in launch["samples"].values()})
        lines += [
            "",
            f"Launch {number} of {len(launches)}: attention takes {launch['attention'] * 1e3:.1f} ms, a node's link "
            f"carries {launch['link'] / 1e6:.1f} MB/s, {' or '.join(map(str, rounds))} rounds; "
            # Once is enough where launches agree.
            + "; ".join(f"{key}: {value}" for key, value in said.items() if before.get(key) != value)
            + ".",
        ]
    for workload in workloads_of(cell):
        lines += [
            "",
            f"### {workload}",
            "",
            "| system | step, s | of it moves, ms | times as fast as static EP | max/mean rows | MB leaving a node "
            f"| MB of a rank | CPU ms: in its quota / beside it | of it planning: before / after the gate "
            f"| waits, %: {' / '.join(KINDS)} | of the bound | overlaps |",
            f"|{'---|' * 12}",
        ]
        lines += [_row(line) for line in lines_of(cell, workload)]
    return "\n".join(lines) + "\n"


def _row(line: dict[str, Any]) -> str:
    waits = line.get("waits")
    columns = [
        line["system"],
        line["seconds"],
        f"{line['moves'] * 1e3:.0f}",
        line["speed-up"],
        _shown(line.get("imbalance")),
        f"{line['sent'] / 1e6:.1f}",
        f"{line['bytes'] / 1e6:.1f}",
        f"{line['cpu'] * 1e3:.0f} / {line['beside'] * 1e3:.0f}",
        _planning(line),
        _percents(waits),
        _shown(line.get("bound")),
        OVERLAPS.get(line["system"], "all"),
    ]
    return "| " + " | ".join(map(str, columns)) + " |"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _planning(line: dict[str, Any]) -> str:
    return " / ".join(f"{seconds * 1e3:.1f}" for seconds in line["planning"]) if "planning" in line else "-"


def _percents(shares: dict[str, float] | None) -> str:
    return "-" if shares is None else " / ".join(f"{shares[kind] * 100:.0f}" for kind in KINDS)


def summary(cells: dict[str, Any]) -> str:
    """One line for every cell and workload: how many times as long as Hecate others take for the same steps."""
    lines = [
        f"| cell | workload | static EP | paper's rule | the fastest other | {' | '.join(SETTINGS)} |",
        f"|{'---|' * (5 + len(SETTINGS))}",
    ]
    for name, workload in compared(cells):
        cell = cells[name]
        takes = {
            system: times_as_long(cell, workload, system, OURS)
            for system in systems_of(cell, workload)
            if system not in BOUNDS
        }
        nearest = min(takes.keys() - {*OWN}, key=lambda system: takes[system].middle)
        own = " | ".join(str(takes.get(system, "-")) for system in SETTINGS)
        paper = takes.get(PAPER, "-")
        lines.append(f"| {name} | {workload} | {takes[BASE]} | {paper} | {nearest}: {takes[nearest]} | {own} |")
    return "\n".join(lines) + "\n"


def means_table(cells: dict[str, Any]) -> str:
    """Geometric means over all lines."""
    lines = ["| other | beside | skewed routing | even routing | times the memory |", "|---|---|---|---|---|"]
    for mean in means(cells):
        kinds = [
            "-" if value is None else f"{value:.2f} ({count} line{'s' * (count > 1)})"
            for value, count in zip((mean.skewed, mean.even), mean.lines, strict=True)
        ]
        lines.append(f"| {mean.other} | {mean.ours} | {' | '.join(kinds)} | {mean.memory:.2f} |")
    return "\n".join(lines) + "\n"


def bounds_table(cells: dict[str, Any]) -> str:
    """What share of the bound Hecate reaches, and for what it waits."""
    lines = [
        f"| cell | workload | free links / hecate | waits, %: {' / '.join(KINDS)} | the rest, % |",
        "|---|---|---|---|---|",
    ]
    for name, workload in compared(cells):
        cell = cells[name]
        waits = waits_of(cell, workload, OURS)
        free = times_as_long(cell, workload, FREE, OURS) if FREE in systems_of(cell, workload) else "-"
        rest = "-" if waits is None else f"{(1 - sum(waits.values())) * 100:.0f}"
        lines.append(f"| {name} | {workload} | {free} | {_percents(waits)} | {rest} |")
    return "\n".join(lines) + "\n"


def text_of(cells: dict[str, Any]) -> str:
    """The whole of ``compare.md``."""
    parts = [
        _HEAD,
        "## In short\n",
        "How many times as long as Hecate with two replicas others take for the same steps. *hecate (paper)*, the\n"
        "paper's rule on the same engine, counts as another. The last columns are Hecate in other settings.\n",
        summary(cells),
        "Geometric means over these lines. Hecate has two replicas on a rank, as others that reserve room. LAER's\n"
        "layout takes more memory, and static EP (node-wise) sends a token's row to a node once; where Hecate was\n"
        "measured like that, a line says so. Even routing is *balanced*, all other is skewed.\n",
        means_table(cells),
        "What share of the bound on free links Hecate reaches, and for what the median rank waits.\n",
        bounds_table(cells),
        *(markdown(name, cell) for name, cell in cells.items()),
    ]
    return "\n".join(parts)


def write(folder: Path) -> None:
    """``compare.md`` and the plots, from ``compare.*.json`` in ``folder``.

    Raises:
        SystemExit: nothing was measured yet.
    """
    cells = store.load(folder)
    if not cells:
        raise SystemExit(f"compare: no samples in {folder}; run python -m benchmarks.compare first")
    (folder / "compare.md").write_text(text_of(cells))
    for name, cell in cells.items():
        plots.draw(folder / f"compare.{name}.png", name, cell)
        plots.draw_timelines(folder / f"compare.{name}.timeline.png", cell)
