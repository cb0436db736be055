"""Tables and plots from raw samples, and nothing else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import shapes
from benchmarks.compare.cells import BOUNDS
from hecate.runtime.ops import collective_named

BASE, OURS, PAPER = "static EP", "hecate", "hecate (paper)"
# The time objective in all settings, which is not compared with itself.
OWN = (OURS, "hecate (calibrate)", "hecate (LAER's memory)")
Samples = Sequence[dict[str, Any]]


def load(folder: Path) -> dict[str, Any]:
    """What was measured: name of a cell -> its JSON."""
    return {path.name[len("compare.") : -len(".json")]: json.loads(path.read_text())
            for path in sorted(folder.glob("compare.*.json"))}  # fmt: skip


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def row(name: str, samples: Samples, base: Samples, states: int) -> dict[str, Any]:
    """One line of a table.

    Args:
        samples: of the system, in order; ``base`` those of static EP in the same rounds.
        states: bytes of its parameters, gradients and optimizer states on the rank that has most.
    """
    speedups = [b["seconds"] / s["seconds"] for s, b in zip(samples, base, strict=True)]
    result: dict[str, Any] = {
        "system": name,
        "seconds": quartiles([s["seconds"] for s in samples]),
        "speed-up": quartiles(speedups),
        "sent": statistics.median(max(s["sent"]) for s in samples),
        "bytes": states,
    }
    if "rows" in samples[0]:
        result["imbalance"] = statistics.median(imbalance(s["rows"]) for s in samples)
        # Slots of all layers, from the forward to their backward, and the gradients of those of one.
        result["bytes"] = states + max(sum(held) + max(held) for s in samples for held in s["held"])
    return result


def imbalance(rows: Sequence[Sequence[int]]) -> float:
    """Rows of the busiest rank over the mean, averaged over layers; ``rows`` is ``[rank][layer]``."""
    layers = list(zip(*rows, strict=True))
    return statistics.mean(max(layer) / max(1e-9, statistics.mean(layer)) for layer in layers)


def rows_of(cell: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    """The table of one workload, fastest first, bounds last."""
    samples = cell["samples"][workload]
    base = samples[BASE]
    lines = [row(name, found, base, cell["bytes"][name]) for name, found in samples.items()]
    return sorted(lines, key=lambda line: (line["system"] in BOUNDS, line["seconds"][1]))


def markdown(name: str, cell: dict[str, Any]) -> str:
    """All tables of one cell."""
    shape = shapes.SHAPES[cell["cell"]["shape"]]
    lines = [f"## {name}", ""]
    ratios = shapes.ratios(shape, cell["link"], cell["attention"])
    lines.append(
        f"{shape.layers} layers, hidden {shape.hidden}, expert {shape.ffn}, {shape.experts} experts, "
        f"top {shape.top_k}, {shape.tokens} tokens per rank; attention takes {cell['attention'] * 1e3:.1f} ms, "
        f"a node's link carries {cell['link'] / 1e6:.1f} MB/s. "
        + "; ".join(f"{key}: {value:.2f}" for key, value in ratios.items())
        + "."
    )
    said = "; ".join(f"{key}: {value}" for key, value in cell["environment"].items())
    rounds = sorted({len(samples[BASE]) for samples in cell["samples"].values()})
    lines += ["", f"{said}; {' or '.join(map(str, rounds))} rounds."]
    for workload in cell["samples"]:
        lines += [
            "", f"### {workload}", "",
            "| system | step, s | times as fast as static EP | max/mean rows | MB leaving a node | MB of a rank |",
            "|---|---|---|---|---|---|",
        ]  # fmt: skip
        for line in rows_of(cell, workload):
            balance = f"{line['imbalance']:.2f}" if "imbalance" in line else "-"
            lines.append(
                f"| {line['system']} | {_spread(line['seconds'])} | {_spread(line['speed-up'])} "
                f"| {balance} | {line['sent'] / 1e6:.1f} | {line['bytes'] / 1e6:.1f} |"
            )
    return "\n".join(lines) + "\n"


def summary(cells: dict[str, Any]) -> str:
    """One line for every cell and workload: how many times as long as Hecate others take in the same round."""
    lines = ["| cell | workload | static EP | paper's rule | the fastest other |", "|---|---|---|---|---|"]
    for name, cell in cells.items():
        for workload, samples in cell["samples"].items():
            if OURS not in samples:
                continue
            ours = [sample["seconds"] for sample in samples[OURS]]
            takes = {
                system: quartiles([s["seconds"] / mine for s, mine in zip(found, ours, strict=True)])
                for system, found in samples.items()
                if system not in BOUNDS and system not in OWN
            }
            nearest = min(takes, key=lambda system: takes[system][1])
            paper = _spread(takes[PAPER]) if PAPER in takes else "-"
            lines.append(
                f"| {name} | {workload} | {_spread(takes[BASE])} | {paper} | {nearest}: {_spread(takes[nearest])} |"
            )
    return "\n".join(lines) + "\n"


def _spread(found: tuple[float, float, float]) -> str:
    low, middle, high = found
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def write(folder: Path) -> None:
    """``compare.md`` and the plots, from ``compare.*.json`` in ``folder``.

    Raises:
        SystemExit: nothing was measured yet.
    """
    cells = load(folder)
    if not cells:
        raise SystemExit(f"compare: no samples in {folder}; run python -m benchmarks.compare first")
    text = [
        "# Hecate beside its rivals, measured",
        "",
        "Made by `python -m benchmarks.compare` from the raw samples in `compare.*.json`. Medians, quartiles in",
        "brackets; speed-ups are of steps in the same round. *MB of a rank*: parameters, gradients, optimizer",
        "states, and the slots that experts are gathered into, on the rank with most. Bounds are no systems: the",
        "first trains on even routing; in the second nothing but the counts of rows takes time on links.",
        "",
        "## In short",
        "",
        "How many times as long as Hecate others take in the same round: median, and quartiles in brackets. *hecate",
        "(paper)*, the paper's rule on the same engine, counts as another.",
        "",
        summary(cells),
    ]
    text += [markdown(name, cell) for name, cell in cells.items()]
    (folder / "compare.md").write_text("\n".join(text))
    for name, cell in cells.items():
        draw(folder / f"compare.{name}.png", name, cell)
        draw_timelines(folder / f"compare.{name}.timeline.png", cell)


def draw(path: Path, name: str, cell: dict[str, Any]) -> None:
    """Step time, imbalance, bytes between nodes and bytes in memory, by system and workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "step, s": "seconds",
        "max/mean rows": "imbalance",
        "MB leaving a node": "sent",
        "MB of a rank": "bytes",
    }
    workloads = list(cell["samples"])
    systems = list(cell["samples"][workloads[0]])
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 11), layout="constrained", sharex=True)
    width = 0.8 / len(systems)
    colors = [plt.get_cmap("tab20")(number) for number in range(len(systems))]
    for axis, (title, key) in zip(axes, panels.items(), strict=True):
        for place, workload in enumerate(workloads):
            found = {line["system"]: line for line in rows_of(cell, workload)}
            for number, system in enumerate(systems):
                value = found[system].get(key)
                if value is None:
                    continue
                x, label = place + (number - len(systems) / 2) * width, system if place == 0 else None
                if key == "seconds":
                    low, middle, high = value
                    spread = [[middle - low], [high - middle]]
                    axis.bar(x, middle, width, yerr=spread, color=colors[number], label=label, error_kw={"lw": 0.7})
                else:
                    axis.bar(x, value if key == "imbalance" else value / 1e6, width, color=colors[number])
        axis.set_ylabel(title)
    axes[0].set_title(f"{name}: {shapes.WORLD_SIZE} ranks in {shapes.NODES} nodes")
    figure.legend(fontsize=8, ncols=5, loc="outside lower center")
    axes[-1].set_xticks(range(len(workloads)), workloads)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_timelines(path: Path, cell: dict[str, Any]) -> None:
    """One step of static EP and of Hecate, on the workload that was hardest for static EP: a line for each rank."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hardest = max(cell["timelines"], key=lambda w: statistics.median(s["seconds"] for s in cell["samples"][w][BASE]))
    shown = {
        name: cell["timelines"][hardest][name] for name in (BASE, "hecate") if name in cell["timelines"][hardest]
    }
    kinds = {"tokens": "tab:blue", "experts": "tab:orange", "counts": "tab:gray", "dense gradients": "tab:green"}
    figure, axes = plt.subplots(len(shown), 1, figsize=(11, 3 * len(shown)), layout="constrained", sharex=True)
    for axis, (name, ranks) in zip(axes if len(shown) > 1 else [axes], shown.items(), strict=True):
        for rank, spans in enumerate(ranks):
            for _, operator, begun, ended, waited, ready in spans:
                axis.broken_barh([(begun, ended - begun)], (rank + 0.5, 0.35), color=kinds[_kind(operator)])
                axis.broken_barh([(waited, ready - waited)], (rank + 0.1, 0.35), color="black")
        axis.set(title=f"{name}, {hardest}", ylabel="rank", yticks=[rank + 0.5 for rank in range(len(ranks))])
        axis.set_yticklabels(list(map(str, range(len(ranks)))))
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (*kinds.values(), "black")]
    labels = [*(f"{kind} travel" for kind in kinds), "compute waits"]
    figure.legend(patches, labels, fontsize=8, ncols=5, loc="outside lower center")
    figure.supxlabel("seconds", fontsize=10)
    figure.savefig(path, dpi=80)
    plt.close(figure)


_KINDS = {
    "rows": "tokens", "counts": "counts", "tickets": "counts", "replicas": "experts", "experts": "experts",
    "dense": "dense gradients", "bucket": "dense gradients",
}  # fmt: skip


def _kind(operator: str) -> str:
    return _KINDS[collective_named(operator).carries]
