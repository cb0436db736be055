"""Pictures of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.compare import shapes
from benchmarks.compare.figures import BASE, OURS, line_of, systems_of, workloads_of
from benchmarks.compare.waits import KINDS, kind_of

_COLORS = dict(zip(KINDS, ("tab:blue", "tab:gray", "tab:orange", "tab:green"), strict=True))


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
    workloads = workloads_of(cell)
    systems = systems_of(cell, workloads[0])
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 11), layout="constrained", sharex=True)
    width = 0.8 / len(systems)
    colors = [plt.get_cmap("tab20")(number) for number in range(len(systems))]
    for place, workload in enumerate(workloads):
        for number, system in enumerate(systems):
            line = line_of(cell, workload, system)
            x, label = place + (number - len(systems) / 2) * width, system if place == 0 else None
            for axis, (title, key) in zip(axes, panels.items(), strict=True):
                axis.set_ylabel(title)
                value = line.get(key)
                if value is None:
                    continue
                if key == "seconds":
                    spread = [[value.middle - value.least], [value.most - value.middle]]
                    style: dict[str, Any] = dict(yerr=spread, label=label, error_kw={"lw": 0.7})
                    axis.bar(x, value.middle, width, color=colors[number], **style)
                else:
                    axis.bar(x, value if key == "imbalance" else value / 1e6, width, color=colors[number])
    axes[0].set_title(f"{name}: {shapes.WORLD_SIZE} ranks in {shapes.NODES} nodes")
    figure.legend(fontsize=8, ncols=5, loc="outside lower center")
    axes[-1].set_xticks(range(len(workloads)), workloads)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_timelines(path: Path, cell: dict[str, Any]) -> None:
    """One step of static EP and of Hecate in the last launch, a line for each rank.

    Of the workload that was hardest for static EP.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timelines = cell["launches"][-1]["timelines"]
    hardest = max(timelines, key=lambda workload: line_of(cell, workload, BASE)["seconds"].middle)
    shown = {name: timelines[hardest][name] for name in (BASE, OURS) if name in timelines[hardest]}
    figure, axes = plt.subplots(len(shown), 1, figsize=(11, 3 * len(shown)), layout="constrained", sharex=True)
    for axis, (name, ranks) in zip(axes if len(shown) > 1 else [axes], shown.items(), strict=True):
        for rank, spans in enumerate(ranks):
            for _, operator, begun, ended, waited, ready in spans:
                axis.broken_barh([(begun, ended - begun)], (rank + 0.5, 0.35), color=_COLORS[kind_of(operator)])
                axis.broken_barh([(waited, ready - waited)], (rank + 0.1, 0.35), color="black")
        axis.set(title=f"{name}, {hardest}", ylabel="rank", yticks=[rank + 0.5 for rank in range(len(ranks))])
        axis.set_yticklabels(list(map(str, range(len(ranks)))))
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (*_COLORS.values(), "black")]
    labels = [*(f"{kind} travel" for kind in _COLORS), "compute waits"]
    figure.legend(patches, labels, fontsize=8, ncols=5, loc="outside lower center")
    figure.supxlabel("seconds", fontsize=10)
    figure.savefig(path, dpi=80)
    plt.close(figure)
